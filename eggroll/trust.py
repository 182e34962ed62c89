"""The trust region of a run: how far the weights may come from where they began."""

import math
from typing import Any

from eggroll.config import EggrollConfig
from eggroll.weights import Weights

# With algo.lr=auto the probe plans the random part of a run's drift. What is learnt adds to it: in
# all it may be this many times as much.
ROOM = 2.0


class TrustRegion:
    """Shortens updates to algo.max_update, and so that a run of any length ends within a drift.

    Most of an update is luck, so n updates of length u add up to a drift of about u * sqrt(n), as
    the steps of a random walk do. All lengths are shares of the initial weights' size.

    Args: planned: the drift that the probe planned, None = it was not asked; state: what a
    checkpoint keeps of the run, where the drift is noted.
    """

    def __init__(
        self, cfg: EggrollConfig, weights: Weights, planned: float | None, state: dict[str, Any]
    ) -> None:
        self.cfg, self.state = cfg, state
        self.size = math.sqrt(weights.size_at_start())
        self.state.setdefault("drift", 0.0)
        limits = [cfg.max_drift, None if planned is None else ROOM * planned]
        self.limit = min((limit for limit in limits if limit is not None), default=None)
        if not cfg.plain_sgd or self.size == 0:  # whose steps, or shares, are not known
            self.limit = None

    def shorten(self, lr: float, gradient_norm: float, steps_left: float | None) -> float:
        """Return lr, or a smaller one. steps_left: with this one; None = not known yet."""
        bounds = [self.cfg.max_update]
        if self.limit is not None and steps_left is not None:
            room = max(0.0, self.limit**2 - self.state["drift"] ** 2)
            bounds.append(math.sqrt(room / steps_left))
        longest = min((bound for bound in bounds if bound is not None), default=None)
        if longest is None or gradient_norm == 0:
            return lr
        return min(lr, longest * self.size / gradient_norm)

    def follow(self, length: float, drift: float | None) -> None:
        """Note the drift after an update of that length: as measured, or as of a random walk."""
        if drift is None and self.size:
            drift = math.hypot(self.state["drift"], length / self.size)
        self.state["drift"] = drift or 0.0
