"use strict";
// Fills the page from the JSON beside it. Nothing is fetched, but by `--serve`, from where it came.
let data = JSON.parse(at("data").textContent);
let run = data.runs[0];
const AXES = { at: "steps", tokens: "generated tokens", seconds: "seconds of training" };

// --- the head and the tables

function tell() {
  document.title = at("title").textContent = run.title;
  at("verdict").textContent = run.verdict.charAt(0).toUpperCase() + run.verdict.slice(1);
  at("verdict").hidden = !run.verdict;
  at("next").hidden = !run.next;
  at("next").querySelector("code").textContent = run.next;
  at("command").hidden = !run.command;
  at("command").textContent = run.command;
  show("measures", run.measures.heads, run.measures.rows);
  show("time", ["phase", "seconds", "share"], run.phases);
  show("facts", ["", ""], run.facts);
  at("warnings").hidden = !run.warnings.length;
  at("warnings").querySelector("ul").replaceChildren(...run.warnings.map((text) => make("li", text)));
  const differing = run.settings.filter((row) => row.length > 2), same = run.settings.filter((row) => row.length < 3);
  at("differing").replaceChildren(
    differing.length ? table(["setting", "here", "default"], differing) : make("p", "Every setting has its default.", "quiet"),
  );
  at("settings").querySelector("summary").textContent = `the other ${same.length} settings, which have their defaults`;
  at("same").replaceChildren(table(["", ""], same));
}

// --- curves of all runs, in the same panels

let boxes = new Map();

// Each panel, by what its axes are -> [run, panel] of the runs that have it: steps of one algorithm
// are no iterations of another.
function panels() {
  const found = new Map();
  for (const one of data.runs)
    for (const panel of one.panels) {
      const key = [panel.title, panel.unit, panel.x].join("\n");
      if (panel.series.length) found.set(key, [...(found.get(key) ?? []), [one, panel]]);
    }
  return found;
}

function curves(of, axis) {
  const share = Number(at("smooth").value), several = data.runs.length > 1, found = [];
  of.forEach(([one, panel]) =>
    panel.series.forEach((series, i) => {
      const colour = COLOURS[(several ? data.runs.indexOf(one) : i) % COLOURS.length], dash = DASHES[(several ? i : Math.floor(i / COLOURS.length)) % DASHES.length];
      const label = several ? `${one.name}: ${series.name}` : series.name, x = series[axis], curve = { label, colour, dash, x };
      const thick = share > 0 && series.y.length > 10 && !panel.exact, raw = !thick || at("raw").checked;
      if (raw) found.push({ ...curve, y: series.y, raw: thick });
      if (thick) found.push({ ...curve, y: smoothed(series, share), line: true, under: raw });
    }),
  );
  return found;
}

function redraw() {
  const all = panels();
  at("curves").hidden = !all.size;
  if ([...all.keys()].join() !== [...boxes.keys()].join()) {
    at("curves").querySelector(".charts").replaceChildren();
    boxes = new Map([...all].map(([key, of]) => [key, box(of[0][1], at("curves").querySelector(".charts"))]));
  }
  for (const [key, of] of all) {
    const every = of.flatMap(([, panel]) => panel.series), wanted = at("axis").value;
    const axis = every.every((one) => one[wanted]) ? wanted : "at", label = axis === "at" ? of[0][1].x : AXES[axis];
    const values = every.flatMap((one) => one.y);  // 0 has no place on a logarithmic axis, and is left out
    const log = at("log").checked && values.every((y) => y >= 0) && values.some((y) => y > 0);
    draw(boxes.get(key), curves(of, axis), { label, zero: of[0][1].zero, log, sync: label, counts: axis !== "seconds" });
  }
}

function offerAxes() {
  const every = data.runs.flatMap((one) => one.panels.flatMap((panel) => panel.series));
  const axes = Object.keys(AXES).filter((axis) => axis === "at" || every.some((one) => one[axis]));
  choose("axis", axes.map((axis) => [axis, AXES[axis]]), "at");
}

// --- everything

function fill() {
  const names = data.runs.map((one, i) => [String(i), one.name]);
  at("runs").hidden = names.length < 2 && !data.live;
  choose("run", names, "0");
  run = data.runs[Number(at("run").value)];
  tell();
  offerAxes();
  redraw();
  showTraining();
  showHeldOut();
  point();
}

// Links to the parts of the page that this run has.
function point() {
  const parts = [...document.querySelectorAll("main > section")].filter((one) => !one.hidden);
  document.querySelector("nav").replaceChildren(
    ...parts.map((one) => {
      const link = make("a", one.querySelector("h2").textContent);
      link.href = `#${one.id}`;
      return link;
    }),
  );
}

// Asks whether a file of a run has changed, and shows what has.
async function follow(mark) {
  try {
    const answer = await fetch(`data?since=${mark}`);
    if (answer.status === 200) {
      data = await answer.json();
      mark = data.mark;
      fill();
    }
    at("state").textContent = "followed live";
  } catch {
    at("state").textContent = "the server has ended; this is what it showed last";
  }
  setTimeout(follow, 2000, mark);
}

choose("smooth", [["0", "nothing"], ["0.02", "2 %"], ["0.05", "5 %"], ["0.1", "10 %"], ["0.25", "25 %"]], "0.05");
fill();
listen(["axis", "smooth", "log", "raw"], redraw);
listen(["run"], fill);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) redraw();
  width = innerWidth;
});
if (data.live) follow(data.mark);
