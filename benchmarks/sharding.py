"""The cost and the gain of opt=fsdp beside opt=ddp: a rollout, a training step and the memory of a
rank, with two ranks on this device.

    python -m benchmarks sharding
    python -m benchmarks sharding --json sharding.json --repeats 7

The work: a Llama of 5.2M parameters with random weights in float32; each rank samples 32
completions of 32 tokens and makes one optimizer step on them. The ways take turns in the same two
processes, so a ratio holds whatever else the machine does. On a CPU two gloo ranks share the
memory, and gathering costs what copying does: read the order, not the size.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Case
from benchmarks.sampler import build
from common import optim
from common.config import Run, SamplingConfig
from common.distributed import fsdp
from common.distributed.context import Context
from common.distributed.workers import launch
from common.model import logprobs
from common.precision import Precision
from common.sampling.engine import Requests
from common.sampling.native import Sampler
from launch import compose

DDP, GATHERED, LAYERWISE = "opt=ddp", "opt=fsdp, gathered", "opt=fsdp, layerwise"
PROMPTS, SAMPLES, TOKENS = 8, 4, 32


def run(options: argparse.Namespace) -> measure.Report:
    """Measure on two ranks."""
    device = measure.find_device(options.device)
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit("error: two ranks need two CUDA devices. Use --device cpu.")
    repeats = options.repeats or (2 if options.quick else 7)
    given = [
        f"hardware={'auto' if device.type == 'cuda' else 'cpu'}",
        "opt=[fsdp]",
        "opt.fsdp.ranks=2",
    ]
    conditions = measure.conditions(
        device,
        sizes={
            "ranks": 2,
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "tokens": TOKENS,
            "quick": options.quick,
        },
        repeats=repeats,
        dtype="float32",
    )
    with tempfile.TemporaryDirectory() as folder:
        composed = compose(["algo=grpo", *given])
        found = launch(
            "benchmarks.sharding:ranks", composed, Path(folder), (options.quick, repeats)
        )
    return report(found, conditions, repeats)


def ranks(run: Run, context: Context, task: tuple[bool, int]) -> dict[str, Any]:
    """In each rank: times of all cases, and what it holds."""
    quick, repeats = task
    device = context.device.device
    numbers = Precision(torch.float32, scaler=False)
    plain = build("small", 128).requires_grad_(True).to(device)
    logprobs.prepare(plain)
    sharded = copy.deepcopy(plain)
    fsdp.shard([sharded], run, context, numbers)
    greedy = SamplingConfig(
        max_new_tokens=4 if quick else TOKENS, temperature=1.0, top_p=1.0, top_k=0
    )
    draw = torch.Generator().manual_seed(context.rank)
    prompts = torch.randint(2, 250, (PROMPTS, 16), generator=draw).tolist()
    made = torch.randint(2, 250, (PROMPTS, SAMPLES, greedy.max_new_tokens), generator=draw).tolist()
    laid = logprobs.group(prompts, made, device)
    samplers = {
        m: Sampler(m, pad_id=0, stop_ids=[], rows=PROMPTS * SAMPLES) for m in (plain, sharded)
    }
    updaters = {
        m: optim.Updater(list(m.parameters()), run.algo, numbers, device) for m in (plain, sharded)
    }

    def rollout(model: Any, how: str | None = None) -> Any:
        def act() -> None:
            if how:
                model.shards.rollout = how
            context.barrier()
            with fsdp.forwards(model):
                samplers[model].generate(Requests(prompts=prompts, samples=SAMPLES), greedy)

        return act

    def step(model: Any) -> Any:
        def act() -> None:
            context.barrier()
            updaters[model].clear()
            logp, _ = logprobs.token_logprobs(model, laid, 1.0)
            loss = -logp.mean()
            loss.backward()
            optim.sum_gradients(updaters[model].parameters)
            updaters[model].step(run.algo.lr, loss.item())

        return act

    cases = [
        *(
            Case(f"rollout, {DDP}", rollout(plain)),
            Case(f"rollout, {GATHERED}", rollout(sharded, "gathered")),
        ),
        *(
            Case(f"rollout, {LAYERWISE}", rollout(sharded, "layerwise")),
            Case(f"training step, {DDP}", step(plain)),
        ),
        Case("training step, opt=fsdp", step(sharded)),
    ]
    timings = measure.interleaved(cases, repeats, device)
    return {
        "seconds": {name: timing.seconds for name, timing in timings.items()},
        "parameters": fsdp.parameters(sharded),
        "state_mb": {DDP: _mb(updaters[plain]), "opt=fsdp": _mb(updaters[sharded])},
        "gathered_mb": {how: _gathered(sharded, how) for how in ("gathered", "layerwise")},
    }


def _mb(updater: optim.Updater) -> float:
    assert updater.memory_gb is not None, "it has made a step"
    return updater.memory_gb * 2**10


def _gathered(model: Any, how: str) -> float:
    model.shards.rollout = how
    return fsdp.gathered_bytes(model, rollout=True) / 2**20


def report(found: dict[str, Any], conditions: dict[str, Any], repeats: int) -> measure.Report:
    """The table and the JSON."""
    rows, lines, seconds = [], [], found["seconds"]
    for name, taken in seconds.items():
        first = f"{name.split(',')[0]}, {DDP}"
        ratio = measure.quantile(measure.paired(taken, seconds[first]), 0.5)
        against = None if name == first else first
        median = measure.quantile(taken, 0.5)
        rows.append(measure.Row("sharding", name, median, "s", against, ratio if against else None))
        lines.append(
            [
                name,
                measure.number(median),
                measure.number(measure.quantile(taken, 0.9)),
                f"{ratio:.2f}x",
            ]
        )
    for name, value in found["state_mb"].items():
        rows.append(measure.Row("sharding", f"training state a rank, {name}", value, "MB"))
        lines.append([f"training state a rank, {name}", f"{value:.1f} MB", "", ""])
    for name, value in found["gathered_mb"].items():
        rows.append(measure.Row("sharding", f"gathered meanwhile, {name}", value, "MB"))
        lines.append([f"gathered in a rollout, {name}", f"{value:.1f} MB", "", ""])
    text = measure.table(["", "s", "p90", "time"], lines)
    text += (
        f"\n\n{found['parameters'] / 1e6:.2f}M parameters, float32, 2 ranks; medians of {repeats};"
        " time against opt=ddp"
    )
    return measure.Report(
        text, {**conditions, "timing": seconds, "parameters": found["parameters"]}, rows
    )
