"""The trust region of a run: how far the weights may come from where they began."""

import logging
import math
import time

from common.run import Budget
from common.session import Session, Step
from eggroll.config import EggrollConfig
from eggroll.weights import Weights

# With algo.lr=auto the probe plans the random part of a run's drift. What is learnt adds to it: in
# all it may be this many times as much.
ROOM = 2.0
FULL = 0.95  # of the limit: hardly any of it is left

log = logging.getLogger("clutch")


class TrustRegion:
    """Shortens updates so that a run of any length ends within a drift.

    Most of an update is luck, so n updates of length u add up to a drift of about u * sqrt(n), as
    the steps of a random walk do. All lengths are shares of the initial weights' size.

    Args: planned: the drift that the probe planned, None = it was not asked; session: what its
    checkpoints keep of the run has the drift.
    """

    def __init__(
        self, cfg: EggrollConfig, weights: Weights, planned: float | None, session: Session
    ) -> None:
        self.cfg, self.budget, self.kept = cfg, session.budget, session.state.own
        # What the probe used, whose share is another one where a run goes on with another budget.
        state, budget = session.state, self.budget
        tokens, seconds = self.kept.setdefault("used_before", [state.generated, state.seconds])
        self.before = Budget(budget.limits, budget.context, tokens, seconds, quiet=True).share
        self.size = math.sqrt(weights.size_at_start())
        self.kept.setdefault("drift", 0.0)
        limits = [cfg.max_drift, None if planned is None else ROOM * planned]
        self.limit = min((limit for limit in limits if limit is not None), default=None)
        if not cfg.plain_sgd or self.size == 0:  # whose steps, or shares, are not known
            self.limit = None
        full = self.limit is not None and self.kept["drift"] > FULL * self.limit
        if full and not session.over and budget.context.main:
            advice = "Raise algo.max_drift."
            if planned is not None:
                advice = "It is twice what the probe has planned: give algo.lr, and algo.max_drift."
            log.warning(
                "the drift of %.3g leaves nothing of the %.3g that the run may come to, so further"
                " steps hardly change the model. %s",
                *(self.kept["drift"], self.limit, advice),
            )

    def shorten(self, lr: float, gradient_norm: float, step: Step) -> tuple[float, float]:
        """Return lr, or a smaller one, and the length of its update."""
        if self.limit is not None:
            left = self.budget.steps_left(step.index, self.cfg.steps, self.before)
            room = max(0.0, self.limit**2 - self.kept["drift"] ** 2)
            longest = math.sqrt(room / (left or self._foresee(step)))
            if gradient_norm > 0:
                lr = min(lr, longest * self.size / gradient_norm)
        return lr, lr * gradient_norm / self.size if self.size else 0.0

    def _foresee(self, step: Step) -> float:
        """Return how many steps the budget has room for, by what the first one has used until its
        update.
        """
        seconds = time.perf_counter() - step.started - step.untimed_seconds
        share, _ = self.budget.limits.nearest(step.tokens, seconds)
        share = max(self.budget.context.gather_objects(share))  # clocks of ranks differ
        return max(1.0, (1 - self.before) / max(share, 1e-9))

    def follow(self, length: float, drift: float | None) -> None:
        """Note the drift after an update of that length: as measured, or as of a random walk."""
        self.kept["drift"] = math.hypot(self.kept["drift"], length) if drift is None else drift
