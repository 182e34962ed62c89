"""The part of what a model knew that it loses while it learns: EGGROLL, GRPO and RFT on one task,
measured on another one and on a text, at an equal gain, with and without a pull towards the start.

    python -m benchmarks forgetting

The model is a tiny one that was taught two tasks, number words and unit conversions; it is trained
on the first. No clock is read: the runs may share the machine.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Report
from common.model.tiny import tiny_model
from common.report.events import EVALUATIONS, events
from common.report.forgetting import find_others
from common.tasks import Example, build
from launch import compose, train

TARGET, OTHER = "translate", "units"
EGGROLL = ["algo=eggroll", "algo.sigma=0.01", "algo.lr=0.02"]  # as for model=tiny
EGGROLL += ["algo.noise.matrices=lowrank"]
# By setting: with what is trained. The pull of RFT is that it begins from the base each time.
SETTINGS = {
    "eggroll": [*EGGROLL],
    "eggroll, algo.weight_decay=0.5": [*EGGROLL, "algo.weight_decay=0.5"],
    "grpo": ["algo=grpo"],
    "grpo, algo.kl.beta=0.1": ["algo=grpo", "algo.kl.beta=0.1"],
    "rft, algo.start_from=last": ["algo=rft", "algo.start_from=last"],
    "rft": ["algo=rft"],
}
LENGTHS = {"eggroll": ("algo.steps", 40, 5), "grpo": ("algo.steps", 40, 5), "rft": ("", 0, 0)}
RFT = ["algo.iterations=3", "algo.patience=9", "algo.prompts=256", "algo.epochs=1", "algo.lr=3e-4"]


class Both:
    """Two tasks as one, to teach a model both."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks = tasks
        self.rows = [(task, row) for task in tasks for row in task.examples("train")]

    def examples(self, split: str) -> Sequence[Example]:
        """Return the rows of both, in turn."""
        return [Example(i, row.question, row.answer) for i, (_, row) in enumerate(self.rows)]

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return what the row's own task teaches."""
        task, row = self.rows[example.id]
        return task.pretraining(row, draw)


def run(options: argparse.Namespace) -> Report:
    """Train, measure and compare."""
    report = Report("forgetting", options, 1, dtype="float32", target=TARGET, other=OTHER)
    tasks = [build(compose([f"task={name}"]).task) for name in (TARGET, OTHER)]
    sizes: Any = compose([f"task={OTHER}"]).model.tiny
    base = tiny_model(replace(sizes, pretrain_steps=20 if options.quick else 600), Both(*tasks))
    found: dict[str, list[Any]] = {}
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(write_rows(tasks[1]), encoding="utf-8")
        shared = [f"task={TARGET}", "model=hf", f"model.path={base}", f"evaluate.also=[{OTHER}]"]
        shared += [f"evaluate.text={text}", f"hardware={'auto' if options.device else 'cpu'}"]
        shared += ["algo.sampling.max_new_tokens=48"]
        for number, (setting, given) in enumerate(SETTINGS.items()):
            made = [*shared, *given, *lengthen(given, options.quick)]
            for seed in range(report.repeats):
                here = Path(folder) / f"{number}-{seed}"
                train(compose([*made, f"seed={seed}"]), here)
                found.setdefault(setting, []).append(events(here / EVALUATIONS))
        rows, told = find_others(found)
    for row in rows:
        for name, value in row.items():
            if name != "setting":
                report.add(row["setting"], float(value), name)
    report.notes.append(told)
    return report


def lengthen(given: Sequence[str], quick: bool) -> list[str]:
    """Return how long a run is and when it is measured."""
    key, steps, every = LENGTHS[given[0].partition("=")[2]]
    least = ["evaluate.examples=8"] if quick else ["evaluate.examples=100"]
    if not key:
        return [*least, *RFT, *(["algo.prompts=8", "algo.select.accept=0.01"] if quick else [])]
    return [*least, f"{key}={2 if quick else steps}", f"evaluate.every={1 if quick else every}"]


def write_rows(task: Any) -> str:
    """Return held-out rows of a task as they should be completed."""
    draw, lines = random.Random(0), []
    for row in task.examples("test"):
        while True:  # what is taught is right in some draws
            prompt, completion = task.pretraining(row, draw)
            if task.reward(row, completion) == 1:
                break
        lines.append(prompt + completion)
    return "\n".join(lines) + "\n"
