"""The training completions that a run saves: a small sample of every run, for its page, and with
completions=all those of every step.

    RUN/completions/training.jsonl    one line per step: a prompt, its rows
    RUN/completions/all.jsonl         one line per completion, in the order of the steps

Both are truncated to the step that a run is resumed from, so no row occurs twice.
"""

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from common.config import Run
from common.system import NUMBER, events, jsonable, write_jsonl
from common.task import Example, plain

FILE, ALL = "training.jsonl", "all.jsonl"  # in RUN/completions
STEPS = 512  # the most steps in the sample; when a run exceeds them, every second one is removed
ROWS = 64  # the most rows of a prompt in the sample
# The most characters of a completion whose tokens are described: those that the page shows.
LETTERS = 4000
# Columns that all rows of a prompt share.
SHARED = ("id", "group", "prompt", "answer")
# Columns of all.jsonl, if they have a value; components of the reward are added.
COLUMNS = ("version", *SHARED, "member", "sign", "sample", "completion", "tokens", "cut")
COLUMNS += ("fitness", "advantage", "logprobs", "ends")

Row = dict[str, Any]


def kept_prompts(run: Run, prompts: int) -> int:
    """Return the number of a step's first `prompts` prompts whose completions are saved."""
    return prompts if run.completions == "all" else min(prompts, 1)


def describe(task: Any, example: Example, group: int) -> Row:
    """Return the values that all rows of a prompt share.

    Args: group: the index of the prompt in the step.
    """
    prompt, answer = plain(task.prompt(example)), str(example.answer)
    return {"id": example.id, "group": group, "prompt": prompt, "answer": answer}


class Tokens:
    """Describes the tokens of completions; the text of each token is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.texts = tokenizer, {}

    def describe(self, tokens: Sequence[int], text: str, logprobs: Sequence[float]) -> Row:
        """Return the end of each token in a completion's `text`, and its log-probability.

        Args: logprobs: those of at least as many tokens.
        """
        drawn = [round(logprob, 3) for logprob in logprobs[: len(tokens)]]
        return {"ends": self.find_ends(tokens, text), "logprobs": drawn}

    def find_ends(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return for each token the number of characters of `text` up to its end.

        A token that is only part of a character, or not in the text, ends at the end of the
        previous token.
        """
        if fresh := sorted(set(tokens) - self.texts.keys()):
            decoded = self.tokenizer.batch_decode([[token] for token in fresh])
            self.texts |= zip(fresh, (one.strip() for one in decoded), strict=True)
        ends, place = [], 0
        for token in tokens:
            piece = self.texts[token]
            start = text.find(piece, place, place + len(piece) + 2) if piece else -1
            if not piece and place < len(text) and text[place].isspace():
                place += 1
            elif start >= 0:
                place = start + len(piece)
            ends.append(place)
        return ends


class Samples:
    """Saves the completions of one run, on rank 0.

    Args:
        everything: whether to save those of every step too.
        resumed: the number of finished steps; rows of later steps are removed.
    """

    def __init__(self, out_dir: Path, everything: bool, resumed: int) -> None:
        self.path, self.all = out_dir / "completions" / FILE, out_dir / "completions" / ALL
        self.everything, self.every = everything, 1
        if self.path.exists():
            self._rewrite(lambda line: line["step"] <= resumed)
        if self.all.exists():
            cut_rows(self.all, resumed)

    def add(self, step: int, rows: Iterable[Row], place: int | None = None) -> None:
        """Save the rows of a 1-based step.

        Args: place: the index of the step among the steps with rows, by which the sample is
        thinned; None = every step has rows.
        """
        place = place or step
        rows = sorted(rows, key=_order)
        if self.everything and rows:
            append_rows(self.all, step, rows)
        if rows and (place - 1) % stride(place) == 0:
            chosen = [row for row in rows if row["group"] == rows[0]["group"]][:ROWS]
            self._write({"step": step} | ({"place": place} if place != step else {}), chosen)

    def _write(self, line: Row, rows: list[Row]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        if (every := stride(_place(line))) > self.every:
            self.every = every
            self._rewrite(lambda line: (_place(line) - 1) % every == 0)
        line |= {key: rows[0][key] for key in SHARED}
        line["rows"] = [
            {"reward": None}  # the default
            | jsonable({k: v for k, v in row.items() if k not in SHARED and v is not None})
            for row in map(_crop, rows)
        ]
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _rewrite(self, wanted: Callable[[Row], bool]) -> None:
        lines = [line for line in read_steps(self.path.parents[1]) if wanted(line)]
        write_jsonl(self.path, lines, ascii_only=False)

    def sync(self) -> None:
        """Flush the rows of every step to the disk, before a checkpoint, in case of a power cut."""
        if self.everything and self.all.exists():
            with self.all.open("rb") as file:
                os.fsync(file.fileno())


def stride(step: int) -> int:
    """Return the stride of the sample of a run at 1-based `step`: every step, every second, every
    fourth, ..., so that it has at most `STEPS` steps.
    """
    return 1 << ((step - 1) // STEPS).bit_length()


def _place(line: Row) -> int:
    return line.get("place", line["step"])


def _crop(row: Row) -> Row:
    """Return a row with only the tokens that the page can show: a run's sample is read
    as a whole.
    """
    if not row.get("ends"):
        return row
    count = bisect_right(row["ends"], LETTERS)
    return row | {name: row[name][:count] for name in ("ends", "logprobs")}


def _order(row: Row) -> tuple[Any, ...]:
    return row["group"], row.get("member") or 0, row.get("sample") or 0


# --- the rows of every step


def append_rows(path: Path, step: int, rows: Sequence[Row]) -> None:
    """Append the rows of a step to RUN/completions/all.jsonl, one line per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(_describe_row(step, row), ensure_ascii=False) + "\n" for row in rows)
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _describe_row(step: int, row: Row) -> Row:
    """Return a row under the names of docs/tracking.md, without empty columns."""
    named = {
        "id": "prompt_id",
        "cut": "cut_off",
        "logprobs": "token_logprobs",
        "ends": "token_ends",
    }
    parts = {f"reward/{name}": value for name, value in (row.get("components") or {}).items()}
    extra = {f"extra/{name}": value for name, value in (row.get("extra") or {}).items()}
    flat = {named.get(key, key): row[key] for key in COLUMNS if row.get(key) is not None}
    return jsonable({"step": step, **flat, "reward": row.get("reward"), **parts, **extra})


def cut_rows(path: Path, steps: int) -> None:
    """Remove the rows after `steps`, and an incomplete last one, from RUN/completions/all.jsonl."""
    kept = 0
    with path.open("rb") as file:
        for line in file:
            step = re.match(rb'{"step": (\d+)[,}]', line)
            if not line.endswith(b"\n") or (step and int(step[1]) > steps):
                break
            kept += len(line)
    os.truncate(path, kept)


# --- reading


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of RUN/completions/training.jsonl; empty if there is no such file."""
    rows = [{"completion": str, "reward": (*NUMBER, NoneType)}]
    kind = {"step": int, "rows": rows, **dict.fromkeys(SHARED, object)}
    return events(folder / "completions" / FILE, kind)


def read_rows_of_steps(folder: Path) -> list[Row]:
    """Return the lines of RUN/completions/all.jsonl; empty if there is no such file."""
    return events(folder / "completions" / ALL, {"step": int, "completion": str})
