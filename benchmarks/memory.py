"""python -m benchmarks memory: what EGGROLL's training takes beside sampling the same rows from the
same model.

Each case runs alone in a process of its own, since a peak never falls: build the model, then a few
steps of sampling, or of noise, sampling and update, as eggroll/train.py makes them. On a CPU the
peak is resident memory less that after the imports, on CUDA what torch allocated. The ratio is of
whole peaks: weights, cache, activations, noise, update.
"""

import argparse
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import measure
from benchmarks.eggroll import VOCABULARY, Sizes, build, name_of, settings
from benchmarks.measure import Report, Row
from common.precision import native_bf16
from common.sampling.engine import Requests
from common.sampling.native import Sampler
from eggroll.fitness import fitness
from eggroll.noise import Noise
from eggroll.weights import Weights

NAME = "memory"
INFERENCE, TRAINING = "inference", "training"
FIGURE = 1.15
STEPS = 2


@dataclass(frozen=True)
class Setting:
    """A line of the table. model: llama (of `sizes`) or gpt2 (124M parameters, or two layers of
    it).
    """

    name: str
    model: str
    sizes: Sizes
    dtype: torch.dtype = torch.float32
    offload: bool = False


# The tiny default: conf/model/tiny.yaml and conf/algo/eggroll.yaml, 256 rows a forward as
# hardware=cpu has them.
TINY = Sizes(128, 4, 4, 384, members=32, prompts=8, prompt_tokens=64, new_tokens=24)
FEW = Sizes(768, 12, 12, 3072, members=4, prompts=2, prompt_tokens=16, new_tokens=8)
MANY = Sizes(768, 12, 12, 3072, members=64, prompts=1, prompt_tokens=16, new_tokens=8)
QUICK = Sizes(64, 2, 2, 128, members=4, prompts=2, prompt_tokens=8, new_tokens=8)


def cases(quick: bool, device: torch.device) -> list[Setting]:
    """The lines that this device can measure."""
    if quick:
        return [Setting("tiny", "llama", QUICK), Setting("GPT-2 shape, 2 layers", "gpt2", QUICK)]
    bf16 = native_bf16(device)
    found = [
        Setting("tiny default, 256 rows", "llama", TINY),
        Setting("GPT-2 124M, 8 rows", "gpt2", FEW),
        Setting("GPT-2 124M, 64 rows", "gpt2", MANY),
        Setting("GPT-2 124M, 8 rows, amp", "gpt2", FEW, torch.bfloat16) if bf16 else None,
        (
            Setting("GPT-2 124M, 8 rows, amp, offload", "gpt2", FEW, torch.bfloat16, offload=True)
            if bf16 and device.type == "cuda"
            else None
        ),
    ]
    return [setting for setting in found if setting is not None]


def model_of(setting: Setting) -> Any:
    """The model with random weights, in the default dtype and on the default device."""
    sizes = setting.sizes
    if setting.model == "llama":
        return build(sizes)
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=sizes.hidden_size,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).requires_grad_(False).eval()


def prepare(setting: Setting, device: torch.device, what: str) -> Callable[[], None]:
    """Some steps of `what`, for a process of its own."""
    sizes, algo = setting.sizes, settings(setting.sizes)
    if what == INFERENCE:
        torch.set_default_dtype(setting.dtype)  # a model is loaded in the dtype it is used in
    with device:
        model = model_of(setting)
    torch.set_default_dtype(torch.float32)
    measure.Peak.forget()  # making random weights takes more than either
    if what == TRAINING:
        noise = Noise(model, algo.noise, rank=algo.rank, mirrored=algo.mirrored, seed=0)
        weights = Weights(
            model, noise, algo, setting.dtype, offload=setting.offload, folder=Path(gettempdir())
        )
    sampler = Sampler(model, pad_id=0, stop_ids=(), rows=sizes.samples, graphs=True)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(
        0, VOCABULARY, (sizes.prompts, sizes.prompt_tokens), generator=draw
    ).tolist()
    rewards = torch.rand(sizes.members, sizes.prompts, generator=draw)

    def sample() -> None:
        sampler.generate(Requests(prompts=prompts, groups=sizes.members), algo.sampling)

    def run() -> None:
        for step in range(STEPS):
            if what == INFERENCE:
                sample()
                continue
            with noise.members(step, range(sizes.members), algo.sigma):
                sample()
            for name, gradient in noise.gradients(step, fitness(rewards, algo.fitness)):
                weights.descend(name, gradient, algo.lr)
                del gradient  # before the next one is made
            weights.drift()

    return run


def run(options: argparse.Namespace) -> Report:
    """Measure each case in its own process."""
    device = measure.find_device(options.device)
    found = cases(options.quick, device)
    repeats = options.repeats or 1
    conditions = measure.conditions(
        device,
        sizes={s.name: asdict(s.sizes) | {"model": s.model} for s in found},
        dtype={s.name: name_of(s.dtype) for s in found},
        quick=options.quick,
        repeats=repeats,
        steps=STEPS,
        memory="peak of a process, model included, "
        + (
            "allocated by torch"
            if device.type == "cuda"
            else "resident, less that after the imports"
        ),
        ratio="peak of training / peak of inference; the median over repeats",
    )
    rows, lines, figures = [], [], []
    for setting in found:
        peaks: dict[str, list[float]] = {INFERENCE: [], TRAINING: []}
        for _ in range(repeats):
            for what in peaks:
                measure.progress(f"{setting.name}: {what}")
                peak = measure.peak_memory_gb(prepare, setting, device, what)
                if peak is None:
                    raise RuntimeError(
                        "this system does not tell how much memory a process has had."
                    )
                peaks[what].append(peak)
        measure.progress("")
        ratio = measure.quantile(measure.paired(peaks[TRAINING], peaks[INFERENCE]), 0.5)
        middle = {what: measure.quantile(values, 0.5) for what, values in peaks.items()}
        names = {what: f"{setting.name}: {what}" for what in peaks}
        rows.append(Row(NAME, names[INFERENCE], middle[INFERENCE], "GB"))
        rows.append(Row(NAME, names[TRAINING], middle[TRAINING], "GB", names[INFERENCE], ratio))
        reached = None if options.quick else ratio <= FIGURE
        figures.append({"what": setting.name, "figure": FIGURE, "value": ratio, "reached": reached})
        verdict = {True: "yes", False: "NO", None: "-"}[reached]
        lines.append(
            (
                setting.name,
                f"{middle[INFERENCE]:.3f}",
                f"{middle[TRAINING]:.3f}",
                f"{ratio:.2f}",
                verdict,
            )
        )
    conditions["figures"] = figures
    about = (
        f"{conditions['device']}, {conditions['threads']} threads, torch {conditions['torch']},"
        f" commit {conditions['commit']}. {STEPS} steps each, each case in a process of its own;"
        f" {conditions['memory']}."
    )
    header = ("", "inference, GB", "training, GB", "ratio", f"<= {FIGURE}")
    return Report(
        f"{textwrap.fill(about, measure.WIDTH)}\n\n{measure.table(header, lines)}", conditions, rows
    )
