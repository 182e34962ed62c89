"""The ledger of proposals: a JSON Lines file that is only ever appended to.

Each line has the SHA-256 of the line before it, so that a line that was removed or changed is found
when the ledger is read: a proposal that is left out would give its share of the error back.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common.config import ConfigError
from common.system import NUMBER, safe_read
from common.uncertainty import Spread
from plugins.judge.statistics import KEEP, decide, find_level, find_share

PATIENCE = 60.0  # seconds to wait for another process, which holds the ledger for an instant
FIRST = "0" * 64  # in place of the line before the first one
# Lines of before the field had the floor in "by_seeds", and are judged with it as they were.
SPREAD = {f.name if f.default is MISSING else f"{f.name}?": NUMBER for f in fields(Spread)}
ENTRY = {
    **dict.fromkeys(("previous", "base", "new", "answer"), str),
    **dict.fromkeys(("place", "look", "seeds"), int),
    "level": NUMBER,
    "effect": NUMBER,
    "spread": SPREAD,
}


@dataclass(frozen=True)
class Pair:
    """A proposal: the digests of the settings of its two sides."""

    base: str
    new: str


class Ledger:
    """The entries of a ledger, one per look at a proposal.

    Attributes:
        path: the file, which need not exist.
        entries: its lines.
    Raises: ConfigError if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, list[dict[str, Any]]()
        self.last, self.size = FIRST, 0
        again = "Restore it from a copy: without all its lines, luck is no longer accounted for."
        with safe_read.reading(path, again):
            if not path.exists():
                return
            if not path.is_file():
                raise ValueError("it is not a file")
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # of a kill while it was written: nobody has read it
                    break
                self._add(line)

    def _add(self, line: bytes) -> None:
        number = len(self.entries) + 1
        try:
            entry = safe_read.parse_json(line.decode("utf-8"))
            safe_read.check(entry, ENTRY)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        places = max((one["place"] for one in self.entries), default=0)
        if entry["previous"] != self.last or not 1 <= entry["place"] <= places + 1:
            raise ValueError(f"line {number} does not follow the line before it")
        self.entries.append(entry)
        self.last, self.size = hashlib.sha256(line).hexdigest(), self.size + len(line)

    def find(self, pair: Pair) -> list[dict[str, Any]]:
        """Return the looks at a proposal."""
        return [one for one in self.entries if (one["base"], one["new"]) == (pair.base, pair.new)]

    def needs_runs(self, pair: Pair, seeds: int) -> bool:
        """Return whether a look with so many seeds is due: they are more than at any look before,
        and the proposal is not kept already.
        """
        looks = self.find(pair)
        return not looks or (looks[-1]["answer"] != KEEP and looks[-1]["seeds"] < seeds)

    def look(
        self, pair: Pair, effect: float, found: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the entry of a look at a proposal, and write it if it says something new.

        A look with no more seeds than before is the last look again, with the numbers of that one:
        runs that were made again are no other chance. Its answer may have become "keep", as the
        proposal before it may have been kept since.
        Args:
            effect: as of `decide`.
            found: what was measured: "seeds", "spread", and facts for people; None = nothing new.
        """
        looks = self.find(pair)
        if looks and looks[-1]["answer"] == KEEP:
            return looks[-1]
        if looks and (found is None or found["seeds"] <= looks[-1]["seeds"]):
            entry = dict(looks[-1])
        else:
            assert found is not None
            places = max((one["place"] for one in self.entries), default=0)
            place = looks[-1]["place"] if looks else places + 1
            entry = {"base": pair.base, "new": pair.new, "place": place, "look": 1, **found}
            if looks:
                entry["look"] = looks[-1]["look"] + 1
        entry["level"] = self.find_level(entry["place"]) * find_share(entry["look"])
        entry |= {"effect": effect}
        entry["answer"] = decide(Spread(**entry["spread"]), entry["level"], effect)
        said = ("look", "answer")
        if not looks or any(entry[key] != looks[-1][key] for key in said):
            self.append(entry)
        return entry

    def find_level(self, place: int) -> float:
        """Return the level of a place; one more than there are is the next proposal's."""
        kept = {one["place"] for one in self.entries if one["answer"] == KEEP}
        return find_level(place, [number in kept for number in range(1, place)])

    def append(self, entry: dict[str, Any]) -> None:
        """Write an entry behind the others, in place of an incomplete last line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entry = {**entry, "previous": self.last, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        line = (json.dumps(entry) + "\n").encode()
        with self.path.open("ab") as file:
            file.truncate(self.size)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._add(line)


@contextmanager
def opened(path: Path) -> Iterator[Ledger]:
    """Yield a ledger that no other process reads or writes during the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=PATIENCE):
            yield Ledger(path)
    except Timeout:
        raise ConfigError(
            f"--ledger {path} is in use by another process. Wait until it has ended."
        ) from None
