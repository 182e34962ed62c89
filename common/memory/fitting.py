"""Fit rows to the memory of a rank, and count what a step of a run takes of it."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common import optim
from common.config import SamplingConfig
from common.distributed import Context, fsdp
from common.memory.arithmetic import (
    Batch,
    StateMemory,
    activation_bytes,
    logits_bytes,
    passing_bytes,
    training_peak,
)
from common.memory.row_limit import FITTED, Load, RowLimit, TradesMemory

if TYPE_CHECKING:
    from common.parts import Parts

log = logging.getLogger("clutch")

# Completions in a training forward where algo.train_rows is null, before they are fitted to the
# memory.
TRAIN_ROWS = {"cpu": 32, "cuda": 128}
EPISODES = 1 << 16  # of a call, whose keys and values are kept at most


def count_state(
    parts: "Parts", trained: bool, reference: bool = False, copies: int = 0
) -> StateMemory:
    """Count weights and training state. reference: a frozen copy beside it; copies: in half
    precision, of what has float32 weights.
    """
    size = parts.lm.parameters if parts.lm.adapter is None else parts.lm.adapter.size
    frozen = parts.lm.reference_bytes if reference and parts.lm.adapter is None else 0
    moments = optim.state_bytes(parts.run.algo.optimizer)
    state = StateMemory.of_training(size, size * trained, frozen, copies, moments)
    if parts.lm.adapter is not None:  # every rank has it whole, beside the weights as they are
        state = replace(
            state, whole=parts.lm.own_bytes, copies=0.0, adapter=state.whole + state.copies
        )
    return replace(state, engine=parts.idle_bytes if parts.engine.separate else 0.0)


class RolloutMemory:
    """The memory of rollouts. It fits their rows as if every row had a prompt of its own, which
    takes the most, and for the tasks of evaluate.also.

    Args: state: weights and training state; extra_bytes: what else is there beside so many rows;
    groups: the most of a call; each: rows of a group.
    Attributes: fixed: bytes beside the rows.
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
            for other in parts.beside.others
        ]

        def peak(rows: int) -> float:
            loads = (self._load(rows), *others)
            sampling = max(parts.engine.peak_bytes(rows, load) for load in loads)
            return self.fixed + extra_bytes(rows) + sampling

        # An adapter is merged where that leaves room for the rows of a call.
        self.room = FITTED * parts.context.memory_gb * 2**30
        fits = self.fixed + self.sampling_bytes(groups * each, 1) <= self.room
        engine = parts.engine
        if isinstance(engine, TradesMemory) and not fits:
            engine.merged_bytes = 0
        fit(parts.engine.limit, peak, parts.context)
        self.fixed += extra_bytes(parts.engine.limit.rows)
        longest = self._load(1)
        parts.engine.limit.columns = longest.prompt_tokens + longest.sampling.max_new_tokens
        pairs = zip(parts.beside.others, others, strict=True)
        replying = [load for other, load in pairs if getattr(other.task, "max_turns", 1) > 1]
        if parts.examples.reply_tokens or replying:
            parts.engine.limit.kept = bisect_right(
                range(1, EPISODES + 1),
                self.room - self.fixed,
                key=lambda count: self._episode_bytes(count, replying),
            )

    def _episode_bytes(self, count: int, others: Sequence[Load]) -> float:
        """Return the most bytes of a rollout of so many episodes that keep their keys and values:
        the task's, and those of evaluate.also.
        """
        rows = min(self.parts.engine.limit.rows, count)
        own = [self._load(rows)] if self.parts.examples.reply_tokens else []
        return max(
            self.parts.engine.peak_bytes(rows, replace(load, completions=count, kept=count))
            for load in (*own, *others)
        )

    def keep(self, training: float, sampling: float) -> float:
        """Keep what a rollout takes while the model is trained, if both fit. Return what stays."""
        engine, rows = self.parts.engine, min(self.parts.engine.limit.rows, self.each)
        if not isinstance(engine, TradesMemory) or training + sampling > self.room:
            return 0.0
        return sampling if engine.keep(rows) else 0.0

    def _load(self, rows: int, samples: int = 1, completions: int | None = None) -> Load:
        """Return what a plan of so many rows is made for: an opening for each group among them."""
        examples, sampling = self.parts.examples, self.parts.run.algo.sampling
        opened = examples.opening * min(self.groups, max(1, rows // self.each))
        longest, replies = examples.longest_prompt, examples.reply_tokens
        if replies:  # the last turn's prompt has all others in it
            longest += sampling.max_new_tokens + replies
        return Load(longest, sampling, samples, completions, opened)

    def sampling_bytes(self, completions: int, samples: int) -> float:
        """Return the bytes of a rollout of so many completions, `samples` of each prompt, beside
        what is there whatever the rows.
        """
        limit = self.parts.engine.limit
        rows, replies = min(limit.rows, completions), self.parts.examples.reply_tokens
        held = completions if replies and completions <= limit.kept else 0
        load = replace(self._load(rows, samples, completions), kept=held)
        return self.parts.engine.peak_bytes(rows, load)


def fit_training(
    parts: "Parts", limit: RowLimit, state: StateMemory, completions: int, samples: int = 1
) -> float:
    """Fit the rows of training forwards to the memory, on every rank the same, since ranks cut
    micro-batches alike. Returns the bytes of a step's training.

    Args: completions: of this rank per step; samples: of a prompt, which share it.
    """
    sampling = parts.run.algo.sampling
    new = sampling.max_new_tokens + parts.examples.reply_tokens
    compute = parts.lm.precision.compute
    recomputed = parts.run.opt.checkpointing.enabled
    fixed = state.on_rank(parts.lm.model, rollout=False)

    def batch(rows: int) -> Batch:
        longest, opening = parts.examples.longest_prompt, parts.examples.opening
        return Batch(rows / samples, longest, rows, new, compute, opening)

    def held(rows: int) -> float:
        return activation_bytes(parts.lm.model, batch(rows), recomputed)

    once = logits_bytes(parts.lm.model, limit.rows * new, sampling)
    fit(limit, lambda rows: fixed + once + held(rows), parts.context)
    limit.rows = min(parts.context.gather_objects(limit.rows))
    most, single = min(limit.rows, completions), completions <= limit.rows
    limit.rows = most  # where memory runs out all the same, half of more would be no fewer
    once = logits_bytes(parts.lm.model, most * new, sampling)
    passing = passing_bytes(parts.lm.model, batch(most)) if recomputed else 0.0
    return training_peak(parts.lm.model, state, held(most), single, once, passing)


@dataclass(frozen=True)
class Memory:
    """The memory that a rank takes in a step, as a plan says it.

    Attributes: state: weights and training state; sampling: bytes of a rollout beside them; rows:
    of a rollout's forward; peak: bytes of a step.
    """

    state: StateMemory
    sampling: float
    rows: int
    peak: float

    def describe(self, model: Any) -> dict[str, str]:
        """Say it for the plan."""
        rollout = f"a rollout of {self.rows} rows {self.sampling / 2**30:.2f} GB"
        return {
            "memory": f"about {self.peak / 2**30:.2f} GB per rank, estimated:"
            f" {self.state.describe(model)}, {rollout}{fsdp.planned(model, self.state.whole)}"
        }


def fit(limit: RowLimit, peak: Callable[[int], float], context: Context) -> None:
    """Fit a limit to the memory of this rank, and say so where the setting asked for more. peak: as
    for `RowLimit.fit`.
    """
    asked = limit.rows
    limit.fit(peak, context.memory_gb)
    if asked - limit.rows >= limit.floor and context.main:  # less is of a pair that stays together
        gb = context.memory_gb
        log.info("%s=%d does not fit %.0f GB; going on with %d", limit.key, asked, gb, limit.rows)
