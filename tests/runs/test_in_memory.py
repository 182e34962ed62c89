"""Rows that a Python program gives: train(run, folder, rows=..., test_rows=..., reward=...)."""

import json
import math
import subprocess
import sys
from types import ModuleType
from typing import ClassVar

import pandas as pd
import pytest

from common.config import ConfigError
from common.tasks import in_memory
from launch import compose, train
from tests.support import ROOT, TINY, events
from tests.support.refusals import refuses

SUMS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(9) for b in range(9)]
SMALL = [
    *(*TINY, "algo=grpo", "hardware=cpu", "algo.steps=2", "evaluate.examples=4"),
    *("algo.prompts_per_step=2", "algo.samples_per_prompt=3"),
]


def first_digit(completion, answer):
    return float(completion.strip()[:1] == answer[:1])


def as_in_trl(prompts, completions, answer, note, **columns):
    assert all(text == "row" for text in note)
    return [len(wanted) / 4 for wanted in answer]


def settings(*overrides: str):
    return compose(["algo=grpo", "task=custom", *overrides])


def built(rows, test_rows=None, reward=None, overrides=()):
    return in_memory.build(settings(*overrides), rows, test_rows, reward)[1]


# --- runs


def test_a_run_on_rows_with_a_function_as_the_reward(in_cache, tmp_path):
    run = compose([*SMALL, "task=custom"])
    result = train(run, tmp_path / "out", rows=SUMS, test_rows=SUMS[:4], reward=first_digit)
    assert result.reward_evaluations > 0
    assert result.metric == "exact"
    logged = [event for event in events(tmp_path / "out") if event["step"]]
    assert any("first_digit" in str(event) for event in logged), "the component has its name"
    with pytest.raises(ConfigError, match="other training or test rows"):
        train(
            compose([*SMALL, "task=custom", "resume=auto"]),
            tmp_path / "out",
            rows=SUMS[:-1],
            test_rows=SUMS[:4],
            reward=first_digit,
        )


def test_rows_make_the_run_that_a_file_with_them_makes(in_cache, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    fields = ["task.prompt_field=prompt", "task.answer_field=answer"]
    common = [*SMALL, "task=custom", "task.reward=numeric"]
    train(compose([*common, *fields, f"task.path={path}"]), tmp_path / "file")
    train(compose(common), tmp_path / "rows", rows=SUMS)
    ours, theirs = ([e["reward"] for e in events(tmp_path / name)[1:]] for name in ("rows", "file"))
    assert ours == theirs


@pytest.mark.thorough
def test_ranks_and_processes_take_rows(in_cache, tmp_path):
    pool = ["opt=[ddp]", "opt.ddp.ranks=2", "scoring.kind=processes"]
    result = train(compose([*SMALL, "task=custom", *pool]), tmp_path / "out", rows=SUMS)
    assert result.world_size == 2


@pytest.mark.run
def test_a_function_that_cannot_be_sent_to_ranks(tmp_path):
    run = compose([*SMALL, "task=custom", "opt=[ddp]", "opt.ddp.ranks=2"])
    refuses(
        lambda: train(run, tmp_path / "out", rows=SUMS, reward=lambda completion, answer: 1.0),
        key="opt",
        value="ddp",
    )


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (["-"], "cannot import the program that starts them, which is not in a file but <stdin>."),
        (["-c"], "it holds what this notebook or shell defines, which ranks cannot import."),
    ],
)
@pytest.mark.run
def test_ranks_cannot_import_what_a_shell_defines(tmp_path, how, text):
    code = f"""
from launch import compose, train
def score(completion, answer):
    return 1.0
run = compose({[*SMALL, "task=custom", "opt=[ddp]", "opt.ddp.ranks=2"]!r})
train(run, {str(tmp_path / "out")!r}, rows={SUMS[:9]!r}, reward=score)
"""
    command = [sys.executable, *how, *([code] if how == ["-c"] else [])]
    done = subprocess.run(
        command, input=code, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert text in done.stderr


# --- forms of rows


def test_rows_of_any_container_give_equal_examples():
    frame = pd.DataFrame(SUMS)
    wanted = built(SUMS).examples("train")
    assert built(frame).examples("train") == wanted
    assert built(dict(row) for row in SUMS).examples("train") == wanted


def test_a_dataset_gives_the_same_examples():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(SUMS)
    assert built(dataset).examples("train") == built(SUMS).examples("train")
    assert built(dataset.to_iterable_dataset()).examples("train") == built(SUMS).examples("train")
    with pytest.raises(
        ConfigError, match=r"is a DatasetDict with the keys train. .*data\['train'\]"
    ):
        built(datasets.DatasetDict({"train": dataset}))


def test_datasets_are_read_without_their_format(monkeypatch):
    """As a user's may be formatted as tensors; and a float32 is read as it is written."""
    module = ModuleType("datasets.arrow_dataset")

    class Dataset:
        features: ClassVar = {"prompt": "text", "answer": type("Value", (), {"dtype": "float32"})}

        def __init__(self, formatted="torch"):
            self.formatted = formatted

        def with_format(self, kind):
            return Dataset(kind)

        def __iter__(self):
            assert self.formatted is None
            return iter([{"prompt": str(n), "answer": 0.10000000149011612} for n in range(5)])

    Dataset.__module__ = module.__name__
    assert {example.answer for example in built(Dataset()).examples("train")} == {"0.1"}


def test_columns_of_a_frame_keep_their_own_types():
    frame = pd.DataFrame(
        {
            "prompt": list("abcdefgh"),
            "answer": pd.Series([0.1] * 8, dtype="float32"),
            "count": pd.array([1, None] * 4, dtype="Int64"),
        }
    )
    assert built(frame).examples("test")[0].answer == "0.1"
    whole = pd.DataFrame({"prompt": list("abcdef"), "answer": range(6)})
    assert {example.answer for example in built(whole).examples("train")} <= set("012345")


def test_task_settings_apply_to_rows_in_memory():
    rows = [{"q": {"en": f"{n}?"}, "a": n, "hint": "h"} for n in range(10)]
    given = ["task.template='{q.en} {hint}'", "task.answer_field=a", "task.test_share=0.5"]
    task = built(rows, overrides=given)
    assert len(task.examples("test")) == 5
    assert task.examples("train")[0].question.endswith("? h")
    default = compose(["algo=grpo", "task=chess"])
    run, task = in_memory.build(default, SUMS)
    assert run.task["_target_"] == "common.tasks.custom.Custom"
    assert run.task["prompt_field"] == "prompt"
    assert task.name == "custom"


# --- rewards


def test_a_function_replaces_the_reward_of_the_task():
    rows = [row | {"note": "row"} for row in SUMS]
    example = built(rows).examples("train")[0]
    assert built(rows).reward(example, example.answer) == 1
    wrong = "x" + example.answer
    ours = built(rows, reward=lambda completion, answer: float(completion.startswith("x")))
    assert (ours.reward(example, wrong), ours.reward(example, example.answer)) == (1, 0)
    trl = built(rows, reward=as_in_trl)
    example = trl.examples("train")[0]
    assert trl.reward(example, "") == len(example.answer) / 4
    assert trl.rewards([example], ["?"]) == [len(example.answer) / 4]
    assert not ours.repeatable


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (3, 3),
        (lambda: 1.0, "lambda"),
        (lambda completions, rating: [], "missing a required argument"),
    ],
)
def test_functions_that_cannot_score_are_refused(reward, value):
    refuses(lambda: built(SUMS, reward=reward), key="reward", value=value)


# --- mistakes


@pytest.mark.parametrize(
    ("rows", "key", "value"),
    [
        ([], "rows", "no rows"),
        (pd.DataFrame({"prompt": [], "answer": []}), "rows", "no rows"),
        (3, "rows", "int"),
        ("data.jsonl", "rows", "'data.jsonl'"),
        ({"prompt": ["a"], "answer": ["b"]}, "rows", ["prompt", "answer"]),
        ([*SUMS, ("a", "b")], "rows[81]", "tuple"),
        ([*SUMS, {"prompt": "1"}], ["task.answer_field", "rows[81]"], "'answer'"),
        ([*SUMS, {"prompt": "", "answer": "2"}], ["task.prompt_field", "rows[81]"], "empty"),
        ([*SUMS, {"prompt": None, "answer": "2"}], "rows[81]", "NoneType"),
        ([*SUMS, {"prompt": "a\0", "answer": "2"}], "rows[81]", "NUL"),
        ([*SUMS, {"prompt": "1", "answer": math.nan}], "rows[81]", "nan"),
        ([*SUMS, {0: "1", "answer": "1"}], "rows[81]", 0),
        (pd.DataFrame([["a", "b"]] * 9, columns=["prompt"] * 2), "columns", "prompt"),
        (SUMS[:1], "rows", "0 train"),
    ],
)
def test_rows_that_are_refused(rows, key, value):
    refuses(lambda: built(rows), key=key, value=value)


def test_test_rows_are_named_apart():
    with pytest.raises(ConfigError, match=r"is not a field of test_rows\[1\]"):
        built(SUMS, [SUMS[0], {"prompt": "?"}])


@pytest.mark.parametrize(
    ("overrides", "given", "key", "other"),
    [
        ("task=custom", {"test_rows": SUMS}, "test_rows=", "rows="),
        ("task=custom", {"reward": first_digit}, "reward=", "rows="),
        ("task=custom task.path=a.csv", {"rows": SUMS}, "task.path=a.csv", "rows="),
        ("task=custom", {"rows": SUMS, "task": object()}, "rows=", "task"),
        (
            "task=custom task.test_share=0.1",
            {"rows": SUMS, "test_rows": SUMS[:2]},
            "test_rows=",
            "task.test_share",
        ),
        ("task=units", {"rows": SUMS}, "rows=", "task=units"),
        ("task=chess task.path=a.csv", {"rows": SUMS}, "rows=", "task=chess"),
        ("algo=classify", {"rows": SUMS}, "rows=", "algo=classify"),
    ],
)
def test_what_does_not_go_together(tmp_path, overrides, given, key, other):
    run = compose(["algo=grpo", *overrides.split()])
    refuses(lambda: train(run, tmp_path / "out", **given), key=key, value=other)
