"""Reward against generated tokens as a sigmoid in their logarithm, and where a run is heading.

R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B), after "The Art of Scaling Reinforcement Learning Compute"
(ScaleRL, arXiv:2510.13786). A curve is not fitted once: every curve of a grid over A, B and Cmid is
weighed by its likelihood, with R0 at its best, so that what the measured part leaves open shows as
a wide interval.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from common.report.events import has_stages

LEAST = 30  # steps of a run, and so 10 of its first third
LAST = 0.1  # of a run: its end, over which rewards are averaged
CEILINGS = np.linspace(0.02, 1.0, 50)  # A
SLOPES = np.geomspace(1.0, 4.0, 12)  # B
MIDDLES = np.geomspace(0.1, 10.0, 40)  # Cmid, in units of the tokens that were measured
DOUBT = 2.0  # times the variance: a run's curve is a sigmoid only roughly (LOG.md)
QUANTILES = (0.025, 0.5, 0.975)


class Range(NamedTuple):
    """A median, and an interval that holds 95 % of the weight."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


class Forecast(NamedTuple):
    """The outcome of a run, reward in [0, 1]. from_third: of its end, from the first third of its
    tokens; end: as it came; ceiling: A, from the whole run.
    """

    from_third: Range
    end: float
    ceiling: Range


def forecast(log: Sequence[dict[str, Any]]) -> Forecast | None:
    """Return where a run was heading after a third of its tokens, and where it ended; None of one
    with fewer than `LEAST` steps with a reward, or whose policy changes in stages, as its curve is
    one of steps. log: the events of its steps.
    """
    # The updates of a rollout share its tokens and its reward, and count as one step.
    rewarded = (event for event in log if event.get("reward") is not None)
    logged = list({event["generated_tokens"]: event for event in rewarded}.values())
    if len(logged) < LEAST or has_stages(logged):
        return None
    tokens = np.array([float(event["generated_tokens"]) for event in logged])
    rewards = np.array([float(event["reward"]) for event in logged])
    last = tokens > (1 - LAST) * tokens[-1]
    third = tokens <= max(tokens[-1] / 3, tokens[LEAST // 3 - 1])
    where = float(tokens[last].mean())
    from_third, _ = fit(tokens[third], rewards[third], where)
    _, ceiling = fit(tokens, rewards, where)
    return Forecast(from_third, float(rewards[last].mean()), ceiling)


def fit(tokens: np.ndarray, rewards: np.ndarray, where: float) -> tuple[Range, Range]:
    """Return the reward that is expected after `where` tokens, and the ceiling.

    Args: tokens: [n], rising; rewards: [n], the mean of each step.
    """
    slope, middle = (x.ravel() for x in np.meshgrid(SLOPES, MIDDLES * tokens[-1], indexing="ij"))

    def risen(at: Any) -> np.ndarray:
        return 1 / (1 + (middle[:, None] / np.atleast_1d(at)) ** slope[:, None])  # [shapes, n]

    # A curve is start * left + ceiling * share, so that its squared error is made of a few sums
    # per shape, whatever the ceiling: arrays of [ceilings, shapes].
    share, ceiling = risen(tokens), CEILINGS[:, None]
    left = 1 - share
    across = (left * share).sum(1)
    # The start that fits each curve best, by least squares; a reward does not fall.
    start = (left @ rewards - ceiling * across) / (left**2).sum(1).clip(1e-9)
    start = np.clip(start, 0.0, ceiling)
    errors = (rewards**2).sum() - 2 * (start * (left @ rewards) + ceiling * (share @ rewards))
    errors += start**2 * (left**2).sum(1) + ceiling**2 * (share**2).sum(1)
    errors = (errors + 2 * start * ceiling * across).clip(0)
    variance = max(DOUBT * errors.min() / max(1, len(rewards) - 4), 1e-9)
    weights = np.exp((errors.min() - errors) / (2 * variance))
    expected = start + (ceiling - start) * risen(where)[:, 0]
    ceilings = np.broadcast_to(ceiling, weights.shape)
    return _quantiles(expected, weights), _quantiles(ceilings, weights)


def _quantiles(values: np.ndarray, weights: np.ndarray) -> Range:
    values, weights = values.ravel(), weights.ravel()
    order = values.argsort()
    shares = weights[order].cumsum() / weights.sum()
    return Range(*(float(values[order][np.searchsorted(shares, q)]) for q in QUANTILES))
