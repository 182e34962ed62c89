"""The rows that are held out."""

import random
from collections.abc import Callable, Hashable
from typing import TypeVar

from common.config import ConfigError

T = TypeVar("T")

SPLIT_SEED = 0  # apart from the run's seed, so that runs of a sweep measure on the same test rows


def split_rows(
    path: str | None, train: list[T], test: list[T], held_out: int, key: Callable[[T], Hashable]
) -> tuple[list[T], list[T], int]:
    """Return train rows, test rows, and how many train rows were dropped because a test row has the
    same `key`.

    Without test rows `held_out` train rows are drawn to be these, a fifth of all at most.
    Raises: ConfigError where fewer than two train rows or no test rows are left. path: task.path.
    """
    if not test:
        random.Random(SPLIT_SEED).shuffle(train)
        held = min(held_out, len(train) // 5)
        test, train = train[:held], train[held:]
    tested = {key(row) for row in test}
    kept = [row for row in train if key(row) not in tested]
    if len(kept) < 2 or not test:
        raise ConfigError(
            f"task.path={path!r} leaves {len(kept)} train and {len(test)} test rows. Give more"
            " rows."
        )
    return kept, test, len(train) - len(kept)


def check_needs_path(path: str | None, **settings: str | None) -> None:
    """Raise ConfigError where one of `settings` is given without task.path."""
    for key, value in settings.items():
        if path is None and value is not None:
            raise ConfigError(
                f"task.{key}={value!r} has no effect without task.path. Give task.path too."
            )
