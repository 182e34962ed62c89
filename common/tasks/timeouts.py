"""Calls of environments in threads, with the time limit task.call_seconds."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from common.config import ConfigError
from common.task import Example, Messages

REPLYING = 64  # environments that may reply at the same time


class LateError(ConfigError):
    """An episode did not begin in time."""


def start(episode: Any, example: Example, name: str, seconds: float) -> Messages:
    """Start an episode (common.tasks.episode.Episode), and return its prompt. After a timeout the
    episode is closed as soon as it has started.

    Args: name: the name of the task; seconds: the time limit.
    Raises: LateError after `seconds`.
    """
    late = Event()

    def begin() -> Messages:
        prompt = episode.start(example, example.extra["seed"])
        if late.is_set():
            episode.close()
        return prompt

    try:
        return SideBySide([(begin,)], seconds).result(0)
    except TimeoutError:
        late.set()
        raise LateError(
            f"{name}, example {example.id}: the episode did not begin within"
            f" task.call_seconds={seconds:g}. Raise it, or see why it waits."
        ) from None


class SideBySide:
    """Calls of environments in parallel threads, at most `REPLYING` at a time. The threads are
    daemons, so a call that hangs does not keep the interpreter alive.

    Args:
        calls: a function and its arguments; None for no call.
        seconds: the time limit of each call.
    """

    def __init__(self, calls: Sequence[tuple[Any, ...] | None], seconds: float) -> None:
        self.outcomes = [Future[Any]() for _ in calls]
        self.waiting: SimpleQueue[Any] = SimpleQueue()
        asked = [pair for pair in zip(calls, self.outcomes, strict=True) if pair[0] is not None]
        for pair in asked:
            self.waiting.put(pair)
        self.until = time.monotonic() + seconds * -(-len(asked) // REPLYING)
        for _ in range(min(len(asked), REPLYING)):
            if not self.waiting.empty():  # quick environments need few threads
                Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with suppress(Empty):
            while True:
                (function, *arguments), outcome = self.waiting.get_nowait()
                try:
                    outcome.set_result(function(*arguments))
                except BaseException as error:
                    outcome.set_exception(error)

    def result(self, number: int) -> Any:
        """Return the result of a call. Raises: its exception; TimeoutError if it hangs."""
        return self.outcomes[number].result(max(0.0, self.until - time.monotonic()))

    def close(self) -> None:
        """Cancel the calls that have not started."""
        with suppress(Empty):
            while True:
                self.waiting.get_nowait()
