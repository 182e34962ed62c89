"""Score a batch of completions with the task's reward, in this process, in threads or in
processes.
"""

import logging
import math
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool, ThreadPool
from multiprocessing.process import BaseProcess
from numbers import Real
from typing import Any

from common.config import ConfigError, ScoringConfig
from common.system import leave_stops_to_the_run
from common.task import Example, Task, TaskFeatures, class_name, task_name
from common.tasks import (
    Component,
    Logged,
    TrainerState,
    as_number,
    checked,
    collecting,
    limited_process,
    list_scores,
    weighted,
    wording,
)

log = logging.getLogger("clutch")

SLOW_SECONDS = 10.0  # scoring in this process warns after this time
LOOK_SECONDS = 0.1  # time between two checks that the workers of a pool are alive
END_SECONDS = 1.0  # time for idle workers to end, and then for killed workers


RawScores = list[float | None]  # as reward functions return them; None = no score


def score(task: Task, examples: Sequence[Example], completions: Sequence[str]) -> RawScores:
    """Return the task's reward of each completion. NaN and infinity are kept.

    Raises: ConfigError with the example, if a reward function raises, or returns too few scores or
    something that is not a number.
    """
    name = class_name(task)
    batched = TaskFeatures(task).rewards
    if batched is not None:
        return _call(f"{name}.rewards", batched, examples, completions)

    def one(examples: Sequence[Example], completions: Sequence[str]) -> list[Any]:
        return [task.reward(examples[0], completions[0])]

    pairs = zip(examples, completions, strict=True)
    return [_call(f"{name}.reward", one, [example], [text])[0] for example, text in pairs]


def _call(
    name: str, function: Component, examples: Sequence[Example], completions: Sequence[str]
) -> RawScores:
    """Return the scores of a task's function. Raises: ConfigError with the function's name if it
    fails.
    """
    if not completions:
        return []
    first = f"example {examples[0].id}, {completions[0][:80]!r}"
    advice = "A reward must score any text; give 0 where it cannot."
    with wording(name, f", on {len(completions)} completions (the first: {first})", advice):
        scores = list_scores(name, function(examples, completions), len(completions))
    scores = [as_number(value) for value in scores]
    for example, value in zip(examples, scores, strict=True):
        if value is None:
            continue
        if not isinstance(value, Real):
            raise ConfigError(
                f"{name} of example {example.id} is {checked.show(value)}, not a number. Return a"
                " float, or None where a completion has no score."
            )
        # A Fraction or an int can be larger than any float.
        if value == value and abs(value) != math.inf and not checked.is_finite(value):
            raise ConfigError(
                f"{name} of example {example.id} is {checked.show(value)}, beyond what a float"
                " holds. Divide it, so that usual rewards are near 1."
            )
    return [None if value is None else float(value) for value in scores]


@dataclass
class ScoringResult:
    """The scores of rows, in order. A missing score is None until the rollout replaces it with
    `fill`.

    Attributes:
        rewards: the reward per row.
        components: the scores by component; empty if the task has no components.
        seconds: the time of scoring by component.
        ended: the number of texts whose scoring was ended at its limit of time or memory
            (common/tasks/limited_process.py).
        unscored: whether a row has no reward of its own; empty before `fill`.
        lacking: by component, whether a row has no score of its own; empty before `fill`.
        logged: the values that reward functions have logged in addition to their scores.
    """

    rewards: list[Any]
    components: dict[str, list[Any]]
    seconds: dict[str, float]
    ended: int = 0
    unscored: list[bool] = field(default_factory=list)
    lacking: dict[str, list[bool]] = field(default_factory=dict)
    logged: Logged = field(default_factory=Logged)

    def take(self, places: Sequence[int]) -> "ScoringResult":
        """Return the scores of the rows at these places."""
        parts = {name: [part[p] for p in places] for name, part in self.components.items()}
        rewards, logged = [self.rewards[p] for p in places], self.logged.rows(places)
        return ScoringResult(rewards, parts, self.seconds, self.ended, logged=logged)


def fill(scores: RawScores, prompts: Sequence[int]) -> list[float]:
    """Replace missing scores (None) by the mean of the prompt's other scores, or 0 if the prompt
    has none, so that a row without a score is neither better nor worse than the others.

    Args: prompts: the number of the prompt, per row.
    """
    of_prompt: defaultdict[int, list[float]] = defaultdict(list)
    for prompt, score in zip(prompts, scores, strict=True):
        of_prompt[prompt] += [] if score is None else [score]
    means = {p: sum(known) / max(1, len(known)) for p, known in of_prompt.items()}
    # The mean of equal scores is exactly that score; rounding would make the filled row differ.
    means |= {p: known[0] for p, known in of_prompt.items() if known and len({*known}) == 1}
    return [means[p] if score is None else score for p, score in zip(prompts, scores, strict=True)]


class Pending:
    """Scores that are being computed; `result()` waits for them.

    Args:
        parts: the parts of the batch, in order: a ScoringResult, or the result of a pool.
        timeout: seconds to wait for a pool.
        examples: the examples of the rows.
        workers: the processes of the pool.
        places: per row, its place among the rows that are scored; None = all rows are scored.
        metrics: the lists to which `result` adds the values that reward functions have logged; None
            = the values are dropped.
    """

    def __init__(
        self,
        parts: list[Any],
        timeout: float,
        examples: Sequence[Example],
        workers: Sequence[BaseProcess] = (),
        places: Sequence[int] | None = None,
        metrics: dict[str, list[float]] | None = None,
    ) -> None:
        self.parts, self.timeout, self.examples, self.workers = parts, timeout, examples, workers
        self.places, self.metrics = places, {} if metrics is None else metrics

    def result(self) -> ScoringResult:
        """Return all scores, in order. Raises: ConfigError if a reward function fails or takes too
        long.
        """
        scored = ScoringResult([], {}, {})
        deadline = time.monotonic() + self.timeout
        for part in self.parts:
            one = part
            if isinstance(part, AsyncResult):
                one = self._wait(part, deadline, self.examples[len(scored.rewards)])
            scored.logged.follow(one.logged, len(scored.rewards), len(one.rewards))
            scored.rewards += one.rewards
            scored.ended += one.ended
            for name, values in one.components.items():
                scored.components.setdefault(name, []).extend(values)
            for name, value in one.seconds.items():
                scored.seconds[name] = scored.seconds.get(name, 0.0) + value
        if scored.ended:
            log.warning(
                "scoring of %d completions took more than %g s of a processor or %.0f GB and was"
                " ended: they earn 0. The examples begin with %s.",
                *(
                    scored.ended,
                    limited_process.SECONDS,
                    limited_process.BYTES / 2**30,
                    self.examples[0].id,
                ),
            )
        for name, values in scored.logged.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        return scored if self.places is None else scored.take(self.places)

    def _wait(
        self, part: AsyncResult[ScoringResult], deadline: float, first: Example
    ) -> ScoringResult:
        while True:
            part.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            if part.ready():
                return part.get()
            # A pool replaces a dead worker, but the scores of its rows never arrive.
            codes = [worker.exitcode for worker in self.workers if worker.exitcode is not None]
            if codes:
                raise ConfigError(
                    f"a process that scores rewards ended with exit code {codes[0]}, at or after"
                    f" example {first.id}. scoring.kind=serial shows where."
                )
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"scoring took longer than scoring.timeout_seconds={self.timeout:g}, at or"
                    f" after example {first.id}. Bound the reward's time, or raise the setting."
                )


class Scorer:
    """Scores batches with the task's reward: in this process, in threads, or in processes. For a
    task with `components` and `weights`, scores and time are recorded per component.

    Args: steps: the number of steps of the run; None = a budget ends it.
    Raises: ConfigError for a component without a weight.
    """

    def __init__(self, task: Task, config: ScoringConfig, steps: int | None = None) -> None:
        self.task, self.config, self.steps = task, config, steps
        self.metrics: dict[str, list[float]] = {}  # values that reward functions have logged
        features = TaskFeatures(task)
        for name in features.components:
            if name not in features.weights:
                raise ConfigError(
                    f"{class_name(task)} has a component {name!r} and no weight for it. Give it"
                    f" one: weights = {{{name!r}: 1.0, ...}}."
                )
        # Not concurrent.futures, which waits for a hung worker when Python exits.
        self.pool: Pool | None = None
        self.workers: list[BaseProcess] = []
        if config.kind == "threads":
            self.pool = ThreadPool(config.workers)
        elif config.kind == "processes":
            self.pool = get_context("spawn").Pool(config.workers, _hold, (_pack(task),))
            self.workers = list(self.pool._pool)  # type: ignore[attr-defined]

    def submit(
        self, examples: Sequence[Example], completions: Sequence[str], step: int | None = None
    ) -> Pending:
        """Start scoring. A pool divides the rows in order, so the scores are the same as from one
        process.

        If the task says that its rewards are `repeatable`, equal texts of an example, which members
        of a population often write, are scored once.

        Args: step: the step that asked for the completions; None = held-out completions.
        """
        state = TrainerState.at_the_end(self.steps)
        if step is not None:
            state = TrainerState(step, self.steps)
        places = None
        if TaskFeatures(self.task).repeatable:
            pairs = list(zip(examples, completions, strict=True))
            once = {(id(example), text): (example, text) for example, text in pairs}
            place = {key: number for number, key in enumerate(once)}
            places = [place[id(example), text] for example, text in pairs]
            examples = [example for example, _ in once.values()]
            completions = [text for _, text in once.values()]
        parts, timeout = self._start(examples, completions, state)
        metrics = None if step is None else self.metrics
        return Pending(parts, timeout, examples, self.workers, places, metrics)

    def take_logged(self, context: Any) -> dict[str, Any]:
        """Return the means of the values that reward functions have logged on all ranks since the
        last call, as the entry "logged" of an event; empty if there are none. All ranks call it
        together.
        """
        if not TaskFeatures(self.task).logs:
            return {}
        mine = {name: (sum(values), len(values)) for name, values in self.metrics.items()}
        self.metrics.clear()
        parts = context.gather_objects(mine)
        means = {}
        for name in sorted({name for part in parts for name in part}):
            held = [part[name] for part in parts if name in part]
            means[name] = sum(total for total, _ in held) / sum(count for _, count in held)
        return {"logged": means} if means else {}

    def _start(
        self, examples: Sequence[Example], completions: Sequence[str], state: TrainerState
    ) -> tuple[list[Any], float]:
        """Return the parts of the batch, as in `Pending`, and the seconds to wait for them."""
        if self.pool is None:
            slow = threading.Timer(SLOW_SECONDS, warn_slow, [examples])
            slow.daemon = True
            slow.start()
            try:
                return [score_parts(self.task, examples, completions, state)], 0.0
            finally:
                slow.cancel()
        if not completions:
            return [], 0.0
        size = -(-len(completions) // self.config.workers)
        starts = range(0, len(completions), size)
        parts = [(list(examples[s : s + size]), list(completions[s : s + size])) for s in starts]
        score = partial(score_parts, self.task) if self.config.kind == "threads" else _score_held
        pending = [self.pool.apply_async(score, (*part, state)) for part in parts]
        return pending, self.config.timeout_seconds

    def close(self) -> None:
        """End the workers, without waiting for one that hangs."""
        if self.pool is None:
            return
        # A worker that was killed while it waited for work holds a lock for ever, so `terminate`
        # may never return.
        ending = threading.Thread(target=self.pool.terminate, daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        for worker in [*self.workers, *getattr(self.pool, "_pool", ())]:
            if isinstance(worker, BaseProcess):
                worker.kill()
        ending.join(END_SECONDS)


def warn_slow(examples: Sequence[Example]) -> None:
    """Warn that a reward function takes long and may never return."""
    log.warning(
        "scoring %d completions, of which the first is of example %s, has taken %.0f s and goes on."
        " Bound the reward's time; with scoring.kind=processes, scoring.timeout_seconds ends it.",
        *(len(examples), examples[0].id if examples else "none", SLOW_SECONDS),
    )


def score_parts(
    task: Task,
    examples: Sequence[Example],
    completions: Sequence[str],
    state: TrainerState | None = None,
) -> ScoringResult:
    """Score rows, by component if the task has components.

    Args: state: the progress of the training, for reward functions that take it.
    """
    components, ended = TaskFeatures(task).components, limited_process.count_ended()
    if not components:
        rewards = score(task, examples, completions)
        names = TaskFeatures(task).shown  # scores of an environment in addition to its reward
        parts = {name: _of_episodes(task, name, examples, completions) for name in names}
        return ScoringResult(rewards, parts, {}, limited_process.count_ended() - ended)
    scores, seconds = {}, {}
    with collecting(state) as logged:
        for name, component in components.items():
            started = time.perf_counter()
            what = f"component {name} of {class_name(task)}"
            scores[name] = _call(what, component, examples, completions)
            seconds[name] = time.perf_counter() - started
    rewards = weighted(scores, task.weights)  # type: ignore[attr-defined]
    ended = limited_process.count_ended() - ended
    return ScoringResult(rewards, scores, seconds, ended, logged=replace(logged, state=None))


def _of_episodes(
    task: Task, name: str, examples: Sequence[Example], completions: Sequence[Any]
) -> RawScores:
    def read(_: Sequence[Example], played: Sequence[Any]) -> list[Any]:
        return [one.components.get(name) for one in played]

    return _call(f"component {name} of {class_name(task)}", read, examples, completions)


_SENT = "scoring.kind=processes sends the task to other processes. Use scoring.kind=threads, or"
_held: Task | ConfigError | None = None


def _pack(task: Task) -> bytes:
    """Return a task as bytes for other processes. Raises: ConfigError if it cannot be pickled."""
    try:
        return pickle.dumps(task)
    except Exception as error:  # whatever its __reduce__ raises
        raise ConfigError(
            f"{task_name(task)} cannot be sent: {type(error).__name__}: {error}. {_SENT} let it"
            " hold no function within a function, lock or connection."
        ) from None


def _hold(packed: bytes) -> None:
    """Keep the task in a worker process, so that it is sent only once."""
    global _held
    leave_stops_to_the_run()
    try:
        _held = pickle.loads(packed)
    except Exception as error:  # for example, a class that is defined in a notebook
        _held = ConfigError(
            f"the task arrived in no process that scores: {type(error).__name__}: {error}. {_SENT}"
            " define it in a module of its own."
        )


def _score_held(
    examples: Sequence[Example], completions: Sequence[str], state: TrainerState
) -> ScoringResult:
    if isinstance(_held, ConfigError):
        raise _held
    assert _held is not None
    return score_parts(_held, examples, completions, state)
