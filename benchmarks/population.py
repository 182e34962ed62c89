"""The population's forward beside the same sampler without noise, by rows: what a forward of many members costs.

    python -m benchmarks population
    python -m benchmarks population --model 0.5b --json population.json

Every row of a forward is a member of its own (mirrored pairs, rank 1, the default's noise policy) and answers one prompt of 32 tokens
with 32 new ones, greedy, on random weights. Three things are timed for each number of rows: sampling without noise; noise made and
applied; and the parts of a step that are not sampling, noise and update, as shares of a step.

--model: small (Llama d=256, 6 layers; the default on a CPU, float32), gpt2 (124M) and 0.5b (Qwen2's 0.5B shape; the default on CUDA),
both in bfloat16 where the device has it.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.eggroll import Sizes, name_of, settings
from benchmarks.measure import Case, Report, Row
from benchmarks.sampler import build
from common.precision import native_bf16
from common.rollout import Sampler
from eggroll.fitness import fitness
from eggroll.noise import Noise
from eggroll.train import Weights

NAME = "population"
PLAIN, POPULATION = "plain sampler, no noise", "population in one forward"
NOISE, UPDATE = "noise generation", "update"
PROMPT_TOKENS, NEW_TOKENS = 32, 32
ROWS = {"cpu": (64, 256), "cuda": (64, 256, 512, 1024)}
# What is to be reached at this many rows and more: the population's share of the plain speed, and noise and update of a step.
WANTED = {"cpu": (64, 0.95, 0.10), "cuda": (512, 0.95, 0.05)}


class Work:
    """A model, and the population of one size on it."""

    def __init__(self, model: Any, members: int, device: torch.device, quick: bool) -> None:
        new = 4 if quick else NEW_TOKENS
        sizes = Sizes(members=members, prompts=1, prompt_tokens=4 if quick else PROMPT_TOKENS, new_tokens=new)
        self.algo, self.members, self.model = settings(sizes), members, model
        self.noise = Noise(model, self.algo.noise, rank=1, mirrored=True, seed=0)
        self.sampler = Sampler(model, pad_id=0, stop_ids=(), rows=members, graphs=True)
        draw = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(1, model.config.vocab_size, (1, sizes.prompt_tokens), generator=draw).tolist()
        self.rewards = torch.rand(members, 1, generator=draw)
        # A second model for the updates to move.
        moved, folder = copy.deepcopy(model), Path(tempfile.gettempdir())
        self.weights = Weights(moved, self.noise, self.algo, model.dtype, offload=False, folder=folder)

    def plain(self) -> Any:
        """The sampler without noise, the prompt once a member."""
        return self.sampler.generate(self.prompt, self.algo.sampling, groups=self.members).tokens

    def population(self) -> Any:
        """All members in one forward; their noise is made here too."""
        with self.noise.members(0, range(self.members), self.algo.sigma):
            return self.plain()

    def draw(self) -> None:
        """What `population` does before it samples."""
        with self.noise.members(0, range(self.members), self.algo.sigma):
            pass

    def update(self) -> None:
        """Rewards to new weights, as the training loop does it."""
        self.weights.update(self.noise, 0, fitness(self.rewards, self.algo.fitness), self.algo.lr)


def run(options: argparse.Namespace) -> Report:
    """Time every number of rows in turn."""
    device = measure.find_device(options.device)
    name = options.model or ("0.5b" if device.type == "cuda" else "small")
    dtype = torch.bfloat16 if name != "small" and native_bf16(device) else torch.float32
    repeats = options.repeats or (1 if options.quick else 5)
    sizes = (4, 8) if options.quick else ROWS[device.type]
    model = build(name, PROMPT_TOKENS + NEW_TOKENS).to(device, dtype)
    conditions = measure.conditions(
        device,
        sizes={"model": name, "rows": sizes, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS},
        repeats=repeats,
        dtype=name_of(dtype),
        quick=options.quick,
    )
    least, speed_wanted, share_wanted = WANTED[device.type]
    rows, lines, figures, timing = [], [], [], {}
    for members in sizes:
        work = Work(model, members, device, options.quick)
        cases = [Case(PLAIN, work.plain), Case(POPULATION, work.population)]
        timed = measure.interleaved([*cases, Case(NOISE, work.draw), Case(UPDATE, work.update)], repeats, device)
        if torch.equal(timed[PLAIN].result, timed[POPULATION].result):
            raise RuntimeError("not the same work: the noise changes no completion.")
        tokens = timed[PLAIN].result.numel()
        speed = measure.quantile(measure.paired(timed[PLAIN].seconds, timed[POPULATION].seconds), 0.5)
        extra, step = (
            [a + b for a, b in zip(timed[first].seconds, timed[UPDATE].seconds, strict=True)]
            for first in (NOISE, POPULATION)
        )
        share = measure.quantile(measure.paired(extra, step), 0.5)
        plain, population = (tokens / timed[which].p50 for which in (PLAIN, POPULATION))
        rows += [
            Row(NAME, f"{members} rows: {PLAIN}", plain, "tokens/s"),
            Row(NAME, f"{members} rows: {POPULATION}", population, "tokens/s", PLAIN, speed),
            Row(NAME, f"{members} rows: {NOISE} and {UPDATE}", share, "share", "a step", share),
        ]
        lines.append([str(members), measure.number(plain), measure.number(population), f"{speed:.1%}", f"{share:.1%}"])
        if members >= least and not options.quick:
            figures.append([f"{members} rows: speed of the plain sampler", f"{speed_wanted:.0%}", f"{speed:.1%}"])
            figures.append([f"{members} rows: {NOISE} and {UPDATE}", f"{share_wanted:.0%}", f"{share:.1%}"])
        timing[members] = {row: {"warm_up": t.warm_up, "seconds": t.seconds} for row, t in timed.items()}
    conditions |= {
        "timing": timing,
        "ratio": "speed of row / speed of against, the median over repeats; a share is itself",
    }
    text = measure.table(["rows", "plain, tokens/s", "population", "its speed", "noise and update"], lines)
    if figures:
        text += "\n\n" + measure.table(["", "wanted", "measured"], figures)
    return Report(text, conditions, rows)
