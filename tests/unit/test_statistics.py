"""Intervals and paired tests: how often they hold the truth, by simulation, and their maths against
peers and naive loops.
"""

import itertools
import math

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from common import uncertainty as sure
from common.tasks.similarity import text_metrics, text_scores

COVERED = (0.94, 0.96)
SIZES = (64, 128, 256, 1000)
SHARES = np.linspace(0.02, 0.98, 49)


def held(intervals: tuple[np.ndarray, np.ndarray], truth: np.ndarray | float) -> np.ndarray:
    low, high = intervals
    return (low <= truth) & (truth <= high)


# --- coverage


@pytest.mark.parametrize("count", SIZES)
def test_wilson_covers_shares(count):
    """Over shares: a share is found in steps, so that at one share coverage must swing about 95 %
    (from 0.91 at 64 examples, where hardly any is right).
    """
    draw = np.random.default_rng(count)
    right = draw.binomial(count, SHARES, (4000, len(SHARES)))
    table = np.array([sure.wilson(number, count) for number in range(count + 1)])
    found = held((table[right, 0], table[right, 1]), SHARES).mean(0)
    assert COVERED[0] < found.mean() < COVERED[1]
    assert found.min() > 0.9


@pytest.mark.parametrize("count", SIZES)
def test_tango_covers_changes_of_the_same_examples(count):
    """Over how many are gained and lost, no change among them."""
    draw, found = np.random.default_rng(count), []
    for gained, lost in itertools.product((0.02, 0.05, 0.1, 0.2, 0.4), (0.02, 0.05, 0.1, 0.2, 0.4)):
        rest = 1 - gained - lost
        drawn = draw.multinomial(count, [gained, lost, rest], size=3000)
        intervals = sure.tango(drawn[:, 0], drawn[:, 1], count)
        found.append(held(intervals, gained - lost).mean())
    assert COVERED[0] < np.mean(found) < COVERED[1]
    assert min(found) > 0.93


def scores_like(kind: str, draw: np.random.Generator, rows: int, count: int):
    """(scores [rows, count] in points, their true mean)."""
    if kind == "likeness":  # most texts right, the others something like it
        same = draw.random((rows, count)) < 0.6
        return 100 * np.where(same, 1.0, draw.random((rows, count))), 80.0
    if kind == "pass":  # of 8 samples, of prompts of which some are hard
        return 100 * draw.binomial(8, draw.beta(0.6, 1.2, (rows, count))) / 8, 100 / 3
    return 100 * draw.beta(2, 5, (rows, count)), 200 / 7


@pytest.mark.run
@pytest.mark.parametrize("count", [64, 256])
def test_the_bootstrap_covers_other_scores(count):
    found = []
    for kind in ("likeness", "pass", "beta"):
        scores, truth = scores_like(kind, np.random.default_rng(count), 700, count)
        intervals = [sure.find_interval(row) for row in scores]
        found += [low <= truth <= high for low, high in intervals]
    assert COVERED[0] < np.mean(found) < COVERED[1]


@pytest.mark.thorough
def test_the_bootstrap_covers_corpus_measures():
    """Of texts that are right, or of which some words are wrong or missing."""
    draw = np.random.default_rng(3)

    def text_pair() -> tuple[str, str]:
        wanted = draw.integers(0, 40, draw.integers(4, 9))
        wrong = draw.random(len(wanted)) < draw.choice([0.0, draw.random()])
        given = np.where(wrong, draw.integers(0, 40, len(wanted)), wanted)
        given = given[: len(given) - wrong[0]]
        return " ".join(map(str, given)), " ".join(map(str, wanted))

    pairs = [text_pair() for _ in range(5000)]
    truth, found = text_metrics(*zip(*pairs, strict=True)), []
    for _ in range(150):
        drawn = [pairs[i] for i in draw.integers(0, len(pairs), 64)]
        scores = text_scores(*zip(*drawn, strict=True))
        intervals = {name: sure.find_interval(scores[name]) for name in ("bleu", "chrf")}
        found += [low <= truth[name] <= high for name, (low, high) in intervals.items()]
    assert 0.93 < np.mean(found) < 0.975, "of 300, which swing by a point"


@pytest.mark.thorough
def test_the_bootstrap_covers_changes():
    found, draw = [], np.random.default_rng(2)
    for kind in ("likeness", "pass", "beta"):
        before, old = scores_like(kind, draw, 700, 128)
        moved = np.clip(before + draw.normal(0, 10, before.shape), 0, 100)
        truth = (np.clip(scores_like(kind, draw, 4000, 128)[0], 0, 100)).mean() - old
        drift = np.clip(
            scores_like(kind, draw, 4000, 128)[0] + draw.normal(0, 10, (4000, 128)), 0, 100
        )
        truth = drift.mean() - old
        pairs = zip(before, moved, strict=True)
        changes = itertools.starmap(sure.find_change, pairs)
        found += [low <= truth <= high for (low, high), _ in changes]
    assert COVERED[0] < np.mean(found) < COVERED[1]


@pytest.mark.parametrize(
    ("count", "share"),
    [(64, 0.1), (128, 0.05), pytest.param(256, 0.1, marks=pytest.mark.thorough)],
)
def test_changes_of_few_examples_are_covered(count, share):
    """Most examples stay as they are, and the others move by any amount, up rather than down."""
    draw, found = np.random.default_rng(4), []
    for _ in range(300):
        moves = np.where(draw.random(count) < share, draw.normal(10, 30, count), 0.0)
        (low, high), _ = sure.find_change(np.full(count, 50.0), 50.0 + moves)
        found.append(low <= 10 * share <= high)
    assert 0.92 < np.mean(found) < 0.985, "of 300, which swing by a point"


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("spread", [0.0, 2.0, 5.0])
def test_seeds_and_examples_both_count(seeds, spread):
    """A measure, the difference of two settings, and of one seed against several: seeds that
    differ by `spread` points, or not at all.
    """
    draw, found = np.random.default_rng(5), {"pooled": [], "difference": [], "one seed": []}
    for _ in range(400):
        base = draw.normal(0, 20, 128)

        def runs(seeds: int, base=base) -> np.ndarray:
            own = draw.normal(0, spread, (seeds, 1))
            return 50.0 + base + own + draw.normal(0, 30, (seeds, 128))

        one, other, alone = runs(seeds), runs(seeds), runs(1)
        low, high = sure.find_pooled(one)
        found["pooled"].append(low <= 50 <= high)
        for name, first in (("difference", one), ("one seed", alone)):
            _, (low, high), p = sure.find_difference(first, other)
            found[name].append(low <= 0 <= high)
            assert (low <= 0 <= high) == (p >= 0.05)
    for name, inside in found.items():
        assert 0.92 < np.mean(inside) < 0.995, name


def test_shares_of_several_seeds():
    """Pooled, and their difference: not far below 95 %, with examples that are hard or easy."""
    draw, pooled, apart = np.random.default_rng(6), [], []
    for mean, _ in itertools.product((0.3, 0.8, 0.95), range(200)):
        hard = draw.beta(4 * mean, 4 * (1 - mean), 100)
        one, other = (100.0 * (draw.random((3, 100)) < hard) for _ in range(2))
        low, high = sure.find_pooled(one)
        pooled.append(low <= 100 * mean <= high)
        _, (low, high), _ = sure.find_difference(one, other)
        apart.append(low <= 0 <= high)
    assert np.mean(pooled) > 0.93
    assert np.mean(apart) > 0.94
    assert sure.find_pooled(np.full((2, 40), 100.0))[0] < 99, "all right is not without doubt"


@pytest.mark.thorough
def test_gains_of_luck_are_claimed_as_seldom_as_is_said():
    draw, claimed = np.random.default_rng(7), 0
    for _ in range(1000):
        before, after = (100.0 * (draw.random(128) < 0.4) for _ in range(2))
        change, p = sure.find_change(before, after)
        claimed += sure.is_supported(change, p)
    assert claimed / 1000 < 0.05


# --- the maths


def test_wilson_is_the_published_formula():
    assert np.allclose(sure.wilson(15, 148), (0.0624, 0.1605), atol=1e-4)  # Newcombe 1998
    assert math.isclose(sure.wilson(0, 20)[0], 0, abs_tol=1e-12)
    assert math.isclose(sure.wilson(0, 20)[1], 0.1611, abs_tol=1e-4)


@pytest.mark.parametrize(("gained", "lost"), [(1, 0), (5, 0), (9, 4), (30, 5)])
def test_tango_is_where_the_score_test_begins_to_refuse(gained, lost):
    """Against the likeliest shares of each change, found by trying many."""
    count, tried = 100, np.linspace(1e-9, 1 - 1e-9, 200_001)

    def score(change: float) -> float:
        losing = tried[(tried + change > 0) & (2 * tried + change < 1)]
        fit = gained * np.log(losing + change) + lost * np.log(losing)
        fit += (count - gained - lost) * np.log(1 - 2 * losing - change)
        best = losing[np.argmax(fit)]
        return (gained - lost - count * change) / math.sqrt(count * (2 * best + change - change**2))

    low, high = sure.tango(gained, lost, count)
    assert math.isclose(score(float(low)), sure.Z, abs_tol=2e-3)
    assert math.isclose(score(float(high)), -sure.Z, abs_tol=2e-3)
    mirrored = sure.tango(lost, gained, count)
    assert np.allclose(mirrored, (-high, -low), atol=1e-9)


@pytest.mark.parametrize(("gained", "lost"), [(5, 0), (9, 4), (30, 30), (0, 0), (700, 650)])
def test_mcnemar_is_the_sum_of_the_binomial(gained, lost):
    total = gained + lost
    tails = sum(
        math.comb(total, k)
        for k in range(total + 1)
        if abs(k - total / 2) >= abs(gained - total / 2)
    )
    assert math.isclose(sure.mcnemar(gained, lost), tails / 2**total, rel_tol=1e-9)


def test_swaps_are_those_of_all_signs():
    apart = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0, 5.0, 3.0])
    sums = [abs(np.dot(signs, apart)) for signs in itertools.product((-1, 1), repeat=10)]
    exact = np.mean(np.array(sums) >= abs(apart.sum()) - 1e-9)
    assert abs(sure.swap(apart) - exact) < 0.01
    assert sure.swap(np.zeros(5)) == 1


def test_students_distribution_is_that_of_the_tables():
    for freedom, t in ((1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042)):
        assert math.isclose(sure.find_t(freedom), t, abs_tol=2e-3)


def test_intervals_are_reproducible_and_computed_in_parts(monkeypatch):
    scores = np.random.default_rng(0).random(100)
    whole = sure.find_interval(scores)
    assert sure.find_interval(scores) == whole
    monkeypatch.setattr(sure, "KEPT", 5000)
    assert np.allclose(sure.find_interval(scores), whole, atol=0.02)


def test_few_scores_have_no_interval():
    assert sure.find_interval([50.0]) is None
    assert sure.find_change([1.0, 2.0], [1.0]) == (None, None)
    assert not sure.is_supported(None, None)


def test_a_loss_is_tested_without_its_interval(monkeypatch):
    draw = np.random.default_rng(3)
    ratings = draw.random(60), draw.random(60)
    _, p = sure.find_change(*ratings)
    fell = np.mean(ratings[1]) < np.mean(ratings[0])
    shares = [np.array([100.0] * right + [0.0] * (60 - right)) for right in (30, 24)]

    def refuse(*_):
        raise AssertionError("an interval is computed")

    for name in ("tango", "mcnemar", "bootstrap"):
        monkeypatch.setattr(sure, name, refuse)
    assert sure.find_loss(*ratings) == (p / 2 if fell else 1 - p / 2)
    assert sure.find_loss(*shares) == pytest.approx(sure.NORMAL.cdf(-6 / math.sqrt(6)))
    assert sure.find_loss(shares[0], shares[0]) == 0.5
    assert sure.find_loss([50.0], [50.0]) is None
    assert sure.find_loss([1.0, 2.0], [1.0]) is None


def test_losses_of_scores_of_batches_are_tested():
    """All answers wrong are scores of examples; F1 of the other model has scores of batches."""
    batches = 80 + np.random.default_rng(0).normal(0, 5, sure.BATCHES)
    assert sure.find_loss(batches, np.zeros(256)) < 0.001
    assert sure.find_loss(np.full(sure.BATCHES, 100.0), np.zeros(256)) < 0.001


def sentences(draw: np.random.Generator, count: int) -> list[str]:
    words = np.array(["one", "two", "three", "four", "five", "six", "seven", "eight"])
    return [" ".join(draw.choice(words, draw.integers(4, 9))) for _ in range(count)]


def test_corpus_measures_are_the_mean_of_what_examples_add():
    """And their interval is about that of sacrebleu's own bootstrap."""
    draw = np.random.default_rng(4)
    wanted = sentences(draw, 200)
    given = [text if draw.random() < 0.3 else sentences(draw, 1)[0] for text in wanted]
    scores, metrics = text_scores(given, wanted), text_metrics(given, wanted)
    assert scores.keys() == metrics.keys()
    for name, values in scores.items():
        assert math.isclose(np.mean(values), metrics[name], abs_tol=1e-9)
    for name, measure in (("bleu", BLEU()), ("chrf", CHRF())):
        theirs = measure.corpus_score(given, [wanted], n_bootstrap=1000)
        low, high = sure.find_interval(scores[name])
        assert math.isclose((high - low) / 2, theirs._ci, rel_tol=0.15)


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.1, 0.9])
def test_seeds_that_agree_bring_no_new_examples(share):
    """Five seeds that answer each prompt alike are as unsure as one of them."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(300):
        one = 100.0 * (draw.random(64) < share)
        low, high = sure.find_pooled(np.repeat(one[None], 5, 0))
        held += low - 1e-9 <= 100 * share <= high + 1e-9
    assert held >= 270


def test_thousands_of_changes_are_counted_at_once():
    """The counts of ways have thousands of digits."""
    assert sure.mcnemar(30_000, 29_000) == pytest.approx(3.9e-5, rel=0.05)
    assert sure.mcnemar(3, 1) == pytest.approx(0.625)
    assert sure.mcnemar(0, 0) == 1.0


@pytest.mark.thorough
def test_the_best_of_many_equal_settings_is_seldom_told_apart():
    draw, claims = np.random.default_rng(2), 0
    for _ in range(200):
        runs = 100.0 * (draw.random((8, 1, 64)) < 0.5)
        best = max(range(8), key=lambda i: runs[i].mean())
        others = [i for i in range(8) if i != best]
        tests = [sure.find_difference(runs[i], runs[best])[1:] for i in others]
        claims += any(sure.is_supported(*test) for test in sure.correct(tests, among=28))
    assert claims <= 16, "of all pairs of 8, whose choice the best was; a third without"


def test_corpus_measures_compare_from_zero():
    """Where every answer is wrong F1 is 0, which each example says too; later batches alone do."""
    after = 80 + np.random.default_rng(0).normal(0, 5, sure.BATCHES)
    change, p = sure.find_change(np.zeros(256), after)
    assert change[0] < after.mean() < change[1]
    assert change[0] > 70
    assert p < 0.001
    assert sure.find_change(np.zeros(256), np.zeros(200)) == (None, None)
