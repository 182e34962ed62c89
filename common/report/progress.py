"""The progress line of a run."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.system import terminal

log = logging.getLogger("clutch")


class Progress:
    """A progress line: a bar on a terminal, an occasional plain line elsewhere. The time left is
    shown once two observations `SPAN` seconds apart determine the speed.

    Args:
        what: the text before the count.
        total: the number of `unit`s in all.
        done: the number of `unit`s at the start.
        brief: whether it is work inside a step: its bar is removed when it is done, and without a
            bar nothing is printed in the first ten seconds.
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
        self.done, self.shown = done, ""
        self.screen = terminal.find_screen()
        if self.screen:
            self.screen.open(self)

    def to(self, done: int, text: str = "", always: bool = False) -> None:
        """Move to `done` of `total`.

        Args: text: the text after the count; always: print even if a line was printed a moment ago.
        """
        now = time.monotonic()
        if self.first is None and done > self.start:
            self.first, self.first_done = now, done
        self.done, self.shown = done, text
        if self.screen:
            self.screen.draw(now=always)
            return
        # seconds; days of training are not a million lines
        due = now - self.printed > max(10, (now - self.began) / 50)
        if due or not self.said or always or (done == self.total and not self.brief):
            self.printed, self.said = now, True
            tail = ", ".join(self._parts(now))
            log.info("%s %d/%d%s", self.name, done, self.total, f": {tail}" if tail else "")

    def text(self) -> str:
        """Return the line with a bar, and as many whole parts as fit the width of the terminal."""
        columns = shutil.get_terminal_size((80, 24)).columns
        width = 10 if columns >= 100 else 6
        filled = "█" * (width * self.done // max(1, self.total))
        head = f"{self.name} {self.done}/{self.total} |{filled:<{width}}| "
        parts = self._parts(time.monotonic())
        while len(parts) > 1 and len(head) + len(", ".join(parts)) >= columns:
            parts.pop()
        return (head + ", ".join(parts))[: columns - 1]

    def _parts(self, now: float) -> list[str]:
        known = self.done == self.total
        known |= self.first is not None and now - self.first >= self.SPAN
        left = [f"{format_seconds(self._left(now))} left"] if known else []
        return [*left, *filter(None, self.shown.split(", "))]

    def _left(self, now: float) -> float:
        """Return the seconds left, at the mean speed since the first observation, which excludes
        the start-up.
        """
        if self.first is None or self.done <= self.first_done:
            return (now - self.began) / max(1, self.done - self.start) * (self.total - self.done)
        return (now - self.first) / (self.done - self.first_done) * (self.total - self.done)

    def close(self) -> None:
        """End the line; a brief one is removed."""
        if self.screen:
            self.screen.close(self, keep=not self.brief)


def format_seconds(seconds: float) -> str:
    """Return a time as 01:23, or as 1:02:03 from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


@contextmanager
def watch_completions(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """Show a progress line of `total` completions for the block, if `shown`. Yields a function to
    call with the number of completions that have just finished; None if not shown.
    """
    if not shown:
        yield None
        return
    line, done = Progress(what, total, unit="completion", brief=True), 0

    def advance(rows: int) -> None:
        nonlocal done
        done = min(total, done + rows)  # rows that are repeated when memory runs out count once
        line.to(done)

    try:
        yield advance
    finally:
        line.close()
