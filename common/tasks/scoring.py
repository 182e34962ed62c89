"""Rewards for a batch of completions, in order."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool, ThreadPool
from multiprocessing.process import BaseProcess
from numbers import Real
from typing import Any

from common.config import ConfigError, ScoringConfig
from common.tasks import Example, Task
from common.tasks.rows import weighted

LOOK_SECONDS = 0.1  # between looks at whether the workers of a pool are alive


def score(task: Task, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """The task's reward of each completion. NaN and infinity pass through: the caller names the
    step.

    Raises: ConfigError naming the example where a reward raises, is no number, or a batch has
    another length.
    """
    batched = getattr(task, "rewards", None)
    if batched is not None:
        try:
            rewards = list(batched(examples, completions))
        except Exception as error:
            raise ConfigError(
                f"{type(task).__name__}.rewards raised {type(error).__name__}: {error}, on"
                f" {len(completions)} completions (the first: example {examples[0].id},"
                f" {completions[0][:80]!r}). A reward must score any text; give 0 where it cannot."
            ) from error
        if len(rewards) != len(completions):
            raise ConfigError(
                f"{type(task).__name__}.rewards returned {len(rewards)} rewards for"
                f" {len(completions)} completions. Return one for each, in order."
            )
    else:
        rewards = [
            _one(task, example, text) for example, text in zip(examples, completions, strict=True)
        ]
    for example, reward in zip(examples, rewards, strict=True):
        if not isinstance(reward, Real):  # numpy's scalars are real numbers too
            raise ConfigError(
                f"the reward of {type(task).__name__} for example {example.id} is"
                f" {repr(reward)[:80]}, not a number in [0, 1]."
            )
    return [float(reward) for reward in rewards]


def _one(task: Task, example: Example, text: str) -> float:
    try:
        return task.reward(example, text)
    except Exception as error:
        raise ConfigError(
            f"{type(task).__name__}.reward raised {type(error).__name__}: {error}, on example"
            f" {example.id} with the completion {text[:80]!r}. A reward must score any text; give 0"
            " where it cannot."
        ) from error


@dataclass
class Scored:
    """Rewards in order; each component's scores and the seconds spent on it, where the task has
    components.
    """

    rewards: list[float]
    components: dict[str, list[float]]
    seconds: dict[str, float]


class Pending:
    """Scores on their way: `result()` waits for them."""

    def __init__(
        self,
        parts: list[Any],
        timeout: float,
        examples: Sequence[Example],
        workers: Sequence[BaseProcess] = (),
    ) -> None:
        self.parts, self.timeout, self.examples, self.workers = parts, timeout, examples, workers

    def result(self) -> Scored:
        """All scores, in order.

        Raises: ConfigError where a reward fails or ends its process, or the batch takes longer than
        allowed.
        """
        scored = Scored([], {}, {})
        deadline = time.monotonic() + self.timeout
        for part in self.parts:
            one = (
                self._wait(part, deadline, self.examples[len(scored.rewards)])
                if isinstance(part, AsyncResult)
                else part
            )
            scored.rewards += one.rewards
            for name, values in one.components.items():
                scored.components.setdefault(name, []).extend(values)
            for name, value in one.seconds.items():
                scored.seconds[name] = scored.seconds.get(name, 0.0) + value
        return scored

    def _wait(self, part: AsyncResult[Scored], deadline: float, first: Example) -> Scored:
        while True:
            part.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            if part.ready():
                return part.get()
            # A pool replaces a dead worker without a word, and what that one was scoring never
            # comes.
            codes = [worker.exitcode for worker in self.workers if worker.exitcode is not None]
            if codes:
                raise ConfigError(
                    f"a process that scores rewards ended with exit code {codes[0]}, at or after"
                    f" example {first.id}. A reward must not end its process; a crash in a library"
                    " or too little memory does it too. scoring.kind=serial shows where."
                )
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"scoring took longer than scoring.timeout_seconds={self.timeout:g}, at or"
                    f" after example {first.id}. Bound the time of the reward, or raise the"
                    " setting."
                )


class Scorer:
    """Scores batches with the task's reward: in this process, in threads, or in processes.

    A task may offer `components`: a dict of name -> function(examples, completions) -> list of
    scores, with `weights` by name; its reward is then their weighted mean, and each one's scores
    and time are kept apart.
    """

    def __init__(self, task: Task, config: ScoringConfig) -> None:
        self.task, self.config = task, config
        # Pools of multiprocessing, not of concurrent.futures: those wait for a hung worker when
        # Python exits.
        self.pool: Pool | None = None
        self.workers: list[BaseProcess] = []
        if config.kind == "threads":
            self.pool = ThreadPool(config.workers)
        elif config.kind == "processes":
            self.pool = get_context("spawn").Pool(
                config.workers, initializer=_hold, initargs=(task,)
            )
            self.workers = list(self.pool._pool)  # type: ignore[attr-defined]

    @staticmethod
    def nothing() -> Scored:
        """The scores of no completions."""
        return Scored([], {}, {})

    def submit(self, examples: Sequence[Example], completions: Sequence[str]) -> Pending:
        """Start scoring; a pool shares out the rows in order, so the result is one process's."""
        if self.pool is None:
            return Pending([score_parts(self.task, examples, completions)], 0.0, examples)
        if not completions:
            return Pending([], 0.0, examples)
        size = -(-len(completions) // self.config.workers)
        starts = range(0, len(completions), size)
        parts = [(list(examples[s : s + size]), list(completions[s : s + size])) for s in starts]
        if self.config.kind == "threads":
            pending = [self.pool.apply_async(score_parts, (self.task, *part)) for part in parts]
        else:
            pending = [self.pool.apply_async(_score_held, part) for part in parts]
        return Pending(pending, self.config.timeout_seconds, examples, self.workers)

    def close(self) -> None:
        """End the workers; one that hangs is not waited for."""
        if self.pool is not None:
            self.pool.terminate()


def score_parts(task: Task, examples: Sequence[Example], completions: Sequence[str]) -> Scored:
    """Score rows by component where the task has components, else whole."""
    components = getattr(task, "components", None)
    if components is None:
        return Scored(score(task, examples, completions), {}, {})
    found, seconds = {}, {}
    for name, component in components.items():
        started = time.perf_counter()
        try:
            found[name] = [float(value) for value in component(examples, completions)]
        except Exception as error:
            raise ConfigError(
                f"component {name} of {type(task).__name__} raised {type(error).__name__}: {error},"
                f" on {len(completions)} completions (the first: example {examples[0].id},"
                f" {completions[0][:80]!r}). A reward must score any text; give 0 where it cannot."
            ) from error
        if len(found[name]) != len(completions):
            raise ConfigError(
                f"component {name} of {type(task).__name__} returned {len(found[name])} scores for"
                f" {len(completions)} completions. Return one for each, in order."
            )
        seconds[name] = time.perf_counter() - started
    return Scored(weighted(found, task.weights), found, seconds)  # type: ignore[attr-defined]


_held: Task | None = None


def _hold(task: Task) -> None:
    """Keep the task in a worker process, so that it is sent once. Ctrl-C is the run's to handle."""
    global _held
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _held = task


def _score_held(examples: Sequence[Example], completions: Sequence[str]) -> Scored:
    assert _held is not None
    return score_parts(_held, examples, completions)
