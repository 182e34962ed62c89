"""Compare the population's forward with the same sampler without noise, by rows.

    python -m benchmarks population --model 0.5b --json population.json
    python -m benchmarks population --layer 8192

Every row of a forward is a member of its own (mirrored pairs, rank 1, the default noise) and
answers one prompt of 32 tokens with 32 new ones, greedily, with random weights.
"""

import argparse

import torch

from benchmarks import layer
from benchmarks.eggroll import NOISE, PLAIN, POPULATION, UPDATE, Sizes, Work
from benchmarks.measure import Case, Report, choose_model, find_device, name_of, paired
from benchmarks.models import build

ROWS = {"cpu": (64, 256), "cuda": (64, 256, 512, 1024)}
# What is to be reached at this many rows and more: the population's share of the plain speed, and
# noise and update of a step.
WANTED = {"cpu": (64, 0.95, 0.10), "cuda": (512, 0.95, 0.05)}


def run(options: argparse.Namespace) -> Report:
    """Time every number of rows in turn; with --layer, one linear layer alone."""
    if options.layer:
        return layer.run(options)
    name, dtype = choose_model(options.model, find_device(options.device))
    tokens = 4 if options.quick else 32
    report = Report("population", options, 5, dtype=name_of(dtype))
    kind = report.device.type
    counts = (4, 8) if options.quick else ROWS[kind]
    report.conditions["sizes"] = {"model": name, "rows": counts, "tokens": (tokens, tokens)}
    model = build(name)
    least, speed_wanted, share_wanted = WANTED[kind]
    for members in counts:
        size = Sizes(name, members, prompts=1, prompt_tokens=tokens, new_tokens=tokens)
        work = Work(size, report.device, dtype, model=model)
        acts = (work.plain, work.population, work.draw_noise, work.update)
        names = [f"{members} rows: {row}" for row in (PLAIN, POPULATION, NOISE, UPDATE)]
        plain, population, noise, update = names
        timed = report.time([Case(*pair) for pair in zip(names, acts, strict=True)])
        if torch.equal(timed[plain].first, timed[population].first):
            raise RuntimeError("not the same work: the noise changes no completion.")
        speeds = {row: timed[row].speeds(torch.numel) for row in (plain, population)}
        report.compare(speeds, "tokens/s", plain, less=False)
        spent = [timed[row].seconds for row in (noise, update, population)]
        extra = [n + u for n, u, _ in zip(*spent, strict=True)]
        share = paired(extra, [u + p for _, u, p in zip(*spent, strict=True)])
        report.add(f"{members} rows: {NOISE} and {UPDATE}", share, "share of a step")
        if members >= least and not options.quick:
            speed = paired(speeds[population], speeds[plain])
            report.figures += [
                (f"{members} rows: of the plain speed", f">= {speed_wanted:.0%}", f"{speed:.1%}"),
                (f"{members} rows: noise, update", f"<= {share_wanted:.0%}", f"{share:.1%}"),
            ]
    return report
