"use strict";
// Fills the comparison from the JSON beside it. Nothing is fetched.
const data = JSON.parse(at("data").textContent);
const boxes = [];
document.title = "Comparison";

function curves(cost) {
  return cost.settings.flatMap((one, i) => {
    const colour = COLOURS[i % COLOURS.length], dash = DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
    const curve = { label: one.name, colour, dash, x: one.at }, found = [];
    if (one.low && at("bands").checked) {
      found.push({ ...curve, y: one.high, hidden: true, band: true, line: true }, { ...curve, y: one.low, hidden: true, line: true });
    }
    if (at("each").checked) found.push(...one.runs.map((run) => ({ ...curve, x: run.at, y: run.y, raw: true })));
    return [...found, { ...curve, y: one.y }];
  });
}

function redraw() {
  for (const [place, cost] of boxes) draw(place, curves(cost), { label: cost.title, sync: cost.title, counts: !cost.title.startsWith("seconds") });
}

for (const kind of data.kinds) {
  const section = make("section"), charts = make("div", undefined, "charts");
  section.append(make("h2", `Held-out ${kind.title}`));
  const [settings, runs] = kind.tables;
  for (const { heads, rows } of [settings, ...kind.apart]) {
    const wide = make("div", undefined, "wide");
    wide.append(table(heads, rows));
    section.append(wide);
  }
  for (const text of kind.remarks) section.append(make("p", text));
  section.append(charts);
  const folded = make("details"), wide = make("div", undefined, "wide");
  wide.append(table(runs.heads, runs.rows));
  folded.append(make("summary", `each of the ${runs.rows.length} runs`), wide);
  section.append(folded);
  at("kinds").append(section);
  for (const cost of kind.costs) boxes.push([box({ title: cost.title, unit: kind.title.split(": ")[1] }, charts), cost]);
}
at("failures").hidden = !data.failures.length;
at("failures").querySelector("ul").append(...data.failures.map((text) => make("li", text)));
redraw();
listen(["each", "bands"], redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) redraw();
  width = innerWidth;
});
