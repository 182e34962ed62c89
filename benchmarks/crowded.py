"""A run next to other processes: alone, next to a process that never rests, next to another PyTorch
program, and two runs at once; with libgomp's default waiting, and with the waiting that runs set.

    python -m benchmarks crowded
    python -m benchmarks crowded --weights DIR     # SmolLM2-135M-Instruct in bfloat16, alone

A value is the training seconds of eight steps of the default EGGROLL run, of the slower one if
there are two. With --weights it is the seconds of three steps of GRPO, alone. Nothing else should
use the machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import Report

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
# What libgomp does by default; set by hand, it holds, whatever the load.
SPINNING = {"GOMP_SPINCOUNT": "300000"}
NEVER_RESTS = [sys.executable, "-S", "-c", "while True: pass"]
PROGRAM = "import torch\na = torch.rand(256, 256)\nwhile True: a = (a @ a).tanh()"
PRODUCTS = [sys.executable, "-c", PROGRAM]
TINY = ["algo=eggroll", "evaluate.examples=8"]
SMOLLM2 = ["algo=grpo", "task=units", "model=hf", "opt=[amp]", "evaluate.examples=1"]
SMOLLM2 += ["algo.prompts_per_step=4", "algo.samples_per_prompt=4"]
SMOLLM2 += ["algo.sampling.max_new_tokens=24"]
OTHERS: dict[str, Sequence[Sequence[str]]] = {
    "alone": (),
    "beside one busy process": (NEVER_RESTS,),
    "beside another PyTorch program": (PRODUCTS,),
    "two at once": (),
}


def run(options: argparse.Namespace) -> Report:
    """Time training next to other processes."""
    report = Report("crowded", options, 3, dtype="float32")
    if report.device.type != "cpu":
        report.skip("crowded", "s", "it is about the cores of a CPU")
        return report
    settings, steps, cases = TINY, 8, OTHERS
    if options.weights is not None:
        settings, steps = [*SMOLLM2, f"model.path={options.weights}"], 3
        cases = {"alone": ()}
    settings = [*settings, f"algo.steps={1 if options.quick else steps}"]
    values: dict[str, list[float]] = {}
    train_beside(settings, {}, (), 1)  # which pre-trains the tiny model
    for _ in range(report.repeats):
        for name, others in cases.items():
            count = 2 if name == "two at once" else 1
            for way, chosen in (("spinning", SPINNING), ("a run now", {})):
                seconds = train_beside(settings, chosen, others, count)
                values.setdefault(f"{name}, {way}", []).append(seconds)
    report.compare(values, "s", "alone, spinning", less=True)
    return report


def train_beside(
    settings: Sequence[str], chosen: dict[str, str], others: Sequence[Sequence[str]], count: int
) -> float:
    """Return the training seconds of a run, or of the slowest of `count` runs that start together.

    Args:
        chosen: environment variables of the runs.
        others: commands that run meanwhile.
    """
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    plain = {key: value for key, value in os.environ.items() if key not in unset}
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory()))
        for command in others:
            process = stack.enter_context(subprocess.Popen(command, env=plain))
            stack.callback(process.kill)
        folders = [root / str(number) for number in range(count)]
        runs = [
            subprocess.Popen(
                [sys.executable, str(LAUNCH), *settings, f"hydra.run.dir={folder}"],
                env=plain | chosen,
                stdout=subprocess.DEVNULL,
            )
            for folder in folders
        ]
        for process in runs:
            if process.wait():
                raise RuntimeError(f"a run ended with exit code {process.returncode}")
        return max(json.loads((f / "result.json").read_text())["seconds"] for f in folders)
