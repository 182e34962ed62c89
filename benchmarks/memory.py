"""Measure the memory of EGGROLL's training relative to sampling the same rows from the same model.

    python -m benchmarks memory

Each case runs in a process of its own, since a peak never falls: build the model, then a few steps
of sampling, or of noise, sampling and update, as eggroll/train.py makes them. On a CPU the peak is
resident memory minus that after the imports, on CUDA the memory that torch allocated.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir

import torch

from benchmarks import measure
from benchmarks.eggroll import Sizes, settings
from benchmarks.measure import Report, name_of, paired
from benchmarks.models import build
from common.device import native_bf16
from common.engine import Population, Requests
from common.model import narrow
from common.sampling import Sampler
from eggroll.config import EggrollConfig
from eggroll.fitness import fitness
from eggroll.noise import Noise
from eggroll.weights import Weights

INFERENCE, TRAINING = "inference", "training"
FIGURE = 1.15
STEPS = 2


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    name: str
    sizes: Sizes
    dtype: torch.dtype = torch.float32
    offload: bool = False


# The tiny default: conf/model/tiny.yaml and conf/algo/eggroll.yaml, 256 rows a forward as
# hardware=cpu has them.
TINY = Sizes("tiny", members=32, prompts=8, prompt_tokens=64, new_tokens=24)
FEW = Sizes("gpt2", members=4, prompts=2, prompt_tokens=16, new_tokens=8)
MANY = Sizes("gpt2", members=64, prompts=1, prompt_tokens=16, new_tokens=8)


def cases(quick: bool, device: torch.device) -> list[Setting]:
    """Return the rows that this device can measure."""
    if quick:
        models = {"tiny": "quick", "GPT-2 shape, 2 layers": "gpt2-quick"}
        return [Setting(k, Sizes(v, 4, prompt_tokens=8, new_tokens=8)) for k, v in models.items()]
    found = [
        Setting("tiny default, 256 rows", TINY),
        Setting("GPT-2 124M, 8 rows", FEW),
        Setting("GPT-2 124M, 64 rows", MANY),
    ]
    if native_bf16(device):
        found.append(Setting("GPT-2 124M, 8 rows, amp", FEW, torch.bfloat16))
        if device.type == "cuda":
            found.append(Setting("GPT-2 124M, 8 rows, amp, offload", FEW, torch.bfloat16, True))
    return found


def prepare(
    setting: Setting, algo: EggrollConfig, device: torch.device, what: str
) -> Callable[[], None]:
    """Return some steps of `what`, for a process of its own."""
    sizes = setting.sizes
    if what == INFERENCE:
        torch.set_default_dtype(setting.dtype)  # a model is loaded in the dtype it is used in
    with device:
        model = build(sizes.model)
    torch.set_default_dtype(torch.float32)
    measure.Peak.forget()  # making random weights takes more than either
    if what == TRAINING:
        noise = Noise(model, algo.noise, rank=algo.rank, mirrored=algo.mirrored, seed=0)
        wide, folder = narrow(model, setting.dtype, device), Path(gettempdir())
        weights = Weights(model, noise, algo, wide, offload=setting.offload, folder=folder)
    sampler = Sampler(model, pad_id=0, stop_ids=(), rows=sizes.samples, graphs=True)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 260, (sizes.prompts, sizes.prompt_tokens), generator=draw).tolist()
    rewards = torch.rand(sizes.members, sizes.prompts, generator=draw)

    def sample() -> None:
        population = Population(members=sizes.members)
        sampler.generate(Requests(prompts=prompts, population=population), algo.sampling)

    def run() -> None:
        for step in range(STEPS):
            if what == INFERENCE:
                sample()
                continue
            with noise.members(step, range(sizes.members), float(algo.sigma)):
                sample()
            for name, gradient in noise.gradients(step, fitness(rewards, algo.fitness)):
                weights.descend(name, gradient, float(algo.lr), compare=False)
                del gradient  # before the next one is made
            weights.measure()

    return run


def run(options: argparse.Namespace) -> Report:
    """Measure each case in its own process."""
    report = Report("memory", options, 1, steps=STEPS)
    found = cases(report.quick, report.device)
    report.conditions["sizes"] = {s.name: asdict(s.sizes) for s in found}
    report.conditions["dtype"] = {s.name: name_of(s.dtype) for s in found}
    for setting in found:
        peaks: dict[str, list[float]] = {INFERENCE: [], TRAINING: []}
        algo = settings(setting.sizes)
        for _ in range(report.repeats):
            for what, values in peaks.items():
                measure.progress(f"{setting.name}: {what}")
                peak = measure.peak_memory_gb(prepare, setting, algo, report.device, what)
                if peak is None:
                    raise RuntimeError("this system does not tell a process's peak memory.")
                values.append(peak)
        measure.progress("")
        named = {f"{setting.name}: {what}": values for what, values in peaks.items()}
        report.compare(named, "GB", next(iter(named)), less=False)
        ratio = paired(peaks[TRAINING], peaks[INFERENCE])
        report.figures.append((setting.name, f"<= {FIGURE}x", f"{ratio:.2f}x"))
    return report
