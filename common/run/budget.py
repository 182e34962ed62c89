"""The limits of a run, and the share of them that is spent."""

import logging
from typing import TYPE_CHECKING

from common.config import BudgetConfig, Run
from common.distributed import Context

if TYPE_CHECKING:
    from common.evaluation import Evaluation
    from common.parts import Parts

log = logging.getLogger("clutch")

TENTHS, SIXTHS = 10, 6
# The most tokens of evaluations at sixths, as a share of those of training so far. Validation
# chooses the exported model, so it may cost more.
COST, VALIDATION_COST = 0.05, 0.25
OVERSHOT = 1.1  # a larger spent share of a budget is worth a warning


class Budget:
    """The spent share of a budget, the same on every rank. Without limits it stays 0.

    Args:
        limits: the limits in tokens and seconds.
        tokens: tokens that the run has used so far.
        seconds: seconds that the run has used so far.
        quiet: whether not to warn of an overshot budget.
    Attributes:
        share: the share of the nearest limit that is spent; 1 or more ends the run.
        unit: the unit of a progress line, token or second.
        used: units used so far, at most `whole`.
        whole: units of the limit; 0 without one.
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
        self.completion = (0.0, 0.0)  # tokens and seconds of a held-out completion, once known
        self.add(tokens, seconds)

    def add(self, tokens: int, seconds: float) -> None:
        """Update the totals of tokens and seconds used."""
        # The count of a progress line; the last step may exceed the limit.
        self.used = min(self.whole, round(seconds) if self.limits.tokens is None else tokens)
        nearest = self.limits.nearest(tokens, seconds)
        if self.limits.seconds is not None:  # clocks of ranks differ
            nearest = max(self.context.gather_objects(nearest))
        self.before, (self.share, self.limit) = self.share, nearest
        if self.context.main and self.before < 1 and not self.quiet:
            warn_if_overshot(self.share, self.limit)

    def foresee(self, run: Run, measured: "Evaluation", completions: int) -> None:
        """Record the cost of a completion in an evaluation of `completions`, and warn if the
        first step is likely to use up budget.seconds; no warning if that evaluation included
        compilation.
        """
        seconds = max(self.context.gather_objects(measured.seconds)) / completions
        self.completion = (measured.answered / completions, seconds)
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
        """Whether the run must end."""
        return self.share >= 1

    def progress(self, step: int, steps: int | None) -> float:
        """Return the progress of a run before 0-based `step`, 0 to 1: by its steps (None = open),
        or by its budget if that is further.
        """
        by_steps = 0.0 if steps is None else step / max(1, steps - 1)
        return min(1.0, max(by_steps, self.share))

    def steps_left(self, step: int, steps: int | None, before: float) -> float | None:
        """Return the estimated number of steps left at 0-based `step`; None = not known yet.

        Args:
            steps: the steps of the run; None = open.
            before: the share of the budget that was spent before the first step.
        """
        counts = [] if steps is None else [float(steps - step)]
        if step and self.share > before:
            counts.append(max(1.0, (1 - self.share) * step / (self.share - before)))
        return min(counts, default=None)

    @property
    def ended_by(self) -> str | None:
        """The limit that ended the run, for result.json; None if the budget is not spent."""
        return self.limit if self.spent else None

    def evaluation_due(
        self,
        step: int,
        every: int | None,
        total: int | None,
        cost: float,
        validation: bool = False,
    ) -> bool:
        """Return whether to evaluate after 1-based `step`, apart from the end of the run.

        Args:
            every: steps between evaluations; None = at each tenth of the budget, or without a
                budget at each sixth of the `total` steps while that is cheap.
            total: the steps of the run; None = open.
            cost: the cost of one evaluation as a share of the tokens of training. Seconds would
                differ in a run that was stopped and resumed.
            validation: whether it is one on validation examples.
        """
        if self.spent:
            return False
        if every is not None:
            return every > 0 and step % every == 0
        if total is None or self.limits.given:
            return int(TENTHS * self.share) > int(TENTHS * self.before)
        parts, most = SIXTHS * step // total, VALIDATION_COST if validation else COST
        return parts > SIXTHS * (step - 1) // total and parts * cost <= most


def warn_if_overshot(share: float, limit: str) -> None:
    """Warn of a budget that was far smaller than the cost of one step.

    Args: share: the spent share of it; limit: its text, such as budget.tokens=100.
    """
    if share > OVERSHOT:
        log.warning(
            "%s is overshot: %.3g times as much is used, because what is under way is never cut"
            " short. Raise it, or make steps smaller.",
            limit,
            share,
        )


def describe_length(parts: "Parts", count: int | None, what: str) -> str:
    """Describe the length of a run: "60 steps", "1 step or budget.tokens=9", "steps until ...".
    Warns if the first step may use up budget.tokens.

    Args: count: the number of steps; None = open; what: the plural of the unit.
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
