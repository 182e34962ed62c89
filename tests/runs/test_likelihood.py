"""EGGROLL whose fitness is the log-probability of given answers: no member samples."""

import json

import pytest

import launch
from tests.support import CONF, MOVING, events
from tests.support.letters import Letters
from tests.support.refusals import COLUMNS, refuses

ANSWERED = [*MOVING, "algo.fitness_of=likelihood", "algo.sampling.temperature=0"]


def test_the_likelihood_of_answers_rises(in_cache, tmp_path):
    """Steps on the same few rows, small enough to climb."""

    class Few(Letters):
        def examples(self, split):
            return list(super().examples(split))[:8]

    more = ["algo.steps=30", "algo.members=32", "algo.prompts_per_step=8", "algo.lr=0.2"]
    more += ["algo.sigma=0.05", "evaluate.every=0"]
    result = launch.train(launch.compose([*ANSWERED, *more]), tmp_path, Few())
    rewards = [event["reward"] for event in events(tmp_path)]
    assert rewards[-1] > rewards[0] + 0.05
    assert result.generated_tokens == result.reward_evaluations == 0
    assert "forward" in events(tmp_path)[0]["phase_seconds"]


@pytest.mark.thorough
def test_two_ranks_move_as_one(launch, tmp_path):
    settings = ["--config-dir", CONF, *ANSWERED, "task=letters", "algo.rollout_rows=8"]
    for name, more in {"one": [], "two": ["opt=[ddp]", "opt.ddp.ranks=2"]}.items():
        launch(*settings, *more, f"hydra.run.dir={tmp_path / name}")
    one, two = (events(tmp_path / name) for name in ("one", "two"))
    assert [e["reward"] for e in one] == pytest.approx([e["reward"] for e in two])
    assert json.loads((tmp_path / "two" / "result.json").read_text())["world_size"] == 2


LIKELY = "algo.fitness_of=likelihood"


@pytest.mark.parametrize(
    COLUMNS,
    [
        (f"{LIKELY} algo.samples_per_prompt=2", "algo.samples_per_prompt", 2, "Leave it out"),
        ("algo.likelihood=answer", "algo.likelihood", "answer", LIKELY),
        ("algo.answers=solution", "algo.answers", "solution", LIKELY),
        (f"{LIKELY} algo.fitness=component_zscore", "algo.fitness", None, "algo.fitness=zscore"),
    ],
)
def test_settings_of_answers_without_effect(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


@pytest.mark.parametrize(
    ("settings", "key", "try_next"),
    [
        (["budget.tokens=100"], "budget.tokens", "budget.seconds"),
        (["algo.sigma=auto"], "algo.sigma", "algo.sigma=0.01"),
    ],
)
def test_runs_without_samples_that_cannot_be(settings, key, try_next, tmp_path):
    run = launch.compose([*ANSWERED, *settings])
    refuses(lambda: launch.train(run, tmp_path, Letters()), key=key, try_next=try_next)
