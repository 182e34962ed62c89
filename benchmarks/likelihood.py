"""Compare a population's log-probabilities of given answers with a plain forward of the same rows.

    python -m benchmarks likelihood --json likelihood.json

Members (mirrored pairs, rank 1, the default noise) score 8 answers of 32 tokens after prompts of
32, with random weights. Both rows of the table make the same forward and read the same logits.
"""

import argparse
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.eggroll import Sizes, Work
from benchmarks.measure import Case, Report, choose_model, find_device, name_of, paired
from benchmarks.models import build
from common.finetune import Tree
from eggroll.likelihood import Likelihood

MEMBERS, ANSWERS, WANTED = (8, 32), 8, 0.9


class Unperturbed:
    """Stands in for the noise of members that have none."""

    def members(self, draw: int, members: range, sigma: float) -> Any:
        """Perturb nothing."""
        return nullcontext()


def run(options: argparse.Namespace) -> Report:
    """Time every number of members in turn."""
    name, dtype = choose_model(options.model, find_device(options.device))
    tokens = 4 if options.quick else 32
    report = Report("likelihood", options, 5, dtype=name_of(dtype))
    counts = (2, 4) if options.quick else MEMBERS
    sizes = {"model": name, "members": counts, "answers": ANSWERS, "tokens": (tokens, tokens)}
    report.conditions["sizes"] = sizes
    model = build(name)
    for count in counts:
        work = Work(Sizes(name, count, ANSWERS, tokens, tokens), report.device, dtype, model=model)
        trees = [Tree(row, [row], [[True] * tokens]) for row in work.prompts.tolist()]
        members, sigma = range(count), float(work.settings.sigma)
        plain, perturbed = (f"{count} x {ANSWERS} rows: {row}" for row in ("plain", "members"))
        noises: dict[str, Any] = {plain: Unperturbed(), perturbed: work.noise}
        cases = [
            Case(row, partial(Likelihood(model, noise, 0, True).score, trees, members, 0, sigma))
            for row, noise in noises.items()
        ]
        timed = report.time(cases)
        if torch.equal(timed[plain].first, timed[perturbed].first):
            raise RuntimeError("not the same work: the noise changes no log-probability.")
        speeds = {row: timed[row].speeds(torch.numel) for row in noises}
        report.compare(speeds, "members x answers/s", plain, less=False)
        if not options.quick:
            share = f"{paired(speeds[perturbed], speeds[plain]):.1%}"
            report.figures.append(
                (f"{count} members: of the plain speed", f">= {WANTED:.0%}", share)
            )
    return report
