"""GRPO with slow rewards: algo.overlap=0 compared with 1.

    python -m benchmarks overlap                   # the tiny model
    python -m benchmarks overlap --weights DIR     # SmolLM2-135M in bfloat16

The task is units, in which a completion reasons before it answers. The rewards of a rollout take as
long as its sampling took in a run without them, and no processor time, like those of a judge at the
other end of a network. Values are training seconds per step; the samples are the same, except that
the policy is one step older.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Report
from common.system import events
from common.task import Example, build
from launch import compose, train


def slow_down(task: Any, seconds: float) -> None:
    """Delay the first component of the task's reward by `seconds`."""
    name, component = next(iter(task.components.items()))

    def judge(examples: Sequence[Example], completions: Sequence[str]) -> Any:
        time.sleep(seconds)
        return component(examples, completions)

    task.components[name] = judge


def run(options: argparse.Namespace) -> Report:
    """Train with and without overlap, in turn."""
    report = Report("overlap", options, 3, dtype="bfloat16" if options.weights else "float32")
    steps = 3 if options.quick else 12
    overrides = ["algo=grpo", f"algo.steps={steps}", "evaluate.examples=1", "checkpoint.every=0"]
    overrides += ["task=units", "evaluate.every=0"]
    overrides += ["algo.resample_rounds=0", "scoring.kind=threads", "scoring.workers=1"]
    values: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        if options.weights is not None:
            overrides += ["model=hf", f"model.path={options.weights}", "opt=[amp]"]

        def measure_step(overlap: int, wait: float) -> dict[str, float]:
            """Return the median seconds of a step, and of its sampling."""
            out = Path(folder) / str(time.monotonic_ns())
            run: Any = compose([*overrides, f"algo.overlap={overlap}"])
            task = build(run.task)
            slow_down(task, wait)
            train(run, out, task)
            logged = events(out / "metrics.jsonl")[1:]
            sampling = median(event["phase_seconds"].get("rollout", 0.0) for event in logged)
            return {"step": median(event["seconds"] for event in logged), "sampling": sampling}

        wait = measure_step(0, 0.0)["sampling"]
        for _ in range(report.repeats):
            for overlap in (0, 1):
                found = measure_step(overlap, wait)["step"]
                values.setdefault(f"algo.overlap={overlap}", []).append(found)
    report.add("the reward of a rollout", wait, "s")
    report.compare(values, "s", "algo.overlap=0", less=True)
    return report
