"""The distance of each phase to the least seconds that the device allows.

    python -m benchmarks distance --model 0.5b --json distance.json

The least is the larger one of two times: the floating-point operations over the rate of a large
matrix product, and the bytes over the bandwidth of a large copy; both rates are measured here. A
decode step reads the weights and the valid part of the cache once; prefill and training read the
weights once, and make the products of the layers, of attention, and of the output layer where a
token's distribution is needed. What is in between (norms, activations, the cache that is written)
counts as distance.

Decoding is the time of some tokens less that of the first one. With one row it shows what a layer
costs however little it has to read. Beside both stands what plan=true would say, with the measured
bandwidth.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Case
from benchmarks.models import Counts, build, count_pairs
from benchmarks.sampler import copy_bandwidth
from common.config import SamplingConfig
from common.engine import Requests
from common.memory import decode_seconds
from common.model import logprobs
from common.sampling import Sampler

ROWS = (1, 64)
WANTED = 2.0  # times the least, of a decode step on CUDA with many rows


@dataclass(frozen=True)
class Sizes:
    """The work. group: completions per prompt in training."""

    prompt: int = 128  # tokens
    new: int = 64
    prefilled: int = 512  # tokens of a prompt that is only read
    trained: int = 256  # tokens of a completion
    groups: int = 8
    group: int = 8


QUICK = Sizes(prompt=8, new=4, prefilled=16, trained=8, groups=2, group=2)
ON_CPU = Sizes(prefilled=256, trained=64, groups=4)


@dataclass(frozen=True)
class Chip:
    """The rates of the device.

    Attributes:
        flops: floating-point operations per second, in the dtype of the phases.
        bandwidth: bytes read and written per second.
    """

    flops: float
    bandwidth: float

    def least(self, flops: float, read: float) -> float:
        """Return the least seconds of an amount of work."""
        return max(flops / self.flops, read / self.bandwidth)


def run(options: argparse.Namespace) -> measure.Report:
    """Time the phases in turn."""
    device = measure.find_device(options.device)
    name, dtype = measure.choose_model(options.model, device)
    name = "quick" if options.quick else name
    sizes = QUICK if options.quick else Sizes() if device.type == "cuda" else ON_CPU
    report = measure.Report("distance", options, 5, dtype=measure.name_of(dtype))
    report.conditions["sizes"] = vars(sizes) | {"model": name}
    small = (64, 1 << 16) if options.quick else (None, None)
    chip = Chip(measure.peak_flops(device, dtype, small[0]), copy_bandwidth(device, small[1]))
    report.conditions |= {"peak_tflops": chip.flops / 1e12, "copy_gbs": chip.bandwidth / 1e9}
    measure_sampling(report, build(name).to(device, dtype), sizes, chip)
    measure_training(report, build(name).to(device), sizes, chip, dtype)
    report.notes += [
        f"The least: {chip.flops / 1e12:.3g} TFLOP/s, {chip.bandwidth / 1e9:.4g} GB/s.",
        "ratio: how many times the least a phase takes.",
    ]
    return report


def measure_sampling(report: measure.Report, model: Any, sizes: Sizes, chip: Chip) -> None:
    """Add prefill and decoding."""
    counts, layers = Counts(model, model.dtype), model.config.num_hidden_layers
    vocabulary = model.config.vocab_size

    def sample(rows: int, prompt: int, new: int) -> Callable[[], Any]:
        sampler = Sampler(model, pad_id=0, stop_ids=(), rows=rows, graphs=True)
        draw = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, vocabulary, (rows, prompt), generator=draw).tolist()
        settings = SamplingConfig.uncut(new, 0.0)
        return lambda: sampler.generate(Requests(prompts=prompts), settings)

    for rows in ROWS:
        whole, first = f"{rows} rows", f"{rows} rows, the first token alone"
        cases = [
            Case(whole, sample(rows, sizes.prompt, sizes.new + 1)),
            Case(first, sample(rows, sizes.prompt, 1)),
        ]
        timed = report.time(cases)
        pairs = zip(timed[whole].seconds, timed[first].seconds, strict=True)
        seconds = median((a - b) / sizes.new for a, b in pairs)
        context = sizes.prompt + sizes.new / 2
        read = counts.read + rows * context * counts.cached
        least = chip.least(counts.flops(rows, rows * context, rows), read)
        title = f"a decode step of {rows} row{'s' * (rows > 1)}"
        if seconds <= 0:
            report.skip(title, "s", "the first token took as long as all of them")
            continue
        add(report, title, seconds, least)
        report.add(title, 1e6 * seconds / layers, "us per layer")
        report.add(title, read / chip.bandwidth / seconds, "share of the bandwidth")
        planned = decode_seconds(read, layers, chip.bandwidth)
        report.add(title, planned, "s, planned for a GPU")
        if rows > 1 and report.device.type == "cuda" and not report.quick:
            ratio = f"{seconds / least:.2f}x"
            report.figures.append((f"{title}: times the least", f"<= {WANTED}x", ratio))
    rows, tokens = ROWS[-1], ROWS[-1] * sizes.prefilled
    title = f"prefill of {rows} prompts of {sizes.prefilled} tokens"
    timed = report.time([Case(title, sample(rows, sizes.prefilled, 1))])
    flops = counts.flops(tokens, rows * count_pairs(sizes.prefilled), rows)
    add(report, title, timed[title].p50, chip.least(flops, counts.read))


def measure_training(
    report: measure.Report, model: Any, sizes: Sizes, chip: Chip, dtype: torch.dtype
) -> None:
    """Add the forward and the backward pass of training all weights, as a run makes them."""
    device = report.device
    model = model.eval().requires_grad_(True)
    logprobs.prepare(model)
    draw = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(1, model.config.vocab_size, (count,), generator=draw).tolist()

    prompts = [ids(sizes.prompt) for _ in range(sizes.groups)]
    completions = [[ids(sizes.trained) for _ in range(sizes.group)] for _ in prompts]
    groups = logprobs.group(prompts, completions, device)
    half = dtype != torch.float32

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, dtype) if half else nullcontext():
            return logprobs.token_logprobs(model, groups, 1.0)[0].sum()

    kept: list[torch.Tensor] = []

    def begin() -> None:
        model.zero_grad(set_to_none=True)
        kept[:] = [forward()]

    timed = report.time([Case("forward", begin), Case("backward", lambda: kept[0].backward())])
    # Masters are float32; a prompt is computed once for its completions.
    counts = Counts(model, torch.float32)
    each = sizes.group * sizes.trained
    tokens, heads = sizes.groups * (sizes.prompt + each), sizes.groups * each
    pairs = count_pairs(sizes.prompt + sizes.trained) - count_pairs(sizes.prompt)
    pairs = sizes.groups * (count_pairs(sizes.prompt) + sizes.group * pairs)
    flops = counts.flops(tokens, pairs, heads)
    work = f"training, {tokens:,} tokens, "
    add(report, work + "forward", timed["forward"].p50, chip.least(flops, counts.read))
    # The gradients of inputs and of weights, which are written.
    least = chip.least(2 * flops, 2 * counts.read)
    add(report, work + "backward", timed["backward"].p50, least)


def add(report: measure.Report, row: str, seconds: float, least: float) -> None:
    """Add the seconds of a phase, and the least ones."""
    report.add(row, least, "s, the least")
    report.add(row, seconds, "s", "the least", seconds / least)
