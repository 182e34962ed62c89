"""What holds for every task, of these: runs of each algorithm, long texts, thoughts, templates."""

import json

import pytest

from common.task import build
from launch import compose
from tests.support.every_task import pair, take_two_steps
from tests.unit import test_conversations, test_long_texts, test_thoughts

FEW = {"problems": 8, "test_problems": 8}


@pytest.mark.run
@pytest.mark.parametrize(("algo", "task"), pair(["countdown"], long=["countdown"]))
def test_two_steps_of_countdown(algo, task, tmp_path, in_cache):
    take_two_steps(algo, task, tmp_path, ["task.problems=64", "task.test_problems=8"])


@pytest.mark.run
@pytest.mark.parametrize(("algo", "task"), pair(["gsm8k"]))
def test_two_steps_of_gsm8k(algo, task, tmp_path, in_cache):
    """Its words cannot be taught to a tiny model."""
    for split, joint in (("train", "plus"), ("test", "and")):
        rows = [
            {
                "question": f"What is {i} {joint} {i}?",
                "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}",
            }
            for i in range(1000, 1020)  # numbers that random bytes do not hit
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    take_two_steps(algo, task, tmp_path, [f"task.path={tmp_path}"], learns=False)


@pytest.mark.run
@pytest.mark.thorough
def test_countdown_scores_any_text():
    node = compose(["task=countdown", "task.problems=4", "task.test_problems=2"]).task
    test_long_texts.check_task(build(node))


@pytest.mark.run
def test_gsm8k_scores_any_text(tmp_path):
    for split, count in (("train", 4), ("test", 6)):
        lines = [f'{{"question": "{n + count}", "answer": "#### {n}"}}' for n in range(2)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    node = compose(["task=gsm8k", f"task.path={tmp_path}"]).task
    test_long_texts.check_task(build(node))


def test_thoughts_earn_nothing_in_countdown():
    test_thoughts.test_thoughts_earn_nothing_and_cost_nothing("countdown", lambda e: e.answer, FEW)


def test_countdown_converses_where_there_is_a_template():
    test_conversations.test_text_tasks_converse_where_there_is_a_template("countdown", FEW)


@pytest.mark.parametrize("name", ["Countdown", "Gsm8k"])
def test_names_of_the_version_before_are_found(name, tmp_path):
    old = f"common.tasks.{name.lower()}.{name}"
    run = compose([f"task={name.lower()}", f"task._target_={old}"])
    assert run.task["_target_"] == f"plugins.tasks.{name.lower()}.{name}"
