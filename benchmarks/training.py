"""A training forward and backward pass, eager and compiled: opt.compile.training.

    python -m benchmarks training                  # the tiny model, random weights
    python -m benchmarks training --weights DIR    # SmolLM2-135M

A micro-batch has 4 prompts of 20 to 60 tokens with 8 completions of 8 to 64 tokens each, with other
lengths in each of 6 micro-batches, in float32. Both ways compute the same micro-batches in turn.
The difference of gradients is relative to the norm of the eager ones.
"""

import argparse
import random
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import Case, Report, seconds, why_no_compiler
from benchmarks.models import build
from common.model import logprobs, training_graph

PROMPTS, SAMPLES, BATCHES = 4, 8, 6
EAGER, COMPILED = "eager", "compiled blocks"


def draw(number: int, vocabulary: int, device: torch.device) -> logprobs.Groups:
    """Return a micro-batch of random tokens, the same at every call."""
    choose = random.Random(number)

    def ids(least: int, most: int) -> list[int]:
        return [choose.randrange(vocabulary) for _ in range(choose.randint(least, most))]

    prompts = [ids(20, 60) for _ in range(PROMPTS)]
    return logprobs.group(prompts, [[ids(8, 64) for _ in range(SAMPLES)] for _ in prompts], device)


def pass_through(model: Any, batches: list[logprobs.Groups], compiled: bool) -> torch.Tensor:
    """Make the passes over all micro-batches. Returns the gradient of the input embedding."""
    model.zero_grad()
    blocks = training_graph.compiled_blocks(model, "default") if compiled else nullcontext()
    with blocks:
        for groups in batches:
            logp, _ = logprobs.token_logprobs(model, groups, 1.0)
            (logp.sum() / len(groups.targets)).backward()
    return model.get_input_embeddings().weight.grad.clone()


def run(options: argparse.Namespace) -> Report:
    """Time both ways in turn, and the compilation."""
    report = Report("training", options, 5, dtype="float32")
    device = report.device
    if (why := why_no_compiler(device)) is not None:
        report.skip(COMPILED, "s", why)
        return report
    model: Any = build("quick" if options.quick else "tiny")
    if options.weights is not None:
        model = AutoModelForCausalLM.from_pretrained(options.weights, dtype=torch.float32)
    model = model.to(device).eval().requires_grad_(True)
    logprobs.prepare(model)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    batches = [
        draw(number, vocabulary, device) for number in range(1 if options.quick else BATCHES)
    ]
    report.conditions["sizes"] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": sum(groups.ids.shape[1] for groups in batches),
    }

    def prepare() -> None:
        with training_graph.compiled_blocks(model, "default"):
            training_graph.rehearse(model, device)

    report.add("the compilation, once", seconds(prepare, device)[0], "s")
    timings = report.time(
        [
            Case(EAGER, lambda: pass_through(model, batches, False)),
            Case(COMPILED, lambda: pass_through(model, batches, True)),
        ]
    )
    report.compare({name: t.seconds for name, t in timings.items()}, "s", EAGER, less=True)
    ours, theirs = timings[COMPILED].first, timings[EAGER].first
    report.add(COMPILED, ((ours - theirs).norm() / theirs.norm()).item(), "share of the gradient")
    return report
