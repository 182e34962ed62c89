"""The progress line of a run."""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

log = logging.getLogger("clutch")


class Progress:
    """A progress line: a bar on a terminal, a plain line now and then elsewhere. The time left is
    told once two observations `SPAN` seconds apart give a speed.

    Args: what: before the count; total, done: in `unit`s; brief: for work inside a step: the bar
    goes when it is done, and without a bar nothing is said in the first ten seconds.
    """

    SPAN = 2.0

    def __init__(
        self, what: str, total: int, done: int = 0, unit: str = "step", brief: bool = False
    ) -> None:
        self.name = f"{what}: {unit}" if what else unit
        self.total, self.start, self.brief = total, done, brief
        self.began = self.printed = time.monotonic()
        self.said = brief
        self.first: float | None = None  # when the first observation came
        self.first_done = done
        self.bar: Any = None
        if sys.stderr.isatty():
            self.width = 10 if terminal_columns() >= 100 else 6
            counts = "{n_fmt}/{total_fmt}"
            self.layout = f"{self.name} {counts} |{{bar:{self.width}}}| %s{{postfix}}"
            options: Any = {
                "bar_format": self.layout % "? left",
                "dynamic_ncols": True,
                "smoothing": 0,
            }
            self.bar = tqdm(total=total, initial=done, leave=not brief, **options)

    def to(self, done: int, text: str = "", always: bool = False) -> None:
        """Move to `done` of `total`. always: say it even if a line was printed a moment ago."""
        now = time.monotonic()
        if self.first is None and done > self.start:
            self.first, self.first_done = now, done
        known = done == self.total or (self.first is not None and now - self.first >= self.SPAN)
        if self.bar is not None:
            if known:
                self.bar.bar_format = self.layout % "{remaining} left"
            self.bar.set_postfix_str(self._cut(text), refresh=False)
            self.bar.update(done - self.bar.n)
            return
        # seconds; days of training are not a million lines
        due = now - self.printed > max(10, (now - self.began) / 50)
        if due or not self.said or always or (done == self.total and not self.brief):
            self.printed, self.said = now, True
            left = self._left(now, done)
            parts = [f"{tqdm.format_interval(left)} left"] if known else []
            tail = ", ".join([*parts, *([text] if text else [])])
            log.info("%s %d/%d%s", self.name, done, self.total, f": {tail}" if tail else "")

    def _left(self, now: float, done: int) -> float:
        """Return the seconds left, at the mean speed since the first observation, which took the
        time of starting up.
        """
        if self.first is None or done <= self.first_done:
            return (now - self.began) / max(1, done - self.start) * (self.total - done)
        return (now - self.first) / (done - self.first_done) * (self.total - done)

    def _cut(self, text: str) -> str:
        """Return as many whole parts of `text` as the terminal has room for."""
        head = f"{self.name} {self.total}/{self.total} |{' ' * self.width}| 0:00:00 left, "
        while len(head) + len(text) >= terminal_columns() and ", " in text:
            text = text.rpartition(", ")[0]
        return text

    def close(self) -> None:
        """End the line."""
        if self.bar is not None:
            self.bar.close()


def terminal_columns() -> int:
    """Return the width of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


@contextmanager
def watch_completions(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Show a progress line of `total` completions for the block, if `shown`. Yields what to call
    with the number of those that have just finished.
    """
    if not shown:
        yield None
        return
    line, done = Progress(what, total, unit="completion", brief=True), 0

    def advance(rows: int) -> None:
        nonlocal done
        done = min(total, done + rows)  # what is repeated when memory runs out counts once
        line.to(done)

    try:
        yield advance
    finally:
        line.close()
