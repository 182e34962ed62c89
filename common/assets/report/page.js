"use strict";
// Fills the page from the JSON beside it. Nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const COLOURS = ["#2f6fb4", "#c4582b", "#2e8b57", "#8a5bb5", "#b0892a", "#c2406f", "#3a9ca6", "#777777"];
const AXES = { step: "steps", tokens: "generated tokens", seconds: "seconds of training" };
const PAGE = 20;

function make(tag, text, kind) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (kind) found.className = kind;
  return found;
}

function table(heads, rows) {
  const found = make("table");
  const kinds = heads.map((_, i) => (rows.every((row) => i && /^[+\-−]?[\d.,]*( %)?$/.test(row[i])) ? "number" : ""));
  const add = (cells, tag) => {
    const line = found.insertRow();
    cells.forEach((cell, i) => line.append(make(tag, cell, kinds[i])));
  };
  if (heads.some((head) => head)) add(heads, "th");
  rows.forEach((row) => add(row, "td"));
  return found;
}

function show(id, heads, rows) {
  if (!rows.length) return;
  at(id).hidden = false;
  at(id).querySelector(".wide").append(table(heads, rows));
}

function choose(id, names, chosen) {
  for (const [value, text] of names) at(id).append(new Option(text, value, false, value === chosen));
}

for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());

// --- the head and the tables

document.title = at("title").textContent = data.title;
at("verdict").textContent = data.verdict.charAt(0).toUpperCase() + data.verdict.slice(1);
at("verdict").hidden = !data.verdict;
if (data.next) {
  at("next").hidden = false;
  at("next").querySelector("code").textContent = data.next;
}
if (data.command) {
  at("command").hidden = false;
  at("command").textContent = data.command;
}
show("measures", data.measures.heads, data.measures.rows);
show("time", ["phase", "seconds", "share"], data.phases);
show("facts", ["", ""], data.facts);
at("warnings").hidden = !data.warnings.length;
for (const text of data.warnings) at("warnings").querySelector("ul").append(make("li", text));
at("settings").querySelector("summary").textContent = `all ${data.settings.length} settings`;
at("settings").querySelector(".wide").append(table(["", ""], data.settings));

// --- curves

function smoothed(values, share) {
  const width = Math.max(1, Math.round(share * values.length));
  let sum = 0;
  return values.map((value, i) => {
    sum += value - (i >= width ? values[i - width] : 0);
    return sum / Math.min(i + 1, width);
  });
}

function faint(colour) {
  return colour + "50";
}

function draw(box, panel) {
  const axis = at("axis").value, share = Number(at("smooth").value);
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--quiet"), line = style.getPropertyValue("--line");
  const tables = [], series = [{ label: AXES[axis] }];
  const log = at("log").checked && panel.series.every((one) => one.y.every((y) => y > 0));
  panel.series.forEach((one, i) => {
    const colour = COLOURS[i % COLOURS.length], x = one[axis];
    const thick = share > 0 && one.y.length > 10 && !panel.exact;
    tables.push([x, one.y]);
    const raw = thick ? { stroke: faint(colour), width: 1, class: "raw" } : { stroke: colour, width: 2 };
    series.push({ label: one.name, points: { show: one.y.length < 30 }, ...raw });
    if (thick) {
      tables.push([x, smoothed(one.y, share)]);
      series.push({ label: one.name, stroke: colour, width: 2, points: { show: false } });
    }
  });
  const grid = { stroke: line, width: 1 };
  const look = { stroke: ink, grid, ticks: grid };
  const options = {
    width: box.clientWidth, height: 230, series,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: panel.zero && !log ? (u, low, high) => [0, high * 1.05 || 1] : undefined } },
    axes: [look, { ...look, size: 64 }],
    cursor: { sync: { key: "run" } },
  };
  if (!options.scales.y.range) delete options.scales.y.range;
  box.querySelector(".uplot")?.remove();
  new uPlot(options, uPlot.join(tables, tables.map(() => [2, 2])), box);
}

const panels = data.panels.filter((panel) => panel.series.length);
if (panels.length) {
  at("curves").hidden = false;
  const axes = Object.keys(AXES).filter((axis) => panels.every((p) => p.series.every((s) => s[axis])));
  choose("axis", axes.map((axis) => [axis, AXES[axis]]), "step");
  choose("smooth", [["0", "nothing"], ["0.02", "2 %"], ["0.05", "5 %"], ["0.1", "10 %"], ["0.25", "25 %"]], "0.05");
  const boxes = panels.map((panel) => {
    const box = make("div", undefined, "chart"), head = make("h3", panel.title + " ");
    head.append(make("span", panel.unit, "unit"));
    box.append(head);
    at("curves").querySelector(".charts").append(box);
    return box;
  });
  const redraw = () => panels.forEach((panel, i) => draw(boxes[i], panel));
  redraw();
  for (const id of ["axis", "smooth", "log"]) at(id).addEventListener("change", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) redraw();
    width = innerWidth;
  });
}

// --- completions

// Words of the longest common subsequence are equal; others are marked.
function compare(old, fresh) {
  const a = old.split(/(\s+)/), b = fresh.split(/(\s+)/);
  if (a.length * b.length > 250000) return [[["", old]], [["", fresh]]];
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const left = [], right = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      left.push(["", a[i++]]);
      right.push(["", b[j++]]);
    } else if (j < b.length && (i === a.length || best[i][j + 1] >= best[i + 1][j])) right.push(["ins", b[j++]]);
    else left.push(["del", a[i++]]);
  }
  return [left, right];
}

function marked(parts) {
  const found = make("div");
  for (const [tag, text] of parts) found.append(tag ? make(tag, text) : text);
  return found;
}

const { prompts, evaluations } = data.completions;
let start = 0;

function list() {
  const one = evaluations[Number(at("left").value)], other = evaluations[Number(at("right").value)];
  const wanted = at("text").value.toLowerCase();
  const kept = prompts.filter((prompt, i) => {
    const texts = [prompt.prompt, prompt.answer, one.texts[i], other.texts[i]];
    if (at("changed").checked && one.texts[i] === other.texts[i]) return false;
    return !wanted || texts.some((text) => text.toLowerCase().includes(wanted));
  });
  start = Math.max(0, Math.min(start, kept.length - 1));
  const box = at("completions").querySelector(".rows");
  box.replaceChildren();
  for (const prompt of kept.slice(start, start + PAGE)) {
    const row = make("div", undefined, "row"), pair = make("div", undefined, "pair"), i = prompts.indexOf(prompt);
    const [left, right] = compare(one.texts[i], other.texts[i]);
    pair.append(marked(left), marked(right));
    row.append(make("p", prompt.prompt, "prompt"), pair, make("span", `answer: ${prompt.answer}`, "answer"));
    box.append(row);
  }
  const last = Math.min(start + PAGE, kept.length);
  const whole = data.completions.total > prompts.length ? `, the first ${prompts.length} of ${data.completions.total} held out` : "";
  at("count").textContent = (kept.length ? `${start + 1} to ${last} of ${kept.length}` : "none") + whole;
  at("less").disabled = start === 0;
  at("more").disabled = last === kept.length;
}

if (evaluations.length) {
  at("completions").hidden = false;
  const names = evaluations.map((one, i) => [String(i), one.name]);
  choose("left", names, "0");
  choose("right", names, String(evaluations.length - 1));
  const restart = () => {
    start = 0;
    list();
  };
  for (const id of ["left", "right", "changed"]) at(id).addEventListener("change", restart);
  at("text").addEventListener("input", restart);
  at("less").addEventListener("click", () => { start -= PAGE; list(); });
  at("more").addEventListener("click", () => { start += PAGE; list(); });
  list();
}
