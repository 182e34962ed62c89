"""EGGROLL whose fitness is the log-probability of given answers: no member samples."""

import json
from dataclasses import replace

import pytest

import launch
from common.tasks import ExampleOrder
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


class Unanswered(Letters):
    def examples(self, split):
        return [replace(one, answer=" ") for one in super().examples(split)]


class OneUnanswered(Letters):
    def examples(self, split):
        first, *others = super().examples(split)
        return [*others, replace(first, id=-7, question="new", answer="")]


@pytest.mark.parametrize(
    ("task", "settings", "key"),
    [
        (Unanswered, [LIKELY], "algo.answers"),
        (OneUnanswered, [LIKELY], ["algo.answers", "-7"]),
        (Letters, [LIKELY, "algo.answers=solution"], "algo.answers"),
        (Letters, [LIKELY, "algo.answers=teach"], "algo.answers"),
        (Unanswered, ["algo=sft"], "algo.answers"),
        (Letters, ["algo=sft", "algo.answers=teach"], "algo.answers"),
        (Letters, ["algo.fitness=component_zscore"], "algo.fitness"),
        (Letters, ["algo=rft", "algo.hint_samples=2"], "algo.hint_samples"),
    ],
)
def test_what_a_task_lacks_is_found_before_a_model_is_made(
    tmp_path, monkeypatch, task, settings, key
):
    monkeypatch.setattr("common.parts.load", lambda *_, **__: pytest.fail("a model is made"))
    numbers = ["algo.sigma=0.1", "algo.lr=0.1"] if LIKELY in settings else []
    run = launch.compose(["hardware=cpu", *settings, *numbers])
    refuses(lambda: launch.train(run, tmp_path, task()), key=key)


def test_a_row_without_an_answer_may_be_one_of_validation(tmp_path, monkeypatch):
    """Nothing is learnt from it: the model is made."""

    class Made(Exception):
        pass

    def make(*_, **__):
        raise Made

    monkeypatch.setattr("common.parts.load", make)
    run = launch.compose([*ANSWERED, "evaluate.validation_examples=100"])
    order = ExampleOrder(Letters().examples("train"), run.seed)
    chosen = order.take(0, 1)[0].id

    class OneInValidation(Letters):
        def examples(self, split):
            rows = super().examples(split)
            return [replace(one, answer="") if one.id == chosen else one for one in rows]

    with pytest.raises(Made):
        launch.train(run, tmp_path, OneInValidation())


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
