"""One linear layer under a population, as the paper on EGGROLL measures it (arXiv:2511.16652,
figure 2a and appendix E): a square layer, a batch whose rows are members in mirrored pairs, rank 1.

    python -m benchmarks population --layer 8192        # as there, on a GPU: bfloat16, batch 1,024

The paper has 91 % of plain inference with noise that is ready, and 69 % with noise that is drawn in
each forward, on a GH200. A rollout of this project draws its noise once and then makes a forward
per token, so the first number is the one that counts here.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.eggroll import Sizes, settings
from benchmarks.measure import Case, Report, find_device, find_kernels, name_of, paired
from common.config import ConfigError
from common.device import native_bf16
from eggroll.noise import Noise

BATCH = {"cpu": 256, "cuda": 1024}
CALLS = {"cpu": 4, "cuda": 100}  # forwards per timed call, so that a GPU waits for no launch
PLAIN, READY, DRAWN = "plain", "noise is ready", "noise is drawn in each forward"
# The share of the plain speed to be reached: on a GPU the paper's, on a CPU that of its reference
# code with jax on two cores.
WANTED = {"cpu": {READY: 0.96}, "cuda": {READY: 0.91, DRAWN: 0.69}}


class OneLayer(PreTrainedModel):
    """A square linear layer without bias."""

    config_class = PreTrainedConfig

    def __init__(self, size: int) -> None:
        settings: dict[str, Any] = {"hidden_size": size, "num_hidden_layers": 0}
        super().__init__(PreTrainedConfig(**settings))
        self.layer = nn.Linear(size, size, bias=False)

    def forward(
        self, x: Tensor | None = None, input_ids: Tensor | None = None, use_cache: bool = False
    ) -> Tensor:
        """Return x W^T [..., size]; for token ids, with which the noise looks for layers that read
        the same input, that of zeros.
        """
        if x is None:
            assert input_ids is not None
            x = self.layer.weight.new_zeros(*input_ids.shape, self.layer.in_features)
        return self.layer(x)


def run(options: argparse.Namespace) -> Report:
    """Time the layer without noise, with noise, and with noise that is drawn each time."""
    device = find_device(options.device)
    size = 64 if options.quick else options.layer
    batch = 8 if options.quick else options.batch or BATCH[device.type]
    if batch % 2:
        raise ConfigError(f"--batch {batch} is odd: members come in pairs. Give an even number.")
    calls = 1 if options.quick else CALLS[device.type]
    dtype = torch.bfloat16 if native_bf16(device) else torch.float32
    report = Report("population", options, 20, dtype=name_of(dtype))
    report.conditions["sizes"] = {"layer": size, "batch": batch, "forwards_per_call": calls}
    torch.manual_seed(0)
    model: Any = OneLayer(size).requires_grad_(False)
    model.to(device, dtype)
    x = torch.randn(batch, 1, size, device=device).to(dtype)
    algo = settings(Sizes())
    members, sigma = range(batch), float(algo.sigma)

    def perturb() -> tuple[Any, Noise]:
        weight = model.layer.weight
        other = copy.deepcopy(model, {id(weight): weight})  # which both share
        return other, Noise(other, algo.noise, rank=1, mirrored=True, seed=0)

    def times(layer: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            for _ in range(calls):
                y = layer(x)
            return y

        return torch.inference_mode()(call)

    held, noise = perturb()
    other, redrawn = perturb()

    @torch.inference_mode()
    def draw() -> Tensor:
        for number in range(calls):
            with redrawn.members(number, members, sigma):
                y = other(x)
        return y

    acts = {PLAIN: times(model), READY: times(held), DRAWN: draw}
    with noise.members(0, members, sigma):
        timed = report.time([Case(name, act, 1 / calls) for name, act in acts.items()])
        found = {name: find_kernels(act, device) for name, act in acts.items()}
    report.conditions["kernels_us_per_call"] = found
    if torch.equal(timed[PLAIN].first, timed[READY].first):
        raise RuntimeError("not the same work: the noise changes no output.")
    spans = {name: [1e6 * seconds for seconds in one.seconds] for name, one in timed.items()}
    report.compare(spans, "us per forward", PLAIN, less=True)
    flops = 2 * batch * size * size
    for name, one in timed.items():
        report.add(name, flops / one.p50 / 1e12, "TFLOP/s")
    for name, least in WANTED[device.type].items():
        share = paired(spans[PLAIN], spans[name])
        if not options.quick:
            report.figures.append((f"{name}: of plain", f">= {least:.0%}", f"{share:.1%}"))
    return report
