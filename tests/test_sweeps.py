"""Budgets, sweeps and their comparison, repeating a run, tab completion."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, events

from common import compare
from common.config import BudgetConfig, ConfigError
from launch import compose, train

LETTERS = [
    *("hardware=cpu", "task=letters", "evaluate.examples=8", "algo.sampling.max_new_tokens=8", "checkpoint.every=1"),
    *("model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2", "model.tiny.intermediate_size=128"),
    *("model.tiny.pretrain_steps=300", "model.tiny.pretrain_lr=5e-3"),
]
OF = {
    "eggroll": ["algo=eggroll", "algo.members=8", "algo.prompts_per_step=4"],
    "grpo": ["algo=grpo", "algo.prompts_per_step=4", "algo.samples_per_prompt=4"],
    "rft": [
        *("algo=rft", "algo.prompts=40", "algo.validation_prompts=8", "algo.samples_per_prompt=4", "algo.epochs=2"),
        *("algo.prompts_per_batch=4", "algo.chunk_size=4", "algo.pass_samples=0", "algo.patience=9"),
    ],
}
CONF = str(ROOT / "tests" / "conf")


def letters(algo: str, *overrides: str):
    return compose([*LETTERS, *OF[algo], *overrides], CONF)


# --- budgets


MISTAKES = {
    "budget.tokens=0": "budget.tokens=0 is out of range. Give a value above 0.",
    "budget.token=5": "budget.token is not a setting. Did you mean 'tokens'? Settings here: tokens, seconds.",
    "algo=classify budget.tokens=5": "budget.tokens has no effect with algo=classify: it generates nothing, and algo.epochs "
    "ends it. Leave it out.",
    "algo.steps=null": "algo.steps is null, so nothing ends the run. Give a number, or a budget.",
    "algo=rft algo.iterations=null": "algo.iterations is null, so nothing ends the run. Give a number, or a budget.",
    "budget.tokens=5 algo.lr_schedule.kind=linear algo.lr_schedule.end=0": "algo.lr_schedule goes over algo.steps, which a "
    "budget leaves open. Give algo.steps too; the budget may end the run earlier.",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes_about_budgets_are_worded(given):
    with pytest.raises(ConfigError) as caught:
        compose(given.split())
    assert str(caught.value) == MISTAKES[given]


def test_a_budget_of_one_stage_of_rft(tmp_path):
    with pytest.raises(ConfigError, match=r"^a budget has no effect with algo\.stage=generate: it is one of a whole run"):
        train(compose(["algo=rft", "algo.stage=generate", "budget.tokens=9", "model.tiny.pretrain_steps=0"]), tmp_path)


def test_with_a_budget_the_number_of_steps_is_open_unless_it_is_given():
    assert [compose([f"algo={a}"]).algo.steps for a in ("eggroll", "grpo")] == [60, 150]
    for budget in ("budget.tokens=1000", "budget.seconds=0.5"):
        assert [compose([f"algo={a}", budget]).algo.steps for a in ("eggroll", "grpo")] == [None, None]
        assert compose(["algo=rft", budget]).algo.iterations is None
    run = compose(["budget.tokens=1000", "algo.steps=7", "algo.lr_schedule={kind: linear, end: 0.1}"])
    assert (run.algo.steps, run.budget.limits()) == (7, {"tokens": "budget.tokens=1000"})


def test_the_limit_that_is_nearest_to_its_end_counts():
    both = BudgetConfig(tokens=200, seconds=10.0)
    assert both.nearest(100, 2.0) == (0.5, "budget.tokens=200")
    assert both.nearest(100, 8.0) == (0.8, "budget.seconds=10")
    assert BudgetConfig(tokens=None, seconds=None).nearest(10**9, 1e9) == (0.0, "")


@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_a_budget_of_tokens_ends_a_run_and_a_resumed_one_counts_what_it_had_used(in_cache, tmp_path, algo):
    whole = train(letters(algo, "budget.tokens=1500"), tmp_path / "whole")
    log = events(tmp_path / "whole")
    assert log[-2]["generated_tokens"] < 1500 <= log[-1]["generated_tokens"] == whole.generated_tokens
    assert (whole.ended_by, whole.steps) == ("budget.tokens=1500", len(log))
    # At each tenth of the budget, but not after the last step, which the result measures.
    tenths = [int(event["generated_tokens"] / 150) for event in log]
    due = [new > old and event is not log[-1] for old, new, event in zip([0, *tenths], tenths, log, strict=False)]
    assert ["metric" in event for event in log] == due
    assert any(due)

    first = train(letters(algo, "budget.tokens=700"), tmp_path / "parts")
    assert first.steps < whole.steps
    again = train(letters(algo, "budget.tokens=700", "resume=auto"), tmp_path / "parts")
    assert (again.steps, again.generated_tokens) == (first.steps, first.generated_tokens), "it is spent already"
    parts = train(letters(algo, "budget.tokens=1500", "resume=auto"), tmp_path / "parts")
    assert (parts.steps, parts.generated_tokens, parts.after) == (whole.steps, whole.generated_tokens, whole.after)
    assert [e["reward"] for e in events(tmp_path / "parts")] == [e["reward"] for e in log]

    short = train(letters(algo, "budget.tokens=1500", "algo.steps=2"), tmp_path / "short")
    assert (short.steps, short.ended_by) == (2, None)


def test_a_budget_ends_the_sampling_of_rft_which_learns_from_what_it_has(in_cache, tmp_path):
    result = train(letters("rft", "budget.tokens=1500"), tmp_path / "run")
    log = events(tmp_path / "run")
    sampling = [event for event in log if event["stage"] == "generate"]
    iterations = max(event["iteration"] for event in log)
    assert result.ended_by == "budget.tokens=1500"
    assert result.generated_tokens == sampling[-1]["generated_tokens"] >= 1500
    # The wave that was under way is kept, and no other.
    assert [e["generated_tokens"] >= 1500 for e in sampling] == [False] * (len(sampling) - 2) + [True, True]
    last = tmp_path / "run" / f"iteration-{iterations}"
    cut = json.loads((last / "budget.json").read_text())
    assert cut["samples"] < 4 * 40
    assert log[-1]["stage"] == "evaluate", "the cut iteration was trained and measured as well"
    assert [e["stage"] for e in log if e["iteration"] == iterations].count("finetune") > 0
    assert result.reward_evaluations == log[-1]["reward_evaluations"]

    again = train(letters("rft", "budget.tokens=1500", "resume=auto"), tmp_path / "run")
    assert (again.after, again.steps, again.ended_by) == (result.after, result.steps, result.ended_by)
    more = train(letters("rft", "budget.tokens=2500", "resume=auto"), tmp_path / "run")
    assert more.generated_tokens >= 2500
    assert sum(e["stage"] == "finetune" for e in events(tmp_path / "run")) == more.steps > result.steps


@pytest.mark.parametrize("algo", OF)
def test_a_budget_of_seconds_ends_a_run(in_cache, tmp_path, algo):
    result = train(letters(algo, "budget.seconds=0.5"), tmp_path)
    log = events(tmp_path)
    used = sum(event.get("seconds", 0) for event in log)
    assert result.ended_by == "budget.seconds=0.5"
    assert result.seconds == pytest.approx(used)
    last = next(event["seconds"] for event in reversed(log) if "seconds" in event)
    assert used >= 0.5
    if algo != "rft" or log[-2]["stage"] == "finetune":
        assert used - last < 0.5 or algo == "rft"
    if algo == "rft":  # half of the seconds that an iteration finds are for its samples: it learns in the others
        first = [event for event in log if event["iteration"] == 1]
        assert [event["stage"] for event in first].count("finetune") > 0


# --- a sweep


def own(cache: Path, more: dict[str, str] | None = None) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"} | (more or {})


def test_three_algorithms_at_an_equal_budget_in_one_command(launch, cache, tmp_path):
    both = [text for text in LETTERS if not text.startswith("checkpoint")]
    done = launch(
        *("--config-dir", CONF, "-m", "algo=eggroll,grpo,rft", *both, "seed=1,2", "budget.tokens=6000"),
        *("hydra.sweep.dir=sweep", "algo.sampling.temperature=1,-1"),
        env=own(cache),
        code=2,
    )
    sweep = tmp_path / "sweep"
    results = [json.loads((sweep / str(n) / "result.json").read_text()) for n in range(0, 12, 2) if n != 99]
    assert len(results) == 6


def job(folder: Path, number: int, seed: int, after: float, tokens: int, middle: bool = True, **given: str) -> Path:
    """A run folder as a sweep leaves it, with two steps of a second each."""
    here = folder / str(number)
    (here / ".hydra").mkdir(parents=True)
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in given.items()] + [f"seed={seed}", "task=letters"]
    (here / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    (here / "run.yaml").write_text(json.dumps({"config": {"seed": seed}}))
    measured = {"metric": 20.0, "metric_name": "exact"} if middle else {}
    log = [
        {"step": 1, "seconds": 1.0, "generated_tokens": tokens // 2, "reward_evaluations": 5, **measured},
        {"step": 2, "seconds": 1.0, "generated_tokens": tokens, "reward_evaluations": 10},
    ]
    (here / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in log))
    result = {"algo": "grpo", "task": "letters", "model": "tiny", "metric": "exact", "before": 10.0, "after": after}
    result |= {"steps": 2, "seconds": 2.0, "generated_tokens": tokens, "reward_evaluations": 10}
    (here / "result.json").write_text(json.dumps(result))
    return here
