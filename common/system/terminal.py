"""The live part at the bottom of a terminal: progress lines. One screen per process, drawn by rich
without a thread.
"""

import os
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

PAUSE = 0.1  # seconds between two drawings


def visible(text: str, kept: str = "") -> str:
    """Return a text, such as a model's, with control characters escaped, except for those in
    `kept`: a model must not set a terminal's title, colour or cursor.
    """
    escaped = (c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    shown = (c.isprintable() or c in kept or unicodedata.category(c) == "Zs" for c in text)
    return "".join(c if s else e for c, s, e in zip(text, shown, escaped, strict=True))


class Line(Protocol):
    """One progress line."""

    def text(self) -> str:
        """Return the current line; it is cut to the width of the terminal."""
        ...


class Screen:
    """The progress lines, and whether they are currently drawn."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.lines: list[Line] = []
        self.live: Live | None = None
        self.drawn, self.notice = 0.0, ""

    def open(self, line: Line) -> None:
        """Add a progress line below the others."""
        self.lines.append(line)
        self.draw(now=True)

    def close(self, line: Line, keep: bool) -> None:
        """Remove a progress line; with `keep` its last state stays in the terminal's text."""
        if line not in self.lines:
            return
        self._stop()
        self.lines.remove(line)
        if keep:
            self.console.print(Text(visible(line.text())), no_wrap=True, crop=True)
        if self.lines:
            self.draw(now=True)
        else:
            self.notice = ""

    def draw(self, now: bool = False) -> None:
        """Draw all lines.

        Args: now: draw even if the last drawing was a moment ago.
        """
        moment = time.monotonic()
        if not now and moment - self.drawn < PAUSE:
            return
        self.drawn = moment
        if self.live is None:
            how: Any = {"auto_refresh": False, "transient": True, "vertical_overflow": "crop"}
            self.live = Live(
                console=self.console, redirect_stdout=False, redirect_stderr=False, **how
            )
            self.live.start()
            self.console.show_cursor(True)  # a process that is killed cannot bring it back
        self.live.update(self._render(), refresh=True)

    def _stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    @contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Hide the lines while the block prints."""
        shown = self.live is not None
        self._stop()
        try:
            yield
        finally:
            if shown:
                self.draw(now=True)

    def _render(self) -> Group:
        texts = [*(line.text() for line in self.lines), *([self.notice] if self.notice else [])]
        return Group(*(Text(visible(text), no_wrap=True, overflow="crop") for text in texts))


_screen: Screen | None = None


def complain(text: str) -> None:
    """Print to standard error, and discard further output once its reader is gone: Ctrl-C also ends
    `tee`, while the run still has to finish a step.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def notify(text: str) -> None:
    """Print a message to standard error from a signal handler; on a live screen it becomes a line,
    which is drawn with the next change.
    """
    if _screen is not None and _screen.live is not None:
        _screen.notice = text
    else:
        complain(text)


def find_screen() -> Screen | None:
    """Return the screen of this process; None if standard error is no terminal with a movable
    cursor.
    """
    global _screen
    able = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if _screen is None and able:
        _screen = Screen()
    return _screen


@contextmanager
def printing() -> Iterator[None]:
    """Print above the live lines in the block."""
    if _screen is None:
        yield
    else:
        with _screen.out_of_the_way():
            yield
