"""Compare opt=fsdp with opt=ddp on two ranks: a rollout, a training step and memory.

    python -m benchmarks sharding --json sharding.json --repeats 7

Each rank samples 32 completions of a small Llama and makes one optimizer step on them. The ways
take turns in the same two processes. On a CPU two gloo ranks share the memory, and gathering costs
as much as copying: read the order, not the size.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Case
from benchmarks.models import build
from common import optim
from common.config import Run, SamplingConfig
from common.device import Precision, count_parameters
from common.distributed import Context, launch, shard, sharding_of
from common.engine import Requests
from common.model import logprobs
from common.sampling import Sampler
from launch import compose

DDP, FSDP = "opt=ddp", "opt=fsdp"
ROLLOUT, STEP = "rollout, ", "training step, "
PROMPTS, SAMPLES, TOKENS = 8, 4, 32


def run(options: argparse.Namespace) -> measure.Report:
    """Measure on two ranks."""
    report = measure.Report("sharding", options, 7, dtype="float32")
    cuda = report.device.type == "cuda"
    if cuda and torch.cuda.device_count() < 2:
        raise SystemExit("error: two ranks need two CUDA devices. Use --device cpu.")
    tokens = 4 if options.quick else TOKENS
    composed = compose(
        ["algo=grpo", f"hardware={'auto' if cuda else 'cpu'}", "opt=[fsdp]", "opt.fsdp.ranks=2"]
    )
    with tempfile.TemporaryDirectory() as folder:
        task = tokens, report.repeats
        found = launch("benchmarks.sharding:ranks", composed, Path(folder), task)
    sizes = {"ranks": 2, "prompts": PROMPTS, "samples": SAMPLES, "tokens": tokens}
    report.conditions |= {"sizes": sizes, "timing": found["seconds"]}
    for kind in (ROLLOUT, STEP):
        series = {name: s for name, s in found["seconds"].items() if name.startswith(kind)}
        report.compare(series, "s", kind + DDP, less=False)
    for name, value in found["mb"].items():
        report.add(name, value, "MB")
    report.notes.append(
        f"{found['parameters'] / 1e6:.2f}M parameters; ratio: of seconds, against {DDP}."
    )
    return report


def ranks(run: Run, context: Context, task: tuple[int, int]) -> dict[str, Any]:
    """Return on each rank the times of all cases, and its memory."""
    tokens, repeats = task
    device = context.device.device
    precision = Precision(torch.float32)
    plain = build("small").requires_grad_(True).to(device)
    logprobs.prepare(plain)
    sharded = copy.deepcopy(plain)
    shard(sharded, run, context, precision)
    sampling = SamplingConfig.uncut(tokens, 1.0)
    draw = torch.Generator().manual_seed(context.rank)
    prompts = torch.randint(2, 250, (PROMPTS, 16), generator=draw).tolist()
    made = torch.randint(2, 250, (PROMPTS, SAMPLES, tokens), generator=draw).tolist()
    laid = logprobs.group(prompts, made, device)
    rows = PROMPTS * SAMPLES
    samplers = {m: Sampler(m, pad_id=0, stop_ids=[], rows=rows) for m in (plain, sharded)}
    updaters = {
        m: optim.Updater(list(m.parameters()), run.algo, precision, device)
        for m in (plain, sharded)
    }

    def rollout(model: Any) -> None:
        context.barrier()
        with sharding_of(model).gathered():
            samplers[model].generate(Requests(prompts=prompts, samples=SAMPLES), sampling)

    def step(model: Any) -> None:
        context.barrier()
        updaters[model].clear()
        logp, _ = logprobs.token_logprobs(model, laid, 1.0)
        loss = -logp.mean()
        loss.backward()
        optim.sum_gradients(updaters[model].parameters)
        updaters[model].step(run.algo.lr, loss.item())

    cases = [
        Case(ROLLOUT + DDP, lambda: rollout(plain)),
        Case(ROLLOUT + FSDP, lambda: rollout(sharded)),
        Case(STEP + DDP, lambda: step(plain)),
        Case(STEP + FSDP, lambda: step(sharded)),
    ]
    timings = measure.interleaved(cases, repeats, device)
    mb: dict[str, float] = {}
    for name, model in ((DDP, plain), (FSDP, sharded)):
        state_gb = updaters[model].memory_gb
        assert state_gb is not None, "it has made a step"
        mb[f"training state a rank, {name}"] = state_gb * 2**10
    mb["gathered meanwhile"] = sharding_of(sharded).gathered_bytes(rollout=True) / 2**20
    seconds = {name: timing.seconds for name, timing in timings.items()}
    return {"seconds": seconds, "parameters": count_parameters(sharded), "mb": mb}
