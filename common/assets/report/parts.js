"use strict";
// What the pages share: elements, tables, choices.
const at = (id) => document.getElementById(id);
const COLOURS = ["#2f6fb4", "#c4582b", "#2e8b57", "#8a5bb5", "#b0892a", "#c2406f", "#3a9ca6", "#777777"];

function make(tag, text, kind) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (kind) found.className = kind;
  return found;
}

// A table of texts and numbers; columns of numbers are set to the right.
function table(heads, rows) {
  const found = make("table");
  const kinds = heads.map((_, i) => (rows.every((row) => i && /^[+\-−]?[\d.,]*( %)?$/.test(row[i])) ? "number" : ""));
  rows = rows.map((row) => row.map(String));
  const add = (cells, tag) => {
    const line = found.insertRow();
    cells.forEach((cell, i) => line.append(make(tag, cell, kinds[i] || (cell.length < 18 ? "short" : ""))));
  };
  if (heads.some((head) => head)) add(heads, "th");
  rows.forEach((row) => add(row, "td"));
  return found;
}

// A table of `rows` in the section `id`, which is hidden where there are none.
function show(id, heads, rows) {
  at(id).hidden = !rows.length;
  at(id).querySelector(".wide").replaceChildren(...(rows.length ? [table(heads, rows)] : []));
}

// Offers [value, text] pairs; what was chosen stays chosen where it is still there.
function choose(id, pairs, first) {
  const select = at(id), before = select.options.length ? select.value : first;
  select.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
  const known = pairs.map(([value]) => String(value));
  select.value = [before, first, known[0]].find((value) => known.includes(String(value))) ?? "";
}

function listen(ids, change) {
  for (const id of ids) at(id).addEventListener(at(id).type === "search" ? "input" : "change", change);
}

// Four digits of a number, more where they are whole.
function short(value) {
  if (value === null || value === undefined || Number.isInteger(value)) return String(value ?? "");
  const size = Math.abs(value);
  return size >= 1000 ? value.toFixed(0) : size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
