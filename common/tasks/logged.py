"""The parameters of TRL's reward functions that are no columns: the state of the training
(`trainer_state`), and functions that log numbers (`log_metric`) and columns (`log_extra`).

A batch is scored within `collecting`, in one thread; the values that its functions log are
collected there, and returned with the scores.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from common.config import ConfigError
from common.tasks.checked import is_finite, show

OF_TRAINER = ("trainer_state", "log_metric", "log_extra")  # names of TRL's parameters


@dataclass(frozen=True)
class TrainerState:
    """The progress of a run, for reward functions.

    Attributes:
        global_step: the number of finished steps when the completions were requested; for held-out
            completions always `max_steps`, so that all evaluations use the same reward.
        max_steps: the steps of the run, or its iterations for an algorithm in stages; None if a
            budget ends the run.
    """

    global_step: int
    max_steps: int | None

    @classmethod
    def at_the_end(cls, max_steps: int | None) -> "TrainerState":
        """Return the state for held-out completions."""
        return cls(max_steps or 0, max_steps)


@dataclass
class Logged:
    """The numbers and columns that functions have logged for a batch.

    Attributes:
        state: the state of the training; None outside of a run.
        metrics: the numbers of each call, by name.
        columns: a text per completion, or None, by name.
    """

    state: TrainerState | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[str | None]] = field(default_factory=dict)

    def offer(self, name: str, count: int) -> Mapping[str, Any]:
        """Return the arguments for a function, by parameter.

        Args: name: the name of the function; count: the number of completions that it scores.
        """
        state = self.state or TrainerState.at_the_end(1)
        log_metric, log_extra = partial(self._log, name), partial(self._extend, name, count)
        return dict(zip(OF_TRAINER, (state, log_metric, log_extra), strict=True))

    def _log(self, function: str, name: str, value: Any) -> None:
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, Real):
            raise ConfigError(
                f"{function} calls log_metric({name!r}, {show(value)}), which is no number."
            )
        if is_finite(number):  # else there is a gap, as of a mean over nothing
            self.metrics.setdefault(str(name), []).append(float(number))

    def _extend(self, function: str, count: int, column: str, values: Sequence[Any]) -> None:
        listed = [None if value is None else str(value) for value in values]
        if len(listed) != count:
            raise ConfigError(
                f"{function} calls log_extra({column!r}, ...) with {len(listed)} values for"
                f" {count} completions. Give one for each, in order."
            )
        self.columns[str(column)] = listed

    def take(self, other: "Logged") -> None:
        """Add the logged values of the same completions."""
        for what, values in other.metrics.items():
            self.metrics.setdefault(what, []).extend(values)
        self.columns |= other.columns

    def follow(self, other: "Logged", before: int, count: int) -> None:
        """Add the logged values of the `count` completions that follow the first `before` ones."""
        for what, values in other.metrics.items():
            self.metrics.setdefault(what, []).extend(values)
        for column in {*self.columns, *other.columns}:
            held = self.columns.setdefault(column, [None] * before)
            held.extend(other.columns.get(column, [None] * count))

    def rows(self, places: Sequence[int]) -> "Logged":
        """Return a copy with only the columns of these completions."""
        columns = {name: [values[p] for p in places] for name, values in self.columns.items()}
        return Logged(self.state, self.metrics, columns)


_current: ContextVar[Logged | None] = ContextVar("logged", default=None)


@contextmanager
def collecting(state: TrainerState | None = None) -> Iterator[Logged]:
    """Collect the values that reward functions log in the block."""
    logged = Logged(state)
    token = _current.set(logged)
    try:
        yield logged
    finally:
        _current.reset(token)


def current() -> Logged:
    """Return the collector of this thread's batch; outside of a batch a new one, which is
    discarded.
    """
    return _current.get() or Logged()
