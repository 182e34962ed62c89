"""The forecast of a run's reward from its first third, on curves that are known."""

import numpy as np
import pytest

from common.report.forecast import fit, forecast


def curve(tokens, start, ceiling, slope, middle):
    return start + (ceiling - start) / (1 + (middle / tokens) ** slope)


def log(rewards, **more):
    return [
        {"step": i + 1, "generated_tokens": 1000 * (i + 1), "reward": float(reward), **more}
        for i, reward in enumerate(rewards)
    ]


def test_without_noise_the_curve_itself_comes_out():
    tokens = np.arange(1.0, 101) * 1000
    rewards = curve(tokens, 0.1, 0.8, 2.0, 30_000)
    expected, ceiling = fit(tokens, rewards, 300_000.0)
    assert expected.middle == pytest.approx(curve(300_000.0, 0.1, 0.8, 2.0, 30_000), abs=0.02)
    assert ceiling.middle == pytest.approx(0.8, abs=0.03)
    assert ceiling.high - ceiling.low < 0.1


def test_intervals_hold_the_end_of_noisy_runs():
    """Of 60 runs of 150 steps at least nine in ten; a point of a third is off by a tenth or less in
    most.
    """
    draw, within, errors = np.random.default_rng(0), 0, []
    for _ in range(60):
        tokens = np.arange(1.0, 151) * 1000
        start, ceiling = draw.uniform(0, 0.3), draw.uniform(0.4, 1.0)
        truth = curve(tokens, start, ceiling, draw.uniform(1, 4), draw.uniform(1e4, 1e5))
        found = forecast(log(np.clip(truth + draw.normal(0, 0.05, 150), 0, 1)))
        end = truth[-15:].mean()
        within += found.from_third.low - 0.02 <= end <= found.from_third.high + 0.02
        errors.append(abs(found.from_third.middle - end))
    assert within >= 54
    assert np.median(errors) < 0.1


def test_what_has_not_risen_yet_is_told_as_open():
    """A flat third allows for anything from where it is to far above."""
    tokens = np.arange(1.0, 31) * 1000
    flat = 0.1 + np.random.default_rng(1).normal(0, 0.02, 30)
    expected, ceiling = fit(tokens, flat, 90_000.0)
    assert expected.low < 0.15
    assert expected.high > 0.2
    assert ceiling.high > 0.9


def test_short_runs_and_runs_in_stages_have_none():
    assert forecast(log(np.linspace(0, 1, 29))) is None
    assert forecast(log(np.linspace(0, 1, 60), stage="generate")) is None
    assert forecast([{"step": 1, "generated_tokens": 1}] * 60) is None


def test_updates_of_one_rollout_are_one_step():
    """They share its tokens and its reward."""
    rollouts = log(np.linspace(0.1, 0.8, 40))
    updates = [{**event, "step": 4 * i + j} for i, event in enumerate(rollouts) for j in range(4)]
    assert forecast(updates) == forecast(rollouts)
