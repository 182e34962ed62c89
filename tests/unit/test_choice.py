"""The rule that chooses the exported model, against a naive reading of it."""

import random
from itertools import pairwise
from statistics import fmean

import pytest

from common.choice import Choice, is_worse
from common.evaluation import Evaluation


def measured(scores: list[float]) -> Evaluation:
    texts = ["" for _ in scores]
    return Evaluation({"right": fmean(scores)}, texts, 100, {"right": list(scores)})


def naive(history: list[list[float]]) -> int:
    """Return the place of the chosen model: the last one that is not worse than the best one that
    was measured up to it.
    """
    chosen = 0
    for place in range(len(history)):
        best = max(history[: place + 1], key=fmean)
        lost = sum(a < b for a, b in zip(history[place], best, strict=True))
        gained = sum(a > b for a, b in zip(history[place], best, strict=True))
        # McNemar's score test, one-sided at 10 %: 1.2816 standard deviations
        if lost <= gained or (lost - gained) ** 2 <= 1.2816**2 * (lost + gained):
            chosen = place
    return chosen


def test_the_choice_agrees_with_a_naive_reading():
    draw = random.Random(0)
    for _ in range(200):
        level = [draw.uniform(0.2, 0.8) for _ in range(8)]
        history = [[100.0 * (draw.random() < p) for _ in range(20)] for p in level]
        choice = Choice.first(0, measured(history[0]))
        for place, scores in enumerate(history[1:], start=1):
            choice.add(place, measured(scores))
        assert choice.step == naive(history)
        assert choice.value == pytest.approx(fmean(history[choice.step]))
        assert choice.best["value"] == pytest.approx(max(map(fmean, history)))
        assert choice.values == pytest.approx([fmean(scores) for scores in history])
        assert choice.step in choice.needed


def test_a_later_model_wins_a_tie():
    choice = Choice.first(0, measured([0.0, 100.0] * 10))
    assert choice.add(5, measured([0.0, 100.0] * 10))
    assert (choice.step, choice.fallen) == (5, 0)


def test_a_slow_fall_is_compared_with_the_best():
    """Each model loses one answer more: it is never worse than the one before, and the second is
    worse than the best (p = 0.08).
    """
    history = [[100.0] * (40 - n) + [0.0] * n for n in range(0, 20, 1)]
    choice = Choice.first(0, measured(history[0]))
    for place, scores in enumerate(history[1:], start=1):
        choice.add(place, measured(scores))
    assert (choice.step, choice.fallen) == (1, 18)
    assert not any(is_worse(after, before) for before, after in pairwise(history))


def test_the_last_right_answers_of_few_examples_are_not_given_away():
    """Two right answers of sixteen, and then none: held out, a loss beyond the interval."""
    choice = Choice.first(0, measured([100.0] * 2 + [0.0] * 14))
    assert not choice.add(5, measured([0.0] * 16))
    assert choice.add(6, measured([100.0] + [0.0] * 15))


def test_a_measure_from_0_to_1_can_get_worse():
    draw = random.Random(0)
    choice = Choice.first(0, measured([draw.uniform(0.8, 1.0) for _ in range(64)]))
    assert not choice.add(5, measured([draw.uniform(0.0, 0.2) for _ in range(64)]))


def test_measures_without_scores_are_compared_by_value():
    bare = Evaluation({"right": 50.0}, ["", ""], 100)
    choice = Choice.first(0, bare)
    assert not choice.add(1, Evaluation({"right": 49.0}, ["", ""], 100))
    assert choice.add(2, Evaluation({"right": 50.0}, ["", ""], 100))


def test_a_choice_survives_a_checkpoint():
    choice = Choice.first(0, measured([0.0] * 4))
    choice.add(3, measured([100.0, 0.0, 0.0, 0.0]))
    assert Choice(**choice.content()) == choice


def test_luck_of_few_prompts_rarely_rejects_an_equal_model():
    """The test is exact, so at most one comparison of ten calls an equal model worse."""
    draw = random.Random(1)
    pairs = [
        [[100.0 * (draw.random() < 0.5) for _ in range(64)] for _ in range(2)] for _ in range(2000)
    ]
    share = fmean(is_worse(new, old) for old, new in pairs)
    assert 0.03 < share < 0.11


def test_one_answer_of_many_does_not_make_a_model_worse():
    best = [0.0] * 47 + [23.0]
    assert not is_worse([0.0] * 48, best)
