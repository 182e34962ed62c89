"""The trust region of a run: a limit on the distance of the weights from the initial weights."""

import logging
import math
import time

from common.run import Budget
from common.session import Session, Step
from eggroll.config import EggrollConfig
from eggroll.weights import Weights

# With algo.lr=auto the probe plans the random part of a run's drift. Learning adds to it: the limit
# is this multiple of the planned drift.
ROOM = 2.0
FULL = 0.95  # share of the limit from which on the run warns that steps hardly change the model

log = logging.getLogger("clutch")


class TrustRegion:
    """Lowers the learning rate so that the drift stays below a limit, however many steps a run has.

    Most of an update is luck, so n updates of length u add up to a drift of about u * sqrt(n), as
    the steps of a random walk do. The drift and all lengths are shares of |W0|, the norm of the
    initial weights.

    Args:
        planned: the drift that the probe planned; None = no probe has run.
        session: the session; checkpoints keep the drift in its `state.own`.
    """

    def __init__(
        self, cfg: EggrollConfig, weights: Weights, planned: float | None, session: Session
    ) -> None:
        self.cfg, self.budget, self.own = cfg, session.budget, session.state.own
        # The tokens and seconds that the probe used. A run that resumes with another budget has
        # used another share of it.
        state, budget = session.state, self.budget
        tokens, seconds = self.own.setdefault("used_before", [state.generated, state.seconds])
        self.before = Budget(budget.limits, budget.context, tokens, seconds, quiet=True).share
        self.size = math.sqrt(weights.size_at_start())
        self.own.setdefault("drift", 0.0)
        limits = [cfg.max_drift, None if planned is None else ROOM * planned]
        self.limit = min((limit for limit in limits if limit is not None), default=None)
        if not cfg.plain_sgd or self.size == 0:  # the length of a step, or its share, is unknown
            self.limit = None
        full = self.limit is not None and self.own["drift"] > FULL * self.limit
        if full and not session.over and budget.context.main:
            advice = "Raise algo.max_drift."
            if planned is not None:
                advice = "It is twice what the probe has planned: give algo.lr, and algo.max_drift."
            log.warning(
                "the drift of %.3g leaves nothing of the %.3g that the run may come to, so further"
                " steps hardly change the model. %s",
                *(self.own["drift"], self.limit, advice),
            )

    def shorten(self, lr: float, gradient_norm: float, step: Step) -> tuple[float, float]:
        """Return the learning rate, lowered if the update would be too long, and the length of the
        update as a share of |W0|.

        An update may use an equal part of the limit that is left: sqrt((limit^2 - drift^2) / steps
        left).
        """
        if self.limit is not None:
            left = self.budget.steps_left(step.index, self.cfg.steps, self.before)
            room = max(0.0, self.limit**2 - self.own["drift"] ** 2)
            longest = math.sqrt(room / (left or self._foresee(step)))
            if gradient_norm > 0:
                lr = min(lr, longest * self.size / gradient_norm)
        return lr, lr * gradient_norm / self.size if self.size else 0.0

    def _foresee(self, step: Step) -> float:
        """Return the number of steps that the budget allows, estimated from the tokens and seconds
        that the current step has used before its update.
        """
        seconds = time.perf_counter() - step.started - step.untimed_seconds
        share, _ = self.budget.limits.nearest(step.tokens, seconds)
        share = max(self.budget.context.gather_objects(share))  # clocks of ranks differ
        return max(1.0, (1 - self.before) / max(share, 1e-9))

    def follow(self, length: float, drift: float | None) -> None:
        """Record the drift after an update: the measured `drift`, or, if that is None, the drift of
        a random walk whose next step has this length.
        """
        self.own["drift"] = math.hypot(self.own["drift"], length) if drift is None else drift
