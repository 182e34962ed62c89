"""The completions of a run as the data of its page: held-out ones of each evaluation, training
completions that the run saves, and its prompts by the share of right answers.

All of them together are limited in size, so that a page is small whatever the run.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.report.run_folder import read_rows
from common.report.samples import LETTERS, read_rows_of_steps, read_steps
from common.system import jsonable
from common.task import plain
from common.tasks import RIGHT

ROWS = 200  # the most held-out completions per evaluation
EVALUATIONS = 12  # the most evaluations with completions, including the first and the last
SIZE = 1_500_000  # the most bytes of all held-out completions
KEPT = 1_200_000  # the most bytes of training completions
STEPS = 12  # the fewest training steps shown, however long the completions are
WINDOWS = 10  # the most windows of the run in the table of prompts
# The columns of that table: the share right, or the mean reward, of a prompt's completions.
SHARES = ("none", "to a quarter", "to a half", "to three quarters", "below all", "all")
ROUNDING = 1e-9  # of a mean

Line = dict[str, Any]


def find_evaluations(folder: Path) -> list[Path]:
    """Return the files of held-out completions in order.

    Args: folder: RUN/completions.
    """
    paths = [folder / "before.jsonl", *sorted(folder.glob("step-*.jsonl"))]
    iterations = folder.glob("iteration-*.jsonl")
    iterations = sorted(iterations, key=lambda path: int(path.stem.rpartition("-")[2]))
    return [p for p in (*paths, *iterations, folder / "after.jsonl") if p.is_file()]


def find_held_out(folder: Path) -> dict[str, Any]:
    """Return the held-out prompts, and the completions of some evaluations.

    Args: folder: RUN/completions.
    """
    paths = find_evaluations(folder)
    if len(paths) > EVALUATIONS:
        paths = [paths[place] for place in _spread(len(paths), EVALUATIONS)]
    read = {path.stem: read_rows(path, ROWS) for path in paths}
    first = next(iter(read.values()), [])
    ids = [row["id"] for row in first]
    same = {name: rows for name, rows in read.items() if [row["id"] for row in rows] == ids}
    said = "".join(row["completion"] for row in first)
    wide = len(said.encode("utf-8", "replace")) / max(1, len(said))  # bytes of a character
    longest = min(LETTERS, int(SIZE / max(1.0, wide) / max(1, len(ids) * (len(same) + 2))))
    prompts = [
        {
            "id": row["id"],
            "prompt": cut(plain(row["prompt"]), longest),
            "answer": cut(str(row["answer"]), longest),
        }
        for row in first
    ]
    evaluations = [
        {
            "name": _name(name),
            "texts": texts,
            # the contribution of each to a measure, of 100, if the run has saved it
            "scores": {
                measure: [(row.get("scores") or {}).get(measure) for row in rows]
                for measure in rows[0].get("scores") or {}
            },
        }
        for name, rows in same.items()
        if (texts := [cut(row["completion"], longest) for row in rows])
    ]
    total = 0
    if first:
        with paths[0].open("rb") as file:
            total = sum(1 for _ in file)
    return {"prompts": prompts, "evaluations": evaluations, "total": total}


def find_training(lines: Sequence[Line]) -> dict[str, Any]:
    """Return some of the steps with saved completions, evenly spread over the run.

    Args: lines: the result of read_steps.
    """
    most = max((len(line["rows"]) for line in lines), default=1)
    longest = min(LETTERS, max(200, KEPT // (STEPS * max(1, most))))
    texts = [_shortened(line, longest) for line in lines]
    count, sizes = len(texts), [len(text.encode("utf-8", "replace")) for text in texts]
    while count > 1 and sum(sizes[i] for i in _spread(len(texts), count)) > KEPT:
        count = count * 3 // 4
    places = _spread(len(texts), count)
    rows = [row for line in lines for row in line["rows"]]
    parts = sorted({name for row in rows for name in row.get("components") or ()})
    return {"steps": [json.loads(texts[i]) for i in places], "total": len(lines), "parts": parts}


def _shortened(line: Line, longest: int) -> str:
    rows = []
    for row in line["rows"]:
        text, ends = row["completion"], row.get("ends")
        row = {**row, "completion": cut(text, longest)}
        if ends and len(text) > longest:
            shown = sum(end <= longest for end in ends)
            row |= {"ends": ends[:shown], "logprobs": row["logprobs"][:shown]}
        rows.append(row)
    asked = {key: cut(str(line[key]), longest) for key in ("prompt", "answer")}
    return json.dumps(jsonable({**line, **asked, "rows": rows}), ensure_ascii=False)


def _spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spread indices below `total`, including the first and the last."""
    if count < 2:
        return list(range(count))
    return [i * (total - 1) // (count - 1) for i in range(count)]


def find_prompts(lines: Sequence[Line], right: float = 1.0) -> dict[str, Any] | None:
    """Return the number of saved prompts by the share of their right completions (`SHARES`), a row
    per window of the run; None without saved prompts.

    Args: right: the least reward of a right completion.
    """
    lines = [line for line in lines if line["rows"]]
    if not lines:
        return None
    size = -(-len(lines) // WINDOWS)
    rows = []
    for start in range(0, len(lines), size):
        part = lines[start : start + size]
        counts = [0] * len(SHARES)
        for line in part:
            scored = [row["reward"] or 0.0 for row in line["rows"] if not row.get("unscored")]
            if scored:
                mean = sum(scored) / len(scored)
                counts[find_column(mean / right if right > 0 else mean >= right)] += 1
        first, last = part[0]["step"], part[-1]["step"]
        rows.append([f"{first} to {last}" if last > first else str(first), *counts])
    return {"heads": list(SHARES), "rows": rows}


def find_column(share: float) -> int:
    """Return the column of a prompt, given the share of its completions that are right."""
    quarters = (0.0, 0.25, 0.5, 0.75)
    return len(SHARES) - 1 if share >= RIGHT else bisect_left(quarters, share - ROUNDING)


def read_training(folder: Path) -> list[Line]:
    """Return the saved lines of a run by step, also those of shards, whose steps have the same
    numbers.
    """
    lines = [line for part in _with_shards(folder) for line in read_steps(part)]
    return sorted(lines, key=lambda line: line["step"])


def read_all(folder: Path) -> list[Line]:
    """Return the rows that a run with completions=all has saved, also those of shards; else an
    empty list.
    """
    return [row for part in _with_shards(folder) for row in read_rows_of_steps(part)]


def _with_shards(folder: Path) -> list[Path]:
    return [folder, *sorted(folder.glob("shard-*-of-*"))]


def cut(text: str, longest: int) -> str:
    """Return a text; if it is longer than `longest` characters, its beginning and dots."""
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _name(stem: str) -> str:
    word, _, number = stem.partition("-")
    return f"{word} {int(number)}" if number else stem
