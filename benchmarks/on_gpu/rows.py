"""The rows of make gpu: written as they come, read again for the table and for the file to send."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.checks import CHECKS
from common.system import write_text
from ddp_bench.report.tables import align

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
ENDS = "ends"  # the row that says how a check ended
SENT = "on_gpu.json"
LOGGED = 60  # lines of each log in the file to send

Row = dict[str, str]


class Rows:
    """The rows in a folder: of each name the last one counts.

    Attributes:
        folder: it also has the logs and the results of the benchmarks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "rows.jsonl"

    def add(self, check: str, name: str, wanted: str, measured: str, result: str) -> None:
        """Write a row."""
        row = {"check": check, "name": name, "wanted": wanted, "measured": measured}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | {"result": result}, ensure_ascii=False) + "\n")

    def of(self, check: str) -> list[Row]:
        """Return the rows of a check."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        found: dict[str, Row] = {}
        for line in text.splitlines():
            row = json.loads(line)
            if row["check"] == check:
                found[row["name"]] = row
        return list(found.values())

    def drop(self, check: str) -> None:
        """Remove the rows of a check that is run again."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        self.path.write_text(
            "".join(line for line in lines if json.loads(line)["check"] != check), encoding="utf-8"
        )

    def has_ended(self, check: str) -> bool:
        """Return whether a check came to its end, well or not."""
        return any(row["name"] == ENDS and row["result"] != NOT_RUN for row in self.of(check))

    def all(self) -> list[Row]:
        """Return all rows, check by check; those of a check without any say that it is not run."""
        rows = []
        for check in CHECKS:
            none = {"check": check.name, "name": check.about, "wanted": "", "measured": ""}
            rows += self.of(check.name) or [none | {"result": NOT_RUN}]
        return rows

    def gather(self) -> Path:
        """Put conditions, rows, results of benchmarks and the ends of logs into one file, with the
        results that an earlier call left in it.
        """
        path = self.folder / SENT
        earlier: dict[str, Any] = {}
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
        conditions = self.folder / "conditions.json"
        results = {
            f.stem: json.loads(f.read_text(encoding="utf-8"))
            for f in sorted(self.folder.glob("*.json"))
            if f not in (path, conditions)
        }
        logs = {f.stem: tail(f, LOGGED) for f in sorted(self.folder.glob("*.log"))}
        content = {
            "conditions": json.loads(conditions.read_text(encoding="utf-8")),
            "rows": self.all(),
            "benchmarks": earlier.get("benchmarks", {}) | results,
            "logs": earlier.get("logs", {}) | logs,
        }
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return path


def tail(log: Path, lines: int) -> str:
    """Return the last lines of a log that are not blank."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])[-4000:]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the closing table, and the number of rows per result."""
    lines = [["check", "what", "wanted", "measured", "result"]]
    for row in rows:
        short = [
            row[key].splitlines()[0][:60] if row[key] else "" for key in ("wanted", "measured")
        ]
        lines.append([row["check"], row["name"][:80], *short, row["result"]])
    results = [row["result"] for row in rows]
    counts = ", ".join(f"{results.count(name)} {name}" for name in (PASS, FAIL, NOT_RUN))
    return ["", *align(lines, left=5), "", counts]


def meets(wanted: str, measured: str) -> bool:
    """Return whether "97.1%" is ">= 95%"; what begins with no number meets nothing."""
    bound = re.match(rf"(>=|<=|<|>)\s*({NUMBER})", wanted)
    assert bound is not None, f"{wanted!r} names no bound"
    found = re.match(NUMBER, measured)
    if found is None:  # such as nan
        return False
    number, limit = float(found[0]), float(bound[2])
    return {
        ">=": number >= limit,
        "<=": number <= limit,
        "<": number < limit,
        ">": number > limit,
    }[bound[1]]
