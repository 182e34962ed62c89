"use strict";
// Charts of uPlot, from panels {title, unit, zero, series}.
// Of an axis that counts: whole numbers.
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

// The running mean over a share of all values. Of a curve that was thinned each pair of values
// stands for the mean of its neighbours, which is given. Every window is added up anew: a value of
// 1e18 would take the digits of those beside it out of a sum that goes on.
function smoothed(one, share) {
  const values = one.mean ?? one.y, width = Math.max(1, Math.round(share * values.length));
  const means = values.map((_, i) => {
    const first = Math.max(0, i + 1 - width);
    let sum = 0;
    for (let k = first; k <= i; k++) sum += values[k];
    return sum / (i + 1 - first);
  });
  return one.mean ? means.flatMap((mean) => [null, mean]) : means;
}

function look() {
  const style = getComputedStyle(document.documentElement);
  const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
  return { stroke: style.getPropertyValue("--quiet"), grid, ticks: grid };
}

// A box with a head, where `draw` puts the chart.
function box(panel, place) {
  const found = make("div", undefined, "chart"), head = make("h3", panel.title + " ");
  head.append(make("span", panel.unit, "unit"));
  found.append(head);
  place.append(found);
  return found;
}

// What stands at a place of an axis whose places are `step` apart.
function say(tick, step) {
  if (!tick) return tick === 0 ? "0" : "";
  if (Math.abs(tick) < 1e-2 && step < 5e-4) return tick.toExponential(Math.max(0, Math.ceil(Math.log10(Math.abs(tick) / step) - 1e-6)));
  const digits = [0, 1, 2, 3, 4, 5, 6, 7, 8].find((d) => Math.abs(step * 10 ** d - Math.round(step * 10 ** d)) < 1e-6);
  return tick.toFixed(digits ?? 9);
}

// The place of the value nearest to place `i`: curves have their values at places of their own.
function nearest(values, i) {
  const known = (at) => values[at] !== null && values[at] !== undefined;
  for (let by = 0; by < values.length; by++) {
    if (i - by >= 0 && known(i - by)) return i - by;
    if (i + by < values.length && known(i + by)) return i + by;
  }
  return i;
}

// curves: [{label, colour, dash, x, y, raw: faint, low, high: a band between two others}].
function draw(place, curves, { label, zero, log, sync, counts }) {
  const tables = [], series = [{ label: "", value: (u, v) => (v === null || v === undefined ? "" : `${label} ${short(v)}`) }], bands = [];
  const value = (u, v, i, at) => {
    const under = u.data[u.series[i].under];
    return v === null || v === undefined ? "" : short(v) + (under && at !== null ? ` (${short(under[nearest(under, at)])})` : "");
  };
  for (const one of curves) {
    tables.push([one.x, log ? one.y.map((y) => (y > 0 ? y : null)) : one.y]);
    const line = { label: one.label, stroke: one.colour + (one.raw ? (one.y.length > 400 ? "28" : "50") : ""), width: one.raw ? 1 : 2, dash: one.dash, value };
    line.points = { show: !one.hidden && !one.line && one.y.length < 30 };
    line.spanGaps = true;
    if (one.raw || one.hidden) line.class = "raw";
    if (one.hidden) line.width = 0;
    if (one.under) line.under = series.length - 1;
    if (one.band) bands.push({ series: [series.length, series.length + 1], fill: one.colour + "28" });
    series.push(line);
  }
  const axis = look();
  const range = log ? undefined : (u, low, high) => {
    if (zero) return [Math.min(0, low), high * 1.05 || 1];
    const size = Math.max(Math.abs(low), Math.abs(high)), room = (size || 1) * 0.1;
    if (high - low > 0.01 * size) return uPlot.rangeNum(low, high, 0.1, true);
    return [low - room, high + room];  // flat, or noise that would be made large
  };
  const options = {
    width: place.clientWidth, height: 230, series, bands,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(range ? { range } : {}) } },
    axes: [{ ...axis, ...(counts ? { incrs: WHOLE } : {}) }, { ...axis, size: 64, values: (u, ticks, i, space, step) => ticks.map((tick) => (log ? tick && short(tick) : say(tick, step))) }],
    cursor: { sync: { key: sync }, dataIdx: (u, i, at) => (i ? nearest(u.data[i], at) : at) },
    legend: { live: true },
  };
  place.querySelector(".uplot")?.remove();
  return new uPlot(options, uPlot.join(tables, tables.map(() => [2, 2])), place);
}
