"""algo.sampling.max_new_tokens=0: how long completions may be, by the answers of a task."""

from types import SimpleNamespace
from typing import Any

import pytest

from common.examples import REASONING, longest_answer
from common.model.tiny import byte_tokenizer
from common.task import Example
from tests.support.models import small_model


class Told:
    """A task whose answers and prompts have these lengths; the tokenizer reads bytes."""

    def __init__(self, answers, prompts=(10,), finals=()):
        finals = finals or answers
        self.rows = [
            Example(i, "q" * prompts[i % len(prompts)], "a" * n, {"final": "a" * finals[i]})
            for i, n in enumerate(answers)
        ]

    def examples(self, split):
        return self.rows if split == "train" else self.rows[:1]

    def prompt(self, example):
        return example.question


@pytest.fixture(scope="module")
def model():
    model: Any = small_model("qwen2")
    model.config.max_position_embeddings = 512
    return model


def longest(task, model, path: Any = "folder"):
    settings = SimpleNamespace(path=path)
    lm: Any = SimpleNamespace(tokenizer=byte_tokenizer(), model=model, settings=settings)
    return longest_answer(lm, task)


def test_twice_the_longest_answer_and_at_least_room_to_reason(model):
    assert longest(Told([50, 40, 3]), model) == 101
    assert longest(Told([3, 2]), model) == REASONING
    assert longest(Told([3, 2]), model, path=None) == 7


def test_one_answer_in_a_hundred_does_not_count(model, caplog):
    with caplog.at_level("INFO", logger="clutch"):
        assert longest(Told([40] * 199 + [90]), model) == 81
    assert "1 of 201 answers ask for more" in caplog.text
    assert longest(Told([40] * 199 + [90]), model, path=None) == 181


def test_a_worked_solution_counts_once(model):
    assert longest(Told([80, 90], finals=[2, 2]), model) == 91


def test_it_leaves_room_for_the_prompts(model):
    context = model.config.max_position_embeddings
    assert longest(Told([context, context]), model) == context - 10
    # Prompts that leave none to answer are an error of their own.
    some = [10] * 199 + [context - 3]
    assert longest(Told([context] * 200, prompts=some), model) == context - 10


def test_the_solutions_of_a_task_count_once(model):
    task = Told([2, 2])
    task.solution = lambda example: "s" * 90
    assert longest(task, model) == 91
