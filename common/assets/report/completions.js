"use strict";
// The browsers of completions: of training, and held-out ones before beside after. `run` is the
// one that is shown.
const PAGE = 20, RIGHT = 1 - 1e-9; // of a score; a weighted mean of components is rounded

// --- of training

let shown = PAGE;

function scoreOf(row) {
  return at("score").value ? (row.components ?? {})[at("score").value] : row.reward;
}

function wanted(row) {
  const score = scoreOf(row), right = at("right").value, cut = at("cut").value;
  const kind = row.unscored ? "" : score >= RIGHT ? "all" : score > 0 ? "part" : "none";
  return (!right || kind === right) && (!cut || row.cut === (cut === "yes"));
}

// What a row is, in words: its member or sample, its score, what it counts for.
function about(row) {
  const parts = [row.member === undefined ? `sample ${row.sample}` : `member ${row.member}${row.sign > 0 ? " +E" : " −E"}`];
  if (row.member !== undefined && row.sample) parts.push(`sample ${row.sample}`);
  const missing = row.unscored ? "none" : "not finite";
  parts.push(`reward ${row.reward === null ? missing : short(row.reward)}`);
  for (const [name, value] of Object.entries(row.components ?? {})) parts.push(`${name} ${value === null ? "none" : short(value)}`);
  for (const name of ["fitness", "advantage"]) if (row[name] !== undefined) parts.push(`${name} ${row[name] > 0 ? "+" : ""}${short(row[name])}`);
  parts.push(`${row.tokens} tokens`);
  if (row.cut) parts.push("cut off");
  return parts.join(" · ");
}

// The completion; the less probable a token was, the stronger its colour.
function textOf(row) {
  const found = make("div", undefined, "text");
  if (!row.logprobs || !at("colour").checked) {
    found.textContent = row.completion;
    return found;
  }
  const signs = Array.from(row.completion);  // one for each code point, as Python counts
  let place = 0;
  row.ends.forEach((end, i) => {
    if (end <= place) return;
    const token = make("span", signs.slice(place, end).join(""), "token");
    token.style.setProperty("--odd", Math.min(1, -row.logprobs[i] / 5).toFixed(2));
    token.title = `log-probability ${row.logprobs[i]}, probability ${short(Math.exp(row.logprobs[i]))}`;
    found.append(token);
    place = end;
  });
  found.append(signs.slice(place).join(""));
  return found;
}

function cell(row) {
  const score = row.reward ?? 0, found = make("div", undefined, wanted(row) ? "cell" : "cell other");
  if (!row.unscored) found.classList.add(score >= RIGHT ? "right" : score > 0 ? "part" : "wrong");
  found.append(make("p", about(row), "about"), textOf(row));
  return found;
}

// Rows that stand side by side: +E beside -E of a member's noise, otherwise each alone.
function pairs(rows) {
  if (rows[0]?.member === undefined || rows.every((row) => row.sign > 0)) return rows.map((row) => [row]);
  const found = new Map();
  for (const row of rows) {
    const key = `${row.member >> 1}/${row.sample}`;
    found.set(key, [...(found.get(key) ?? []), row]);
  }
  return [...found.values()];
}

const ORDERS = {
  sampling: () => 0,
  "the score, best first": (row) => -(scoreOf(row) ?? 0),
  "the score, worst first": (row) => scoreOf(row) ?? 0,
  "fitness or advantage": (row) => -(row.fitness ?? row.advantage ?? 0),
  length: (row) => -row.tokens,
};

// Lines with a key each: shards that were run apart count their steps alike.
function keyed(lines) {
  const counts = new Map();
  return lines.map((line) => {
    counts.set(line.step, (counts.get(line.step) ?? 0) + 1);
    return [`${line.step}/${counts.get(line.step)}`, line];
  });
}

function listTraining() {
  const { steps, total } = run.training, of = at("prompt").value;
  const kept = keyed(steps).filter(([, line]) => !of || String(line.id) === of);
  const select = at("step"), follows = select.selectedIndex === select.options.length - 1;
  choose("step", kept.map(([key, line]) => [key, String(line.step)]), kept[kept.length - 1][0]);
  if (follows) select.selectedIndex = kept.length - 1; // of a run that goes on the newest
  const place = kept.findIndex(([key]) => key === at("step").value), line = kept[place][1];
  at("before").disabled = place === 0;
  at("after").disabled = place === kept.length - 1;
  const first = ORDERS[at("order").value];
  const best = (pair) => Math.min(...pair.map(first));
  const found = pairs(line.rows).filter((pair) => pair.some(wanted)).sort((a, b) => best(a) - best(b));
  const scored = line.rows.filter((row) => !row.unscored), rewards = scored.map((row) => row.reward ?? 0);
  const count = found.flat().filter(wanted).length, unscored = line.rows.length - scored.length;
  const mean = rewards.length ? short(rewards.reduce((sum, one) => sum + one, 0) / rewards.length) : "unknown";
  const asked = at("asked");
  asked.replaceChildren(
    make("span", line.prompt, "prompt"),
    make("span", `answer: ${line.answer}`, "answer"),
    make("span", `${count} of ${line.rows.length} completions; mean reward ${mean}, ${unscored ? `${unscored} without one, ` : ""}${rewards.filter((one) => one >= RIGHT).length} right, ${line.rows.filter((row) => row.cut).length} cut off` +
      (steps.length < total ? `. ${steps.length} of the ${total} ${run.unit}s that the run has kept are on this page.` : ".") + (line.rows.some((row) => row.fitness !== undefined) ? " Fitness is of all prompts of the step." : ""), "quiet"),
  );
  const rows = found.slice(0, shown).map((pair) => {
    const row = make("div", undefined, pair.length > 1 ? "sampled pair" : "sampled");
    row.append(...pair.map(cell));
    return row;
  });
  at("training").querySelector(".rows").replaceChildren(...rows);
  at("rest").hidden = found.length <= shown;
  at("rest").textContent = `${found.length - shown} more`;
}

function showTraining() {
  const { steps, parts } = run.training, rows = steps.flatMap((line) => line.rows);
  at("training").hidden = !rows.length;
  at("prompts").hidden = !run.prompts;
  if (run.prompts) showShares();
  if (!rows.length) return;
  at("unit").textContent = run.unit;
  choose("score", [["", "reward"], ...parts.map((name) => [name, name])], "");
  const asked = new Map(steps.map((line) => [String(line.id), `${line.id}: ${line.prompt.trim().slice(0, 50)}`]));
  choose("prompt", [["", `any of ${asked.size}`], ...asked], "");
  choose("order", Object.keys(ORDERS).map((name) => [name, name]), "sampling");
  at("coloured").hidden = !rows.some((row) => row.logprobs);
  listTraining();
}

// Prompts by the share of their completions that is right, over the run: darker is more of them.
function showShares() {
  const { heads, rows } = run.prompts, found = table([run.unit + "s", ...heads], rows);
  [...found.rows].slice(1).forEach((line, i) => {
    const sum = rows[i].slice(1).reduce((total, count) => total + count, 0);
    [...line.cells].slice(1).forEach((one, k) => {
      one.style.setProperty("--share", (rows[i][k + 1] / sum).toFixed(3));
      one.className = "number share";
    });
  });
  at("prompts").querySelector(".wide").replaceChildren(found);
}

function move(by) {
  at("step").selectedIndex += by;
  shown = PAGE;
  listTraining();
}

listen(["step", "prompt", "score", "right", "cut", "order", "colour"], () => {
  shown = PAGE;
  listTraining();
});
at("before").addEventListener("click", () => move(-1));
at("after").addEventListener("click", () => move(1));
at("rest").addEventListener("click", () => { shown += 5 * PAGE; listTraining(); });

// --- held out

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

// What each completion of an evaluation adds to the measure that is chosen, of 100.
function scoresOf(one) {
  return one.scores[at("measure").value];
}

function marked(parts, score) {
  const known = score !== undefined;
  const found = make("div", undefined, !known ? "" : score >= 100 ? "right" : score > 0 ? "part" : "wrong");
  for (const [tag, text] of parts) found.append(tag ? make(tag, text) : text);
  if (known) found.prepend(make("p", `${at("measure").value} ${short(score)}`, "about"));
  return found;
}

const BECAME = {
  "": ["any", () => true],
  right: ["right on the right side", (one, other) => other >= 100],
  wrong: ["wrong on the right side", (one, other) => other < 100],
  learnt: ["wrong, then right", (one, other) => one < 100 && other >= 100],
  lost: ["right, then wrong", (one, other) => one >= 100 && other < 100],
  better: ["better", (one, other) => other > one],
  worse: ["worse", (one, other) => other < one],
};
let start = 0;

function listHeldOut() {
  const { prompts, evaluations, total } = run.completions;
  const [one, other] = ["left", "other"].map((id) => evaluations.find(({ name }) => name === at(id).value));
  const text = at("text").value.toLowerCase(), became = BECAME[at("became").value][1];
  const before = scoresOf(one), after = scoresOf(other);
  const kept = prompts.map((_, i) => i).filter((i) => {
    if (at("changed").checked && one.texts[i] === other.texts[i]) return false;
    if (before && after && !became(before[i], after[i])) return false;
    return !text || [prompts[i].prompt, prompts[i].answer, one.texts[i], other.texts[i]].some((t) => t.toLowerCase().includes(text));
  });
  start = Math.max(0, Math.min(start, kept.length - 1));
  const rows = kept.slice(start, start + PAGE).map((i) => {
    const row = make("div", undefined, "row"), pair = make("div", undefined, "pair");
    const [left, right] = compare(one.texts[i], other.texts[i]);
    pair.append(marked(left, before?.[i]), marked(right, after?.[i]));
    row.append(make("p", prompts[i].prompt, "prompt"), pair, make("span", `answer: ${prompts[i].answer}`, "answer"));
    return row;
  });
  at("completions").querySelector(".rows").replaceChildren(...rows);
  const last = Math.min(start + PAGE, kept.length);
  const whole = total > prompts.length ? `, the first ${prompts.length} of ${total} held out` : "";
  at("count").textContent = (kept.length ? `${start + 1} to ${last} of ${kept.length}` : "none") + whole;
  at("less").disabled = start === 0;
  at("more").disabled = last === kept.length;
}

// Each held-out prompt's score in each evaluation.
function showGrid() {
  const { prompts, evaluations } = run.completions, known = evaluations.filter(scoresOf);
  at("grid").hidden = !known.length;
  if (!known.length) return;
  const all = known.map(scoresOf);
  const rows = prompts.map((prompt, i) => [prompt.prompt.trim().slice(0, 60), ...all.map((scores) => short(scores[i]))]);
  const found = table([`prompt, its ${at("measure").value}`, ...known.map((one) => one.name)], rows);
  [...found.rows].slice(1).forEach((line, i) =>
    all.forEach((scores, k) => {
      line.cells[k + 1].className = "number share";
      line.cells[k + 1].style.setProperty("--share", Math.max(0, Math.min(1, scores[i] / 100)));
    }),
  );
  at("grid").querySelector(".wide").replaceChildren(found);
}

function showHeldOut() {
  const { evaluations } = run.completions;
  at("completions").hidden = !evaluations.length;
  if (!evaluations.length) return;
  const names = evaluations.map(({ name }) => [name, name]), newest = names.at(-1)[0];
  const followed = at("other").selectedIndex === at("other").options.length - 1;  // the newest until now
  choose("left", names, names[0][0]);
  choose("other", names, newest);
  if (followed) at("other").value = newest;
  const measures = [...new Set(evaluations.flatMap((one) => Object.keys(one.scores)))];
  at("changes").hidden = !measures.length;
  choose("measure", measures.map((name) => [name, name]), measures[0]);
  choose("became", Object.entries(BECAME).map(([key, [name]]) => [key, name]), "");
  showGrid();
  listHeldOut();
}

const restart = () => {
  start = 0;
  listHeldOut();
};
listen(["left", "other", "became", "changed", "text"], restart);
listen(["measure"], () => { showGrid(); restart(); });
at("less").addEventListener("click", () => { start -= PAGE; listHeldOut(); });
at("more").addEventListener("click", () => { start += PAGE; listHeldOut(); });
