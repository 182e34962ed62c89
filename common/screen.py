"""The live part at the foot of a terminal: progress lines and, above them, what a run has come to:
curves, phases, the last completions. One for each process, drawn by rich without a thread.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of a curve, in characters
PAUSE = 0.1  # seconds between two drawings
TEXTS = 3  # completions


class Line(Protocol):
    """One progress line."""

    def text(self) -> str:
        """Return it as it is now, as long as the terminal allows."""
        ...


class Screen:
    """The lines and curves that are shown, and whether they are shown now."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.lines: list[Line] = []
        self.live: Live | None = None
        self.drawn = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget the run that has ended."""
        self.curves: dict[str, list[float]] = {}
        self.phases: dict[str, float] = {}
        self.texts: list[tuple[str, str]] = []
        self.notice = ""

    # --- what a run tells

    def add(self, name: str, value: float) -> None:
        """Go on with a curve."""
        if math.isfinite(value):
            self.curves.setdefault(name, []).append(value)

    def look(self, event: Mapping[str, Any]) -> None:
        """Take in the reward and the seconds of phases of an event of metrics.jsonl."""
        if event.get("reward") is not None:
            self.add("reward", event["reward"])
        for name, seconds in event.get("phase_seconds", {}).items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds

    def quote(self, texts: Sequence[tuple[str, str]]) -> None:
        """Take in the newest prompts and completions."""
        self.texts = list(dict(texts).items())[:TEXTS] or self.texts

    # --- lines

    def open(self, line: Line) -> None:
        """Show one more progress line, below the others."""
        self.lines.append(line)
        self.draw(now=True)

    def close(self, line: Line, keep: bool) -> None:
        """Take a progress line away; `keep`: it stays in the terminal's text, as it is."""
        if line not in self.lines:
            return
        self._stop()
        self.lines.remove(line)
        if keep:
            self.console.print(Text(line.text()), no_wrap=True, crop=True)
        if self.lines:
            self.draw(now=True)

    def draw(self, now: bool = False) -> None:
        """Show what there is. now: even a moment after the last time."""
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
        """Show nothing while the block prints."""
        shown = self.live is not None
        self._stop()
        try:
            yield
        finally:
            if shown:
                self.draw(now=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        wide = self.console.width >= 60 and self.console.encoding.startswith("utf")
        curves = {name: values for name, values in self.curves.items() if len(values) > 1}
        if wide and curves:
            table = Table.grid(padding=(0, 2))
            for name, values in curves.items():
                table.add_row(name, draw_curve(values), f"{values[0]:.4g} → {values[-1]:.4g}")
            parts.append(table)
        if wide and self.phases and (total := sum(self.phases.values())):
            longest = sorted(self.phases.items(), key=lambda item: -item[1])
            seen = [f"{name} {part / total:.0%}" for name, part in longest if part > total / 100]
            parts.append(Text(f"time: {', '.join(seen)}", style="dim"))
        if wide:
            parts += [self._quote(prompt, said) for prompt, said in self.texts]
        room = self.console.height - 1 - len(self.lines)  # progress comes before all else
        while parts and sum(self._height(part) for part in parts) > room:
            parts.pop()
        parts += [Text(line.text()) for line in self.lines]
        parts += [Text(self.notice)] if self.notice else []
        for part in parts:
            if isinstance(part, Text):
                part.no_wrap, part.overflow = True, "crop"
        return Group(*parts)

    def _height(self, part: RenderableType) -> int:
        return part.row_count if isinstance(part, Table) else 1

    def _quote(self, prompt: str, said: str) -> Text:
        half = self.console.width // 2 - 2
        asked, answer = (" ".join(text.split()) for text in (prompt, said))
        asked = asked if len(asked) <= half else f"…{asked[1 - half :]}"
        return Text.assemble((asked, "dim"), " ", answer[:half])


def draw_curve(values: list[float], width: int = WIDTH) -> str:
    """Return a curve of blocks, one per value, or per mean of neighbours where there are more."""
    count = min(width, len(values))
    parts = [
        values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)
    ]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


_screen: Screen | None = None


def notify(text: str) -> None:
    """Say something on standard error from a handler of signals: on a live screen as a line of it,
    which is drawn with the next change.
    """
    if _screen is not None and _screen.live is not None:
        _screen.notice = text
    else:
        print(text, file=sys.stderr, flush=True)


def find_screen() -> Screen | None:
    """Return the screen of this process, None where standard error is no terminal that can move its
    cursor.
    """
    global _screen
    able = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if _screen is None and able:
        _screen = Screen()
    return _screen


@contextmanager
def printing() -> Iterator[None]:
    """Print in the block, above what is live."""
    if _screen is None:
        yield
    else:
        with _screen.out_of_the_way():
            yield
