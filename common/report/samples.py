"""The completions of training that a run keeps: a small sample of every run, for its page, and with
completions=all those of every step, as Parquet.

    RUN/completions/training.jsonl                         one line per step: a prompt, its rows
    RUN/completions/training/steps-00000001-00000020.parquet  all rows of these steps, by prompt

Both are cut off at the step that a run is resumed from, so no row is there twice. A file of Parquet
is written whole, and ends where a checkpoint is written.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from common.config import Run
from common.report.events import events, jsonable, write_jsonl
from common.system import NUMBER, import_optional
from common.task import Example, plain

FILE, FOLDER = "training.jsonl", "training"  # in RUN/completions
STEPS = 512  # in the sample at most; where a run has more steps, every second one goes
ROWS = 64  # of a prompt in the sample
# Of a completion whose tokens are described in the sample, as many as the page shows.
LETTERS = 4000
BUFFERED = 50_000  # rows for Parquet that are held back for the next checkpoint
# What all rows of a prompt have in common.
SHARED = ("id", "group", "prompt", "answer")

Row = dict[str, Any]


def kept(run: Run, prompts: int) -> int:
    """Return of how many of a step's first `prompts` prompts the completions are kept."""
    return prompts if run.completions == "all" else min(prompts, 1)


def describe(task: Any, example: Example, group: int) -> Row:
    """Return what the rows of a prompt share. group: its place in the step."""
    prompt, answer = plain(task.prompt(example)), str(example.answer)
    return {"id": example.id, "group": group, "prompt": prompt, "answer": answer}


class Tokens:
    """Describes the tokens of completions; the text of a token is looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.texts = tokenizer, {}

    def describe(self, tokens: Sequence[int], text: str, logprobs: Sequence[float]) -> Row:
        """Return where in a completion's `text` its tokens end, and how likely each was. logprobs:
        of at least as many tokens.
        """
        drawn = [round(logprob, 3) for logprob in logprobs[: len(tokens)]]
        return {"ends": self.find_ends(tokens, text), "logprobs": drawn}

    def find_ends(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return for each token the number of characters of `text` up to its end.

        A token that is part of a character, or left out of the text, ends where the one before it
        does.
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
    """Writes the completions of one run, on rank 0.

    Args: everything: those of every step too, as Parquet; resumed: steps already done, what is of
    later ones is cut off.
    """

    def __init__(self, out_dir: Path, everything: bool, resumed: int) -> None:
        self.path, self.folder = out_dir / "completions" / FILE, out_dir / "completions" / FOLDER
        self.everything, self.buffer, self.every = everything, [], 1
        if self.path.exists():
            self._rewrite(lambda line: line["step"] <= resumed)
        for path in self.folder.glob(".steps-*.tmp"):  # of a run that was killed
            path.unlink()
        for path in self.folder.glob("steps-*.parquet"):
            cut_table(path, resumed)

    def add(self, step: int, rows: Iterable[Row], place: int | None = None) -> None:
        """Keep the rows of a step, 1-based. place: among the steps that have rows, where others
        have none; the sample is thinned by it.
        """
        place = place or step
        rows = sorted(rows, key=_order)
        if self.everything:
            self.buffer += [{"step": step, **row} for row in rows]
            if len(self.buffer) >= BUFFERED:
                self.flush()
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
            {"reward": None}  # where there is none
            | jsonable({k: v for k, v in row.items() if k not in SHARED and v is not None})
            for row in map(_crop, rows)
        ]
        with self.path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _rewrite(self, wanted: Callable[[Row], bool]) -> None:
        lines = [line for line in read_steps(self.path.parents[1]) if wanted(line)]
        write_jsonl(self.path, lines, ascii_only=False)

    def flush(self) -> None:
        """Write what is held back as a file of Parquet; before each checkpoint, and at the end."""
        if self.buffer:
            write_table(self.folder, self.buffer)
            self.buffer = []


def stride(step: int) -> int:
    """Return which steps are in the sample of a run that has come to 1-based `step`: every one,
    every second, every fourth, ..., so that there are at most `STEPS`.
    """
    return 1 << ((step - 1) // STEPS).bit_length()


def _place(line: Row) -> int:
    return line.get("place", line["step"])


def _crop(row: Row) -> Row:
    """Return a row with the tokens that the page can show: a run's sample is read as a whole."""
    if not row.get("ends"):
        return row
    count = bisect_right(row["ends"], LETTERS)
    return row | {name: row[name][:count] for name in ("ends", "logprobs")}


def _order(row: Row) -> tuple[Any, ...]:
    return row["group"], row.get("member") or 0, row.get("sample") or 0


# --- Parquet


def write_table(folder: Path, rows: Sequence[Row]) -> Path:
    """Write rows, with their steps, as one file: grouped by prompt, then in order of steps."""
    pa = _pyarrow()
    rows = sorted(rows, key=lambda row: (row["id"], row["step"], _order(row)))
    parts = sorted({name for row in rows for name in row.get("components") or ()})
    extra = sorted({name for row in rows for name in row.get("extra") or ()})
    kinds = {
        **dict.fromkeys(("step", "version", "prompt_id", "group", "member", "sample"), pa.int64()),
        "sign": pa.int8(),
        **dict.fromkeys(("prompt", "answer", "completion"), pa.string()),
        **{"tokens": pa.int32(), "cut_off": pa.bool_(), "reward": pa.float64()},
        **{f"reward/{name}": pa.float64() for name in parts},
        **{f"extra/{name}": pa.string() for name in extra},
        **dict.fromkeys(("fitness", "advantage"), pa.float64()),
        "token_logprobs": pa.list_(pa.float32()),
        "token_ends": pa.list_(pa.int32()),
    }
    named = {"prompt_id": "id", "cut_off": "cut", "token_logprobs": "logprobs"}
    named["token_ends"] = "ends"
    columns = {name: [_cell(row, named.get(name, name)) for row in rows] for name in kinds}
    table = pa.table(columns, schema=pa.schema(list(kinds.items())))
    steps = [row["step"] for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"steps-{min(steps):08d}-{max(steps):08d}.parquet"
    _replace(table, path)
    return path


def _cell(row: Row, name: str) -> Any:
    if name.startswith("reward/"):
        return (row.get("components") or {}).get(name.removeprefix("reward/"))
    value = row.get(name)
    if name.startswith("extra/"):
        value = (row.get("extra") or {}).get(name.removeprefix("extra/"))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def cut_table(path: Path, steps: int) -> None:
    """Drop the rows after `steps` from a file of Parquet, and the file where none are left."""
    first, last = map(int, path.stem.split("-")[1:])
    if first > steps:
        path.unlink()
    elif last > steps:
        table = _pyarrow("pyarrow.parquet").read_table(path)
        rows = _pyarrow("pyarrow.compute").less_equal(table["step"], steps)
        _replace(table.filter(rows), path.with_stem(f"steps-{first:08d}-{steps:08d}"))
        path.unlink()


def _replace(table: Any, path: Path) -> None:
    beside = path.with_name(f".{path.stem}.tmp")  # readers of the folder leave it out
    _pyarrow("pyarrow.parquet").write_table(table, beside)
    os.replace(beside, path)


def _pyarrow(module: str = "pyarrow") -> Any:
    return import_optional(module, "completions=all needs pip install -e '.[parquet]'.")


# --- reading


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of RUN/completions/training.jsonl, none where there is no such file."""
    rows = [{"completion": str, "reward": (*NUMBER, NoneType)}]
    kind = {"step": int, "rows": rows, **dict.fromkeys(SHARED, object)}
    return events(folder / "completions" / FILE, kind)
