"""The model that a run exports, the best one on validation examples, and what its result says."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import launch
from common.run.resume import CAME_LATER
from tests.support import CONF, MOVING, SMALL_GRPO, events
from tests.support.letters import Letters, Planned
from tests.support.refusals import COLUMNS, refuses

VALIDATED = ["evaluate.examples=10", "evaluate.validation_examples=20", "evaluate.every=1"]
GRPO = [*SMALL_GRPO, *VALIDATED, "checkpoint.every=0"]
EGGROLL = [*MOVING, *VALIDATED, "checkpoint.every=0"]
TWO = ["opt=[ddp]", "opt.ddp.ranks=2"]
LETTERS = ["--config-dir", CONF, "task=letters", "task.scoring=smooth"]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def checkpoint(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "tensors.safetensors")


def same(exported: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> bool:
    shared = exported.keys() & saved.keys()
    assert shared
    return all(torch.equal(exported[name].float(), saved[name].float()) for name in shared)


def chosen(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())["chosen"]


@pytest.mark.parametrize("small", [GRPO, EGGROLL], ids=["grpo", "eggroll"])
def test_the_best_model_is_exported(small, in_cache, tmp_path):
    task = Planned([10, 50, 80, 30, 20])
    result = launch.train(launch.compose(small), tmp_path, task)
    assert result.chosen is not None
    assert (result.chosen["step"], result.chosen["value"], result.chosen["last"]) == (2, 80, 20)
    assert result.chosen["examples"] == 20
    assert result.steps == 4
    assert same(tensors(tmp_path / "model"), checkpoint(tmp_path, 2))
    assert not same(tensors(tmp_path / "model"), checkpoint(tmp_path, 4))
    assert set(result.chosen["last_metrics"]) == {"exact", "characters"}
    found = [event["validation"] for event in events(tmp_path) if "validation" in event]
    assert found == [50, 80, 30]
    assert "step 2" in result.verdict + (tmp_path / "report.md").read_text()


def test_a_run_that_only_gets_worse_exports_its_base(in_cache, tmp_path):
    run = launch.compose(GRPO)
    result = launch.train(run, tmp_path, Planned([90, 50, 40, 30, 20]))
    assert result.chosen is not None
    assert result.chosen["step"] == 0
    assert result.metrics["after"] == result.metrics["before"]
    assert same(tensors(tmp_path / "model"), checkpoint(tmp_path, 0))
    for sure in result.intervals.values():  # the same weights: nothing is left to chance
        assert (tuple(sure["change"]), sure["p_value"]) == ((0, 0), 1)
    assert result.outcome == "not-learnt"
    assert [one["code"] for one in result.advice] == ["base-is-best"]


def test_a_trained_model_with_equal_scores_keeps_its_interval(in_cache, tmp_path):
    run = launch.compose([*GRPO, "keep=last", "algo.lr=1e-9"])
    result = launch.train(run, tmp_path, Planned([10, 50, 80, 30, 20]))
    assert result.metrics["after"]["exact"] == result.metrics["before"]["exact"]
    low, high = result.intervals["exact"]["change"]
    assert low < -5 < 5 < high


def test_the_last_model_is_exported_if_it_is_asked_for(in_cache, tmp_path):
    run = launch.compose([*GRPO, "keep=last"])
    result = launch.train(run, tmp_path, Planned([10, 50, 80, 30, 20]))
    assert same(tensors(tmp_path / "model"), checkpoint(tmp_path, 4))
    assert result.chosen is None
    kept = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert kept == ["step-00000004"]


@pytest.mark.parametrize(
    ("settings", "values", "steps", "ended_by"),
    [
        (["evaluate.stop_at=70"], (10, 50, 80), 2, "evaluate.stop_at=70"),
        (["algo.patience=2"], (10, 50, 20, 30), 3, "algo.patience=2"),
        (["evaluate.stop_at=99", "algo.patience=3"], (10, 50, 80, 30, 20), 4, None),
    ],
)
def test_validation_ends_a_run(settings, values, steps, ended_by, in_cache, tmp_path):
    result = launch.train(launch.compose([*GRPO, *settings]), tmp_path, Planned(values))
    assert (result.steps, result.ended_by) == (steps, ended_by)


def test_validation_examples_are_not_trained_on(in_cache, tmp_path):
    class Watched(Letters):
        def __init__(self):
            super().__init__("smooth")
            self.validated, self.trained = set(), set()

        def metrics(self, examples, completions):
            if len(examples) == 20:
                self.validated |= {example.question for example in examples}
            return super().metrics(examples, completions)

        def reward(self, example, completion):
            self.trained.add(example.question)
            return super().reward(example, completion)

    task = Watched()
    launch.train(launch.compose([*GRPO, "algo.steps=120", "evaluate.every=60"]), tmp_path, task)
    assert len(task.validated) == 20
    assert len(task.trained) > 300
    assert not task.validated & task.trained


def test_an_adapter_is_chosen_too(in_cache, tmp_path):
    run = launch.compose([*GRPO, "model.adapter.rank=4"])
    launch.train(run, tmp_path, Planned([10, 50, 80, 30, 20]))
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    saved = checkpoint(tmp_path, 2)
    assert sorted(t.abs().sum().item() for t in exported.values()) == pytest.approx(
        sorted(t.abs().sum().item() for t in saved.values())
    )


@pytest.mark.thorough
@pytest.mark.parametrize("more", [["model.quantize=int8"], ["opt=[amp]"]], ids="-".join)
def test_the_masters_of_eggroll_are_taken_back(more, in_cache, tmp_path):
    """What the chosen model answers is what it answered when it was chosen."""
    task = Planned([10, 50, 80, 30, 20])
    run = launch.compose([*EGGROLL, *more])
    result = launch.train(run, tmp_path, task)
    assert result.chosen is not None
    assert result.chosen["step"] == 2
    held = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    at_2 = next(one for one in held if one["step"] == 2)
    assert result.metrics["after"] == at_2["metrics"]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [TWO, ["opt=[fsdp]", "opt.fsdp.ranks=2"]], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("small", [GRPO, EGGROLL], ids=["grpo", "eggroll"])
@pytest.mark.parametrize(("values", "step"), [([10, 50, 80, 30, 20], 2), ([90, 5, 4, 3, 2], 0)])
def test_ranks_go_back_to_the_same_model(small, more, values, step, begin, tmp_path):
    folder = tmp_path / "run"
    planned = ["--config-dir", CONF, "task=planned", f"task.values={values}"]
    without = [text for text in small if not text.startswith("task=")]
    process = begin(*planned, *without, *more, f"hydra.run.dir={folder}")
    said = process.communicate()
    assert process.returncode == 0, said
    result = json.loads((folder / "result.json").read_text())
    held = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert result["chosen"]["step"] == step
    at = next(one for one in held if one["step"] == step)
    assert result["metrics"]["after"] == at["metrics"]


@pytest.mark.thorough
def test_a_killed_run_chooses_the_same_model(begin, in_cache, tmp_path):
    without = [text for text in GRPO if not text.startswith("task=")]
    settings = [*LETTERS, *without, "algo.steps=40", "algo.lr=3e-3"]
    whole = begin(*settings, f"hydra.run.dir={tmp_path / 'whole'}")
    whole.communicate()
    killed = begin(*settings, f"hydra.run.dir={tmp_path / 'killed'}")
    log = tmp_path / "killed" / "metrics.jsonl"
    while killed.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= 4):
        pass
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = begin(*settings, f"hydra.run.dir={tmp_path / 'killed'}", "resume=auto")
    said = again.communicate()
    assert again.returncode == 0, said
    assert chosen(tmp_path / "killed") == chosen(tmp_path / "whole")
    first, other = (tensors(tmp_path / name / "model") for name in ("whole", "killed"))
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_run_that_goes_on_elsewhere_chooses_anew(in_cache, tmp_path):
    """The checkpoints that its choice names are in the first folder."""
    launch.train(launch.compose(GRPO), tmp_path / "one", Planned([10, 80, 50, 30, 20]))
    more = launch.compose([*GRPO, "algo.steps=6", f"resume={tmp_path / 'one'}"])
    result = launch.train(more, tmp_path / "two", Planned([20, 40, 30]))
    assert result.chosen is not None
    assert (result.chosen["before"], result.chosen["step"]) == (20, 5)
    assert same(tensors(tmp_path / "two" / "model"), checkpoint(tmp_path / "two", 5))


def test_a_lost_checkpoint_does_not_lose_the_run(in_cache, tmp_path):
    class Losing(Planned):
        def metrics(self, examples, completions):
            if len(examples) == 20 and self.asked == 4:
                (tmp_path / "checkpoints" / "step-00000002" / "state.json").write_text("{")
            return super().metrics(examples, completions)

    result = launch.train(launch.compose(GRPO), tmp_path, Losing([10, 50, 80, 30, 20]))
    assert result.chosen is not None
    assert result.chosen["step"] == 4
    assert "step-00000002" in (tmp_path / "run.log").read_text()
    assert same(tensors(tmp_path / "model"), checkpoint(tmp_path, 4))


def test_few_training_examples_leave_the_last_model(in_cache, tmp_path):
    run = launch.compose([*SMALL_GRPO, "evaluate.examples=8", "evaluate.every=1"])
    result = launch.train(run, tmp_path, Letters("smooth"))
    assert result.chosen is None
    assert "chosen" not in json.loads((tmp_path / "result.json").read_text())


SET_ASIDE, OWN = "evaluate.validation_examples", "algo.validation_prompts"


@pytest.mark.parametrize(
    COLUMNS,
    [
        (f"algo=rft {SET_ASIDE}=9", SET_ASIDE, 9, OWN),
        (f"algo=classify {SET_ASIDE}=9", SET_ASIDE, 9, "Leave it out"),
        ("algo=scaling keep=last", "keep", "last", "Leave it out"),
        ("algo=predict evaluate.stop_at=5", "evaluate.stop_at", 5, "Leave it out"),
        (f"algo=rft {OWN}=0 evaluate.stop_at=5", "evaluate.stop_at", 5, OWN),
        ("keep=first", "keep", "first", ["best", "last"]),
        ("algo.method=randopt algo.patience=2", "algo.patience", 2, "Leave it out"),
    ],
)
def test_settings_of_validation_without_effect(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        (["evaluate.validation_examples=0", "algo.patience=1"], "algo.patience", 1),
        (["evaluate.validation_examples=0", "evaluate.stop_at=50"], "evaluate.stop_at", 50),
        (["evaluate.validation_examples=100000"], "evaluate.validation_examples", None),
    ],
)
def test_validation_needs_examples(settings, key, value, in_cache, tmp_path):
    run = launch.compose([*GRPO, *settings])
    refuses(
        lambda: launch.train(run, tmp_path, Letters()),
        key=key,
        value=value,
        try_next="evaluate.validation_examples" if value else "Lower it",
    )


def test_a_folder_of_the_version_before_needs_no_validation():
    assert CAME_LATER["evaluate.validation_examples"] == 0


def test_a_classifier_exports_its_last_epoch_if_it_is_asked_to(in_cache, tmp_path):
    """With a rate at which it breaks after the first epoch."""
    settings = ["algo=classify", "hardware=cpu", "algo.epochs=3", "task.rows=300", "algo.lr=0.05"]
    best = launch.train(launch.compose(settings), tmp_path / "best")
    last = launch.train(launch.compose([*settings, "keep=last"]), tmp_path / "last")
    assert best.metrics["validation"] == last.metrics["validation"]
    saved = sorted((tmp_path / "last" / "checkpoints").glob("step-*"))[-1]
    exported = next((tmp_path / "last" / "model").glob("*.safetensors"))
    assert same(load_file(exported), load_file(saved / "tensors.safetensors"))


def test_a_run_may_go_on_with_another_choice(in_cache, tmp_path):
    """The rows that are set aside depend on neither keep nor the schedule."""
    small = [text for text in GRPO if not text.startswith("evaluate.")] + ["evaluate.examples=16"]
    launch.train(launch.compose([*small, "evaluate.every=1"]), tmp_path, Letters("smooth"))
    for steps, more in ((5, ["keep=last"]), (6, ["evaluate.every=0"]), (7, ["keep=best"])):
        run = launch.compose([*small, f"algo.steps={steps}", "resume=auto", *more])
        assert launch.train(run, tmp_path, Letters("smooth")).steps == steps


def test_a_folder_of_an_earlier_version_goes_on(in_cache, tmp_path):
    """It has set nothing aside, and its run.yaml says nothing about it."""
    small = [text for text in GRPO if not text.startswith("evaluate.")] + ["evaluate.examples=16"]
    first = launch.compose([*small, "evaluate.validation_examples=0", "algo.steps=2"])
    launch.train(first, tmp_path, Letters("smooth"))
    saved = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(saved.replace("    validation_examples: 0\n", ""))
    for steps in (3, 4):
        run = launch.compose([*small, "resume=auto", f"algo.steps={steps}"])
        result = launch.train(run, tmp_path, Letters("smooth"))
        assert (result.steps, result.chosen) == (steps, None)
