"""Rows of one's own: files that were generated here, for which no setting was chosen, are learnt
with the defaults by each of the three algorithms.
"""

import csv
import datetime
import itertools
import random
import re
from pathlib import Path

import pytest

from launch import compose, train
from tests.support import ROOT

ALGORITHMS = ("eggroll", "grpo", "rft")


def sums(draw: random.Random) -> list[tuple[str, str]]:
    pairs = draw.sample(list(itertools.product(range(10, 100), repeat=2)), 2000)
    return [(f"{a} + {b} =", str(a + b)) for a, b in pairs]


def colours(draw: random.Random) -> list[tuple[str, str]]:
    tones = ["light", "dark", "pale", "deep", "bright", "dull", "soft", "warm", "cool", "vivid"]
    hues = {"red": "F00", "green": "0F0", "blue": "00F", "yellow": "FF0", "orange": "F80"}
    hues |= {"pink": "F8C", "brown": "840", "grey": "888", "purple": "808", "teal": "088"}
    rows = [
        (f"{one} {other} {hue}", f"{one[0]}{other[0]}-{code}".upper())
        for one, other in itertools.permutations(tones, 2)
        for hue, code in hues.items()
    ]
    return draw.sample(rows, 700)


def dates(_: random.Random) -> list[tuple[str, str]]:
    days = [datetime.date(2026, 1, 1) + datetime.timedelta(i) for i in range(365)]
    return [(f"{day.day} {day:%B}", f"{day:%A}") for day in days]


def settings(folder: Path, make) -> list[str]:
    path = folder / f"{make.__name__}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *make(random.Random(1))])
    fields = ["task.prompt_field=question", "task.answer_field=answer", "hardware=cpu"]
    return ["task=custom", f"task.path={path}", *fields]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("make", [sums, colours, dates], ids=lambda make: make.__name__)
def test_own_rows_are_learnt_with_the_defaults(make, algo, in_cache, tmp_path):
    result = train(compose([f"algo={algo}", *settings(tmp_path, make)]), tmp_path / "run")
    print(f"{algo} {make.__name__}: {result.before:.1f} -> {result.after:.1f}, {result.verdict}")
    assert result.verdict.startswith("it has learnt: ")
    assert result.after - result.before >= 20  # weekdays are right by chance at 14 %


@pytest.mark.thorough  # in make test smaller models learn letters, with EGGROLL and with RFT
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_own_rows_are_learnt_in_seconds(algo, in_cache, tmp_path, capsys):
    """The fast form: fewer words, and a shorter lesson for the tiny model."""
    short = ["model.tiny.pretrain_steps=250", "evaluate.examples=64"]
    short += {
        "eggroll": ["algo.steps=20"],
        "grpo": ["algo.steps=30"],
        "rft": ["algo.iterations=1"],
    }[algo]
    own = settings(tmp_path, colours)
    result = train(compose([f"algo={algo}", *own, *short]), tmp_path / "run")
    assert result.after - result.before >= 20, result.verdict
    assert result.verdict.startswith("it has learnt: held-out exact ")
    assert "verdict" in capsys.readouterr().out
    assert "It has learnt: held-out exact" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "held-out exact "),
        pytest.param(40, "it has learnt: held-out exact ", marks=pytest.mark.thorough),
    ],
)
def test_the_printed_example_of_an_own_task_runs_and_learns(launch, tmp_path, steps, said):
    """The blocks of docs/tasks.md, as they are printed, in a folder of their own."""
    page = (ROOT / "docs" / "tasks.md").read_text().partition("## Your own\n")[2]
    code, yaml = (re.search(rf"```{kind}\n(.*?)```", page, re.S)[1] for kind in ("python", "yaml"))
    assert code == (ROOT / "examples" / "own_task" / "acronyms.py").read_text()
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "acronyms.py").write_text(code)
    (tmp_path / "conf" / "task" / "acronyms.yaml").write_text(yaml)
    command = re.search(r"launch.py (--config-dir conf task=acronyms task.length=2.*)", page)[1]
    short = [f"model.tiny.pretrain_steps={150 if steps > 1 else 2}", f"algo.steps={steps}"]
    short += ["algo.sampling.max_new_tokens=4", "evaluate.examples=64", "hydra.run.dir=out"]
    done = launch(*command.split(), *short, env={"PYTHONPATH": str(tmp_path)})
    assert said in done.stdout, done.stdout


@pytest.mark.thorough
def test_a_run_that_cannot_learn_says_why(in_cache, tmp_path, capsys):
    """Random weights and a reward that only right answers earn: no sample is ever right."""
    own = [*settings(tmp_path, sums), "task.partial=0", "model.tiny.pretrain_steps=0"]
    own += ["algo.steps=22", "algo.prompts_per_step=2", "evaluate.examples=32"]
    own += ["algo.resample_rounds=0"]
    result = train(compose(["algo=grpo", *own]), tmp_path / "run")
    said = capsys.readouterr().out
    advice = "100% of the groups teach nothing: in most of them no sample is right"
    assert said.count(f"warning: step 20: {advice}") == 1
    assert "Try algo.samples_per_prompt=16." in said
    assert "it has not measurably learnt: held-out exact 0.0 -> 0.0" in result.verdict
    assert f"Likely reason: {advice}" in result.verdict
    assert result.next_command == "", "no command began it"
    assert result.advice[0]["settings"] == {"algo.samples_per_prompt": 16}
    page = (tmp_path / "run" / "report.md").read_text()
    assert "Try next:\n\n    algo.samples_per_prompt=16" in page
