"""The log of what environments have said since the last checkpoint. A run that is killed and goes
on plays its episodes again from there, and takes from the log what a tool or a server has answered:
a second search could find something else, and lead to other tokens.

    RUN/replies/step-00000040-TIME-rank-0.jsonl    since the checkpoint of step 40, on rank 0

A line is found again by its place: the checkpoint before it, the call of the sampler since then,
and the episode and its conversation there. A run that ends in order, with an error too, leaves no
log behind, so that an environment that has been corrected is asked for everything again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any

from common.system import NUMBER, safe_read

log = logging.getLogger("clutch")

FOLDER = "replies"  # in the run folder
# Of a reply, without messages where the episode was over; or of what an episode earned.
LINE = {
    "key": str,
    "messages?": [{"role": str, "content": str}],
    "reward?": (*NUMBER, NoneType),
    "components?": {str: NUMBER},
}
Line = dict[str, Any]


class ReplyLog:
    """The log of one rank.

    Attributes: known: by key, what the killed run has left; step: of the last checkpoint; calls: of
    the sampler since then; silent: whether nothing is looked up or written.
    """

    def __init__(self, out_dir: Path, rank: int, settings: Any = None) -> None:
        self.folder, self.rank, self.settings = out_dir / FOLDER, rank, settings
        self.step, self.calls, self.silent = 0, 0, False
        self.known: dict[str, Line] = {}
        self.file: Any = None
        self.used = False  # a run that is refused leaves the log of another as it is

    def resume(self, step: int | None) -> None:
        """Take over what this rank has written since the checkpoint of a step; None = all that is
        there, and go on behind the newest of them.
        """
        paths, self.used = self._paths(), True
        newest = max(map(_step_of, paths), default=0)
        self.step = newest if step is None else step
        for path in paths:
            if step is None or _step_of(path) >= step:
                self.known |= {line["key"]: line for line in safe_read.read_lines(path, LINE)}

    def begin(self, step: int, oldest: int) -> None:
        """Begin anew behind a checkpoint. oldest: the step of the oldest one that is kept."""
        self._leave_file()
        self.step, self.calls = step, 0
        for path in self._paths():
            if _step_of(path) < oldest:
                path.unlink(missing_ok=True)

    def leave_behind(self) -> None:
        """Begin anew behind what is kept for good, so that no run asks for it again."""
        self.begin(self.step + 1, self.step + 1)

    def open(self) -> list[Any]:
        """Return the place of a call of the sampler, with which what it writes is found again."""
        if not self.silent:
            self.calls += 1
        return [self.step, self.calls, self.settings]

    def recall(self, place: list[Any], episode: list[Any]) -> Line | None:
        """Return what the killed run has left about a moment of an episode; None = nothing."""
        if self.silent or not self.known:  # as in a run that has not been killed
            return None
        return self.known.get(_key(place, episode))

    def note(self, place: list[Any], episode: list[Any], **said: Any) -> None:
        """Add a line about a moment of an episode."""
        if not self.silent:
            self.write({"key": _key(place, episode), **said})

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Log nothing in the block, which is no part of the run's course."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def write(self, line: Line) -> None:
        """Add a line. Where the disk is full, the log ends, and the run goes on."""
        self.used = True
        try:
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"step-{self.step:08d}-{time.time_ns()}-rank-{self.rank}.jsonl"
                self.file = (self.folder / name).open("a", encoding="utf-8")
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            log.warning("%s cannot be written (%s), so a kill would lose replies", FOLDER, error)
            self.silent = True

    def remove(self) -> None:
        """Remove what this rank has written, at the end of its run."""
        self._leave_file()
        if not self.used:
            return
        with suppress(OSError):  # another rank's files are there, or nothing is
            for path in self._paths():
                path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"step-*-rank-{self.rank}.jsonl"))

    def _leave_file(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
        self.file = None


def _key(place: list[Any], episode: list[Any]) -> str:
    text = json.dumps([place, episode], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])
