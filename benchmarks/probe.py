"""Compare the sigma and lr that EGGROLL's probe chooses with a grid of both, on three tasks of the
tiny model, by the held-out measure after training.

    python -m benchmarks probe --json probe.json                 # all points, hours
    python -m benchmarks probe --json probe.json --points 5      # five more of them

A point is a run of EGGROLL's defaults, in a process of its own with one thread; there are as many
at a time as cores, as no clock is read. The points that the JSON holds are not run again, so that a
grid is filled in bit by bit; it is written after each of them. Seeds come one after the other, the
probe's choice and the defaults first. After the first seed a task goes on with those of its grid
that gained `NEAR` of the most, the best first: the others would not be the best in the mean.
"""

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import measure
from benchmarks.measure import Report
from common.signals import RunStopped
from launch import compose, train

AUTO, DEFAULT = "auto", "default"
POINTS = "points"  # of the conditions in the JSON
NEAR = 2 / 3


@dataclass(frozen=True)
class Sizes:
    """The grid. overrides: of each run."""

    tasks: tuple[str, ...] = ("translate", "countdown", "units")
    sigmas: tuple[float, ...] = (0.0025, 0.005, 0.01, 0.02, 0.04)
    lrs: tuple[float, ...] = (0.005, 0.01, 0.02, 0.04, 0.08)
    overrides: tuple[str, ...] = ("hardware=cpu",)


TINY = ("hidden_size=32", "layers=2", "heads=2", "intermediate_size=64", "pretrain_steps=40")
FEW = ("members=8", "prompts_per_step=4", "steps=2", "sampling.max_new_tokens=16")
QUICK = Sizes(
    tasks=("translate",),
    sigmas=(0.01,),
    lrs=(0.02,),
    overrides=(
        *Sizes.overrides,
        "evaluate.examples=4",
        "algo.sampling.temperature=1.0",
        *(f"model.tiny.{text}" for text in TINY),
        *(f"algo.{text}" for text in FEW),
    ),
)


def settings(sizes: Sizes) -> dict[str, list[str]]:
    """Return the points of a task and a seed, by name."""
    grid = {f"sigma {s:g}, lr {lr:g}": (s, lr) for s in sizes.sigmas for lr in sizes.lrs}
    given = {name: [f"algo.sigma={s}", f"algo.lr={lr}"] for name, (s, lr) in grid.items()}
    return {AUTO: ["algo.sigma=auto", "algo.lr=auto"], DEFAULT: [], **given}


def name_points(sizes: Sizes, seed: int, points: dict[str, Any]) -> dict[str, list[str]]:
    """Return the points of a seed in the order of work: the name and the overrides of each run."""
    shares = {task: share_gains(points, task) for task in sizes.tasks}
    found = []
    for name, given in settings(sizes).items():
        for task in sizes.tasks:
            first = seed == 1 or name in (AUTO, DEFAULT)
            share = 1.0 if first else shares[task].get(f"{task}: {name}: seed 1", 0.0)
            if share >= NEAR:
                made = ["algo=eggroll", f"task={task}", f"seed={seed}", *sizes.overrides, *given]
                found.append((share, f"{task}: {name}: seed {seed}", made))
    found.sort(key=lambda point: -point[0])
    return {name: made for _, name, made in found}


def share_gains(points: dict[str, Any], task: str) -> dict[str, float]:
    """Return what each point of a task's grid gained with seed 1, as a share of the most that one
    of them did.
    """
    gains = {
        key: point["after"] - point["before"]
        for key, point in points.items()
        if key.startswith(f"{task}: sigma")
        and key.endswith("seed 1")
        and point["after"] is not None
    }
    most = max(gains.values(), default=0.0)
    return {key: gain / most if most > 0 else 1.0 for key, gain in gains.items()}


def measure_point(overrides: list[str]) -> dict[str, Any]:
    """Return what a run came to; a run that ends in NaN has nothing after training."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        try:
            result = train(compose(overrides), Path(folder))
        except RunStopped as stop:
            return {"after": None, "stopped": str(stop)}
        found = {"after": result.after, "before": result.before, "metric": result.metric}
        if (chosen := Path(folder) / "probe.json").exists():
            probed = json.loads(chosen.read_text(encoding="utf-8"))
            found |= {key: probed[key] for key in ("sigma", "lr")}
        return found


def run(options: argparse.Namespace) -> Report:
    """Run the points that are missing, and compare. --repeats: seeds."""
    sizes = QUICK if options.quick else Sizes()
    report = Report("probe", options, 3, sizes=asdict(sizes), dtype="float32")
    points = read_points(options.json, report.conditions["sizes"])
    report.conditions[POINTS] = points
    left = options.points if options.points is not None else sys.maxsize
    for seed in range(1, report.repeats + 1):
        asked = name_points(sizes, seed, points)
        missing = [name for name in asked if name not in points]
        run_points(report, {name: asked[name] for name in missing[:left]}, options.json)
        done = sum(name in points for name in asked)
        report.notes.append(f"seed {seed}: {done} of {len(asked)} points")
        left -= len(missing)
        if left < 0:
            break
    for task in sizes.tasks:
        add_task(report, sizes, task)
    return report


def run_points(report: Report, asked: dict[str, list[str]], path: Path | None) -> None:
    """Run points, as many at a time as there are cores, and keep what each came to."""
    points = report.conditions[POINTS]
    runs = partial(measure.in_new_process, __name__, measure_point)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting = {pool.submit(runs, overrides): name for name, overrides in asked.items()}
        for number, done in enumerate(as_completed(waiting), 1):
            points[waiting[done]] = done.result() | {"commit": report.conditions["commit"]}
            measure.progress(f"{number} of {len(asked)} points: {waiting[done]}")
            if path is not None:
                report.save(path)
    measure.progress("")


def read_points(path: Path | None, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the points that an earlier session has written, none where there was none."""
    if path is None or not path.exists():
        return {}
    conditions = json.loads(path.read_text(encoding="utf-8"))["conditions"]
    if conditions["sizes"] != json.loads(json.dumps(sizes)):
        sys.exit(f"error: {path} holds points of another grid. Give another --json.")
    return conditions[POINTS]


def add_task(report: Report, sizes: Sizes, task: str) -> None:
    """Add the means of a task's points, and how the probe's choice stands beside the others."""
    points, means, seeds = report.conditions[POINTS], {}, {}
    for name in settings(sizes):
        keys = [f"{task}: {name}: seed {seed}" for seed in range(1, report.repeats + 1)]
        values = [points[key]["after"] or 0.0 for key in keys if key in points]
        if values:
            means[name], seeds[name] = statistics.fmean(values), len(values)
            report.add(f"{task}: {name}", means[name], "held out")
            report.add(f"{task}: {name}", seeds[name], "seeds")
    grid = [name for name in means if name not in (AUTO, DEFAULT)]
    if AUTO in means and grid:
        best = max(grid, key=lambda name: (seeds[name], means[name]))
        share = f"{means[AUTO]:.1f} of {means[best]:.1f} ({best}; {len(grid)} points)"
        report.figures.append((f"{task}: auto, of the grid's best", ">= 90 %", share))
    if AUTO in means and DEFAULT in means:
        both = f"{means[AUTO]:.1f} against {means[DEFAULT]:.1f}"
        report.figures.append((f"{task}: auto against the defaults", "more, on two tasks", both))
