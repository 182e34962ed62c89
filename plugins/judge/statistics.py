"""The statistics of the gate: levels of a sequence of proposals, verdicts, and how many more seeds
a verdict needs. Pure functions.

A proposal is a changed setting. It is kept if the lower bound of its gain, at the level of its
place in the ledger, is above 0. The levels control the probability that a ledger keeps any proposal
without effect (the family-wise error rate) at `ALPHA`, for sequences without an end: online
fallback (Tian and Ramdas, Online control of the familywise error rate, Statistical Methods in
Medical Research 2021, arXiv:1910.04900), which is alpha spending that passes the level of a kept
proposal on to the next one.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit, zeta

from common.uncertainty import LEVEL, Spread

ALPHA = 0.05  # the probability that a ledger keeps any proposal without effect
POWER = 1.6  # how fast the levels fall: place k gets a share in proportion to k ** -POWER
WHOLE = float(zeta(POWER))  # the sum of k ** -POWER over all places
MOST = 100  # the most seeds that are ever recommended
KEEP, DISCARD, NOT_YET = "keep", "discard", "not yet"


def find_level(place: int, kept: Sequence[bool]) -> float:
    """Return the one-sided level of a place in the ledger, from 1.

    Args: kept: whether the proposals at the earlier places are kept, the first one first.
    """
    level = 0.0
    for number in range(1, place + 1):
        passed = level if number > 1 and kept[number - 2] else 0.0
        level = ALPHA * number**-POWER / WHOLE + passed
    return level


def find_share(look: int) -> float:
    """Return the share of its level that the n-th look at a proposal spends, from 1: 1/2, 1/4, ...
    Looking again with more seeds would otherwise be another chance for luck.
    """
    return 0.5**look


def bound(spread: Spread, level: float) -> float:
    """Return the lower bound of the gain at a one-sided level."""
    return spread.find_interval(1 - 2 * level)[0]


def decide(spread: Spread, level: float, effect: float) -> str:
    """Return the verdict on a proposal.

    Args:
        spread: the gain over the base.
        level: the one-sided level of this look.
        effect: the smallest gain of use, in points. Discarding is no claim, so the bound that
            excludes it is at 95 %, whatever the place in the ledger.
    """
    if bound(spread, level) > 0:
        return KEEP
    return DISCARD if spread.find_interval()[1] < effect else NOT_YET


def foresee(spread: Spread, seeds: int, level: float, effect: float) -> int | None:
    """Return with how many seeds a look at this level is likely to decide: the fewest with which it
    would, if the gain and the spreads stay as they are. None if not even `MOST` seeds would: then
    more held-out examples are needed, or a smaller difference does not matter.

    Args: seeds: the number of seeds so far; level: the one-sided level of the next look.
    """
    counts = np.arange(seeds + 1, MOST + 1)
    # The examples' own part is the same with more seeds: the same examples are measured.
    by_seeds, floor = (part * seeds / counts for part in (spread.by_seeds, spread.floor))

    def find_halves(one_sided: float) -> np.ndarray:
        freedoms = spread.examples, counts - 1, np.inf
        of_examples, t, z = (stdtrit(freedom, 1 - one_sided) for freedom in freedoms)
        of_seeds = np.maximum(t**2 * by_seeds, z**2 * floor)
        return np.sqrt(of_examples**2 * spread.by_examples + of_seeds)

    kept = spread.centre > find_halves(level)
    excluded = spread.centre + find_halves((1 - LEVEL) / 2) < effect
    decided = np.flatnonzero(kept | excluded)
    return int(counts[decided[0]]) if len(decided) else None
