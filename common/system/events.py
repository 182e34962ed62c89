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
# in the run folder: every held-out measure, the one before and the one after too
EVALUATIONS = "evaluations.jsonl"
OVERRIDES = ".hydra/overrides.yaml"  # of a run that a command began
EVENT = {"step": int}  # a line of metrics.jsonl
EVALUATION = {"step": int, "metric": NUMBER, "metrics": {str: NUMBER}}
# The same curve whatever the stage of a run, so that runs of different algorithms lie in one plot.
SHARED = ("step", "iteration", "metric", "metric_name", "metrics")
SHARED += ("generated_tokens", "reward_evaluations")


def jsonable(value: Any) -> Any:
    """Return the same with null for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def events(path: Path, kind: Any = EVENT) -> list[dict[str, Any]]:
    """Return what an interrupted run has logged, without damaged lines, and a torn last one."""
    return safe_read.read_lines(path, kind)


def has_stages(history: Sequence[Numbers]) -> bool:
    """Return whether events are of a run in stages, so that not all of them are optimizer steps."""
    return any("stage" in event for event in history)


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table; what would end a cell is escaped."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(
        "| " + " | ".join(markdown_cell(value) for value in line) + " |" for line in lines
    )


def markdown_cell(value: Any) -> str:
    """Return a value on one line of Markdown, in which it is text and nothing else."""
    text = visible(str(value).strip().replace("\r\n", "\n"), kept="\n")
    text = re.sub(r"[\\|*`~]|(?<=\])\(|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)  # what Markdown takes for HTML
    return text.replace("\n", "<br>")


def cut_events(path: Path, steps: int) -> None:
    """Drop events after `steps`, and a torn last line, from an interrupted run's file."""
    if path.exists():
        write_jsonl(path, [event for event in events(path) if event["step"] <= steps])


def write_jsonl(path: Path, rows: list[dict[str, Any]], ascii_only: bool = True) -> None:
    """Write a JSON Lines file, whole or not at all."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows))


def numbers(event: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an event under the names that W&B, TensorBoard and the report show.

    {"phase_seconds": {"rollout": 1}} -> {"phase_seconds/rollout": 1}, with the stage in front where
    there is one, but for SHARED ones. The step is left out.
    """
    if stage := event.get("stage"):
        of_stage = {key: value for key, value in event.items() if key not in (*SHARED, "stage")}
        shared = {key: event[key] for key in SHARED if key in event}
        named = flat(shared, separator="/") | flat(of_stage, f"{stage}/", "/")
    else:
        named = flat(event, separator="/")
    return {key: v for key, v in named.items() if isinstance(v, (int, float)) and key != "step"}
