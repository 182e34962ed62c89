"""The certainty of a held-out measure: intervals and paired tests from the scores of the examples.

The scores of a measure are what each example adds to it, in points: their mean is the measure. For
a share of right answers they are 0 and 100. Pure functions; what is drawn has a fixed seed, so the
same scores give the same interval, whatever the ranks. docs/uncertainty.md says what is used where;
tests/unit/test_statistics.py simulates how often an interval holds the truth.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

Scores = Sequence[float] | np.ndarray
Interval = tuple[float, float]

LEVEL = 0.95  # the share of intervals that hold the truth
RESAMPLES = 2000  # of a bootstrap
SWAPS = 9999  # of a permutation test, so that p is 0.0001 at least
FEW = 10  # scores
BATCHES = 20  # of examples, where a measure is no mean over them
KEPT = 1 << 22  # numbers of a table of resamples that is kept for the next measure
NORMAL = NormalDist()
Z = NORMAL.inv_cdf((1 + LEVEL) / 2)


def find_interval(scores: Scores) -> Interval | None:
    """Return the interval of a measure; None where there are fewer than two scores.

    Shares have Wilson's (1927); other scores have that of the bootstrap, BCa (Efron 1987).
    """
    values = np.asarray(scores, dtype=float)
    if len(values) < 2:
        return None
    if _are_shares(values):
        low, high = wilson(int(np.count_nonzero(values)), len(values))
        return 100 * low, 100 * high
    return bootstrap(values)


def find_change(before: Scores, after: Scores) -> tuple[Interval, float] | tuple[None, None]:
    """Return the interval of the change of a measure on the same examples, and p: how likely so
    large a change is where nothing has changed, on either side. None, None where there are fewer
    than two, or not the same number of scores.

    Shares have Tango's interval (1998) for paired answers and the exact test of McNemar (1947);
    others have that of the differences, and a permutation test that swaps before and
    after.
    """
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    old, new = _of_batches(old, new), _of_batches(new, old)
    if len(old) != len(new) or len(old) < 2:
        return None, None
    if _are_shares(old) and _are_shares(new):
        gained, lost = int(np.count_nonzero(new > old)), int(np.count_nonzero(new < old))
        low, high = tango(gained, lost, len(old))
        return (float(100 * low), float(100 * high)), mcnemar(gained, lost)
    if not (new - old).any():  # as of shares of which none has moved
        low, high = tango(0, 0, len(old))
        largest = float(np.abs(old).max())
        return (largest * low, largest * high), 1.0
    return _bound_change(new - old), swap(new - old)


def _bound_change(differences: np.ndarray) -> Interval:
    """Return the interval of the mean of differences, of which most may be 0.

    At each end it is the wider of the bootstrap's and of Student's t, which counts a difference up
    and one down beside those that are there, as large as they are (after Bonett and Price 2012),
    the less the fewer are 0: where few examples move, a sample holds too few of them or none.
    """
    count, moved = len(differences), differences[differences != 0]
    still = 1 - len(moved) / count
    squares = np.sum((differences - differences.mean()) ** 2) + 2 * still * np.mean(moved**2)
    half = find_t(count - 1) * math.sqrt(squares / (count - 1) / count)
    low, high = bootstrap(differences)
    mean = float(differences.mean())
    return min(low, mean - half), max(high, mean + half)


def _of_batches(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return scores by batches of examples where `others` are: a measure that is no mean, as F1,
    may be one all the same while every answer is wrong.
    """
    if len(others) != BATCHES or len(values) < 2 * BATCHES:
        return values
    parts = np.array([values[first::BATCHES].mean() for first in range(BATCHES)])
    return parts + (values.mean() - parts.mean())


def is_supported(interval: Sequence[float] | None, p: float | None) -> bool:
    """Return whether a change may be claimed: its interval leaves out 0 and its test is sure."""
    if interval is None or p is None:
        return False
    return not interval[0] <= 0 <= interval[1] and p < 1 - LEVEL


def correct(
    tests: Sequence[tuple[Interval, float]], among: int | None = None
) -> list[tuple[Interval, float]]:
    """Return the tests of several changes with p as Holm (1979) corrects it: so that, where nothing
    has changed, one claim in twenty such tables is false, not one in twenty tests. among: the tests
    that these were chosen from; None = these are all.
    """
    among = len(tests) if among is None else among
    order = sorted(range(len(tests)), key=lambda i: tests[i][1])
    corrected, least = list(tests), 0.0
    for rank, place in enumerate(order):
        interval, p = tests[place]
        least = max(least, min(1.0, (among - rank) * p))
        corrected[place] = interval, least
    return corrected


def show_interval(interval: Sequence[float] | None, signed: bool = False) -> str:
    """Return an interval as text: 41.2 to 55.3; "" where there is none."""
    if interval is None:
        return ""
    sign, digits = "+" if signed else "", 1 if interval[1] - interval[0] >= 1 else 3
    return " to ".join(f"{bound:{sign}.{digits}f}" for bound in interval)


def show_p(p: float) -> str:
    """Return p = 0.032, or p < 0.001."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


# --- shares


def wilson(right: int, count: int) -> Interval:
    """Return the interval of a share, of which `right` of `count` were found."""
    from scipy.stats import binomtest  # a second, which --help need not wait

    interval = binomtest(right, count).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def tango(gained: Any, lost: Any, count: int) -> tuple[Any, Any]:
    """Return the interval of the change of a share on the same examples, of which `gained` became
    right and `lost` wrong. Takes arrays too. It inverts the score test, by bisection.
    """
    gained, lost = np.asarray(gained, dtype=float), np.asarray(lost, dtype=float)
    change = (gained - lost) / count

    def score(at: Any) -> Any:
        linear = (2 * count - gained + lost) * at - gained - lost
        root = np.sqrt(np.maximum(linear**2 + 8 * count * lost * at * (1 - at), 0.0))
        spread = count * ((root - linear) / (2 * count) + at * (1 - at))
        return (gained - lost - count * at) / np.sqrt(np.maximum(spread, 1e-12))

    def find_bound(end: float) -> Any:
        inside, outside = change, np.full_like(change, end)
        for _ in range(50):
            middle = (inside + outside) / 2
            within = np.abs(score(middle)) < Z
            inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
        return inside

    return find_bound(-1.0), find_bound(1.0)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact p of as uneven a split as `gained` and `lost`."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _are_shares(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 100.0)).all())


# --- other scores, faster than by SciPy: LOG.md


def bootstrap(scores: np.ndarray) -> Interval:
    """Return the BCa interval of a mean, widened as Student's t is for few scores (Hesterberg
    2015); that of Student's t for fewer than `FEW`.
    """
    count, mean = len(scores), float(np.mean(scores))
    apart = scores - mean
    squares = float(np.sum(apart**2))
    if squares <= 1e-18 * max(1.0, mean**2) * count:
        return mean, mean
    if count < FEW:  # resamples of so few are too much alike
        half = find_t(count - 1) * math.sqrt(squares / (count - 1) / count)
        return mean - half, mean + half
    means = np.sort(_resampled(scores))
    below = float(np.mean(means < mean) + np.mean(means == mean) / 2)
    bias = NORMAL.inv_cdf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    skew = float(np.sum(apart**3)) / (6 * squares**1.5)
    wide = find_t(count - 1) * math.sqrt(count / (count - 1))

    def find_bound(deviations: float) -> float:
        moved = bias + deviations
        place = NORMAL.cdf(bias + moved / max(1 - skew * moved, 1e-3))
        return float(np.quantile(means, min(max(place, 0.0), 1.0)))

    return find_bound(-wide), find_bound(wide)


def swap(differences: np.ndarray) -> float:
    """Return the p of a mean of `differences` that may as well have had other signs."""
    if not np.any(differences):
        return 1.0
    as_far, total, draw = 0, abs(float(np.sum(differences))), np.random.default_rng(0)
    for part in _parts(SWAPS, len(differences)):
        signs = draw.integers(0, 2, (part, len(differences)), dtype=np.int8)
        sums = (2.0 * signs - 1.0) @ differences
        as_far += int(np.count_nonzero(np.abs(sums) >= total * (1 - 1e-12)))
    return (as_far + 1) / (SWAPS + 1)


def contributions(
    sums: np.ndarray, measure: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, list[float]]:
    """Return a measure that is no mean, but a function of sums over examples, and its scores: by
    the jackknife, what each example adds.

    Args: sums: [examples, k], what each adds to the sums; measure: [rows, k] -> [rows].
    """
    count, total = len(sums), sums.sum(0, keepdims=True)
    value = float(measure(total)[0])
    if count < 2:
        return value, [value] * count
    added = (count - 1) * (value - np.asarray(measure(total - sums), dtype=float))
    return value, (value + added - added.mean()).tolist()


def _resampled(scores: np.ndarray) -> np.ndarray:
    """Return the means of samples of the scores, drawn with replacement."""
    count = len(scores)
    if count * RESAMPLES <= KEPT:
        return _drawn(count) @ scores / count
    draw = np.random.default_rng(0)
    parts = _parts(RESAMPLES, count)
    return np.concatenate([_draw(draw, part, count) @ scores / count for part in parts])


@lru_cache(maxsize=4)
def _drawn(count: int) -> np.ndarray:
    return _draw(np.random.default_rng(0), RESAMPLES, count)


def _draw(draw: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Return how often each score is in each sample: [rows, count]."""
    return draw.multinomial(count, np.full(count, 1 / count), size=rows).astype(float)


def _parts(rows: int, width: int) -> list[int]:
    """Return `rows` in parts of a table that fits the memory."""
    size = max(1, KEPT // width)
    return [min(size, rows - start) for start in range(0, rows, size)]


# --- runs of several seeds


def find_difference(one: np.ndarray, other: np.ndarray) -> tuple[float, Interval, float]:
    """Return by how much `other` is above `one` on the same examples, its interval, and p.

    Shares get an example that is gained and one that is lost (after Bonett and Price 2012), as all
    that agree are not without spread either. One seed of each tells nothing of others: it is
    `find_change`; one against several takes the spread of the several for its own.
    Args: one, other: scores [seeds, examples], of runs of two settings.
    """
    apart = other.mean(0) - one.mean(0)
    gap = float(apart.mean())
    if len(one) == len(other) == 1:
        interval, p = find_change(one[0], other[0])
        assert interval is not None
        assert p is not None
        return gap, interval, p
    shares = _are_shares(one) and _are_shares(other)
    lone = 1 in (len(one), len(other))
    groups = [(runs, 1 + lone * len(runs)) for runs in (one, other) if len(runs) > 1]
    (low, high), p = _combine(apart, (100.0, -100.0) if shares else (), groups)
    return gap, (max(low, -100.0), min(high, 100.0)) if shares else (low, high), p


def find_pooled(runs: np.ndarray) -> Interval | None:
    """Return the interval of a measure over seeds and examples. runs: scores [seeds, examples].

    Shares get an example that is right and one that is wrong.
    """
    if len(runs) == 1:
        return find_interval(runs[0])
    shares = _are_shares(runs)
    (low, high), _ = _combine(runs.mean(0), (0.0, 100.0) if shares else (), [(runs, 1)])
    return (max(low, 0.0), min(high, 100.0)) if shares else (low, high)


def _combine(
    values: np.ndarray, added: Sequence[float], groups: Sequence[tuple[np.ndarray, int]]
) -> tuple[Interval, float]:
    """Return the interval of the mean of examples' values, and the p of 0.

    Examples and seeds are both drawn, so the spread of each counts (two-way analysis of variance),
    each with Student's t for as many as were drawn: two seeds tell little of the spread of seeds,
    however many examples there are. Several groups of seeds have the degrees of freedom of
    Satterthwaite (1946).
    Args: added: values of examples that stand beside them; groups: runs of several seeds
    [seeds, examples], and how often the spread of their means counts.
    """
    gap, every = float(values.mean()), np.append(values, added)
    by_examples, by_seeds, uncertain = float(every.var(ddof=1)) / len(every), 0.0, 0.0
    for runs, times in groups:
        spread = float(runs.mean(1).var(ddof=1)) / len(runs)
        rest = runs - runs.mean(0) - runs.mean(1, keepdims=True) + runs.mean()
        noise = float(np.sum(rest**2)) / ((len(runs) - 1) * (len(values) - 1) * runs.size)
        by_examples -= times * noise  # which the spread of the seeds holds too
        by_seeds += times * spread
        uncertain += (times * spread) ** 2 / (len(runs) - 1)
    by_examples = max(0.0, by_examples)
    if by_examples + by_seeds == 0:
        return (gap, gap), 1.0 if gap == 0 else 0.0
    drawn = max(by_seeds**2 / uncertain, 1.0) if by_seeds else 1.0  # degrees of freedom of seeds

    def find_half(level: float) -> float:
        """Return how far an interval of this level reaches to each side."""
        examples, seeds = find_t(len(every) - 1, level), find_t(drawn, level)
        return math.sqrt(examples**2 * by_examples + seeds**2 * by_seeds)

    half, centre = find_half(LEVEL), float(every.mean())
    low, high = 0.0, 1.0  # the level of the interval that ends at 0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if find_half(middle) < abs(centre) else (low, middle)
    return (centre - half, centre + half), 1 - low


def find_t(freedom: float, level: float = LEVEL) -> float:
    """Return how many standard errors an interval reaches to each side."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2))
