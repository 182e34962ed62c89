"""Read and shape the events of metrics.jsonl."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import flat
from common.system import safe_read
from common.system.files import write_text
from common.system.safe_read import NUMBER
from common.system.terminal import visible

Numbers = dict[str, Any]  # an event of metrics.jsonl
# the file of all held-out measures in the run folder, also those before and after training
EVALUATIONS = "evaluations.jsonl"
OVERRIDES = ".hydra/overrides.yaml"  # of a run that a command began
EVENT = {"step": int}  # a line of metrics.jsonl
EVALUATION = {"step": int, "metric": NUMBER, "metrics": {str: NUMBER}}
# Numbers without a stage's prefix, so that runs of different algorithms share a plot.
SHARED = ("step", "iteration", "metric", "metric_name", "metrics")
SHARED += ("generated_tokens", "reward_evaluations")


def jsonable(value: Any) -> Any:
    """Return a value with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def events(path: Path, kind: Any = EVENT) -> list[dict[str, Any]]:
    """Return the events that an interrupted run has logged, without damaged lines and an incomplete
    last one.
    """
    return safe_read.read_lines(path, kind)


def has_stages(history: Sequence[Numbers]) -> bool:
    """Return whether events belong to a run in stages, in which not all events are
    optimizer steps.
    """
    return any("stage" in event for event in history)


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table; characters that would end a cell are escaped."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(
        "| " + " | ".join(markdown_cell(value) for value in line) + " |" for line in lines
    )


def markdown_cell(value: Any) -> str:
    """Return a value on one line of Markdown, with all markup escaped."""
    text = visible(str(value).strip().replace("\r\n", "\n"), kept="\n")
    text = re.sub(r"[\\|*`~]|(?<=\])\(|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)  # text that Markdown would read as HTML
    return text.replace("\n", "<br>")


def cut_events(path: Path, steps: int) -> None:
    """Remove events after `steps`, and an incomplete last line, from an interrupted run's file."""
    if path.exists():
        write_jsonl(path, [event for event in events(path) if event["step"] <= steps])


def write_jsonl(path: Path, rows: list[dict[str, Any]], ascii_only: bool = True) -> None:
    """Write a JSON Lines file, atomically."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows))


def numeric_values(event: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an event under the names that W&B, TensorBoard and the report show.

    {"phase_seconds": {"rollout": 1}} becomes {"phase_seconds/rollout": 1}. The name of a stage is
    the prefix of its numbers, except for SHARED ones. The step is left out.
    """
    if stage := event.get("stage"):
        of_stage = {key: value for key, value in event.items() if key not in (*SHARED, "stage")}
        shared = {key: event[key] for key in SHARED if key in event}
        named = flat(shared, separator="/") | flat(of_stage, f"{stage}/", "/")
    else:
        named = flat(event, separator="/")
    return {key: v for key, v in named.items() if isinstance(v, (int, float)) and key != "step"}
