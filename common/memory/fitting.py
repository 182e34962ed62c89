"""Fit rows to the memory of a rank, and count the bytes of a training step."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common import optim
from common.config import SamplingConfig
from common.distributed import Context, sharding_of
from common.memory.arithmetic import (
    BatchShape,
    StateMemory,
    activation_bytes,
    passing_bytes,
    training_peak,
)
from common.memory.row_limit import FITTED, Load, RowLimit, TradesMemory
from common.model import logits_bytes
from common.task import TaskFeatures

if TYPE_CHECKING:
    from common.parts import Parts

log = logging.getLogger("clutch")

# Completions in a training forward if algo.train_rows is null, before they are fitted to memory.
TRAIN_ROWS = {"cpu": 32, "cuda": 128}
EPISODES = 1 << 16  # the most episodes of a call whose keys and values are kept


def count_state(
    parts: "Parts", trained: bool, reference: bool = False, copies: int = 0
) -> StateMemory:
    """Count the bytes of weights and training state.

    Args:
        trained: whether there are gradients and optimizer state.
        reference: whether there is a frozen copy of the model.
        copies: the number of half-precision copies of float32 weights.
    """
    size = parts.lm.parameters if parts.lm.adapter is None else parts.lm.adapter.size
    frozen = parts.lm.reference_bytes if reference and parts.lm.adapter is None else 0
    moments = optim.state_bytes(parts.run.algo.optimizer)
    state = StateMemory.of_training(size, size * trained, frozen, copies, moments)
    if parts.lm.adapter is not None:  # unsharded on every rank, in addition to the frozen weights
        state = replace(
            state, whole=parts.lm.own_bytes, copies=0.0, adapter=state.whole + state.copies
        )
    return replace(state, engine=parts.idle_bytes if parts.engine.separate else 0.0)


class RolloutMemory:
    """The memory of rollouts. Fits the engine's rows, for the run's task and the tasks of
    evaluate.also.

    The rows are fitted for one prompt per row, which takes the most memory.
    Args:
        state: bytes of weights and training state.
        extra_bytes: further bytes that exist during a rollout with that many rows.
        groups: the most groups of one call.
        each: rows per group.
    Attributes:
        fixed: bytes that do not depend on the rows.
    """

    def __init__(
        self,
        parts: "Parts",
        state: StateMemory,
        extra_bytes: Callable[[int], float] = lambda rows: 0.0,
        groups: int = 1,
        each: int = 1,
    ) -> None:
        self.parts, self.groups, self.each = parts, groups, each
        self.fixed = state.on_rank(parts.lm.model, rollout=True)

        others = [
            Load(
                other.longest_prompt,
                SamplingConfig.uncut(other.tokens, 0.0),
                completions=len(parts.context.share(other.examples)),
            )
            for other in parts.extras.others
        ]

        def peak(rows: int) -> float:
            loads = (self._load(rows), *others)
            sampling = max(parts.engine.peak_bytes(rows, load) for load in loads)
            return self.fixed + extra_bytes(rows) + sampling

        # The adapter is merged if that leaves room for the rows of a call.
        self.room = FITTED * parts.context.memory_gb * 2**30
        fits = self.fixed + self.sampling_bytes(groups * each, 1) <= self.room
        engine = parts.engine
        if isinstance(engine, TradesMemory) and not fits:
            engine.forgo_merging()
        fit(parts.engine.row_limit, peak, parts.context)
        self.fixed += extra_bytes(parts.engine.row_limit.rows)
        longest = self._load(1)
        columns = longest.prompt_tokens + longest.sampling.max_new_tokens
        parts.engine.row_limit.lower(columns=columns)
        pairs = zip(parts.extras.others, others, strict=True)
        replying = [load for other, load in pairs if TaskFeatures(other.task).max_turns > 1]
        if parts.examples.reply_tokens or replying:
            fitting = bisect_right(
                range(1, EPISODES + 1),
                self.room - self.fixed,
                key=lambda count: self._episode_bytes(count, replying),
            )
            parts.engine.row_limit.lower(cached_episodes=fitting)

    def _episode_bytes(self, count: int, others: Sequence[Load]) -> float:
        """Return the peak bytes of a rollout of `count` episodes that keep their keys and values
        between turns, over the run's task and those of evaluate.also.
        """
        rows = min(self.parts.engine.row_limit.rows, count)
        own = [self._load(rows)] if self.parts.examples.reply_tokens else []
        return max(
            self.parts.engine.peak_bytes(
                rows, replace(load, completions=count, cached_episodes=count)
            )
            for load in (*own, *others)
        )

    def keep(self, training: float, sampling: float) -> float:
        """Let the engine keep its rollout memory while the model is trained, if both fit. Return
        the bytes that it keeps.
        """
        engine, rows = self.parts.engine, min(self.parts.engine.row_limit.rows, self.each)
        if not isinstance(engine, TradesMemory) or training + sampling > self.room:
            return 0.0
        return sampling if engine.keep(rows) else 0.0

    def _load(self, rows: int, samples: int = 1, completions: int | None = None) -> Load:
        """Return the load of a rollout of `rows` rows, with one common opening per group."""
        examples, sampling = self.parts.examples, self.parts.run.algo.sampling
        opened = examples.opening * min(self.groups, max(1, rows // self.each))
        longest, replies = examples.longest_prompt, examples.reply_tokens
        if replies:  # the last turn's prompt contains all earlier turns
            longest += sampling.max_new_tokens + replies
        return Load(longest, sampling, samples, completions, opened)

    def sampling_bytes(self, completions: int, samples: int) -> float:
        """Return the bytes of a rollout of `completions` completions, `samples` per prompt, in
        addition to `fixed`.
        """
        row_limit = self.parts.engine.row_limit
        rows, replies = min(row_limit.rows, completions), self.parts.examples.reply_tokens
        held = completions if replies and completions <= row_limit.cached_episodes else 0
        load = replace(self._load(rows, samples, completions), cached_episodes=held)
        return self.parts.engine.peak_bytes(rows, load)


def fit_training(
    parts: "Parts",
    row_limit: RowLimit,
    state: StateMemory,
    completions: int,
    samples: int = 1,
    new: int | None = None,
) -> float:
    """Fit the rows of training forwards to the memory, and return the peak bytes of a training
    step. All ranks get the same number of rows, since they cut micro-batches alike.

    Args:
        row_limit: the rows of a training forward, which are lowered in place.
        completions: completions of this rank per step.
        samples: completions per prompt, which share it.
        new: the most tokens of a completion; None = those of an episode.
    """
    sampling = parts.run.algo.sampling
    most_new: int = new or sampling.max_new_tokens + parts.examples.reply_tokens
    compute = parts.lm.precision.compute
    recomputed = parts.run.opt.checkpointing.enabled
    fixed = state.on_rank(parts.lm.model, rollout=False)

    def batch(rows: int) -> BatchShape:
        longest, opening = parts.examples.longest_prompt, parts.examples.opening
        return BatchShape(rows / samples, longest, rows, most_new, compute, opening)

    def held(rows: int) -> float:
        return activation_bytes(parts.lm.model, batch(rows), recomputed)

    once = logits_bytes(parts.lm.model, row_limit.rows * most_new, sampling)
    fit(row_limit, lambda rows: fixed + once + held(rows), parts.context)
    row_limit.lower(min(parts.context.gather_objects(row_limit.rows)))
    most, single = min(row_limit.rows, completions), completions <= row_limit.rows
    row_limit.lower(most)  # so that halving after an out-of-memory error does lower the rows
    once = logits_bytes(parts.lm.model, most * most_new, sampling)
    passing = passing_bytes(parts.lm.model, batch(most)) if recomputed else 0.0
    return training_peak(parts.lm.model, state, held(most), single, once, passing)


@dataclass(frozen=True)
class Memory:
    """The memory of a rank in a step, for the plan.

    Attributes:
        state: bytes of weights and training state.
        sampling: bytes of a rollout in addition to them.
        rows: rows of a rollout's forward.
        peak: peak bytes of a step.
    """

    state: StateMemory
    sampling: float
    rows: int
    peak: float

    def describe(self, model: Any) -> dict[str, str]:
        """Describe the memory for the plan."""
        rollout = f"a rollout of {self.rows} rows {self.sampling / 2**30:.2f} GB"
        compared = sharding_of(model).describe(self.state.whole)
        return {
            "memory": f"about {self.peak / 2**30:.2f} GB per rank, estimated:"
            f" {self.state.describe(model)}, {rollout}{compared}"
        }


def fit(row_limit: RowLimit, peak: Callable[[int], float], context: Context) -> None:
    """Fit a row limit to the memory of this rank, and log if the setting asked for more rows.

    Args: peak: returns the bytes for a number of rows, as in `RowLimit.fit`.
    """
    asked = row_limit.rows
    row_limit.fit(peak, context.memory_gb)
    # A smaller difference is rounding.
    if asked - row_limit.rows >= row_limit.floor and context.main:
        gb = context.memory_gb
        log.info(
            "%s=%d does not fit %.0f GB; going on with %d", row_limit.key, asked, gb, row_limit.rows
        )
