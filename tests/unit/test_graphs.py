"""Decode steps that are recorded and replayed, by the tape of tests/support/standin/tape.py."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from common.config import ConfigError
from common.engine import Population, Requests
from common.sampling import kv_cache
from common.sampling.cuda_graphs import CudaGraphs
from common.sampling.native import Sampler
from common.sampling.schedule import LOOK_EVERY
from eggroll.config import NoiseConfig
from eggroll.noise import Noise
from tests.support import ROOT
from tests.support.models import ARCHITECTURES, prompts, sampling, small_model
from tests.support.standin.tape import Recording


class Tape(CudaGraphs):
    """Records operations instead of kernels."""

    recorded = replayed = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.replays, self.recordings = device, {}, []

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        Tape.recorded += 1
        with Recording() as recording:
            step()
        recording.finish()
        self.recordings.append(recording)

        def replay() -> None:
            Tape.replayed += 1
            recording.replay()

        return replay


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sampler]:
    """A sampler whose steps are recorded, in spans of 8 columns, and looked at every 4."""
    monkeypatch.setattr(kv_cache, "SPAN", 8)
    monkeypatch.setitem(LOOK_EVERY, "cpu", 4)
    # In inference mode operations that consist of others would be seen whole.
    monkeypatch.setattr("common.distributed.Sharding.inference", lambda _: torch.no_grad())
    Tape.recorded = Tape.replayed = 0

    def build(model: Any, rows: int, **more: Any) -> Sampler:
        sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=rows, **more)
        sampler.recorder, sampler.shares = Tape, False
        return sampler

    return build


def same(one: Any, other: Any) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.lengths, other.lengths)
    assert torch.equal(one.finished, other.finished)
    torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "rows", "groups"),
    [
        ("llama", 64, 1),
        pytest.param("qwen3", 12, 3, marks=pytest.mark.run),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("llama", 12, 3), ("gpt2", 5, 1), ("qwen2", 5, 1))
        ),
    ],
)
def test_recorded_steps_change_nothing(name, rows, groups, recorded):
    """Refills, shifts of the cache and shrinks included; nothing in a step waits for the device."""
    model = small_model(name)
    arguments: Any = {
        "samples": 4,
        "seed": 3,
        "population": Population(members=groups),
        "logprobs": True,
    }
    plain = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=rows).generate(
        Requests(prompts=prompts(), **arguments), sampling(1.0)
    )
    same(
        recorded(model, rows).generate(Requests(prompts=prompts(), **arguments), sampling(1.0)),
        plain,
    )
    assert Tape.replayed > Tape.recorded > 1


@pytest.mark.parametrize(
    "cut",
    [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8}],
)
def test_recorded_steps_draw_as_others(cut, recorded):
    model = small_model("qwen2")
    plain = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=6).generate(
        Requests(prompts=prompts(), logprobs=True), sampling(**cut)
    )
    same(
        recorded(model, 6).generate(Requests(prompts=prompts(), logprobs=True), sampling(**cut)),
        plain,
    )


@pytest.mark.run
def test_recorded_steps_under_autocast(recorded):
    model = small_model("qwen2")
    half: Any = {"autocast": torch.bfloat16}
    plain = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=6, **half)
    plain.shares = False
    arguments: Any = {"samples": 2, "logprobs": True}
    one, other = (
        s.generate(Requests(prompts=prompts(), **arguments), sampling(1.0))
        for s in (recorded(model, 6, **half), plain)
    )
    assert (
        one.tokens == other.tokens
    ).double().mean() > 0.9  # rounding differs, as products of other shapes do
    assert Tape.replayed > Tape.recorded


@pytest.mark.run
def test_recorded_steps_of_any_length(recorded):
    """A window may be opened for its last column alone, and a row may use the last position."""
    model = small_model("gpt2")
    for new in (1, 2, 7, 8, 9, 118):
        cut = sampling(1.0, new=new)
        plain = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=3)
        ways = [
            s.generate(Requests(prompts=prompts((10, 10, 3, 8)), logprobs=True), cut)
            for s in (recorded(model, 3), plain)
        ]
        same(*ways)


@pytest.mark.parametrize(("version", "unwound"), [("2.12.1+cu126", True), ("2.13.0", False)])
def test_memory_that_runs_out_while_recording_is_no_refusal(version, unwound, monkeypatch):
    """The end of the recording, which fails too, does not hide it: rows are halved. Before torch
    2.13 it leaves the allocator recording, so that it is told of the end here.
    """

    class Fails:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    told = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        told_as = partial(lambda *call: told.append(call), name)
        monkeypatch.setattr(torch._C, name, told_as, raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Fails)

    def step(error: Exception) -> None:
        raise error

    graphs = CudaGraphs(torch.device("cuda", 0))
    with pytest.raises(torch.OutOfMemoryError, match="20 GiB"):
        graphs.record(lambda: step(torch.OutOfMemoryError("tried to allocate 20 GiB")))
    ended = [("_cuda_endAllocateToPool", 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]
    assert told == ended * unwound
    with pytest.raises(ConfigError, match=r"graph \(not permitted when stream is capturing\)"):
        graphs.record(lambda: step(RuntimeError("not permitted when stream is capturing\nmore")))


@pytest.mark.run
def test_recorded_steps_with_the_models_own_attention(recorded):
    model = small_model("qwen2")
    made = recorded(model, 3)
    made.replaces = False
    plain = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=64)
    same(
        *(
            s.generate(Requests(prompts=prompts(), samples=2, logprobs=True), sampling(1.0))
            for s in (made, plain)
        )
    )


@pytest.mark.run
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_a_recorded_population_is_that_population(name, recorded):
    """The noise is read where it lies: a step records the forward, not the noise."""
    model = small_model(name).requires_grad_(False)
    config = NoiseConfig(
        matrices="lowrank", vectors="full", embeddings="frozen", head="frozen", patterns={}
    )
    noise = Noise(model, config, rank=2, mirrored=True, seed=5)
    arguments: Any = {"population": Population(members=4), "logprobs": True}
    plain, replayed = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=12), recorded(model, 12)
    for step in range(2):
        with noise.members(step, range(4), sigma=0.1):
            same(
                replayed.generate(Requests(prompts=prompts(), **arguments), sampling(1.0)),
                plain.generate(Requests(prompts=prompts(), **arguments), sampling(1.0)),
            )
    assert Tape.replayed > Tape.recorded


def test_a_step_that_waits_is_found(recorded):
    """What the tape is there to find."""
    model = small_model("llama")
    model.model.layers[0].register_forward_hook(lambda _, args, out: out * bool(out.sum()))
    with pytest.raises(AssertionError, match=r"_local_scalar_dense\.default waits for the device"):
        recorded(model, 4).generate(Requests(prompts=prompts()), sampling(1.0))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_ampere = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a CUDA device of compute capability 8.0",
)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("groups", [1, 3])
def test_cuda_graphs_change_nothing(name, groups):
    model = small_model(name).cuda()
    made = []
    for graphs in (True, False):
        sampler = Sampler(model, pad_id=96, stop_ids=(11, 12), rows=12, graphs=graphs)
        arguments: Any = {
            "samples": 4,
            "seed": 3,
            "population": Population(members=groups),
            "logprobs": True,
        }
        made.append(
            sampler.generate(Requests(prompts=prompts(), **arguments), sampling(1.0, new=100))
        )
    same(*made)


@pytest.mark.gpu
@needs_cuda
def test_cuda_graphs_give_their_memory_back():
    sampler = Sampler(small_model("llama").cuda(), pad_id=96, stop_ids=(), rows=8, graphs=True)
    held = []
    for _ in range(4):
        sampler.generate(Requests(prompts=prompts()), sampling(1.0))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[3]


@pytest.mark.gpu
@needs_cuda
def test_a_step_that_cuda_cannot_record_is_told():
    """In a process of its own: a recording that fails may leave something behind."""
    command = [sys.executable, "-c", f"import {__name__} as tests; tests.record_what_cannot_be()"]
    subprocess.run(command, cwd=ROOT, check=True)


def record_what_cannot_be() -> None:
    """And then go on with fewer rows, which gives memory back."""
    model = small_model("llama").cuda()
    model.model.layers[0].register_forward_hook(lambda _, args, out: out * bool(out.sum()))
    with pytest.raises(ConfigError, match=r"Set engine\.cuda_graphs=false"):
        Sampler(model, pad_id=96, stop_ids=(), rows=4, graphs=True).generate(
            Requests(prompts=prompts()), sampling(1.0)
        )
    torch.cuda.empty_cache()
