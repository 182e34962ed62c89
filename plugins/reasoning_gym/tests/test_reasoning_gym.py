"""The data sets of reasoning-gym: rows, scores, and that nothing that a model writes is run."""

import ast
import json
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from common.config import ConfigError
from common.task import build
from launch import compose, train
from plugins.reasoning_gym.task import ReasoningGym
from tests.support import ROOT, SMALL_GRPO
from tests.support.every_task import pair, take_two_steps
from tests.support.refusals import refuses

pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[reasoning_gym]'")

SETTINGS: dict[str, Any] = OmegaConf.to_container(  # type: ignore
    OmegaConf.load(ROOT / "plugins/reasoning_gym/conf/task/reasoning_gym.yaml")
)
MIX = [{"name": "chain_sum", "weight": 2, "config": {"max_digits": 1}}, {"name": "gcd"}]


def make(dataset: str, **changed: Any) -> ReasoningGym:
    task = build(SETTINGS | {"problems": 20, "test_problems": 8, "dataset": dataset} | changed)
    assert isinstance(task, ReasoningGym)
    return task


def error(dataset: str, **changed: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(dataset, **changed)
    return str(caught.value)


@pytest.mark.parametrize(
    "dataset",
    [
        *("chain_sum", "spell_backward", "gcd", "arc_1d", "bf", "countdown", "puzzle24", "sudoku"),
        *("simple_integration", "binary_matrix", "spiral_matrix", "string_manipulation"),
    ],
)
def test_own_answers_are_right_and_garbage_is_not(dataset, capsys):
    task = make(dataset)
    rows = task.examples("train")
    assert task.rewards(rows, [f" {row.answer}" for row in rows]) == pytest.approx(
        [1.0] * len(rows)
    )
    tags = [f"so <answer>{row.answer}</answer>" for row in rows]
    assert task.metrics(rows, tags) == pytest.approx(
        {"accuracy": 100.0, "score": 100.0, "answered": 100.0}
    )
    for text in ("", "garbage", "<answer>", "[[[", "9" * 5000, "(" * 500, "\x00", "1e99999999"):
        assert all(0 <= value < 1 for value in task.rewards(rows, [text] * len(rows)))
    sent = pickle.loads(pickle.dumps(task))
    assert sent.rewards(rows, tags) == task.rewards(rows, tags)
    assert capsys.readouterr().out == ""


@pytest.mark.run
def test_the_splits_are_disjoint_and_the_same_at_every_start():
    code = (
        "import json, sys; from common.tasks import build\n"
        "settings = json.loads(sys.argv[1])\n"
        "for name in ('chain_sum', 'list_functions'):\n"
        "    task = build(settings | {'dataset': name})\n"
        "    rows = [[e.question, e.answer] for s in ('train', 'test') for e in task.examples(s)]\n"
        "    print(json.dumps(rows))\n"
    )
    given = json.dumps(SETTINGS | {"problems": 40, "test_problems": 20})
    found = [
        subprocess.check_output([sys.executable, "-c", code, given], cwd=ROOT, text=True)
        for _ in range(2)
    ]
    assert found[0] == found[1]
    few = make(
        "chain_sum", problems=500, test_problems=200, config={"max_terms": 2, "max_digits": 1}
    )
    sets = [{row.question for row in few.examples(split)} for split in ("train", "test")]
    assert not sets[0] & sets[1]
    assert len(sets[0]) > 2 * len(sets[1]) > 50


def test_text_of_a_model_is_not_run(tmp_path):
    file = tmp_path / "run"
    attack = f"__import__('pathlib').Path({str(file)!r}).touch()"
    for dataset in ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown"):
        task = make(dataset)
        task.rewards(task.examples("test")[:1], [attack])
    for dataset in ("puzzle24", "simple_integration", "intermediate_integration"):
        task = make(dataset, problems=4, test_problems=2)
        rows = task.examples("test")[:1]
        huge = ["9**9**9**9", "((9**99)**99)**99", "exit()", "(x).real", "factorial(99999)"]
        assert max(task.rewards(rows * 6, [attack, *huge])) < 0.2
    assert not file.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dataset", "texts"),
    [
        ("complex_arithmetic", ["nan", "NaN", "nan+nanj", "inf", "1+infj"]),
        ("rubiks_cube", ["R9999999"]),
        ("rush_hour", ["A+99999999"]),
        ("intermediate_integration", ["(x+y+z)**99"]),
    ],
)
def test_no_text_scores_for_ever_or_as_no_number(dataset, texts):
    task = make(dataset, weights={"score": 1.0, "answered": 0.0})
    rows = task.examples("train")[:1]
    assert task.rewards(rows * len(texts), texts) == [0.0] * len(texts)


@pytest.mark.parametrize(
    ("dataset", "wrong"),
    [
        ("spell_backward", "{}?"),
        ("game_of_life_halting", "maybe"),
        ("coin_flip", "0"),
        ("gsm_symbolic", "-{}"),
        ("letter_jumble", "{} and more"),
        ("puzzle24", "10*3-7+1"),
        ("word_sorting", "{}, zebra"),
    ],
)
def test_wrong_answers_that_the_package_takes_are_no_right_ones(dataset, wrong):
    task = make(dataset, problems=20, test_problems=20)
    rows = task.examples("train")
    assert task.metrics(rows, [row.answer for row in rows])["accuracy"] == 100
    texts = [wrong.format(row.answer) for row in rows]
    assert task.metrics(rows, texts)["accuracy"] < 10, "but for a coin that is never odd"
    assert dataset == "coin_flip" or max(task.rewards(rows, texts)) < 0.95


def test_numbers_that_are_rounded_are_not_sorted_ones():
    task = make("number_sorting", problems=20, test_problems=20, config={"min_decimals": 2})
    rows = task.examples("train")
    texts = [str([str(round(float(n))) for n in ast.literal_eval(row.answer)]) for row in rows]
    assert task.metrics(rows, [row.answer for row in rows])["accuracy"] == 100
    assert max(task.rewards(rows, texts)) < 0.2


@pytest.mark.parametrize("dataset", ["leg_counting", "chain_sum", "gcd", "products"])
def test_an_answer_that_holds_the_right_one_earns_nothing(dataset):
    """GRPO learnt to write 240, in which 24, 40, 4, 2 and 0 are."""
    task = make(dataset, weights={"score": 1.0, "answered": 0.0})
    rows = [row for row in task.examples("train") if row.answer != "0"]
    for wrong in ("{}0", "9{}", "1 {} 2", "-{}", "{} legs", "1,{}"):
        texts = [wrong.format(row.answer) for row in rows]
        assert task.rewards(rows, texts) == [0.0] * len(rows), wrong
    for same in ("{}.", "**{}**", "{}?"):
        texts = [same.format(row.answer) for row in rows]
        assert all(reward > 0 for reward in task.rewards(rows, texts)), same


def test_tags_are_needed_in_a_conversation():
    task = make("spell_backward", chat=True)
    (row, *_) = task.examples("test")
    assert task.prompt(row)[0] == {"role": "system", "content": SETTINGS["system"]}
    assert task.reward(row, row.answer) == 0
    assert task.reward(row, f"<answer>{row.answer}</answer>") == 1
    assert "The answer is" in task.hint(row)[1]["content"]  # type: ignore[index]


def test_worked_examples_leave_the_training_rows():
    bare, task = make("chain_sum", chat=True), make("chain_sum", chat=True, few_shot=2)
    (row, *_) = task.examples("test")
    _, *shots, question = task.prompt(row)
    taken, rest = bare.examples("train")[:2], bare.examples("train")[2:]
    texts = [text for shot in taken for text in (shot.question, f"<answer>{shot.answer}</answer>")]
    assert [shot["content"] for shot in shots] == texts  # type: ignore[index]
    assert [shot["role"] for shot in shots] == ["user", "assistant"] * 2  # type: ignore[index]
    assert question == {"role": "user", "content": row.question}
    assert [row.question for row in task.examples("train")] == [row.question for row in rest]
    assert task.examples("test") == bare.examples("test")
    assert make("chain_sum", few_shot=2).prompt(row) == make("chain_sum").prompt(row)  # no chat
    assert "task.few_shot=30" in error("chain_sum", few_shot=30)
    assert "task.few_shot=-1" in error("chain_sum", few_shot=-1)


def test_a_mix_has_rows_of_all():
    task = make("composite", config={"datasets": MIX})
    rows = task.examples("train")
    sources = {row.extra["entry"]["metadata"]["source_dataset"] for row in rows}
    assert sources == {"chain_sum", "gcd"}
    assert task.metrics(rows, [row.answer for row in rows])["accuracy"] == 100


def test_mistakes_are_told(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "task.dataset='chan_sum' is no data set of reasoning-gym. Did you mean chain_sum" in (
        error("chan_sum")
    )
    assert "task.config.max_digit=2 is not a setting. Did you mean 'max_digits'?" in error(
        "chain_sum", config={"max_digit": 2}
    )
    assert "config.max_digits=two is not a whole" in error(
        "chain_sum", config={"max_digits": "two"}
    )
    assert "task.config={'min_terms': 9}" in (text := error("chain_sum", config={"min_terms": 9}))
    assert "max_terms must be >= min_terms" in text
    assert "task.config.datasets is needed" in error("composite")
    part = [{"name": "gcd", "config": {"terms": 1}}]
    assert "task.config.datasets[0].config.terms" in error("composite", config={"datasets": part})
    assert "Put PYTHONHASHSEED=0 before the command" in error("ransom_note")
    assert "codeio' makes other questions at every start" in error("codeio")
    unknown = make("rush_hour", problems=4, test_problems=2)
    with pytest.raises(ConfigError, match="scores answers but gives none"):
        unknown.pretraining(unknown.examples("train")[0], random.Random(0))


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install -e '.[reasoning_gym]'" in error("chain_sum")


def test_a_run_trains_on_one_and_measures_others(in_cache, tmp_path):
    given = [text for text in SMALL_GRPO if not text.startswith("task")]
    also = "evaluate.also=[reasoning_gym,reasoning_gym/chain_sum]"
    more = [
        "task=reasoning_gym",
        "task.problems=40",
        "task.test_problems=8",
        "task.config.max_word_len=5",
        also,
    ]
    result = train(compose([*given, *more, "algo.steps=2"]), tmp_path)
    assert result.task == "reasoning_gym"
    for name in ("accuracy", "reasoning_gym/accuracy", "reasoning_gym/chain_sum/score"):
        assert 0 <= result.metrics["after"][name] <= 100


def test_unknown_names_beside_the_task_are_told(in_cache, tmp_path):
    refuses(
        lambda: compose(["evaluate.also=[units/gcd]"]),
        key="task",
        value="units",
        try_next="Use units",
    )
    run = compose(["hardware=cpu", "evaluate.also=[reasoning_gym/chan_sum]"])
    with pytest.raises(
        ConfigError, match=r"evaluate.also, task reasoning_gym/chan_sum: .*chain_sum"
    ):
        train(run, tmp_path)


@pytest.mark.run
@pytest.mark.parametrize(("algo", "task"), pair(["reasoning_gym"]))
def test_two_steps(algo, task, tmp_path, in_cache):
    take_two_steps(algo, task, tmp_path, ["task.problems=64", "task.test_problems=8"])
