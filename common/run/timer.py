"""Seconds by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Seconds of a step by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, seconds: dict[str, float]) -> None:
        """Add seconds, by phase, that were measured elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`; blocks of one name add up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
