"""Every algorithm in every environment, for a step or two."""

import pytest

from common.model.tiny import ASSETS, tiny_model
from common.task import build
from launch import compose
from tests.support.every_task import pair, take_two_steps

TASKS = ("calculator", "environment", "guess", "maze", "search", "sql")
# Nobody can teach these to a tiny model, to call a tool or to find a way, in so few steps.
HARD = ("calculator", "maze", "search", "sql")
FACTORY = ["task.factory=plugins.environments.games:Guess", "task.test_problems=8"]


@pytest.mark.run
@pytest.mark.parametrize(("algo", "task"), pair(TASKS))
def test_two_steps(algo, task, tmp_path, in_cache):
    needs, name = (FACTORY, "guess") if task == "environment" else ((), None)
    take_two_steps(algo, task, tmp_path, needs, name=name, learns=task not in HARD)


def test_guess_needs_no_pretraining(tmp_path, monkeypatch):
    """Its tiny model comes with the project, as those of the default tasks do."""
    monkeypatch.setenv("CLUTCH_CACHE", str(tmp_path))
    run = compose(["algo=grpo", "task=guess"])
    assert run.model.tiny is not None
    assert tiny_model(run.model.tiny, build(run.task)).parent == ASSETS


def test_names_of_the_version_before_are_found():
    old = ["task._target_=common.tasks.environment.Environment"]
    run = compose(["task=environment", *old, "task.factory=common.tasks.games:Guess"])
    assert run.task["_target_"] == "plugins.environments.task.Environment"
    assert build(run.task).kind.__module__ == "plugins.environments.games"
