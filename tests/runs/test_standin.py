"""Whole runs and parts of them on the stand-in for a CUDA device (tests/support/standin)."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from common import rows
from common.config import ConfigError
from common.distributed.workers import launch
from common.sampling.engine import Requests
from common.sampling.kv_cache import SlotCache
from common.sampling.native import Sampler
from eggroll.noise import Noise
from eggroll.weights import Weights
from launch import compose
from tests.support import CONF, SMALL, SMALL_CLASSIFY, SMALL_GRPO, SMALL_RFT, events, standin
from tests.support.models import ARCHITECTURES, prompts, sampling, small_model

pytestmark = pytest.mark.standin

RUNS = {
    "eggroll": ["algo=eggroll", *SMALL],
    "grpo": [*SMALL_GRPO, "algo.num_iterations=2", "algo.kl.beta=0.1"],
    "rft": SMALL_RFT,
    "classify": SMALL_CLASSIFY,
}
SWITCHES = {
    "eggroll": ["opt=[]", "opt=[amp,offload]"],
    "grpo": ["opt=[]", "opt=[amp,offload,checkpointing,deterministic]"],
    "rft": ["opt=[]", "opt=[amp,checkpointing]"],
    "classify": ["opt=[]", "opt=[amp]"],
}


def on_device(arguments):
    """Return the arguments with the stand-in's preset in place of the CPU's."""
    return [a for a in arguments if a != "hardware=cpu"] + ["hardware=a100_80g"]


def train(folder, arguments, capability=(8, 0)):
    """Run on the device. Return its peak, what made the host wait, and what was copied."""
    torch.cuda.get_device_capability = lambda *_: capability
    given = compose(on_device(arguments), CONF)
    package = type(given.algo).__module__.removesuffix(".config")
    with standin.watch() as seen:
        launch(f"{package}.train:train", given, folder)
    return {"peak": standin.DEVICE.peak, "waits": seen.waits, "copies": seen.to_device}


@pytest.mark.parametrize(("algo", "opt"), [(a, o) for a, given in SWITCHES.items() for o in given])
def test_a_run_goes_through_the_branches_for_cuda(algo, opt, standin, cache, tmp_path):
    """Mixed devices would raise. What is measured is what a CPU measures, in float32."""
    seen = standin.call(train, tmp_path / "cuda", [*RUNS[algo], opt], CLUTCH_CACHE=str(cache))
    assert seen["peak"] > 0
    assert (tmp_path / "cuda" / "result.json").exists()
    if opt == "opt=[]" and algo in ("eggroll", "grpo"):
        given = compose(RUNS[algo])
        standin.call(
            launch, f"{algo}.train:train", given, tmp_path / "cpu", CLUTCH_CACHE=str(cache)
        )
        ours, theirs = (events(tmp_path / name) for name in ("cuda", "cpu"))
        assert [e["reward"] for e in ours] == pytest.approx([e["reward"] for e in theirs], abs=1e-6)
        assert ours[-1]["generated_tokens"] == theirs[-1]["generated_tokens"]


@pytest.mark.parametrize("algo", ["grpo", "rft", "classify"])
def test_float16_with_a_grad_scaler_as_on_a_v100(algo, standin, cache, tmp_path):
    arguments = [*RUNS[algo], "opt=[amp]"]
    standin.call(train, tmp_path, arguments, (7, 0), CLUTCH_CACHE=str(cache))
    log = (tmp_path / "run.log").read_text()
    assert "float16, GradScaler" in log


# --- what the host waits for


def decode(name, rows):
    """Count what makes the host wait while 64 tokens of 32 rows are decoded."""
    model = small_model(name).to("cuda:0")
    sampler = Sampler(model, pad_id=96, stop_ids=(), rows=rows, graphs=True)
    requests = Requests(prompts=prompts((10,) * 8), samples=4)
    with standin.watch() as seen:
        sampler.generate(requests, sampling(1.0, new=64))
    return seen.waits, seen.to_device


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_decoding_asks_the_host_for_little(name, standin):
    """At most 5 waits for 8 tokens, and nothing but the prompts goes to the device."""
    waits, _ = standin.call(decode, name, 64)
    assert waits.total() <= 5 * 64 / 8


def micro_batches(folder, arguments):
    """Train with GRPO; count the waits and copies of its training pass alone."""
    given = compose(on_device(arguments))
    policy = importlib.import_module("grpo.policy")
    inner, seen = policy.Policy._backward, standin.watch()
    batches = []

    def backward(self, rollouts, advantage, loss, rows):
        batches.append(-(-rollouts.lengths.numel() // rows))
        with seen:
            return inner(self, rollouts, advantage, loss, rows)

    policy.Policy._backward = backward
    launch("grpo.train:train", given, folder)
    return sum(batches), len(batches), seen.waits, seen.to_device


def test_a_training_pass_asks_the_host_for_one_number_per_pass(standin, cache, tmp_path):
    """What goes to the device is pinned, so the host does not wait for it."""
    arguments = [*SMALL_GRPO, "algo.train_rows=4"]
    batches, passes, waits, copies = standin.call(
        micro_batches, tmp_path, arguments, CLUTCH_CACHE=str(cache)
    )
    assert waits.total() <= batches + passes, waits
    assert copies.total() == 0, copies


# --- memory


def planted(algo, arguments, folder, places):
    """Let memory run out once at each of `places` of a run; return what came of it."""
    device, found = standin.DEVICE, []
    before = device.total
    given = compose(on_device(arguments))
    launch(f"{algo}.train:train", given, folder / "whole")
    taken, kept = device.total - before, device.live
    kinds = ("memory", "accelerator", "cublas")
    for place in range(places):
        device.fail(int(taken * (place + 0.5) / places), kinds[place % 3])
        try:
            launch(f"{algo}.train:train", given, folder / str(place))
            outcome = "went on"
        except ConfigError as error:
            outcome = str(error)
        except RuntimeError as error:
            outcome = f"RuntimeError: {error}" if rows.is_out_of_memory(error) else repr(error)
        device.fail(0)
        found.append((outcome, device.live - kept))
    return found


@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_memory_that_runs_out_at_25_places_is_survived_or_told(algo, standin, cache, tmp_path):
    """In a recording too. A run goes on with half the rows, or ends with one clear error; what it
    held is given back.
    """
    arguments = [a for a in RUNS[algo] if not a.startswith("algo.steps")]
    arguments += ["algo.steps=1", "evaluate.examples=2"]
    found = standin.call(planted, algo, arguments, tmp_path, 25, CLUTCH_CACHE=str(cache))
    went_on = [outcome for outcome, _ in found if outcome == "went on"]
    others = {outcome for outcome, _ in found if outcome != "went on"}
    assert len(went_on) >= 15, others
    assert all("out of memory" in other.lower() or "CUBLAS" in other for other in others), others
    assert max(left for _, left in found) <= 1 << 20


def cached_dtype():
    """Return the dtypes of keys and values where float32 weights are sampled under autocast."""
    kinds, inner = set(), SlotCache.allocate

    def allocate(self, layer, keys, values):
        kinds.add((keys.dtype, values.dtype))
        inner(self, layer, keys, values)

    SlotCache.allocate = allocate
    for name in ARCHITECTURES:
        model = small_model(name).to("cuda:0")
        sampler = Sampler(
            model, pad_id=96, stop_ids=(), rows=4, graphs=True, autocast=torch.bfloat16
        )
        sampler.generate(Requests(prompts=prompts()), sampling(1.0))
    return kinds


def test_keys_take_as_much_room_as_the_plan_says(standin):
    """A rotation with float32 angles widens them, and they were kept so."""
    assert standin.call(cached_dtype) == {(torch.bfloat16, torch.bfloat16)}


def kept_buffers(folder):
    """Return the dtypes of a model's buffers and parameters where EGGROLL trains it in bf16."""
    given = compose(["algo=eggroll", *SMALL])
    model = small_model("llama").to("cuda:0")
    noise = Noise(model, given.algo.noise, rank=1, mirrored=True, seed=0)
    Weights(model, noise, given.algo, torch.bfloat16, offload=False, folder=Path(folder))
    return {b.dtype for b in model.buffers()}, {p.dtype for p in model.parameters()}


def test_eggroll_rounds_weights_alone(standin, tmp_path):
    """Rotary frequencies in bf16 are off by 0.4 %, and what is exported has exact ones."""
    buffers, parameters = standin.call(kept_buffers, str(tmp_path))
    assert buffers == {torch.float32}
    assert parameters == {torch.bfloat16}


def test_recorded_steps_read_nothing_that_a_recording_left(standin):
    """What a recording allocated is poisoned: the tokens stay those of plain steps."""
    recorded, plain, graphs = standin.call(both_ways)
    assert recorded == plain
    assert graphs[1] > graphs[0] > 1


def both_ways():
    """Sample with and without graphs."""
    from tests.support.standin.tape import Graph

    model = small_model("llama").to("cuda:0")
    made = []
    for graphs in (True, False):
        sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=6, graphs=graphs)
        requests = Requests(prompts=prompts(), samples=3, logprobs=True)
        found = sampler.generate(requests, sampling(1.0, new=40))
        assert all(math.isfinite(x) for x in found.logprobs.flatten().tolist())
        made.append(found.tokens.tolist())
    return *made, (Graph.recorded, Graph.replayed)
