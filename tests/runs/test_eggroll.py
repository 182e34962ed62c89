"""EGGROLL as a whole: equal runs, runs that are stopped and go on, runs that fail, and learning."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from common.checkpoint import checkpoint
from common.config import ConfigError, plugins
from common.device import precision, profile
from common.model.precision_copies import narrow
from common.sampling.native import Sampler
from common.system.signals import EXIT_NUMBERS, EXIT_SIGNAL, RunStopped
from eggroll.instruments import idle_share
from eggroll.noise import Noise
from eggroll.weights import DiskTensors, Weights
from launch import compose, train
from tests.support import MOVING, ROOT, SMALL, events
from tests.support.commands import Begin, Started, Warm
from tests.support.letters import Letters
from tests.support.models import small_model
from tests.support.refusals import refuses

TIMES = ("seconds", "phase_seconds", "tokens_per_second", "samples_per_second", "peak_memory_gb")

pytestmark = pytest.mark.usefixtures("in_cache")


@pytest.fixture(scope="module")
def own_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder of YAML files with one task."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "task").mkdir()
    (folder / "task" / "letters.yaml").write_text(
        "_target_: tests.support.letters.Letters\nscoring: smooth\nfault: null\nfault_id: 0\n"
    )
    return folder


def run_here(out: Path, *overrides: str, task: object = None):
    return train(compose([*MOVING, *overrides]), out, task or Letters("smooth"))


@pytest.mark.thorough
def test_a_full_trust_region_is_reported(tmp_path):
    first = ["algo.lr=0.1", "algo.steps=6", "algo.max_drift=0.5"]
    run_here(tmp_path, *first)
    more = ["algo.lr=0.1", "algo.steps=8", "resume=auto"]
    run_here(tmp_path, *more, "algo.max_drift=0.5")
    assert "further steps hardly change the model" in (tmp_path / "run.log").read_text()
    rates = [event["lr"] for event in events(tmp_path)]
    assert max(rates[6:]) < 0.5 * min(rates[:6])
    run_here(tmp_path, *more, "algo.steps=10", "algo.max_drift=2")
    assert events(tmp_path)[-1]["lr"] > 5 * max(rates[6:])


@pytest.fixture
def run_in_ranks(warm: Warm):
    """`run_here` for two ranks, without their imports."""

    def run(out: Path, *overrides: str, task: object = None):
        return warm.call(
            train, compose([*MOVING, "opt=[ddp]", *overrides]), out, task or Letters("smooth")
        )

    return run


def saved(out: Path) -> checkpoint.Checkpoint:
    """The newest checkpoint; fails where another one is damaged."""
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None
    return found


def same_bits(one: Path, other: Path) -> bool:
    first, second = saved(one), saved(other)
    assert first.step == second.step
    assert set(first.tensors) == set(second.tensors)
    return all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


def largest_difference(one: Path, other: Path) -> float:
    first, second = saved(one).tensors, saved(other).tensors
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def completions(out: Path, name: str = "after") -> list[str]:
    return [
        json.loads(line)["completion"]
        for line in (out / "completions" / f"{name}.jsonl").read_text().splitlines()
    ]


def timeless(out: Path) -> list[dict]:
    return [
        {key: value for key, value in event.items() if key not in TIMES} for event in events(out)
    ]


# --- equal runs


def test_two_ranks_and_one_end_alike(run_in_ranks, tmp_path):
    one = run_here(tmp_path / "one")
    two = run_in_ranks(tmp_path / "two")
    assert (one.world_size, two.world_size) == (1, 2)
    assert saved(tmp_path / "one").step == 4
    assert events(tmp_path / "one")[0]["drift"] > 1e-3, (
        "the weights must have moved, or equality says nothing"
    )
    assert same_bits(tmp_path / "one", tmp_path / "two")
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")
    for name in ("before", "after"):
        assert completions(tmp_path / "one", name) == completions(tmp_path / "two", name)
    assert one.metrics == two.metrics
    assert one.generated_tokens == two.generated_tokens


@pytest.fixture(scope="module")
def plain(cache, tmp_path_factory) -> Path:
    """Three steps of eight rows per forward."""
    out = tmp_path_factory.mktemp("plain")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUTCH_CACHE", str(cache))
        run_here(out, "algo.steps=3")
    return out


@pytest.mark.parametrize(
    "rows", [6, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 16))]
)
def test_the_size_of_a_forward_does_not_change_the_result(plain, tmp_path, rows):
    run_here(tmp_path, "algo.steps=3", f"algo.rollout_rows={rows}")
    first, second = saved(plain).tensors, saved(tmp_path).tensors
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-4, atol=1e-5)
    assert [event["reward"] for event in events(plain)] == pytest.approx(
        [event["reward"] for event in events(tmp_path)], rel=1e-6
    )


def test_forward_size_keeps_filled_rewards_unchanged(tmp_path):
    """Which is that of all members, whatever others are in its forward."""
    for rows in (4, 64):
        asked = ["algo.steps=2", f"algo.rollout_rows={rows}"]
        run_here(tmp_path / str(rows), *asked, task=Letters("smooth", unscored=True))
    few, all_at_once = (events(tmp_path / str(rows)) for rows in (4, 64))
    assert few[0]["unscored"] > 0
    assert [event["reward"] for event in few] == pytest.approx(
        [event["reward"] for event in all_at_once], rel=1e-6
    )


def test_a_seed_is_a_run(tmp_path):
    run_here(tmp_path / "first", "algo.steps=2")
    run_here(tmp_path / "again", "algo.steps=2")
    run_here(tmp_path / "other", "algo.steps=2", "seed=1")
    assert same_bits(tmp_path / "first", tmp_path / "again")
    assert not same_bits(tmp_path / "first", tmp_path / "other")


# --- killed, stopped, resumed

# Momentum, noise that outlives a step, and drawn tokens: all that a checkpoint has to bring back.
STEPS = 36  # some ten more than where it is killed, for a test that waits for its core
LONG = [
    *MOVING,
    "task=letters",
    f"algo.steps={STEPS}",
    "algo.optimizer.name=Adam",
    "algo.lr=0.003",
    "algo.noise_reuse=3",
    "algo.lr_schedule={kind: cosine, end: 0.1}",
    "checkpoint.every=4",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def started(begin: Begin, own_task: Path, folder: Path):
    """Start the LONG run in a process of its own."""

    def start(*overrides: str) -> Started:
        given = ("--config-dir", str(own_task), f"hydra.run.dir={folder}", *LONG, *overrides)
        return begin(*given)

    return start


def wait_for_step(process: Started | subprocess.Popen[str], out: Path, step: int) -> None:
    """Return as soon as the run has logged `step`."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        path = out / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    raise AssertionError(f"no step {step} in two minutes")


@pytest.fixture(scope="module")
def unbroken(own_task, cache, tmp_path_factory):
    """The LONG run, never stopped."""
    out = tmp_path_factory.mktemp("unbroken")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUTCH_CACHE", str(cache))
        train(compose(LONG, str(own_task)), out)
    return out


def go_on(own_task: Path, out: Path, *overrides: str):
    return train(compose([*LONG, "resume=auto", *overrides], str(own_task)), out)


@pytest.mark.faults
def test_kill_9_and_resume_ends_with_the_same_bits(own_task, started, unbroken, folder):
    """Killed twice, the second time while it resumes; the newest checkpoint is damaged between the
    two.
    """
    step = random.randrange(9, 18)
    print(f"killed after step {step}")  # shown when the test fails
    process = started()
    wait_for_step(process, folder, step)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "result.json").exists()
    newest = max((folder / "checkpoints").glob("step-????????"))
    done = int(newest.name.removeprefix("step-"))
    assert done < STEPS
    weights = newest / "tensors.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    process = started("resume=auto")
    wait_for_step(process, folder, done + 6)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0]
    assert f"warning: checkpoint {newest} is not valid: tensors.safetensors is damaged" in said
    assert f"resuming after step {done - 4} from" in said

    result = go_on(own_task, folder)
    assert same_bits(folder, unbroken)
    assert timeless(folder) == timeless(unbroken)
    assert completions(folder) == completions(unbroken)
    before, after = (json.loads((out / "result.json").read_text()) for out in (unbroken, folder))
    assert after["generated_tokens"] == before["generated_tokens"] == result.generated_tokens
    assert after["metrics"] == before["metrics"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGINT"],
)
@pytest.mark.faults
def test_a_signal_saves_and_the_run_goes_on(own_task, started, unbroken, folder, number):
    process = started("checkpoint.every=0")
    wait_for_step(process, folder, 5)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_SIGNAL == 75
    step = saved(folder).step
    assert len(events(folder)) == step < STEPS
    assert f"{number.name}: finishing this step, then saving." in said
    assert f"stopped after step {step} of {STEPS}, saved in {folder}/checkpoints." in said
    assert f"Go on with hydra.run.dir={folder} resume=auto." in said
    assert "Traceback" not in said
    go_on(own_task, folder)
    assert same_bits(folder, unbroken)
    assert timeless(folder) == timeless(unbroken)


@pytest.mark.thorough
@pytest.mark.faults
def test_a_signal_to_the_parent_stops_all_ranks(own_task, cache, unbroken, tmp_path):
    """Of spawned ranks, so in a new interpreter. One rank then goes on with the run of two.
    tests/runs/test_launch.py has torchrun's.
    """
    settings = [f"hydra.run.dir={tmp_path}", *LONG, "checkpoint.every=0", "opt=[ddp]"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), "--config-dir", str(own_task), *settings],
        env=os.environ | {"CLUTCH_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(process, tmp_path, 5)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_SIGNAL, said
    assert "Traceback" not in said
    assert len(events(tmp_path)) == saved(tmp_path).step < STEPS
    go_on(own_task, tmp_path)
    assert same_bits(tmp_path, unbroken)


@pytest.mark.faults
def test_resume_refuses_other_settings(tmp_path):
    run_here(tmp_path / "first", "algo.steps=2")
    folder = tmp_path / "first"

    def start(overrides):
        run_here(folder, *overrides)

    refuses(
        "algo.steps=2 resume=auto algo.sigma=0.2 seed=3",
        key=[f"{folder}/checkpoints/step-00000002", "seed", "algo.sigma"],
        value=["was 0, is 3", "was 0.1, is 0.2"],
        try_next="hydra.run.dir",
        start=start,
    )
    refuses("algo.steps=2", key=str(folder), try_next=["resume=auto", "hydra.run.dir"], start=start)


@pytest.mark.faults
def test_resume_refuses_other_examples_and_schedule_lengths(tmp_path, capsys):
    linear = ["algo.lr_schedule={kind: linear, end: 0.0}", "algo.steps=null"]
    budget = [*linear, "budget.tokens=40"]
    run_here(tmp_path / "first", *budget)
    with pytest.raises(ConfigError, match=r"evaluate\.examples was 8, is 3"):
        run_here(tmp_path / "first", *budget, "resume=auto", "evaluate.examples=3")
    with pytest.raises(ConfigError, match=r"algo\.steps was None, which algo\.lr_schedule depends"):
        run_here(tmp_path / "first", linear[0], "resume=auto", "algo.steps=9")
    assert "follows the budget" not in "".join(capsys.readouterr())
    run_here(tmp_path / "first", *linear, "budget.tokens=80", "resume=auto")
    warned = "budget.tokens was 40, is 80: algo.lr_schedule follows the budget"
    assert warned in "".join(capsys.readouterr())


class Known(Letters):
    """A task that the base model knows already."""

    def metrics(self, examples, completions):
        return dict.fromkeys(super().metrics(examples, completions), 100.0)


def test_a_run_that_made_no_step_may_be_resumed(tmp_path):
    results = [run_here(tmp_path, more, task=Known()) for more in ("resume=no", "resume=auto")]
    assert [one.steps for one in results] == [0, 0]
    assert results[0].metrics == results[1].metrics
    with pytest.raises(ConfigError, match="holds a run that has ended"):
        run_here(tmp_path, task=Known())


@pytest.mark.thorough
def test_resume_from_the_folder_of_another_run(tmp_path):
    whole = run_here(tmp_path / "whole", "algo.steps=4")
    run_here(tmp_path / "half", "algo.steps=2")
    result = run_here(tmp_path / "rest", "algo.steps=4", f"resume={tmp_path}/half")
    assert same_bits(tmp_path / "rest", tmp_path / "whole")
    assert saved(tmp_path / "half").step == 2, "the other run is left as it was"
    assert [event["step"] for event in events(tmp_path / "rest")] == [3, 4]
    assert result.metrics == whole.metrics
    refuses(
        lambda: run_here(tmp_path / "new", "resume=nowhere"),
        key="resume",
        value="nowhere",
        try_next="Give a run folder",
    )


@pytest.mark.thorough
def test_resume_auto_of_a_finished_run_measures_again(tmp_path):
    run_here(tmp_path, "algo.steps=2")
    done = run_here(tmp_path, "algo.steps=2", "resume=auto")
    assert [event["step"] for event in events(tmp_path)] == [1, 2]
    assert done.steps == 2


# --- rewards that go wrong

_ORDER = list(range(len(Letters().examples("train"))))
random.Random("order 0 0").shuffle(_ORDER)  # seed 0, epoch 0
FAULTY = _ORDER[5]  # a row of the third step


@pytest.mark.faults
def test_a_nan_reward_stops_the_run_and_names_the_row(own_task, launch, tmp_path):
    out = tmp_path / "run"
    done = launch(
        *("--config-dir", str(own_task), f"hydra.run.dir={out}", *MOVING),
        *("task=letters", "task.fault=infinite", f"task.fault_id={FAULTY}", "checkpoint.every=1"),
        code=EXIT_NUMBERS,
    )
    kept = [json.loads(line) for line in (out / "not_finite.jsonl").read_text().splitlines()]
    assert [(row["step"], row["member"], row["id"], row["reward"]) for row in kept] == [
        (3, member, FAULTY, "nan") for member in range(8)
    ]
    assert (
        done.stderr
        == f"step 3: NaN or infinity in a reward or logits on example {FAULTY}. The rows are in"
        f" {out}/not_finite.jsonl. Last good checkpoint: {out}/checkpoints/step-00000002.\n"
    )
    assert [event["step"] for event in events(out)] == [1, 2]


def fails(tmp_path: Path, task: object, *overrides: str, run=run_here) -> str:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", *overrides, task=task)
    return str(caught.value)


class Batched(Letters):
    """Scores a whole batch at once."""

    def rewards(self, examples, completions):
        if self.fault == "short":
            return [0.5] * (len(completions) - 1)
        if self.fault == "batch raises":
            raise ZeroDivisionError("by zero")
        return [
            self.reward(example, text) for example, text in zip(examples, completions, strict=True)
        ]


@pytest.mark.thorough
@pytest.mark.faults
def test_a_batch_of_rewards(tmp_path):
    run_here(tmp_path / "one", "algo.steps=2", task=Letters("smooth"))
    run_here(tmp_path / "many", "algo.steps=2", task=Batched("smooth"))
    assert same_bits(tmp_path / "one", tmp_path / "many")
    assert (
        fails(tmp_path, Batched(fault="short"))
        == "Batched.rewards returned 1 scores for 2 completions. Return one for each, in order."
    )
    said = fails(tmp_path, Batched(fault="batch raises"))
    assert said.startswith("Batched.rewards raised ZeroDivisionError: by zero (")


@pytest.mark.thorough
@pytest.mark.faults
def test_a_mistake_on_one_rank_ends_all(run_in_ranks, tmp_path, capfd):
    """And with the text of that rank's error, not with a traceback of the other, which waits for
    it.
    """
    said = fails(tmp_path, Letters(fault="raises", fault_id=FAULTY), run=run_in_ranks)
    assert said.startswith("Letters.reward raised KeyError: 'no such letter' (")
    assert f"(the first: example {FAULTY}, " in said
    assert capfd.readouterr().err == ""


# --- settings


# Each setting in one of five runs; what noise and fitness compute is in tests/oracles.
BUNDLES = (
    "algo.noise_reuse=2 algo.samples_per_prompt=2 algo.fitness=prompt_zscore"
    " algo.lr_schedule={kind:linear,end:0.5}",
    "algo.fitness=centered_rank algo.mirrored=false algo.members=7 algo.optimizer.name=Adam"
    " algo.lr=0.01 algo.sampling.top_p=0.9 algo.sampling.top_k=50",
    "algo.fitness=pair_sign algo.rank=4 algo.optimizer.name=SGD algo.lr=0.02"
    " algo.optimizer.kwargs={momentum:0.9} algo.sigma_schedule={kind:exponential,end:0.5}",
    "algo.noise.vectors=full algo.noise.embeddings=full",
    "algo.noise.patterns={lower:frozen,*.mlp.*:frozen}",
)


@pytest.mark.parametrize("overrides", BUNDLES)
def test_every_setting_runs_and_changes_the_weights(plain, tmp_path, overrides):
    asked = "algo.stop_at.drift=1e9"  # measured at every step
    run_here(tmp_path / "set", "algo.steps=3", asked, *overrides.split())
    log = events(tmp_path / "set")
    assert [event["step"] for event in log] == [1, 2, 3]
    assert log[0]["drift"] > 0
    assert log[2]["drift"] != log[1]["drift"] != log[0]["drift"]
    assert all(0 < event["reward"] < 1 for event in log)
    one, other = saved(tmp_path / "set").tensors, saved(plain).tensors
    assert set(one) != set(other) or largest_difference(tmp_path / "set", plain) > 1e-6
    if "patterns" in overrides:
        assert not any(".mlp." in name or ".layers.0." in name for name in one)
    if "vectors" in overrides:
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= one.keys()
    for key in ("lr", "sigma"):
        if f"{key}_schedule" in overrides:
            assert log[2][key] == pytest.approx(log[0][key] / 2)


@pytest.mark.thorough
def test_weight_decay_pulls_to_the_initial_weights(tmp_path):
    drifts = []
    for decay in (0.0, 1.0):
        asked = "algo.stop_at.drift=1e9"  # measured at every step
        run_here(tmp_path / str(decay), "algo.steps=6", asked, f"algo.weight_decay={decay}")
        drifts.append(events(tmp_path / str(decay))[-1]["drift"])
    assert drifts[1] < 0.8 * drifts[0]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_drift_is_measured_from_the_first_weights(tmp_path, compute, offload):
    """Which lie in a file that has no name, so that nothing is left of it."""
    model = small_model("gpt2").requires_grad_(False)
    first = {name: parameter.clone() for name, parameter in model.named_parameters()}
    settings = compose(
        ["algo.members=4", "algo.weight_decay=0.5", "algo.lr=0.5", "algo.optimizer.name=Adam"]
    ).algo
    noise = Noise(model, settings.noise, rank=1, mirrored=True, seed=0)
    wide = narrow(model, compute, torch.device("cpu"))
    weights = Weights(model, noise, settings, wide, offload=offload, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    for step in range(2):
        for name, gradient in noise.gradients(step, torch.tensor([1.0, -1.0, 0.5, 0.0])):
            weights.descend(name, gradient, 0.5, compare=True)
        finite, moved_by = weights.measure()
        assert finite
        moved = sum(
            (master - first[name]).square().sum().double()
            for name, master in weights.masters.items()
        )
        began = sum(first[name].square().sum().double() for name in weights.masters)
        assert moved_by["drift"] == pytest.approx(float((moved / began).sqrt()), rel=1e-6)
    for name, parameter in model.named_parameters():
        expected = weights.masters[name] if name in weights.masters else first[name]
        assert parameter.dtype == (torch.float32 if parameter.ndim == 1 else compute)
        assert torch.equal(parameter, expected.to(parameter.dtype))


def test_what_was_loaded_becomes_the_masters(tmp_path):
    """In half precision the forward's weights are new; float32 weights are never there twice."""
    model = small_model("llama")
    given = compose(["algo=eggroll", *SMALL]).algo
    noise = Noise(model, given.noise, rank=1, mirrored=True, seed=0)
    loaded = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    wide = narrow(model, torch.bfloat16, torch.device("cpu"))
    weights = Weights(model, noise, given, wide, offload=False, folder=tmp_path)
    assert weights.masters
    for name, master in weights.masters.items():
        assert (master.data_ptr(), master.dtype) == (loaded[name], torch.float32)
        assert weights.used[name].dtype == torch.bfloat16


@pytest.mark.thorough
def test_initial_weights_are_read_only_where_something_asks(tmp_path, monkeypatch):
    """They lie in a file, which takes longer to read than the rest of an update."""
    read, inner = [], DiskTensors.__getitem__
    monkeypatch.setattr(DiskTensors, "__getitem__", lambda *a: read.append(a[1]) or inner(*a))
    run_here(tmp_path / "plain", "algo.steps=12")
    compared = [event["step"] for event in events(tmp_path / "plain") if "drift" in event]
    assert compared == [1, 11]
    once = len(read) // 2
    run_here(tmp_path / "bound", "algo.steps=12", "algo.stop_at.drift=1e9")
    assert all("drift" in event for event in events(tmp_path / "bound"))
    assert len(read) == 14 * once
    drifts = [event.get("drift") for event in events(tmp_path / "bound")]
    assert [drifts[0], drifts[10]] == [
        event["drift"] for event in events(tmp_path / "plain") if "drift" in event
    ]


def test_offload_wants_masters_of_their_own():
    def check(run):
        run.algo.check_run(run)

    refuses(
        lambda: check(compose(["opt=[offload]"])),
        key="opt",
        value="offload",
        try_next=["algo=eggroll", "opt=amp"],
    )
    check(compose(["opt=[offload,amp]"]))


@pytest.mark.thorough
def test_equal_rewards_change_nothing(tmp_path):
    class Indifferent(Letters):
        def reward(self, example, completion):
            return 0.5

    run_here(tmp_path, "algo.steps=2", "algo.stop_at.drift=1", task=Indifferent())
    assert [(event["zero_fitness"], event["drift"]) for event in events(tmp_path)] == [
        (1.0, 0.0),
        (1.0, 0.0),
    ]


def test_amp_keeps_float32_masters(tmp_path):
    result = run_here(tmp_path, "opt=[amp]")
    bf16 = precision.native_bf16(torch.device("cpu"))
    assert result.dtype == ("bfloat16" if bf16 else "float32")
    assert json.loads((tmp_path / "result.json").read_text())["dtype"] == result.dtype
    assert {tensor.dtype for tensor in saved(tmp_path).tensors.values()} == {torch.float32}
    exported = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in exported.items():
        narrow = bf16 and "norm" not in name
        assert tensor.dtype == (torch.bfloat16 if narrow else torch.float32)
    if bf16:  # masters have bits that the forward's weights have not
        assert any(
            not torch.equal(tensor, tensor.bfloat16().float())
            for tensor in saved(tmp_path).tensors.values()
        )
    go_on = run_here(tmp_path, "opt=[amp]", "algo.steps=5", "resume=auto")
    assert go_on.steps == 5


@pytest.mark.thorough
def test_compile_equals_eager(own_task, launch, tmp_path):
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        pytest.skip(f"torch.compile needs a C++ compiler: {error}")
    launch(
        *("--config-dir", str(own_task), f"hydra.run.dir={tmp_path}/compiled", *MOVING),
        *("task=letters", "opt=[compile]", "algo.steps=2", "model.tiny.layers=1"),
    )
    run_here(tmp_path / "eager", "algo.steps=2", "model.tiny.layers=1")
    first, second = events(tmp_path / "compiled")
    assert first["compile_seconds"] > 3 * first["seconds"], (
        "compilation is told apart from the first step"
    )
    assert "compile_seconds" not in second
    assert completions(tmp_path / "compiled", "before") == completions(tmp_path / "eager", "before")
    assert largest_difference(tmp_path / "compiled", tmp_path / "eager") < 1e-4
    assert [event["reward"] for event in events(tmp_path / "compiled")] == pytest.approx(
        [event["reward"] for event in events(tmp_path / "eager")], rel=1e-3
    )


def test_profile_writes_a_trace_and_a_table(tmp_path):
    run_here(tmp_path, "opt=[profile]", "opt.profile.steps=1", "algo.steps=3")
    trace = json.loads((tmp_path / "profile" / "trace.json").read_text())
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])
    assert "Self CPU" in (tmp_path / "profile" / "table.txt").read_text()


@pytest.mark.thorough
def test_a_profile_leaves_out_most_of_a_long_rollout(tmp_path, monkeypatch):
    """And nothing of what comes after it."""
    traced = []
    for most in (64, 2):
        monkeypatch.setattr(profile, "MOST", most)
        out = tmp_path / str(most)
        run_here(out, "opt=[profile]", "opt.profile.steps=1", "algo.steps=2", "evaluate.every=null")
        trace = json.loads((out / "profile" / "trace.json").read_text())["traceEvents"]
        traced.append(Counter(event.get("name", "") for event in trace))
    whole, part = traced
    assert 0 < part["aten::searchsorted"] <= whole["aten::searchsorted"] / 2
    update = "Optimizer.step#SGD.step"
    assert part[update] == whole[update] > 0


@pytest.mark.thorough
def test_evaluation_on_the_way(tmp_path):
    run_here(tmp_path, "evaluate.every=2", "algo.steps=5")
    log = events(tmp_path)
    assert [event["step"] for event in log if "metric" in event] == [2, 4]
    assert log[1]["metric_name"] == "exact"
    assert "evaluate" in log[1]["phase_seconds"]


def test_a_prompt_that_does_not_fit_is_a_worded_error(tmp_path):
    refuses(
        ["algo.sampling.max_new_tokens=300"],
        key="algo.sampling.max_new_tokens",
        value=["300", "618 of 618 prompts", "256"],
        try_next=["Lower it to 251", "prompts.too_long=skip"],
        start=lambda overrides: run_here(tmp_path, *overrides),
    )


# --- memory that runs out


def run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, above_rows: int, population: bool = True
) -> list[int]:
    """The sampler's forwards, of a population or of the model alone, fail above a number of rows.
    Returns the rows tried, filled as the run goes.
    """
    real, tried = Sampler.generate_once, []

    def generate(self, requests, sampling, rows, watch):
        if (requests.members > 1) == population:
            tried.append(rows)
            if rows > above_rows:
                raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        return real(self, requests, sampling, rows, watch)

    monkeypatch.setattr(Sampler, "generate_once", generate)
    return tried


@pytest.mark.faults
def test_out_of_memory_halves_the_rows(tmp_path, monkeypatch):
    run_here(tmp_path / "smaller", "algo.steps=3", "algo.rollout_rows=4")
    tried = run_out_of_memory(monkeypatch, above_rows=4)
    run_here(tmp_path / "halved", "algo.steps=3", "algo.rollout_rows=16")
    assert tried[:3] == [16, 8, 4]
    assert set(tried[3:]) == {4}, "what held once is kept"
    assert same_bits(tmp_path / "halved", tmp_path / "smaller")
    log = (tmp_path / "halved" / "run.log").read_text()
    assert log.count("WARNING out of memory: repeating with 8 rows per forward") == 1
    assert log.count("WARNING out of memory: repeating with 4 rows per forward") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("auto", [False, True])
def test_noise_of_forwards_that_are_no_more_is_given_back(tmp_path, monkeypatch, auto):
    """Of those that did not fit, and of the probe, whose members are fewer."""
    held, fill = [], Noise.members

    def members(self, *args):
        held.append({count for count, _ in self.perturbed})
        return fill(self, *args)

    monkeypatch.setattr(Noise, "members", members)
    asked = ["algo.steps=2", "algo.members=32", "algo.rollout_rows=16"]
    if auto:
        pytest.importorskip("plugins.probe")
        run_here(tmp_path, *asked, "algo.sigma=auto")
        assert held[-1] == {4}, "directions of the run; those of the probe have more prompts"
    else:
        run_out_of_memory(monkeypatch, above_rows=8)
        run_here(tmp_path, *asked)
        assert held[1] == set(), "while the step is repeated"
        assert held[-1] == {2}


class ShortOnRank1(Letters):
    """Rank 1, and it alone, has memory for forwards of four rows of members, or of two rows in
    evaluations.
    """

    def __init__(self, scoring: str, population: bool) -> None:
        super().__init__(scoring)
        self.population = population

    def examples(self, split):
        if dist.is_initialized() and dist.get_rank() == 1 and split == "test":
            # in a process of its own, which ends with the run
            above = 4 if self.population else 2
            run_out_of_memory(pytest.MonkeyPatch(), above, self.population)
        return super().examples(split)


@pytest.mark.thorough
@pytest.mark.faults
@pytest.mark.parametrize("population", [True, False])
def test_ranks_agree_on_rows_after_running_out(run_in_ranks, tmp_path, population):
    """Members are shared out by rows, so a rank that goes on with fewer on its own would leave some
    out.
    """
    run_here(tmp_path / "one", "algo.steps=3")
    run_in_ranks(tmp_path / "two", "algo.steps=3", task=ShortOnRank1("smooth", population))
    assert "repeating with 4 rows per forward" in (tmp_path / "two" / "rank-1.log").read_text()
    assert "repeating with" not in (tmp_path / "two" / "run.log").read_text()
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-4
    assert [event["reward"] for event in events(tmp_path / "two")] == pytest.approx(
        [event["reward"] for event in events(tmp_path / "one")], rel=1e-6
    )


@pytest.mark.faults
def test_out_of_memory_at_the_floor_gives_advice(tmp_path, monkeypatch):
    tried = run_out_of_memory(monkeypatch, above_rows=0)
    with pytest.raises(ConfigError, match=r"2 rows .* algo\.sampling\.max_new_tokens"):
        run_here(tmp_path)
    assert tried == [8, 4, 2]


# --- what is left of a run


def test_the_export_completes_as_the_run_did(tmp_path):
    result = run_here(tmp_path)
    model, tokenizer = result.model_and_tokenizer()
    task = Letters()
    assert len(completions(tmp_path)) == 8
    for example, text in zip(task.examples("test"), completions(tmp_path), strict=False):
        ids = tokenizer(task.prompt(example), return_tensors="pt")["input_ids"]
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=256,
        )
        assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == text


def test_learning(tmp_path):
    """A base model that writes capitals more often than not learns to leave them."""
    result = train(
        compose(
            [
                "hardware=cpu",
                *("model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2"),
                *(
                    "model.tiny.intermediate_size=128",
                    "model.tiny.pretrain_steps=250",
                    "model.tiny.pretrain_lr=6e-3",
                ),
                *(
                    "algo.steps=30",
                    "algo.members=32",
                    "algo.prompts_per_step=4",
                    "algo.sampling.max_new_tokens=6",
                ),
                *("algo.sigma=0.02", "algo.lr=0.04", "evaluate.examples=40"),
            ]
        ),
        tmp_path,
        Letters(),
    )
    log = events(tmp_path)
    assert result.metric == "exact"
    assert result.before < 60
    assert result.after > result.before + 30
    assert result.verdict.startswith("it has learnt: held-out exact ")
    assert "It has learnt: held-out exact" in (tmp_path / "report.md").read_text()
    assert sum(e["reward"] for e in log[-5:]) > sum(e["reward"] for e in log[:5])


@pytest.mark.faults
def test_a_run_that_is_not_finite_stops(tmp_path):
    with pytest.raises(
        RunStopped, match=r"step 1: weights are not finite. No checkpoint was written before\."
    ) as stop:
        run_here(tmp_path, "algo.lr=1e38", "algo.steps=2")
    assert stop.value.code == EXIT_NUMBERS


@pytest.mark.faults
def test_all_checkpoints_damaged_is_no_fresh_start(launch, tmp_path):
    """Nothing is overwritten by a run that cannot go on."""
    out = tmp_path / "run"
    launch(*SMALL, f"hydra.run.dir={out}")
    before = (out / "metrics.jsonl").read_bytes()
    for manifest in (out / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{")
    for resume in ("auto", "no"):
        done = launch(*SMALL, f"hydra.run.dir={out}", f"resume={resume}", code=2)
        assert ("are damaged" if resume == "auto" else "already holds a run") in done.stderr
    assert (out / "metrics.jsonl").read_bytes() == before


@pytest.mark.thorough
def test_another_preset_may_go_on(launch, tmp_path):
    out = tmp_path / "run"
    launch(*SMALL, "algo.steps=2", f"hydra.run.dir={out}")
    launch(
        *[s for s in SMALL if s != "hardware=cpu"],
        "hardware=a100_40g",
        f"hydra.run.dir={out}",
        "resume=auto",
    )
    assert len(events(out)) == 4
    done = launch(*SMALL, "algo.steps=3", f"hydra.run.dir={out}", "resume=auto", code=2)
    assert "4 steps are done already, algo.steps is 3" in done.stderr


def test_a_pair_with_equal_rewards_moves_nothing():
    shaped = torch.tensor([1.7, 1.7, -0.5, -0.5, 0.3, -0.4])
    assert idle_share(shaped, mirrored=True) == pytest.approx(2 / 3)
    assert idle_share(torch.tensor([0.0, 1.0]), mirrored=False) == 0.5


# --- fitness


@pytest.mark.thorough
def test_the_best_of_the_samples_counts(tmp_path):
    """And is not what their mean teaches."""
    two = ("algo.steps=2", "algo.samples_per_prompt=2")
    run_here(tmp_path / "mean", *two)
    run_here(tmp_path / "best", *two, "algo.sample_quantile=1")
    assert events(tmp_path / "mean")[0]["reward"] == events(tmp_path / "best")[0]["reward"]
    assert not same_bits(tmp_path / "mean", tmp_path / "best")
    refuses(lambda: compose(["algo.sample_quantile=1"]), key="algo.sample_quantile", value="1")


@pytest.mark.thorough
def test_components_are_logged_and_normalised_apart(tmp_path):
    countdown = compose(
        [*MOVING, "task=countdown", "algo.steps=2", "algo.fitness=component_zscore"]
    )
    train(countdown, tmp_path / "run")
    first, second = events(tmp_path / "run")
    names = {"right", "numbers", "valid", "close"}
    assert set(first["components"]) == set(second["components"]) == names
    weights = countdown.task["weights"]
    whole = sum(weights[name] * first["components"][name] for name in names)
    assert first["reward"] == pytest.approx(whole / sum(weights.values()))
    assert "reward_centre" in first
    assert "reward_centre" not in second, "one step in ten is looked at closely"
    for parts, said in (((), "has none"), (("right",), "has 1")):
        task = Letters("smooth")
        task.components, task.weights = parts, dict.fromkeys(parts, 1.0)
        with pytest.raises(ConfigError, match=f"two components or more, and this task's {said}"):
            run_here(tmp_path / "letters", "algo.fitness=component_zscore", task=task)
    with pytest.raises(ConfigError, match=r"prompt_zscore has no effect with .*=1: it is zscore"):
        compose(["algo.fitness=prompt_zscore", "algo.prompts_per_step=1"])


# --- plugins


@pytest.mark.parametrize(
    ("asked", "folder"),
    [
        ("algo.method=randopt", "randopt"),
        ("probe=true", "probe"),
        ("algo.sigma=auto", "probe"),
        ("algo.lr=auto", "probe"),
    ],
)
def test_a_missing_plugin_is_named_with_the_setting(tmp_path, monkeypatch, asked, folder):
    given = [text for text in MOVING if not text.startswith("algo.lr=")]
    run = compose([*given, "algo.lr=0.1" if "sigma" in asked or "probe" in asked else asked, asked])
    monkeypatch.setattr(plugins, "PLUGINS", tmp_path / "none")
    with pytest.raises(ConfigError, match=rf"^{asked} .*plugins/{folder}, which is not there"):
        train(run, tmp_path, Letters("smooth"))
