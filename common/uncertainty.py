"""The uncertainty of a held-out measure: intervals and paired tests from the scores of the
examples.

The scores of a measure are the contributions of the examples, in points: their mean is the measure.
For a share of right answers they are 0 and 100. All functions are pure; random draws have a fixed
seed, so the same scores give the same interval, whatever the number of ranks. docs/uncertainty.md
says which method is used for which measure; tests/unit/test_statistics.py simulates the coverage of
the intervals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

Scores = Sequence[float] | np.ndarray
Interval = tuple[float, float]

LEVEL = 0.95  # the share of intervals that contain the true value
RESAMPLES = 2000  # of a bootstrap
SWAPS = 9999  # of a permutation test, so that p is 0.0001 at least
FEW = 10  # with fewer scores Student's t replaces the bootstrap
BATCHES = 20  # the number of batches of examples for a measure that is no mean over examples
KEPT = 1 << 22  # the most numbers in a table of resamples that is cached for the next measure
NORMAL = NormalDist()
Z = NORMAL.inv_cdf((1 + LEVEL) / 2)


def find_interval(scores: Scores) -> Interval | None:
    """Return the interval of a measure at `LEVEL`; None for fewer than two scores.

    Shares get Wilson's interval (1927), other scores the BCa bootstrap interval (Efron 1987).
    """
    values = np.asarray(scores, dtype=float)
    if len(values) < 2:
        return None
    if _are_shares(values):
        low, high = wilson(int(np.count_nonzero(values)), len(values))
        return 100 * low, 100 * high
    return bootstrap(values)


def find_change(before: Scores, after: Scores) -> tuple[Interval, float] | tuple[None, None]:
    """Return the interval of the change of a measure on the same examples, and the two-sided
    p-value of no change. Returns (None, None) for fewer than two scores, or for different numbers
    of scores.

    Shares get Tango's interval (1998) for paired answers and McNemar's exact test (1947). Other
    scores get the interval of the differences and a permutation test that swaps before and after.
    """
    old, new = _pair(before, after)
    if len(old) != len(new) or len(old) < 2:
        return None, None
    if _are_shares(old) and _are_shares(new):
        gained, lost = int(np.count_nonzero(new > old)), int(np.count_nonzero(new < old))
        low, high = tango(gained, lost, len(old))
        return (float(100 * low), float(100 * high)), mcnemar(gained, lost)
    if not (new - old).any():  # no score has changed: as for shares
        low, high = tango(0, 0, len(old))
        largest = float(np.abs(old).max())
        return (largest * low, largest * high), 1.0
    return _bound_change(new - old), swap(new - old)


def find_loss(before: Scores, after: Scores) -> float | None:
    """Return the one-sided p-value of "`after` is no worse than `before`" on the same examples;
    None for fewer than two scores, or for different numbers of scores.

    Shares get McNemar's score test, which Tango's interval inverts: the exact test cannot say
    anything of fewer than four changed answers (Fagerland, Lydersen and Laake 2013). Other scores
    get half the p-value of `find_change`.
    """
    old, new = _pair(before, after)
    if len(old) != len(new) or len(old) < 2:
        return None
    if _are_shares(old) and _are_shares(new):
        gained, lost = int(np.count_nonzero(new > old)), int(np.count_nonzero(new < old))
        return NORMAL.cdf((gained - lost) / math.sqrt(gained + lost)) if gained + lost else 0.5
    p = swap(new - old)
    return p / 2 if new.mean() < old.mean() else 1 - p / 2


def _pair(before: Scores, after: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of both evaluations as arrays, of batches if those of one of them are."""
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    return _of_batches(old, new), _of_batches(new, old)


def _bound_change(differences: np.ndarray) -> Interval:
    """Return the interval of the mean of differences, most of which may be 0.

    Each end is the wider one of the bootstrap and of Student's t. For the latter, one positive and
    one negative difference of the typical size are added (after Bonett and Price 2012), with less
    weight the fewer differences are 0: if few examples change, a sample may hold too few of them or
    none.
    """
    count, moved = len(differences), differences[differences != 0]
    still = 1 - len(moved) / count
    squares = np.sum((differences - differences.mean()) ** 2) + 2 * still * np.mean(moved**2)
    half = find_t(count - 1) * math.sqrt(squares / (count - 1) / count)
    low, high = bootstrap(differences)
    mean = float(differences.mean())
    return min(low, mean - half), max(high, mean + half)


def _of_batches(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the mean scores of batches of examples if `others` are scores of batches, else the
    scores themselves. A measure that is no mean, such as F1, may have scores per example in one
    evaluation (all answers wrong) and per batch in the other.
    """
    if len(others) != BATCHES or len(values) < 2 * BATCHES:
        return values
    parts = np.array([values[first::BATCHES].mean() for first in range(BATCHES)])
    return parts + (values.mean() - parts.mean())


def is_supported(interval: Sequence[float] | None, p: float | None) -> bool:
    """Return whether a change may be claimed: its interval excludes 0, and p is below
    1 - `LEVEL`.
    """
    if interval is None or p is None:
        return False
    return not interval[0] <= 0 <= interval[1] and p < 1 - LEVEL


def correct(
    tests: Sequence[tuple[Interval, float]], among: int | None = None
) -> list[tuple[Interval, float]]:
    """Return the tests of several changes with p-values corrected after Holm (1979), so that the
    probability of any false claim among them, rather than per test, is at most 5 %.

    Args: among: the number of tests that these were chosen from; None = these are all.
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
    """Return an interval as text, such as "41.2 to 55.3"; "" for None."""
    if interval is None:
        return ""
    sign, digits = "+" if signed else "", 3 if 0 < interval[1] - interval[0] < 1 else 1
    return " to ".join(f"{bound:{sign}.{digits}f}" for bound in interval)


def show_p(p: float) -> str:
    """Return "p = 0.032", or "p < 0.001"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


# --- shares


def wilson(right: int, count: int) -> Interval:
    """Return Wilson's interval of a share, given `right` of `count`; both ends in [0, 1]."""
    from scipy.stats import binomtest  # takes a second to import, which --help must not wait for

    interval = binomtest(right, count).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def tango(gained: Any, lost: Any, count: int) -> tuple[Any, Any]:
    """Return Tango's interval of the change of a share on the same `count` examples, of which
    `gained` became right and `lost` became wrong. Takes arrays as well. It inverts the score test
    by bisection.
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
    """Return the exact two-sided p-value of McNemar's test for `gained` against `lost` examples."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _are_shares(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 100.0)).all())


# --- other scores, faster than by SciPy: docs/decisions.md


def bootstrap(scores: np.ndarray) -> Interval:
    """Return the BCa interval of the mean of scores, widened as Student's t is for few scores
    (Hesterberg 2015); for fewer than `FEW` scores the interval of Student's t.
    """
    count, mean = len(scores), float(np.mean(scores))
    apart = scores - mean
    squares = float(np.sum(apart**2))
    if squares <= 1e-18 * max(1.0, mean**2) * count:
        return mean, mean
    if count < FEW:  # resamples of so few scores are too similar
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
    """Return the two-sided p-value of the mean of `differences` under random changes of their
    signs.
    """
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
    """Return the value and the scores of a measure that is a function of sums over examples. The
    scores are the jackknife's contributions of the examples.

    Args:
        sums: [examples, k], the summands of each example.
        measure: maps sums [rows, k] to values [rows].
    """
    count, total = len(sums), sums.sum(0, keepdims=True)
    value = float(measure(total)[0])
    if count < 2:
        return value, [value] * count
    added = (count - 1) * (value - np.asarray(measure(total - sums), dtype=float))
    return value, (value + added - added.mean()).tolist()


def _resampled(scores: np.ndarray) -> np.ndarray:
    """Return the means of `RESAMPLES` bootstrap samples of the scores."""
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
    """Return the multiplicity of each score in each bootstrap sample: [rows, count]."""
    return draw.multinomial(count, np.full(count, 1 / count), size=rows).astype(float)


def _parts(rows: int, width: int) -> list[int]:
    """Split `rows` rows of `width` numbers into parts that fit a table of `KEPT` numbers; return
    their row counts.
    """
    size = max(1, KEPT // width)
    return [min(size, rows - start) for start in range(0, rows, size)]


# --- runs of several seeds


def find_difference(one: np.ndarray, other: np.ndarray) -> tuple[float, Interval, float]:
    """Return the mean difference `other` - `one` on the same examples, its interval, and the
    p-value of no difference.

    For shares, one gained and one lost example are added (after Bonett and Price 2012), so that the
    interval has a width even if all examples agree. With one seed on each side the result is that
    of `find_change`. With one seed against several, the spread of the several stands for both.
    Args: one, other: scores [seeds, examples] of runs of two settings.
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
    spread = _combine(apart, (100.0, -100.0) if shares else (), groups)
    low, high = spread.find_interval()
    return gap, (max(low, -100.0), min(high, 100.0)) if shares else (low, high), spread.p


def find_pooled(runs: np.ndarray) -> Interval | None:
    """Return the interval of a measure over seeds and examples; for shares one right and one wrong
    example are added.

    Args: runs: scores [seeds, examples].
    """
    if len(runs) == 1:
        return find_interval(runs[0])
    shares = _are_shares(runs)
    spread = _combine(runs.mean(0), (0.0, 100.0) if shares else (), [(runs, 1)])
    low, high = spread.find_interval()
    return (max(low, 0.0), min(high, 100.0)) if shares else (low, high)


@dataclass(frozen=True)
class Spread:
    """The mean of values of examples over seeds, and the variance of that mean.

    Examples and seeds are both random samples, so the spread of both counts (two-way analysis of
    variance), each with Student's t for its number: two seeds estimate the spread of seeds poorly,
    however many examples there are.

    Attributes:
        gap: the mean over the examples.
        centre: the middle of intervals: the mean with pseudo-examples, if there are some.
        by_examples: the variance of the mean because of the examples.
        by_seeds: the variance of the mean because of the seeds.
        examples: degrees of freedom of `by_examples`.
        seeds: degrees of freedom of `by_seeds`.
        floor: the part of the variance because of the seeds that is noise, of neither seeds nor
            examples; it has many degrees of freedom, so it bounds intervals from below.
    """

    gap: float
    centre: float
    by_examples: float
    by_seeds: float
    examples: float
    seeds: float
    floor: float = 0.0

    def find_half(self, level: float) -> float:
        """Return half the width of the two-sided interval at this level."""
        examples, seeds = find_t(self.examples, level), find_t(self.seeds, level)
        of_seeds = max(seeds**2 * self.by_seeds, find_t(math.inf, level) ** 2 * self.floor)
        return math.sqrt(examples**2 * self.by_examples + of_seeds)

    @property
    def is_certain(self) -> bool:
        """Whether nothing varies, so that the interval has no width."""
        return self.by_examples + self.by_seeds + self.floor == 0

    def find_interval(self, level: float = LEVEL) -> Interval:
        """Return the two-sided interval of the mean."""
        if self.is_certain:
            return self.gap, self.gap
        half = self.find_half(level)
        return self.centre - half, self.centre + half

    @property
    def p(self) -> float:
        """The two-sided p-value of a mean of 0."""
        if self.is_certain:
            return 1.0 if self.gap == 0 else 0.0
        low, high = 0.0, 1.0  # the level of the interval that ends at 0
        for _ in range(50):
            middle = (low + high) / 2
            within = self.find_half(middle) < abs(self.centre)
            low, high = (middle, high) if within else (low, middle)
        return 1 - low


def pair_seeds(one: np.ndarray, other: np.ndarray) -> Spread:
    """Return the spread of the difference `other` - `one`, paired by example and by seed: two runs
    of one seed may begin with the same weights and read the same rows, which cancels out.

    For shares, one gained and one lost example are added, as in `find_difference`. The spread of
    the seeds, with Student's t, counts as at least the noise that it contains, with the normal
    distribution: the means of a few seeds may be equal by chance, which at levels far below 5 %
    would be a certain difference.
    Args: one, other: scores [seeds, examples] of runs of two settings with the same seeds, at least
    two.
    """
    shares = _are_shares(one) and _are_shares(other)
    apart = other - one
    spread = _combine(apart.mean(0), (100.0, -100.0) if shares else (), [(apart, 1)])
    return replace(spread, seeds=len(apart) - 1, floor=_find_noise(apart))


def _combine(
    values: np.ndarray, added: Sequence[float], groups: Sequence[tuple[np.ndarray, int]]
) -> Spread:
    """Return the spread of the mean of the examples' values.

    Several groups of seeds get the degrees of freedom of Satterthwaite (1946).
    Args:
        values: the values of the examples.
        added: values of pseudo-examples that are added to them.
        groups: (runs [seeds, examples], how often the spread of their means counts).
    """
    gap, every = float(values.mean()), np.append(values, added)
    by_examples, by_seeds, uncertain = float(every.var(ddof=1)) / len(every), 0.0, 0.0
    for runs, times in groups:
        spread = float(runs.mean(1).var(ddof=1)) / len(runs)
        by_examples -= times * _find_noise(runs)  # the spread of the seeds contains it as well
        by_seeds += times * spread
        uncertain += (times * spread) ** 2 / (len(runs) - 1)
    drawn = max(by_seeds**2 / uncertain, 1.0) if by_seeds else 1.0  # degrees of freedom of seeds
    centre = float(every.mean())
    return Spread(gap, centre, max(0.0, by_examples), by_seeds, len(every) - 1, drawn)


def _find_noise(runs: np.ndarray) -> float:
    """Return the variance of the mean of scores [seeds, examples] because of what is of neither the
    seeds nor the examples.
    """
    rest = runs - runs.mean(0) - runs.mean(1, keepdims=True) + runs.mean()
    return float(np.sum(rest**2)) / ((len(runs) - 1) * (runs.shape[1] - 1) * runs.size)


def find_t(freedom: float, level: float = LEVEL) -> float:
    """Return the two-sided critical value of Student's t.

    Args: freedom: degrees of freedom; infinity = that of the normal distribution. level: the
    confidence level.
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2))
