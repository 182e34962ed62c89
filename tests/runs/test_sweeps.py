"""Budgets, sweeps, repeating a run, tab completion."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import BudgetConfig, command
from launch import compose, train
from tests.support import ROOT, events
from tests.support.killing import differing
from tests.support.refusals import COLUMNS, refuses
from tests.support.short_runs import letters

MISTAKES = [
    ("budget.tokens=0", "budget.tokens", "0", "Give a value above 0"),
    ("budget.token=5", "budget.token", "5", "'tokens'"),
    ("algo=classify budget.tokens=5", "budget.tokens", "5", "Leave it out"),
    ("algo.steps=null", "algo.steps", None, "Give a number, or a budget"),
    ("algo=rft algo.iterations=null", "algo.iterations", None, "Give a number, or a budget"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_about_budgets_are_refused(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


def test_a_budget_of_one_stage_of_rft(tmp_path):
    refuses(
        lambda: train(
            compose(
                [
                    "algo=rft",
                    "algo.stage=generate",
                    "budget.tokens=9",
                    "model.tiny.pretrain_steps=0",
                ]
            ),
            tmp_path,
        ),
        key="algo.stage",
        value="generate",
    )


def test_a_budget_leaves_the_number_of_steps_open():
    assert [compose([f"algo={a}"]).algo.steps for a in ("eggroll", "grpo")] == [60, 150]
    for budget in ("budget.tokens=1000", "budget.seconds=0.5"):
        assert [compose([f"algo={a}", budget]).algo.steps for a in ("eggroll", "grpo")] == [
            None,
            None,
        ]
        assert compose(["algo=rft", budget]).algo.iterations is None
    run = compose(
        ["budget.tokens=1000", "algo.steps=7", "algo.lr_schedule={kind: linear, end: 0.1}"]
    )
    assert (run.algo.steps, run.budget.limits()) == (7, {"tokens": "budget.tokens=1000"})


def test_the_limit_that_is_nearest_to_its_end_counts():
    both = BudgetConfig(tokens=200, seconds=10.0)
    assert both.nearest(100, 2.0) == (0.5, "budget.tokens=200")
    assert both.nearest(100, 8.0) == (0.8, "budget.seconds=10")
    assert BudgetConfig(tokens=None, seconds=None).nearest(10**9, 1e9) == (0.0, "")


@pytest.mark.parametrize("algo", ["eggroll", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_token_budget_counts_across_resumes(in_cache, tmp_path, algo):
    whole = train(letters(algo, "budget.tokens=1500"), tmp_path / "whole")
    log = events(tmp_path / "whole")
    assert (
        log[-2]["generated_tokens"] < 1500 <= log[-1]["generated_tokens"] == whole.generated_tokens
    )
    assert (whole.ended_by, whole.steps) == ("budget.tokens=1500", len(log))
    # At each tenth of the budget, but not after the last step, which the result measures.
    tenths = [int(event["generated_tokens"] / 150) for event in log]
    due = [
        new > old and event is not log[-1]
        for old, new, event in zip([0, *tenths], tenths, log, strict=False)
    ]
    assert ["metric" in event for event in log] == due
    assert any(due)

    first = train(letters(algo, "budget.tokens=700"), tmp_path / "parts")
    assert first.steps < whole.steps
    again = train(letters(algo, "budget.tokens=700", "resume=auto"), tmp_path / "parts")
    assert (again.steps, again.generated_tokens) == (
        first.steps,
        first.generated_tokens,
    ), "it is spent already"
    parts = train(letters(algo, "budget.tokens=1500", "resume=auto"), tmp_path / "parts")
    assert (parts.steps, parts.generated_tokens, parts.after) == (
        whole.steps,
        whole.generated_tokens,
        whole.after,
    )
    assert [e["reward"] for e in events(tmp_path / "parts")] == [e["reward"] for e in log]

    short = train(letters(algo, "budget.tokens=1500", "algo.steps=2"), tmp_path / "short")
    assert (short.steps, short.ended_by) == (2, None)


def test_rft_learns_from_samples_that_a_budget_cut(in_cache, tmp_path):
    result = train(letters("rft", "budget.tokens=1500"), tmp_path / "run")
    log = events(tmp_path / "run")
    sampling = [event for event in log if event["stage"] == "generate"]
    iterations = max(event["iteration"] for event in log)
    assert result.ended_by == "budget.tokens=1500"
    assert result.generated_tokens == sampling[-1]["generated_tokens"] >= 1500
    # The wave that was under way is kept, and no other.
    assert [e["generated_tokens"] >= 1500 for e in sampling] == [False] * (len(sampling) - 2) + [
        True,
        True,
    ]
    last = tmp_path / "run" / f"iteration-{iterations}"
    cut = json.loads((last / "budget.json").read_text())
    assert cut["samples"] < 4 * 40
    assert log[-1]["stage"] == "evaluate", "the cut iteration was trained and measured as well"
    assert [e["stage"] for e in log if e["iteration"] == iterations].count("finetune") > 0
    assert result.reward_evaluations == log[-1]["reward_evaluations"]

    again = train(letters("rft", "budget.tokens=1500", "resume=auto"), tmp_path / "run")
    assert (again.after, again.steps, again.ended_by) == (
        result.after,
        result.steps,
        result.ended_by,
    )
    more = train(letters("rft", "budget.tokens=2500", "resume=auto"), tmp_path / "run")
    assert more.generated_tokens >= 2500
    assert (
        sum(e["stage"] == "finetune" for e in events(tmp_path / "run")) == more.steps > result.steps
    )


@pytest.mark.thorough
def test_a_raised_budget_continues_a_cut_iteration(in_cache, tmp_path):
    """And ends where a run ends that had the larger budget from the start."""
    train(letters("rft", "budget.tokens=2000", "algo.iterations=1"), tmp_path / "whole")
    cut = train(letters("rft", "budget.tokens=500", "algo.iterations=1"), tmp_path / "parts")
    assert cut.ended_by == "budget.tokens=500", "though it did all its iterations"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(letters("rft", "budget.tokens=2000", "algo.iterations=1", "resume=auto"), parts)
    assert differing(whole, parts) == []
    assert (
        "iteration 1 goes on: the budget that cut it short is no longer spent"
        in (parts / "run.log").read_text()
    )


@pytest.mark.thorough
def test_a_cut_iteration_is_not_repeated(in_cache, tmp_path):
    """Its sampling is cut at half of them, so that some of the same budget are left at its end."""
    asked = ["rft", "algo.iterations=1", "budget.seconds=1000"]
    train(letters(*asked), tmp_path)
    cut = {"samples": 1, "used": {}, "budget": BudgetConfig(tokens=None, seconds=1000).limits()}
    (tmp_path / "iteration-1" / "budget.json").write_text(json.dumps(cut))
    made = (tmp_path / "iteration-1" / "finetune.json").read_bytes()
    train(letters(*asked, "resume=auto"), tmp_path)
    assert "goes on: the budget" not in (tmp_path / "run.log").read_text()
    assert (tmp_path / "iteration-1" / "finetune.json").read_bytes() == made
    train(letters(*asked[:2], "budget.seconds=2000", "resume=auto"), tmp_path)
    assert "goes on: the budget" in (tmp_path / "run.log").read_text()


@pytest.mark.thorough
def test_a_budget_without_accepted_samples_keeps_the_base(in_cache, tmp_path):
    result = train(letters("rft", "budget.tokens=10", "task.scoring=smooth"), tmp_path)
    assert (result.ended_by, result.iteration, result.steps) == ("budget.tokens=10", 0, 0)
    assert result.generated_tokens > 10
    assert result.after == result.before
    log = (tmp_path / "run.log").read_text()
    assert "no sample was accepted within the budget" in log
    assert "WARNING budget.tokens=10 is overshot: " in log
    again = train(
        letters("rft", "budget.tokens=10", "task.scoring=smooth", "resume=auto"), tmp_path
    )
    assert (again.ended_by, again.generated_tokens) == (result.ended_by, result.generated_tokens)


@pytest.mark.parametrize(
    "algo", ["grpo", *(pytest.param(a, marks=pytest.mark.thorough) for a in ("eggroll", "rft"))]
)
def test_seconds_that_the_first_step_uses_up_are_foreseen(algo, in_cache, tmp_path):
    train(letters(algo, "budget.seconds=1e-6"), tmp_path)
    said = [line for line in (tmp_path / "run.log").read_text().splitlines() if "likely" in line]
    assert len(said) == 1
    assert "budget.seconds=1e-06 is likely to be used up by the first step" in said[0]


@pytest.mark.thorough
def test_a_tiny_budget_is_overshot_with_a_warning(in_cache, tmp_path):
    result = train(letters("eggroll", "budget.tokens=3"), tmp_path)
    log = (tmp_path / "run.log").read_text()
    assert "budget.tokens=3 may be used up by the first step" in log
    assert (
        f"budget.tokens=3 is overshot: {result.generated_tokens / 3:.3g} times as much is used"
        in log
    )


@pytest.mark.parametrize(
    "algo", ["eggroll", *(pytest.param(a, marks=pytest.mark.thorough) for a in ("grpo", "rft"))]
)
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
    if (
        algo == "rft"
    ):  # half of the seconds that an iteration finds are for its samples: it learns in the others
        first = [event for event in log if event["iteration"] == 1]
        assert [event["stage"] for event in first].count("finetune") > 0


def test_a_repeated_run_keeps_settings_without_a_file(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\nopt: {amp: {dtype: auto}}\ntask: {}\n")
    repeat = ["-cp", str(tmp_path), "-cn", "config"]
    completed = command.complete_repeated([*repeat, "opt.amp.enabled=true", "seed=2", "task.a=1"])
    assert completed == [*repeat, "++opt.amp.enabled=true", "seed=2", "task.a=1"]
    assert command.complete_repeated(["-cn", "config", "model=hf"]) == ["-cn", "config", "model=hf"]


PAGE = (ROOT / "docs" / "sweeps.md").read_text().replace("\\\n", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("task=co", ["task=countdown"]),
        pytest.param(
            *("budget.", ["budget.seconds=", "budget.tokens="]), marks=pytest.mark.thorough
        ),
    ],
)
def test_tab_completion_in_bash(typed, offered):
    (install,) = re.findall(r"^ {4}(eval .*)$", PAGE, flags=re.M)
    line = f"python launch.py {typed}"
    script = (
        f'python() {{ "{sys.executable}" "$@"; }}\n{install}\nunset -f'
        f' python\nPATH="{Path(sys.executable).parent}:$PATH"\nCOMP_LINE="{line}"'
        f' COMP_POINT={len(line)} COMP_CWORD=2\nhydra_bash_completion\nprintf "%s\\n"'
        ' "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == offered, done.stderr
