"""RUN/report.md and RUN/report.html: the report of a run for people, made only from the files of
the run folder.

    python -m common.report outputs/mine

So it is the same after a kill and a resume as after an uninterrupted run, and can be made for a run
that was killed.
"""

import logging
import shlex
from pathlib import Path
from typing import Any

from common.config import ConfigError, name_folder
from common.report import web
from common.report.completions import cut, find_evaluations
from common.report.run_folder import load, read_rows
from common.system import EVALUATIONS, markdown_cell, markdown_table, safe_read, write_text
from common.task import plain

log = logging.getLogger("clutch")

SAMPLES = 5  # the number of completions shown
LONGEST = 600  # the most characters shown of a completion; the files have all


def write_or_warn(folder: Path) -> bool:
    """Write the report without failing the run; return whether it was written."""
    try:
        write_report(folder)
    except Exception as error:
        log.warning(
            "%s/report.md could not be written (%s: %s). Again: python -m common.report %s",
            *(folder, type(error).__name__, error, shlex.quote(str(folder))),
        )
        return False
    return True


def write_report(folder: Path) -> Path:
    """Write FOLDER/report.md and FOLDER/report.html. Returns the path of report.md.

    Raises: ConfigError if `folder` is no run folder.
    """
    check_folder(folder)
    with safe_read.reading(folder):  # errors of writing, below, are no damage
        data = web.read_data(folder)
        parts = [
            _head(folder, data),
            markdown_table([{"": key, " ": value} for key, value in data["facts"]]),
            _section("Held-out measures", data["measures"]["heads"], data["measures"]["rows"]),
            *(_section(one["title"], one["heads"], one["rows"]) for one in data["tables"]),
            _section("Time", ["phase", "seconds", "share"], data["phases"]),
            _completions(folder / "completions"),
            _confusion(folder / "confusion.json"),
            _warnings(data["warnings"]),
        ]
        page = web.make_page(data)
    write_text(folder / "report.html", page)
    parts.append(_files(folder))
    path = folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def check_folder(folder: Path) -> None:
    """Raise ConfigError if `folder` is no run folder."""
    if not (folder / "run.yaml").exists():
        raise ConfigError(f"{folder} has no run.yaml, so it is no run folder. {advise(folder)}")


def advise(folder: Path) -> str:
    """Return the next step for a path that is no run folder."""
    if runs := sorted(path.parent for path in folder.glob("*/run.yaml")):
        return (
            f"It holds the runs of a sweep: give one of them, such as {runs[0]}, or compare them:"
            f" python -m common.compare {shlex.quote(str(folder))}"
        )
    for above in list(folder.parents)[:3]:
        if (above / "run.yaml").exists():
            return f"It is a part of the run {above}: give that."
    missing = (
        "" if folder.is_dir() else "It is a file. " if folder.exists() else "It is not there. "
    )
    return f"{missing}Give one, for example outputs/mine."


def _head(folder: Path, data: dict[str, Any]) -> str:
    lines = [f"# {data['title']}"]
    if verdict := data["verdict"]:
        lines.append(f"{verdict[0].upper()}{verdict[1:]}")
        if data["next"]:
            lines.append(f"Try next:\n\n    {data['next']}")
    measured = data["measured"]
    if measured and (folder / f"{measured}.txt").exists():
        text = safe_read.read_text(folder / f"{measured}.txt").strip()
        lines.append(f"```\n{text}\n```")
    elif measured:
        lines.append(f"The times are in {measured}.json.")
    elif not data["ended"]:
        lines.append(
            f"{data['logged']} are logged. Go on with `{name_folder(folder)} resume=auto`."
        )
    if data["command"]:
        lines.append(f"```\n{data['command']}\n```")
    return "\n\n".join(lines)


def _section(title: str, heads: list[str], rows: list[list[str]]) -> str:
    table = [dict(zip(heads, row, strict=True)) for row in rows]
    return f"## {title}\n\n{markdown_table(table)}" if rows else ""


def _completions(folder: Path) -> str:
    first = read_rows(folder / "before.jsonl", SAMPLES)
    if not first:
        return ""
    last = find_evaluations(folder)[-1]
    later = [] if last.stem == "before" else read_rows(last, SAMPLES)
    name = "after" if last.stem == "after" else "last"
    said = [cut(row["completion"], LONGEST) for row in later] + [""] * len(first)
    rows = [
        {"prompt": cut(plain(old["prompt"]), LONGEST), "before": cut(old["completion"], LONGEST)}
        | ({name: said[i]} if later else {})
        | {"answer": cut(str(old["answer"]), LONGEST)}
        for i, old in enumerate(first)
    ]
    head = f"The first {len(rows)}, greedy. All of every evaluation are in completions/."
    return f"## Held-out completions\n\n{head}\n\n{markdown_table(rows)}"


def _confusion(path: Path) -> str:
    confusion = load(path)
    if confusion is None or len(confusion["classes"]) > 12:
        return ""
    rows = [
        {"true \\ predicted": name, **dict(zip(confusion["classes"], line, strict=True))}
        for name, line in zip(confusion["classes"], confusion["table"], strict=True)
    ]
    return "## Confusion of the test rows\n\n" + markdown_table(rows)


def _warnings(found: list[str]) -> str:
    lines = [f"- {markdown_cell(text)}" for text in found]
    return "\n\n".join(["## Warnings", "\n".join(lines)]) if found else ""


def _files(folder: Path) -> str:
    known = {
        "report.html": "this, with curves and more completions",
        "model": "the trained model",
        "adapter": "the trained adapter",
        "metrics.jsonl": "every step",
        EVALUATIONS: "every held-out measure",
        "completions": "held-out completions of each evaluation, and some of training",
        "predictions.jsonl": "the class of each test row",
        "checkpoints": "to go on from",
        "result.json": "the outcome",
        "run.yaml": "settings, versions, commit, device",
        "run.log": "what was printed",
        "not_finite.jsonl": "what was behind numbers that were not finite",
    }
    there = {name: what for name, what in known.items() if (folder / name).exists()}
    return "## Files\n\n" + "\n".join(f"- [{name}]({name}): {what}" for name, what in there.items())
