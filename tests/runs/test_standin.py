"""Whole runs and parts of them on the stand-in for a CUDA device (tests/support/standin)."""

import contextlib
import errno
import importlib
import io
import json
import math
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import launch as command_line
from common import language_model
from common.checkpoint import checkpoint
from common.config import AdapterConfig, ConfigError, SamplingConfig
from common.device import hardware
from common.distributed.context import Context
from common.distributed.workers import launch
from common.engine import Requests
from common.memory import fitting, row_limit
from common.memory import plan as plans
from common.memory.row_limit import Load
from common.model import logprobs, precision_copies, varlen
from common.model.adapter import Adapter
from common.model.precision_copies import narrow
from common.model.quantized import replace_layers
from common.model.tiny import byte_tokenizer
from common.parts import open_parts
from common.report import gpu_usage, summary
from common.run.checkpoints import Checkpoints
from common.sampling import slots
from common.sampling.cuda_graphs import CudaGraphs
from common.sampling.kv_cache import ColumnCache
from common.sampling.native import Sampler
from common.session import Session
from common.system.signals import EXIT_NUMBERS, EXIT_WRITE, RunStopped
from eggroll import weights
from eggroll.noise import Noise
from eggroll.weights import Weights
from launch import compose
from rft import stages
from rft.config import SelectConfig
from tests.support import (
    CONF,
    MOVING,
    SMALL,
    SMALL_CLASSIFY,
    SMALL_GRPO,
    SMALL_RFT,
    events,
    nvml,
    standin,
)
from tests.support.flash import emulated
from tests.support.letters import Letters
from tests.support.models import (
    ARCHITECTURES,
    KINDS,
    configure_qwen,
    prompts,
    sampling,
    small_model,
)
from tests.support.traffic import Traffic

pytestmark = pytest.mark.standin

RUNS = {
    "eggroll": ["algo=eggroll", *SMALL, "algo.steps=2"],
    "grpo": [*SMALL_GRPO, "algo.num_iterations=2", "algo.kl.beta=0.1", "algo.steps=3"],
    "rft": SMALL_RFT,
    "classify": SMALL_CLASSIFY,
}
SWITCHES = {
    "eggroll": ["opt=[]", "opt=[amp,offload]"],
    "grpo": ["opt=[]", "opt=[amp,offload,checkpointing,deterministic]"],
    "rft": ["opt=[]", "opt=[amp,checkpointing]"],
    "classify": ["opt=[]", "opt=[amp]"],
}


# An iteration from random weights, some of whose samples are close enough.
UNTAUGHT = ["model.tiny.pretrain_steps=0", "task.scoring=smooth", "algo.select.accept=0.01"]
UNTAUGHT += ["algo.iterations=1", "algo.epochs=1"]


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


@pytest.mark.parametrize(
    ("algo", "opt"),
    [
        pytest.param(algo, opt, marks=[pytest.mark.thorough] if opt == "opt=[]" else [])
        for algo, switches in SWITCHES.items()
        for opt in switches
    ],
)
def test_a_run_goes_through_the_branches_for_cuda(algo, opt, standin, cache, tmp_path):
    """Mixed devices would raise. What is measured is what a CPU measures, in float32."""
    asked = [*RUNS[algo], opt, *(UNTAUGHT if algo == "rft" else [])]
    seen = standin.call(train, tmp_path / "cuda", asked, CLUTCH_CACHE=str(cache))
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


def plan_by_itself(arguments):
    """Return the plan of a run with hardware=auto, as it is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        by_itself = [a for a in arguments if a != "hardware=cpu"]
        command_line.train(compose(by_itself, CONF), "")
    return printed.getvalue()


def test_the_plan_names_the_cards_experiment(standin, cache):
    asked = [*SMALL_RFT, "plan=true"]
    printed = standin.call(plan_by_itself, asked, CLUTCH_CACHE=str(cache))
    assert "experiment=rft_a100_80g is made for this card (hardware=a100_80g)" in printed


def train_with_nvml(folder, arguments):
    """Run on the device, whose use is read fifty times per second."""
    gpu_usage.SECONDS = 0.02
    sys.modules["pynvml"] = nvml.module([nvml.Gpu("GPU-aa", utilisation=(20, 80))])
    train(folder, arguments)
    assert sys.modules["pynvml"].started == 0, "NVML is closed"


@pytest.mark.parametrize("algo", ["grpo", "rft"])
def test_a_run_tells_how_much_it_used_the_device(algo, standin, cache, tmp_path):
    asked = [*RUNS[algo], *(UNTAUGHT if algo == "rft" else [])]
    standin.call(train_with_nvml, tmp_path / "out", asked, CLUTCH_CACHE=str(cache))
    result = json.loads((tmp_path / "out/result.json").read_text())
    logged = [event["gpu"] for event in events(tmp_path / "out") if "gpu" in event]
    assert result["gpu"]["utilisation"]["p10"] >= 20
    assert result["gpu"]["utilisation"]["p90"] <= 80
    assert result["gpu"]["memory"]["p50"] == 25
    assert result["gpu"]["joules"] == pytest.approx(sum(event["joules"] for event in logged))
    assert result["gpu"]["joules_per_1000_tokens"] == pytest.approx(
        1000 * result["gpu"]["joules"] / result["generated_tokens"]
    )
    assert "GPU utilisation" in (tmp_path / "out/report.md").read_text()


def test_a_resumed_run_goes_on_with_what_it_used(standin, cache, tmp_path):
    asked = [*RUNS["grpo"], "algo.lr_schedule.kind=constant", "algo.lr_schedule.end=1"]
    for steps in ("algo.steps=2", "algo.steps=4"):
        given = [*asked, steps, "resume=auto"]
        standin.call(train_with_nvml, tmp_path / "out", given, CLUTCH_CACHE=str(cache))
    result = json.loads((tmp_path / "out/result.json").read_text())
    logged = [event["gpu"] for event in events(tmp_path / "out") if event["step"]]
    assert len(logged) == 4
    assert result["gpu"]["joules"] == pytest.approx(sum(event["joules"] for event in logged))
    assert sum(event["tokens"] for event in logged) == result["generated_tokens"]


@pytest.mark.thorough
@pytest.mark.parametrize("algo", ["grpo", "rft", "classify"])
def test_float16_with_a_grad_scaler_as_on_a_v100(algo, standin, cache, tmp_path):
    arguments = [*RUNS[algo], "opt=[amp]", *(["algo.iterations=1"] if algo == "rft" else [])]
    standin.call(train, tmp_path, arguments, (7, 0), CLUTCH_CACHE=str(cache))
    log = (tmp_path / "run.log").read_text()
    assert "float16, GradScaler" in log


@pytest.mark.thorough
@pytest.mark.parametrize("quantize", ["null", "int8", "nf4"])
@pytest.mark.parametrize("algo", ["eggroll", "grpo", "rft"])
def test_adapters_in_float16_as_on_a_v100(algo, quantize, standin, cache, tmp_path):
    """On weights in float16 or in few bits. The adapter moves, and its master is float32."""
    pytest.importorskip("peft")
    arguments = [*RUNS[algo], "opt=[amp]", *(["algo.iterations=1"] if algo == "rft" else [])]
    arguments += ["model.adapter.rank=4", f"model.quantize={quantize}"]
    arguments += ["algo.sampling.temperature=1"] if algo == "eggroll" else []
    standin.call(train, tmp_path, arguments, (7, 0), CLUTCH_CACHE=str(cache))
    assert (
        f"float16{'' if algo == 'eggroll' else ', GradScaler'}"
        in (tmp_path / "run.log").read_text()
    )
    seen = events(tmp_path)
    assert not any(event.get("overflow") for event in seen)
    assert all(math.isfinite(event["loss"]) for event in seen if "loss" in event)
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    held = torch.float16 if algo == "eggroll" else torch.float32  # what it samples with
    assert {tensor.dtype for tensor in adapter.values()} == {held}
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


def evolve_in_float16(folder):
    """Perturb weights so much that float16 does not hold what comes of it."""
    try:
        train(folder, [*RUNS["eggroll"], "opt=[amp]", "algo.sigma=3e3"], (7, 0))
    except RunStopped as stop:
        return stop.code, str(stop)


@pytest.mark.thorough
def test_an_overflow_of_members_in_float16_is_told_as_such(standin, cache, tmp_path):
    code, text = standin.call(evolve_in_float16, tmp_path, CLUTCH_CACHE=str(cache))
    assert code == EXIT_NUMBERS
    assert text.startswith("step 1: NaN or infinity in a reward or logits on example")
    assert "In float16 (the largest number is 65,504) models that were trained in" in text


def precisions(folder):
    """Return the precision of products while the model is checked, and while it is trained."""
    found, inner = [], logprobs.token_logprobs

    def token_logprobs(*arguments):
        found.append(torch.get_float32_matmul_precision())
        return inner(*arguments)

    logprobs.token_logprobs = token_logprobs
    train(folder, [*RUNS["grpo"], "opt=[tf32]", "algo.steps=1"])
    return found


@pytest.mark.thorough
def test_a_model_is_checked_without_tf32_and_trained_with_it(standin, cache, tmp_path):
    checked, *trained = standin.call(precisions, tmp_path, CLUTCH_CACHE=str(cache))
    assert checked == "highest"
    assert set(trained) == {"high"}


# --- what the host waits for


def decode(name, rows):
    """Count what makes the host wait while 64 tokens of 32 rows are decoded."""
    model = small_model(name).to("cuda:0")
    sampler = Sampler(model, pad_id=96, stop_ids=(), rows=rows, graphs=True)
    requests = Requests(prompts=prompts((10,) * 8), samples=4)
    with standin.watch() as seen:
        sampler.generate(requests, sampling(1.0, new=64))
    return seen.waits, seen.to_device


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.thorough), "qwen2"])
def test_decoding_asks_the_host_for_little(name, standin):
    """At most 5 waits for 8 tokens, and nothing but the prompts goes to the device."""
    waits, _ = standin.call(decode, name, 64)
    assert waits.total() <= 5 * 64 / 8


def micro_batches(folder, arguments, flash=False):
    """Train with GRPO; count the waits and copies of its training pass alone."""
    if flash:
        contextlib.ExitStack().enter_context(emulated("CUDA"))
    given = compose(on_device(arguments))
    policy = importlib.import_module("grpo.policy")
    inner, seen = policy.Policy.backward, standin.watch()
    batches = []

    def backward(self, batch, advantage, loss, rows, computed):
        batches.append(-(-batch.lengths.numel() // rows))
        with seen:
            return inner(self, batch, advantage, loss, rows, computed)

    policy.Policy.backward = backward
    launch("grpo.train:train", given, folder)
    return sum(batches), len(batches), seen.waits, seen.to_device


@pytest.mark.thorough
@pytest.mark.parametrize("flash", [False, True])
def test_a_training_pass_waits_once_for_the_host(flash, standin, cache, tmp_path):
    """What goes to the device is pinned, so the host does not wait for it, and lays out the next
    micro-batch while the device computes this one.
    """
    arguments = [*SMALL_GRPO, "algo.train_rows=4", *(["opt=[amp]"] if flash else [])]
    batches, passes, waits, copies = standin.call(
        micro_batches, tmp_path, arguments, flash, CLUTCH_CACHE=str(cache)
    )
    assert batches > passes
    assert waits.total() <= passes, waits
    assert copies.total() == 0, copies


def lend_reference(folder):
    """Count what it takes to have the reference model on the device for a block."""
    run = compose(on_device([*SMALL_GRPO, "opt=[amp,offload]", "model.tiny.pretrain_steps=0"]))
    context = Context(0, 1, hardware.find(run.hardware), Path(folder))
    one = open_parts(run, context, Letters("smooth"), reference=True)
    held = [p.data_ptr() for p in one.lm.reference.parameters()]
    before, seen = standin.DEVICE.live, standin.watch()
    with seen, one.lm.reference_on_device() as reference:
        there = {p.device.type for p in (*reference.parameters(), *reference.buffers())}
        lent = standin.DEVICE.live - before
    size = sum(p.nbytes for p in one.lm.reference.parameters())
    kept = held == [p.data_ptr() for p in one.lm.reference.parameters()]
    given_back = standin.DEVICE.live == before
    one.close()
    return there, lent >= size, kept, given_back, seen.waits, seen.to_device


def test_an_offloaded_reference_is_not_copied_back(standin, tmp_path):
    """It never changes; and what goes to the device is pinned."""
    there, lent, kept, given_back, waits, copies = standin.call(lend_reference, tmp_path)
    assert there == {"cuda"}
    assert lent
    assert kept
    assert given_back
    assert waits.total() == 0, waits
    assert copies.total() == 0, copies


# --- checkpoints


def keep_checkpoints(folder, arguments, how):
    """Run with a checkpoint per step. Return the thread that wrote each, and what ended the run.
    how: "beside", "in turn", or "full": the second one cannot be written.
    """
    wrote, inner = [], checkpoint.seal

    def seal(*given):
        wrote.append(threading.current_thread().name)
        if how == "full" and len(wrote) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(0.2)  # steps go on meanwhile
        return inner(*given)

    checkpoint.seal = seal
    if how == "in turn":
        save = Checkpoints.save
        Checkpoints.save = lambda self, state, _, *more: save(self, state, False, *more)
    try:
        train(folder, [*arguments, "checkpoint.every=1", "checkpoint.keep=9"])
    except RunStopped as stop:
        return wrote, (stop.code, str(stop))
    return wrote, None


@pytest.mark.thorough
@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_checkpoints_written_beside_training_are_those_of_their_step(
    algo, standin, cache, tmp_path
):
    more = {
        "eggroll": ["algo.optimizer.name=Adam", "algo.lr=0.01"],
        "grpo": ["algo.num_iterations=1"],
    }
    arguments = [*RUNS[algo], *more[algo], "algo.steps=4"]
    found = {}
    for how in ("beside", "in turn"):
        found[how], ended = standin.call(
            keep_checkpoints, tmp_path / how, arguments, how, CLUTCH_CACHE=str(cache)
        )
        assert ended is None
    names = [path.name for path in sorted((tmp_path / "beside/checkpoints").iterdir())]
    steps = [name for name in names if name.startswith("step-")]
    assert steps == names, "nothing is half-written at the end"
    assert len(steps) >= 4
    written = found["beside"][: len(steps)]
    assert written == ["checkpoint"] * (len(steps) - 1) + ["MainThread"]
    for name in steps:
        one, other = (checkpoint.load(tmp_path / how / "checkpoints" / name) for how in found)
        assert one.tensors.keys() == other.tensors.keys()
        for key, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[key])
        for a, b in zip(tree_leaves(one.extra), tree_leaves(other.extra), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert one.state["run"]["step"] == other.state["run"]["step"] == one.step


def test_a_failed_background_checkpoint_ends_the_run(standin, cache, tmp_path):
    """When the next one is due; those before it are whole."""
    _, ended = standin.call(
        keep_checkpoints, tmp_path, RUNS["eggroll"], "full", CLUTCH_CACHE=str(cache)
    )
    code, text = ended
    assert code == EXIT_WRITE
    assert re.search(r"step-00000002 could not be written: .*No space left on device", text)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


# --- what is read and written


def training_traffic(shape, rows, flash):
    """Return the bytes per trained token of a training forward and backward in bfloat16: of the
    transformer and of the head.
    """
    standin.DEVICE.limit(400 << 30)
    standin.DEVICE.compute_below(1 << 20)
    model, device = model_of(shape), torch.device("cuda:0")
    logprobs.find_gap = lambda _: None
    logprobs.prepare(model)
    laid = logprobs.group([[5] * 128] * (rows // 8), [[[7] * 256] * 8] * (rows // 8), device)
    body, head = Traffic(), Traffic()
    with emulated("CUDA", hollow=True) if flash else contextlib.nullcontext():
        with torch.autocast("cuda", torch.bfloat16):
            with body:
                states = logprobs.hidden_states(model, laid)
            found = states.detach().requires_grad_()
            with head:
                logp, _ = logprobs.head_logprobs(model, found, laid.targets, 1.0)
        with head:
            logp.sum().backward()
        with body:
            states.backward(found.grad)
    return body.moved / len(laid.targets), head.moved / len(laid.targets)


@pytest.mark.thorough
@pytest.mark.parametrize("flash", [False, True])
def test_the_head_moves_half_of_what_the_transformer_moves(flash, standin):
    """With a vocabulary of 152k, which is the worst: 35 MB per token where it went in chunks of
    110 tokens with a product beside the gradient, 27 MB in the transformer.
    """
    body, head = standin.call(training_traffic, "0.5b", 32, flash)
    assert head < 0.5 * body
    assert head < 12e6


class Launched(CudaGraphs):
    """In place of recordings: each step counts what it launches."""

    steps: ClassVar[list[Traffic]] = []

    def __init__(self, device):
        self.device, self.replays = device, {}

    def record(self, step):
        def counted():
            with Traffic() as seen:
                step()
            self.steps.append(seen)

        return counted


def decode_traffic(shape, lengths, flash):
    """Return the bytes of a decode step in bfloat16 over those of the weights and of the keys and
    values of its rows; lengths: tokens of their prompts.
    """
    standin.DEVICE.limit(400 << 30)
    standin.DEVICE.compute_below(1 << 20)
    model, new = model_of(shape).to(torch.bfloat16), 24

    with emulated("CUDA", hollow=True) if flash else contextlib.nullcontext():
        sampler = Sampler(model, pad_id=0, stop_ids=(), rows=len(lengths), graphs=True)
        sampler.recorder = Launched
        sampler.generate(Requests(prompts=[[5] * n for n in lengths]), sampling(1.0, new=new))
    config = model.config
    of_token = 4 * config.num_hidden_layers * config.num_key_value_heads * 64
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    return Launched.steps[-1].moved / (weights + of_token * sum(n + new for n in lengths))


@pytest.mark.thorough
@pytest.mark.parametrize(("flash", "least", "most"), [(False, 1.6, 2.0), (True, 1.0, 1.3)])
def test_a_decode_step_reads_weights_and_keys_that_count(flash, least, most, standin):
    """64 rows of up to 1k tokens. Without flash attention scores are made, masked and cast, and
    shorter rows read what the longest one has.
    """
    lengths = [1000 - 10 * row for row in range(64)]
    ratio = standin.call(decode_traffic, "0.5b", lengths, flash)
    assert least < ratio < most


def adapted(model, folder, rank=4):
    """Put an adapter that has been trained beside a model, as a run with opt=[amp] has it."""
    run = compose(on_device(SMALL_GRPO))
    one = Context(0, 1, hardware.find(run.hardware), Path(folder))
    adapter = Adapter(model.bfloat16(), AdapterConfig(rank=rank), one, seed=0)
    precision_copies.keep_wide(model)
    for parameter in adapter.parameters.values():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def layer_kernels(folder, adapter):
    """Return how many kernels a decode step launches per layer, and how many of them cast."""
    seen = []
    for layers in (2, 4):
        sizes = KINDS["qwen2"] | {"num_hidden_layers": layers, "vocab_size": 97}
        config = AutoConfig.for_model("qwen2", **sizes)
        model = AutoModelForCausalLM.from_config(config).to("cuda:0").eval()
        model = adapted(model, folder) if adapter else model
        half_precision = {"graphs": True, "autocast": torch.bfloat16}
        sampler = Sampler(model, pad_id=0, stop_ids=(), rows=4, **half_precision)
        sampler.recorder = Launched
        sampler.refresh()
        sampler.generate(Requests(prompts=prompts()[:4]), sampling(1.0))
        seen.append(Launched.steps[-1])
    return (seen[1].calls - seen[0].calls) / 2, (seen[1].casts - seen[0].casts) / 2


def test_an_adapter_takes_no_more_kernels_than_a_plain_model(standin, tmp_path):
    """It is merged into the weights that are sampled with; beside them it took 81 kernels to 48.
    What a norm returns is cast once, for q, k and v and for gate and up.
    """
    pytest.importorskip("peft")
    plain, casts = standin.call(layer_kernels, tmp_path, False)
    assert casts == 5, "two norms, the output of attention, keys and scores"
    assert plain <= 45
    merged, casts = standin.call(layer_kernels, tmp_path, True)
    assert casts == 5
    assert merged <= 1.1 * plain


def count_recordings(folder, room):
    """Train an adapter with flash attention, on a device with so many bytes to plan with. Return
    the recordings after each rollout, and the bytes that merging took then.
    """
    from tests.support.standin.tape import Graph

    policy, counts = importlib.import_module("grpo.policy").Policy, []
    backward = policy.backward

    def count(self, *arguments):
        counts.append((Graph.recorded, self.parts.engine.merged_bytes))
        return backward(self, *arguments)

    policy.backward = count
    Context.memory_gb = room / row_limit.FITTED / 2**30
    arguments = [*SMALL_GRPO, "opt=[amp]", "model.adapter.rank=4", "algo.steps=2"]
    with emulated("CUDA"):
        train(folder, [*arguments, "algo.resample_rounds=0", "evaluate.every=0"])
    return counts


@pytest.mark.parametrize(("room", "fits"), [(1e9, True), (2.6e5, False)])
def test_recorded_steps_stay_while_an_adapter_is_trained(room, fits, standin, cache, tmp_path):
    """And it is merged, where there is room for both; else each rollout records its own."""
    pytest.importorskip("peft")
    asked = count_recordings, tmp_path, room
    (first, merged_bytes), (second, _) = standin.call(*asked, CLUTCH_CACHE=str(cache))
    assert (second == first) == fits
    assert (merged_bytes > 0) == fits
    assert ("the adapter merged" in (tmp_path / "report.md").read_text()) == fits


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
            outcome = f"RuntimeError: {error}" if hardware.is_out_of_memory(error) else repr(error)
        device.fail(0)
        found.append((outcome, device.live - kept))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_running_out_of_memory_anywhere_is_handled(algo, standin, cache, tmp_path):
    """In a recording too. A run goes on with half the rows, or ends with one clear error; what it
    held is given back.
    """
    arguments = [a for a in RUNS[algo] if not a.startswith("algo.steps")]
    arguments += ["algo.steps=1", "evaluate.examples=2", "algo.sampling.max_new_tokens=4"]
    found = standin.call(planted, algo, arguments, tmp_path, 25, CLUTCH_CACHE=str(cache))
    went_on = [outcome for outcome, _ in found if outcome == "went on"]
    others = {outcome for outcome, _ in found if outcome != "went on"}
    assert len(went_on) >= 15, others
    assert all("out of memory" in other.lower() or "CUBLAS" in other for other in others), others
    assert max(left for _, left in found) <= 1 << 20


def cached_dtype():
    """Return the dtypes of keys and values where float32 weights are sampled under autocast."""
    kinds, inner = set(), ColumnCache.allocate

    def allocate(self, layer, keys, values):
        kinds.add((keys.dtype, values.dtype))
        inner(self, layer, keys, values)

    ColumnCache.allocate = allocate
    for name in ARCHITECTURES:
        model = small_model(name).to("cuda:0")
        sampler = Sampler(
            model, pad_id=96, stop_ids=(), rows=4, graphs=True, autocast=torch.bfloat16
        )
        sampler.generate(Requests(prompts=prompts()), sampling(1.0))
    return kinds


@pytest.mark.thorough
def test_keys_take_as_much_room_as_the_plan_says(standin):
    """A rotation with float32 angles widens them, and they were kept so."""
    assert standin.call(cached_dtype) == {(torch.bfloat16, torch.bfloat16)}


def kept_buffers(folder):
    """Return the dtypes of buffers, matrices and norms where EGGROLL trains a model in bf16."""
    given = compose(["algo=eggroll", *SMALL])
    model = small_model("llama").to("cuda:0")
    noise = Noise(model, given.algo.noise, rank=1, mirrored=True, seed=0)
    wide = narrow(model, torch.bfloat16, model.device)
    Weights(model, noise, given.algo, wide, offload=False, folder=Path(folder))
    kinds = [{p.dtype for p in model.parameters() if p.ndim == n} for n in (2, 1)]
    return {b.dtype for b in model.buffers()}, *kinds


@pytest.mark.thorough
def test_eggroll_rounds_weights_alone(standin, tmp_path):
    """Rotary frequencies in bf16 are off by 0.4 %, and norms lose small updates."""
    buffers, matrices, norms = standin.call(kept_buffers, str(tmp_path))
    assert buffers == norms == {torch.float32}
    assert matrices == {torch.bfloat16}


def load_for_evolution(folder, arguments):
    """Load a model as EGGROLL does. Return the planned bytes of its weights, and the peak until the
    plan is made.
    """

    def stop(self, model):
        planned.append(self.state.on_rank(model, rollout=True))
        raise Measured

    planned = []
    fitting.Memory.describe = stop
    with contextlib.suppress(Measured):
        train(folder, arguments)
    return planned[0], standin.DEVICE.peak


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [[], ["model.quantize=int8"]])
def test_loading_a_population_fits_its_sampling_memory(more, dtype, standin, tmp_path):
    """Without a float32 copy of the weights on the device, in whatever dtype their file is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configure_small(), dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["algo=eggroll", "opt=[amp,offload]", "model=hf", f"model.path={tmp_path}/model"]
    arguments += ["algo.members=4", "algo.sampling.max_new_tokens=4", *more]
    arguments += ["algo.noise.matrices=lowrank"]
    planned, peak = standin.call(load_for_evolution, tmp_path, arguments)
    assert peak == pytest.approx(planned, rel=0.1)


def configure_small():
    """Return the configuration of a Llama of 34M parameters, none of whose matrices is large."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 40}
    return LlamaConfig(**sizes, num_attention_heads=8, vocab_size=512)


def find_memory(arguments):
    """Return the memory of the device, and what of it a run may use."""
    device = hardware.find(compose(["algo=grpo", *arguments]).hardware)
    return device.memory_gb, hardware.available_gb(device)


def test_a_run_may_be_given_a_part_of_the_memory(standin):
    """Of a card that is shared with others; the facts of a preset limit nothing."""
    assert standin.call(find_memory, ["hardware.memory_gb=3"]) == (3, 3)
    assert standin.call(find_memory, ["hardware=v100"]) == (80, 80)


@pytest.mark.thorough
def test_masters_on_the_host_change_no_number(standin, cache, tmp_path):
    """The same steps to the bit, drift among them, as with all of it on the device."""
    found, told = [], ("reward", "drift", "applied_share")
    for opt in ("opt=[amp]", "opt=[amp,offload]"):
        given = compose(on_device([*MOVING, opt, "algo.weight_decay=0.1"]))
        arguments = "eggroll.train:train", given, tmp_path / opt, Letters("smooth")
        standin.call(launch, *arguments, CLUTCH_CACHE=str(cache))
        found.append([[event[name] for name in told] for event in events(tmp_path / opt)])
    assert found[0] == found[1]
    assert found[0][-1][1] > 0


@pytest.mark.thorough
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


def draw_peak(rows, vocabulary, settings):
    """Return the bytes that one draw takes, its logits among them."""
    uniform, held = torch.rand(rows).to("cuda:0"), standin.DEVICE.live
    logits = torch.randn(rows, vocabulary).to("cuda:0")
    standin.DEVICE.reset_peak()
    slots.draw(logits, settings, uniform, True)
    return standin.DEVICE.peak - held


@pytest.mark.thorough
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 50), (0.9, 50)])
def test_the_plan_of_a_rollout_counts_what_cutting_takes(top_p, top_k, standin):
    settings = SamplingConfig(
        max_new_tokens=1, temperature=0.7, top_p=top_p, top_k=top_k, min_p=0.0
    )
    model = small_model("llama")
    wide, narrow = model.config.vocab_size + 50_000, model.config.vocab_size
    planned = []
    for model.config.vocab_size in (wide, narrow):
        sampler = Sampler(model, pad_id=96, stop_ids=(), rows=8)
        planned.append(sampler.peak_bytes(8, Load(1, settings)))
    # Those of the prompts are there beside those of the rows.
    counted = standin.call(draw_peak, 8, 50_000, settings) + 8 * 4 * 50_000
    assert planned[0] - planned[1] == pytest.approx(counted, rel=0.1)


# --- the plan, for shapes of models that people have


class Long(Letters):
    """Prompts of 253 or 256 tokens with rewards that differ."""

    def prompt(self, example):
        return f"{example.question} " * (85 - example.id % 2)

    def reward(self, example, completion):
        return random.random()


class Alike(Long):
    """Prompts of 1,006 or 1,012 tokens, all but a few of which all have."""

    def prompt(self, example):
        return "Repeat two letters. " * 50 + f"{example.question} " * (2 + 2 * (example.id % 2))


class Measured(Exception):
    """Ends a run after its first step."""


class NotKept(dict):
    """In place of a file with all initial weights."""

    def __init__(self, tensors, folder):
        super().__init__((name, tensor.shape) for name, tensor in tensors)

    def __getitem__(self, name):
        return torch.empty(super().__getitem__(name))


SIZES = {
    "grpo": ["algo.steps=1", "algo.resample_rounds=0"],
    "eggroll": ["algo.steps=1", "algo.members=32", "algo.noise.matrices=lowrank"],
    "rft": ["algo.prompts=32", "algo.validation_prompts=0"],
}


def model_of(shape):
    """Return a model of that shape, of zeros, on the device."""
    with torch.device("cuda:0"):
        return AutoModelForCausalLM.from_config(configure_qwen(shape)).eval()


def measure_peak(shape, folder, arguments, kind=Long):
    """Make one step with a model of that shape, of zeros, on a kind of task. Return the planned and
    the real peak.
    """
    device, planned = standin.DEVICE, []
    device.limit(400 << 30)
    device.compute_below(1 << 20)

    def load(run, task, context, dtype, home):
        model = model_of(shape).to(dtype)
        if run.model.quantize is not None:
            replace_layers(model, run.model.quantize, "model.quantize")
        return model, byte_tokenizer()

    def stop(*_):
        raise Measured

    def print_plan(plan):
        if not planned:  # else it is the result, in the same form
            planned.append(plan["memory"])
            device.reset_peak()

    def make_step(*arguments):
        inner(*arguments)
        raise Measured

    inner = stages.make_step
    language_model.load_on_all_ranks, logprobs.find_gap = load, lambda _: None
    summary.print_plan, weights.DiskTensors = print_plan, NotKept
    if not {"algo=classify", "algo=rft"} & set(arguments):  # batches of classify differ in length
        Session.stopping = property(stop)  # which is asked for after each step
    stages.make_step, SelectConfig.accepts = make_step, lambda *_: True
    with contextlib.suppress(Measured, RunStopped):
        named = any(text.startswith("hardware=") for text in arguments)
        given = compose(arguments if named else [*arguments, "hardware=a100_80g"])
        package = type(given.algo).__module__.removesuffix(".config")
        task = None if package == "ddp_bench" else kind("smooth")
        launch(f"{package}.train:train", given, folder, task)
    return float(re.search(r"about ([0-9.]+) GB", planned[0])[1]), device.peak / 2**30


@pytest.mark.parametrize(
    ("algo", "switches"),
    [
        ("grpo", "amp"),
        pytest.param("grpo", "amp,checkpointing", marks=pytest.mark.slow),
        pytest.param("eggroll", "amp", marks=pytest.mark.thorough),
        pytest.param("rft", "amp", marks=pytest.mark.thorough),
        pytest.param("rft", "amp,checkpointing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "shape",
    ["0.5b", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("1.5b", "3b", "7b"))],
)
def test_the_plan_is_within_a_tenth_of_the_peak(
    shape, algo, switches, standin, tmp_path, monkeypatch
):
    check_plan(shape, algo, one_step(algo, switches), (standin, tmp_path, monkeypatch))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algo", "switches"),
    [
        ("eggroll", "amp"),
        ("rft", "amp"),
        ("grpo", "amp,checkpointing"),
        pytest.param("grpo", "amp", marks=pytest.mark.slow),
        pytest.param("eggroll", "", marks=pytest.mark.slow),
    ],
)
def test_the_plan_knows_what_prompts_begin_with(algo, switches, standin, tmp_path):
    """That is held once more while prompts wait, and is in a training forward once."""
    arguments = [*one_step(algo, switches), *(["algo.prompts_per_step=4"] * (algo == "eggroll"))]
    planned, peak = standin.call(measure_peak, "0.5b", tmp_path, arguments, Alike)
    assert 0.98 * peak < planned < 1.1 * peak


def rollout_peak(rows, opening):
    """Sample from twice as many prompts as rows, which begin alike. Return the planned and the real
    peak beside the model.
    """
    device, settings = standin.DEVICE, sampling(1.0, new=16)
    device.limit(400 << 30)
    device.compute_below(1 << 20)
    sampler = Sampler(model_of("0.5b").bfloat16(), pad_id=0, stop_ids=(), rows=rows, graphs=True)
    held = device.live
    device.reset_peak()
    asked = [[*[5] * opening, *[6 + i % 200] * (1 + i % 8)] for i in range(2 * rows)]
    sampler.generate(Requests(prompts=asked), settings)
    load = Load(opening + 8, settings, opening=opening)
    return sampler.peak_bytes(rows, load), device.peak - held


@pytest.mark.thorough
def test_short_prompt_rests_need_no_more_memory(standin):
    """Each of them looks at its own copy of what all begin with."""
    planned, peak = standin.call(rollout_peak, 256, 1000)
    assert 0.99 * peak < planned < 1.1 * peak


def check_plan(shape, algo, arguments, using):
    """Compare the plan of a run with the counted peak, and a plan alone with that plan."""
    standin, tmp_path, monkeypatch = using
    planned, peak = standin.call(measure_peak, shape, tmp_path, arguments)
    assert planned == pytest.approx(peak, rel=0.1)
    monkeypatch.setattr(varlen, "has_flash", lambda *_: False)  # as on that device
    configure_qwen(shape).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = [*arguments, "hardware=a100_80g", "hardware.memory_gb=400", "plan=true"]
    arguments += ["model=hf", f"model.path={tmp_path}/model"]
    alone = plans.make(f"{algo}.train:plan", compose(arguments), Long("smooth"))
    assert alone.peak_gb == pytest.approx(planned, abs=0.01)


def one_step(algo, switches):
    """Return the settings of a run of one step."""
    arguments = [f"algo={algo}", f"opt=[{switches}]", "evaluate.examples=4"]
    arguments += ["algo.sampling.max_new_tokens=16", "not_finite.policy=skip"]
    return [*arguments, "not_finite.max_skips=1", *SIZES[algo]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algo", "shape"),
    [
        ("grpo", "0.5b"),
        *(pytest.param("grpo", shape, marks=pytest.mark.slow) for shape in ("1.5b", "3b", "7b")),
        *(pytest.param("rft", shape, marks=pytest.mark.slow) for shape in ("0.5b", "7b")),
        *(pytest.param("eggroll", shape, marks=pytest.mark.slow) for shape in ("0.5b", "7b")),
    ],
)
def test_the_plan_knows_that_an_adapter_alone_has_state(
    algo, shape, standin, tmp_path, monkeypatch
):
    pytest.importorskip("peft")
    arguments = [*one_step(algo, "amp"), "model.adapter.rank=16"]
    arguments += ["algo.kl.beta=0.01"] if algo == "grpo" else []
    check_plan(shape, algo, arguments, (standin, tmp_path, monkeypatch))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "shape", "switches"),
    [
        ("nf4", "0.5b", "amp,checkpointing"),
        pytest.param("int8", "0.5b", "amp,checkpointing", marks=pytest.mark.slow),
        pytest.param("nf4", "7b", "amp", marks=pytest.mark.slow),
    ],
)
def test_the_plan_knows_how_few_bits_weights_take(
    kind, shape, switches, standin, tmp_path, monkeypatch
):
    pytest.importorskip("peft")
    arguments = [*one_step("grpo", switches), "model.adapter.rank=16", f"model.quantize={kind}"]
    check_plan(shape, "grpo", arguments, (standin, tmp_path, monkeypatch))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algo", "shape", "switches"),
    [
        ("eggroll", "0.5b", "amp,offload"),
        *(pytest.param("eggroll", shape, "amp", marks=pytest.mark.slow) for shape in ("3b", "7b")),
        pytest.param("rft", "7b", "amp", marks=pytest.mark.slow),
    ],
)
def test_the_plan_knows_steps_that_are_not_recorded(
    algo, shape, switches, standin, tmp_path, monkeypatch
):
    arguments = [*one_step(algo, switches), "engine.cuda_graphs=false"]
    check_plan(shape, algo, arguments, (standin, tmp_path, monkeypatch))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layers", "size", "switches"),
    [
        (8, 512, "amp"),
        pytest.param(4, 1024, "", marks=pytest.mark.slow),
        pytest.param(8, 1024, "amp", marks=pytest.mark.slow),
        pytest.param(8, 1024, "amp,checkpointing", marks=pytest.mark.slow),
    ],
)
def test_the_plan_of_a_classifier_is_within_a_tenth(layers, size, switches, standin, tmp_path):
    """Without dropout, with which the attention of a CPU keeps its scores."""
    arguments = ["algo=classify", "task.rows=512", "task.test_rows=20", f"opt=[{switches}]"]
    arguments += ["algo.model.dropout=0", "algo.batch_size=256", "algo.loader.workers=0"]
    arguments += ["algo.epochs=1", "algo.validation_share=0", "algo.patience=null"]
    arguments += [f"algo.model.layers={layers}", f"algo.model.size={size}"]
    arguments += [f"algo.model.feedforward={4 * size}", "algo.model.heads=8"]
    planned, peak = standin.call(measure_peak, "0.5b", tmp_path, arguments)
    assert planned == pytest.approx(peak, rel=0.1)
