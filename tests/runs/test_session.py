"""The frame around every run, proved once on a toy algorithm of twenty lines; and that an
algorithm, an engine, a task and a loss are added as docs/architecture.md says.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import launch
from common.config import ConfigError
from common.report.tracker import Tracker
from common.run.checkpoints import Checkpoints
from common.sampling.native import Sampler
from common.system.files import problem
from common.system.signals import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped
from common.tasks.order import ExampleOrder
from tests.support import ROOT, TINY, events
from tests.support.commands import Started
from tests.support.letters import Letters
from tests.support.refusals import refuses

EXTENSION = ROOT / "tests" / "support" / "extension"
TOY = ["algo=toy", *TINY, "evaluate.examples=4"]


@pytest.fixture
def toy(monkeypatch):
    """Compose a run of the toy, whose folder is on the path as a user's is."""
    monkeypatch.syspath_prepend(str(EXTENSION))
    from toy.config import ToyConfig

    monkeypatch.setitem(launch.ALGORITHMS, "toy", ToyConfig)
    return lambda *overrides: launch.compose([*TOY, *overrides], str(EXTENSION / "conf"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def rewards(folder: Path) -> list[float]:
    return [event["reward"] for event in events(folder)]


@pytest.fixture
def command(begin):
    """Start the toy's command."""

    def start(folder: Path, *overrides: str) -> Started:
        arguments = ["--config-dir", str(EXTENSION / "conf"), *TOY, f"hydra.run.dir={folder}"]
        there = {"PYTHONPATH": str(EXTENSION)}
        return begin(*arguments, *overrides, env=there, module="toy_launch")

    return start


def wait_for_two_steps(process: Started, folder: Path) -> None:
    log = folder / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= 2):
        time.sleep(0.01)


def test_a_new_algorithm_trains(toy, in_cache, tmp_path):
    result = launch.train(toy("evaluate.every=2", "checkpoint.every=3"), tmp_path, Letters())
    assert (result.algo, result.steps, result.ended_by) == ("toy", 6, None)
    found = events(tmp_path)
    assert [event["step"] for event in found] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in found if "metric" in event] == [2, 4]
    assert found[-1]["reward_evaluations"] == 12
    assert found[-1]["generated_tokens"] == result.generated_tokens > 0
    assert set(found[0]["phase_seconds"]) == {"rollout", "reward"}
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 2, 4, 6]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006"]
    assert "toy" in (tmp_path / "report.md").read_text()


@pytest.mark.thorough
def test_cheap_evaluations_happen_at_sixths_of_the_steps(toy, in_cache, tmp_path):
    """An evaluation of one example takes about half the tokens of a step of the toy."""
    many = ("algo.steps=126", "checkpoint.every=50", "evaluate.examples=1")

    def evaluated(folder: Path) -> list[int]:
        return [event["step"] for event in events(folder) if "metric" in event]

    launch.train(toy(*many), tmp_path / "whole", Letters())
    assert evaluated(tmp_path / "whole") == [21, 42, 63, 84, 105]
    launch.train(toy(*many, "evaluate.every=0"), tmp_path / "never", Letters())
    assert evaluated(tmp_path / "never") == []
    assert rewards(tmp_path / "never") == rewards(tmp_path / "whole"), "training does not see it"
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(t, whole[n]) for n, t in weights(tmp_path / "never").items())
    launch.train(toy(*many, "evaluate.examples=4"), tmp_path / "dear", Letters())
    assert evaluated(tmp_path / "dear") == [], "twice the tokens of a step"
    more = ["evaluate.samples=4"]  # of each example, and the greedy one
    launch.train(toy(*many, *more), tmp_path / "samples", Letters())
    assert evaluated(tmp_path / "samples") == []
    saved = tmp_path / "whole" / "checkpoints" / "step-00000100"
    shutil.copytree(saved, tmp_path / "cut" / "checkpoints" / saved.name)
    again = toy(*many, f"resume={tmp_path / 'cut'}")
    launch.train(again, tmp_path / "again", Letters())
    assert evaluated(tmp_path / "again") == [105], "as the run that was never stopped"


@pytest.mark.thorough
def test_a_killed_run_resumes_exactly(toy, command, in_cache, tmp_path):
    many = "algo.steps=40"
    launch.train(toy(many, "checkpoint.every=1"), tmp_path / "whole")
    process = command(tmp_path / "killed", many, "checkpoint.every=1")
    wait_for_two_steps(process, tmp_path / "killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    again = command(tmp_path / "killed", many, "checkpoint.every=1", "resume=auto")
    said = again.communicate()
    assert again.returncode == 0, said
    assert rewards(tmp_path / "killed") == rewards(tmp_path / "whole")
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(t, whole[n]) for n, t in weights(tmp_path / "killed").items())


@pytest.mark.thorough
def test_a_signal_stops_it_after_saving(command, tmp_path):
    process = command(tmp_path / "run", "algo.steps=2000", "checkpoint.every=0")
    wait_for_two_steps(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == EXIT_SIGNAL
    assert f"Go on with hydra.run.dir={tmp_path / 'run'} resume=auto." in said
    done = len(events(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == [
        f"step-{done:08d}"
    ]


class Signals(Letters):
    """Sends a signal while the reward of the last step is computed."""

    def reward(self, example, completion):
        self.scored = getattr(self, "scored", 0) + 1
        if self.scored == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().reward(example, completion)


@pytest.mark.parametrize(
    "algo", ["toy", *(pytest.param(a, marks=pytest.mark.thorough) for a in ("eggroll", "grpo"))]
)
def test_a_last_step_signal_finishes_the_run(algo, toy, in_cache, tmp_path):
    sizes = {
        "toy": [],
        "eggroll": ["algo.members=2", "algo.prompts_per_step=6", "algo.steps=1"],
        "grpo": [
            *("algo.prompts_per_step=3", "algo.samples_per_prompt=4", "algo.steps=1"),
            *("algo.resample_rounds=0", "algo.sampling.max_new_tokens=8"),
        ],
    }
    run = toy() if algo == "toy" else launch.compose([f"algo={algo}", *TOY[1:], *sizes[algo]])
    result = launch.train(run, tmp_path, Signals())
    assert result.steps == run.algo.steps
    assert (tmp_path / "result.json").exists()


def test_a_checkpoint_is_uploaded_before_the_next_one_removes_it(
    toy, in_cache, tmp_path, monkeypatch
):
    """As on a GPU, where a checkpoint is written while training goes on."""
    uploaded = {}

    def note(tracker, kind, folder, name):
        if kind == "checkpoint":
            uploaded[name] = problem(folder)

    monkeypatch.setattr(Tracker, "artifact", note)
    monkeypatch.setattr(Checkpoints, "can_go_on", property(lambda _: True, lambda *_: None), False)
    overrides = ["algo.steps=6", "checkpoint.every=2", "checkpoint.keep=1"]
    launch.train(toy(*overrides), tmp_path, Letters())
    assert uploaded == dict.fromkeys(["step-2", "step-4", "step-6"])


def test_a_text_added_on_resume_has_no_change(toy, in_cache, tmp_path):
    texts = [tmp_path / name for name in ("one.txt", "other.txt")]
    for text in texts:
        text.write_text(f"{text.stem} and more of it. " * 20)
    launch.train(toy("algo.steps=4", f"evaluate.text={texts[0]}"), tmp_path / "run", Letters())
    for steps, text, known in ((6, texts[0], True), (8, texts[1], False), (10, None, False)):
        asked = toy(f"algo.steps={steps}", "resume=auto", f"evaluate.text={text or 'null'}")
        result = launch.train(asked, tmp_path / "run", Letters())
        assert ("text/bits_per_byte" in result.metrics["before"]) is known
        assert ("text/bits_per_byte" in result.metrics["after"]) is (text is not None)
        assert (tmp_path / "run" / "result.json").exists()


def test_a_budget_ends_it(toy, in_cache, tmp_path):
    result = launch.train(toy("budget.tokens=20"), tmp_path, Letters())
    assert result.ended_by == "budget.tokens=20"
    used = [event["generated_tokens"] for event in events(tmp_path)]
    assert used[-1] >= 20
    assert all(tokens < 20 for tokens in used[:-1])


class Broken(Letters):
    """Earns NaN for one of eight examples."""

    def examples(self, split):
        return super().examples(split)[:8]

    def reward(self, example, completion):
        bad = example.question == self.examples("train")[0].question
        return float("nan") if bad else super().reward(example, completion)


@pytest.mark.thorough
def test_numbers_that_are_not_finite_stop_it(toy, in_cache, tmp_path):
    with pytest.raises(RunStopped, match=r"step \d+: NaN in a reward on example") as stopped:
        launch.train(toy("algo.steps=40"), tmp_path, Broken())
    assert stopped.value.code == EXIT_NUMBERS
    assert all(event["reward"] is not None for event in events(tmp_path))
    assert (tmp_path / "report.md").exists()


@pytest.mark.thorough
def test_or_leave_the_step_out(toy, in_cache, tmp_path):
    skip = ["not_finite.policy=skip", "not_finite.max_skips=40"]
    result = launch.train(toy("algo.steps=40", *skip), tmp_path, Broken())
    assert result.steps == 40
    assert result.skipped_steps == events(tmp_path)[-1]["skipped_steps"] > 0


class Long(Letters):
    """Has one prompt that does not fit."""

    def prompt(self, example):
        first = self.examples("train")[0].question
        return "x" * 300 if example.question == first else super().prompt(example)


@pytest.mark.parametrize(
    "algo",
    ["grpo", *(pytest.param(a, marks=pytest.mark.thorough) for a in ("toy", "eggroll", "rft"))],
)
def test_too_long_prompts_are_refused_or_skipped(algo, toy, in_cache, tmp_path):
    sizes = {
        "eggroll": ["algo.members=2", "algo.steps=1"],
        "grpo": ["algo.steps=1", "algo.prompts_per_step=1"],
        "rft": [
            *("algo.iterations=1", "algo.prompts=4", "algo.validation_prompts=2"),
            *("algo.epochs=1", "algo.select.accept=1e-9", "evaluate.samples=null"),
        ],
    }

    def compose(*overrides):
        if algo == "toy":
            return toy(*overrides)
        short = "algo.sampling.max_new_tokens=8"
        return launch.compose([f"algo={algo}", *TOY[1:], short, *sizes[algo], *overrides])

    with pytest.raises(ConfigError, match=r"^1 of \d+ prompts do not fit .*prompts.too_long=skip"):
        launch.train(compose(), tmp_path / "error", Long())
    result = launch.train(compose("prompts.too_long=skip"), tmp_path / "skip", Long())
    assert result is not None
    log = (tmp_path / "skip" / "run.log").read_text()
    assert "do not fit the model's context" in log
    assert "1 too long and left out" in log


def test_a_new_engine_is_a_file_and_its_yaml(toy, in_cache, tmp_path):
    result = launch.train(toy("engine=echo"), tmp_path, Letters())
    assert result.generated_tokens == 12  # one token per completion
    lines = (tmp_path / "completions" / "after.jsonl").read_text().splitlines()
    assert {json.loads(line)["completion"] for line in lines} == {"e"}
    assert "the run cannot be repeated to the bit" in (tmp_path / "run.log").read_text()
    assert "echo.open_echo" in (tmp_path / "run.yaml").read_text()
    refuses(
        lambda: launch.train(toy("engine=echo", "+engine.tokn=1"), tmp_path / "typo", Letters()),
        key="engine.tokn",
        value="1",
        try_next="'token'",
    )


def test_an_engine_starts_before_the_clock_of_a_step(toy, in_cache, tmp_path, monkeypatch):
    """As vLLM does, for a minute or more: in a run that begins, and in one that goes on."""
    order: list[str] = []
    refresh, take = Sampler.refresh, ExampleOrder.take
    monkeypatch.setattr(Sampler, "refresh", lambda self: order.append("refresh") or refresh(self))
    monkeypatch.setattr(
        ExampleOrder, "take", lambda self, *which: order.append("step") or take(self, *which)
    )
    for steps in (2, 4):
        order.clear()
        launch.train(toy(f"algo.steps={steps}", "resume=auto"), tmp_path, Letters())
        assert order[0] == "refresh"
        assert order.count("step") == 2


def test_a_new_loss_is_a_function(in_cache, tmp_path, monkeypatch):
    """REINFORCE instead of the clipped ratio: what `policy_loss` gets is all that a loss needs."""
    from grpo import train as module

    def reinforce(logp, old, advantage, mask, counts, settings, **more):
        loss = -(advantage[:, None] * logp * mask).sum() / counts.tokens
        zero = logp.new_zeros(())
        return loss, {"clip_fraction": zero, "approx_kl": zero, "entropy": zero, "kl": zero}

    sizes = ["algo.steps=2", "algo.prompts_per_step=2", "algo.sampling.max_new_tokens=8"]
    run = launch.compose(["algo=grpo", *TOY[1:], *sizes, "algo.samples_per_prompt=4"])
    launch.train(run, tmp_path / "clipped", Letters("smooth"))
    monkeypatch.setattr(module, "policy_loss", reinforce)
    launch.train(run, tmp_path / "reinforce", Letters("smooth"))
    one, other = events(tmp_path / "clipped"), events(tmp_path / "reinforce")
    assert one[0]["reward"] == other[0]["reward"]
    assert one[0]["loss"] != other[0]["loss"]
