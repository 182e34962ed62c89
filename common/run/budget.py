"""The limits of a run, and the part of them that is used."""

import logging
from typing import TYPE_CHECKING

from common.config import BudgetConfig, Run
from common.distributed import Context

if TYPE_CHECKING:
    from common.evaluation import Evaluation
    from common.parts import Parts

log = logging.getLogger("clutch")

TENTHS, SIXTHS = 10, 6
COST = 0.05  # of evaluations at sixths: their tokens, beside those of training until then
OVERSHOT = 1.1  # share of a budget from which on it is worth a warning


class Budget:
    """The used share of a budget, on every rank alike. Without limits it stays 0.

    Args: tokens, seconds: what the run used so far; quiet: do not warn of a budget that is
    overshot.

    Attributes: unit: what a progress line counts, up to `whole`; used: so many of it.
    """

    def __init__(
        self,
        limits: BudgetConfig,
        context: Context,
        tokens: int = 0,
        seconds: float = 0.0,
        quiet: bool = False,
    ) -> None:
        self.limits, self.context, self.quiet = limits, context, quiet
        self.before, self.share, self.limit = 0.0, 0.0, ""
        self.unit, self.used = ("second" if limits.tokens is None else "token"), 0
        self.whole = round(getattr(limits, f"{self.unit}s") or 0)
        self.completion = (0.0, 0.0)  # tokens and seconds of a held-out one, once they are known
        self.add(tokens, seconds)

    def add(self, tokens: int, seconds: float) -> None:
        """Take note of what is used in all."""
        # As a progress line counts it; the last step goes beyond the end.
        self.used = min(self.whole, round(seconds) if self.limits.tokens is None else tokens)
        nearest = self.limits.nearest(tokens, seconds)
        if self.limits.seconds is not None:  # clocks of ranks differ
            nearest = max(self.context.gather_objects(nearest))
        self.before, (self.share, self.limit) = self.share, nearest
        if self.context.main and self.before < 1 and not self.quiet:
            warn_if_overshot(self.share, self.limit)

    def foresee(self, run: Run, measured: "Evaluation", examples: int) -> None:
        """Take note of what a completion took in a measurement of `examples`, and warn of seconds
        that the first step is likely to use up; not where that measurement compiled.
        """
        seconds = max(self.context.gather_objects(measured.seconds)) / examples
        self.completion = (measured.greedy / examples, seconds)
        limit, samples = self.limits.seconds, run.algo.step_samples
        foreseen = limit is not None and samples * seconds > limit
        if foreseen and self.context.main and not run.opt.compile.enabled:
            log.warning(
                "budget.seconds=%g is likely to be used up by the first step: to sample %d"
                " completions takes about %.0f seconds here, and to learn from them comes on top."
                " Raise it, or make steps smaller.",
                *(limit, samples, samples * seconds),
            )

    @property
    def spent(self) -> bool:
        """Whether the run is to end."""
        return self.share >= 1

    def progress(self, step: int, steps: int | None) -> float:
        """Return how far a run is before 0-based `step`, from 0 to 1: by its steps (None = they are
        open), or by its budget if that is further.
        """
        by_steps = 0.0 if steps is None else step / max(1, steps - 1)
        return min(1.0, max(by_steps, self.share))

    def steps_left(self, step: int, steps: int | None, before: float) -> float | None:
        """Return how many steps are likely to be left, with 0-based `step`; None = not known yet.

        Args: steps: of the run, None = they are open; before: the share of the budget that was used
        before the first step.
        """
        counts = [] if steps is None else [float(steps - step)]
        if step and self.share > before:
            counts.append(max(1.0, (1 - self.share) * step / (self.share - before)))
        return min(counts, default=None)

    @property
    def ended_by(self) -> str | None:
        """The limit that ended the run, for result.json; None where the budget is not spent."""
        return self.limit if self.spent else None

    def evaluation_due(self, step: int, every: int | None, total: int | None, cost: float) -> bool:
        """Return whether to measure after 1-based `step`, apart from the end of the run.

        Args: every: steps between measurements; None = at each tenth of the budget, or else at each
        sixth of the `total` steps while that is cheap; cost: of one, as a share of the tokens of
        training. Seconds would tell it too, but differ where a run was stopped and goes on.
        """
        if self.spent:
            return False
        if every is not None:
            return every > 0 and step % every == 0
        if total is None or self.limits.given:
            return int(TENTHS * self.share) > int(TENTHS * self.before)
        parts = SIXTHS * step // total
        return parts > SIXTHS * (step - 1) // total and parts * cost <= COST


def warn_if_overshot(share: float, limit: str) -> None:
    """Warn of a budget that was far below what is spent at once.

    Args: share: the used share of it; limit: its text, such as budget.tokens=100.
    """
    if share > OVERSHOT:
        log.warning(
            "%s is overshot: %.3g times as much is used, because what is under way is never cut"
            " short. Raise it, or make steps smaller.",
            limit,
            share,
        )


def describe_length(parts: "Parts", count: int | None, what: str) -> str:
    """Say how long a run is: "60 steps", "1 step or budget.tokens=9", "steps until ...". Warns of a
    budget of tokens that the first step may use up.

    Args: count: of steps, None = they are open.
    """
    limits, tokens = list(parts.run.budget.limits().values()), parts.run.budget.tokens
    each, samples = parts.run.algo.sampling.max_new_tokens, parts.run.algo.step_samples
    if tokens is not None and tokens < samples * each and parts.context.main:
        log.warning(
            "budget.tokens=%d may be used up by the first step, which samples %d completions of up"
            " to %d tokens. Raise it, or make steps smaller.",
            *(tokens, samples, each),
        )
    if count is None:
        return f"{what} until {' or '.join(limits)}"
    steps = f"{count} {what.removesuffix('s') if count == 1 else what}{parts.epochs}"
    return " or ".join([steps, *limits])
