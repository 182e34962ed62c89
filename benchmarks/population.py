"""The population's forward beside the same sampler without noise, by rows: what a forward of many
members costs.

    python -m benchmarks population
    python -m benchmarks population --model 0.5b --json population.json

Every row of a forward is a member of its own (mirrored pairs, rank 1, the default's noise policy)
and answers one prompt of 32 tokens with 32 new ones, greedy, on random weights. Three things are
timed for each number of rows: sampling without noise; noise made and applied; and the parts of a
step that are not sampling, noise and update, as shares of a step.

--model: small (Llama d=256, 6 layers; the default on a CPU, float32), gpt2 (124M) and 0.5b (Qwen2's
0.5B shape; the default on CUDA), both in bfloat16 where the device has it.
"""

import argparse

import torch

from benchmarks import measure
from benchmarks.eggroll import NOISE, PLAIN, POPULATION, UPDATE, Sizes, Work, name_of
from benchmarks.measure import Case, Report, Row
from benchmarks.sampler import build
from common.precision import native_bf16

NAME = "population"
PROMPT_TOKENS, NEW_TOKENS = 32, 32
ROWS = {"cpu": (64, 256), "cuda": (64, 256, 512, 1024)}
# What is to be reached at this many rows and more: the population's share of the plain speed, and
# noise and update of a step.
WANTED = {"cpu": (64, 0.95, 0.10), "cuda": (512, 0.95, 0.05)}


def run(options: argparse.Namespace) -> Report:
    """Time every number of rows in turn."""
    device = measure.find_device(options.device)
    name = options.model or ("0.5b" if device.type == "cuda" else "small")
    dtype = torch.bfloat16 if name != "small" and native_bf16(device) else torch.float32
    repeats = options.repeats or (1 if options.quick else 5)
    sizes = (4, 8) if options.quick else ROWS[device.type]
    prompt_tokens, new_tokens = (4, 4) if options.quick else (PROMPT_TOKENS, NEW_TOKENS)
    model = build(name, prompt_tokens + new_tokens)
    tokens_each = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    conditions = measure.conditions(
        device,
        sizes={"model": name, "rows": sizes, **tokens_each},
        repeats=repeats,
        dtype=name_of(dtype),
        quick=options.quick,
    )
    least, speed_wanted, share_wanted = WANTED[device.type]
    rows, lines, figures, timing = [], [], [], {}
    for members in sizes:
        size = Sizes(members=members, prompts=1, **tokens_each)
        work = Work(size, device, dtype, False, model)
        cases = [Case(PLAIN, work.plain), Case(POPULATION, work.population)]
        timed = measure.interleaved(
            [*cases, Case(NOISE, work.draw_noise), Case(UPDATE, work.update)], repeats, device
        )
        if torch.equal(timed[PLAIN].result, timed[POPULATION].result):
            raise RuntimeError("not the same work: the noise changes no completion.")
        tokens = timed[PLAIN].result.numel()
        speed = measure.quantile(
            measure.paired(timed[PLAIN].seconds, timed[POPULATION].seconds), 0.5
        )
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
        speeds = [measure.number(plain), measure.number(population)]
        lines.append([str(members), *speeds, f"{speed:.1%}", f"{share:.1%}"])
        if members >= least and not options.quick:
            figures += [
                [f"{members} rows: {what}", f"{wanted:.0%}", f"{value:.1%}"]
                for what, wanted, value in (
                    ("speed of the plain sampler", speed_wanted, speed),
                    (f"{NOISE} and {UPDATE}", share_wanted, share),
                )
            ]
        timing[members] = measure.taken(timed)
    conditions |= {
        "timing": timing,
        "ratio": "speed of row / speed of against, the median over repeats; a share is itself",
    }
    text = measure.table(
        ["rows", "plain, tokens/s", "population", "its speed", "noise and update"], lines
    )
    if figures:
        text += "\n\n" + measure.table(["", "wanted", "measured"], figures)
    return Report(text, conditions, rows)
