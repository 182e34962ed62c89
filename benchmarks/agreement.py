"""The same short runs on a GPU and on the CPU beside it, to see that their numbers agree.

    python -m benchmarks agreement

EGGROLL, GRPO and RFT with the model, the task and the settings that `python launch.py algo=NAME`
has, for a few steps, with hardware=cpu, and on the GPU in float32 and with opt=[amp]. Their random
draws are the same; logits differ by rounding, so that some tokens, and then the rewards, differ.
Three runs go on at the same time, each as a command.
"""

import argparse
import os
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure
from benchmarks.study import measure_run
from common.system import events

NOT_VALIDATED = "evaluate.validation_examples=0"
STEPS = {
    "eggroll": ["algo.steps=3", "algo.members=16", NOT_VALIDATED],
    "grpo": ["algo.steps=3", NOT_VALIDATED],
    "rft": ["algo.prompts=32", "algo.iterations=1", "algo.second_round_samples=0"],
}
COMMON = ["evaluate.examples=64", "checkpoint.every=0"]
QUICK = ["algo.steps=1", "algo.prompts_per_step=2", "evaluate.examples=4"]
CPU, SINGLE, AMP = "on the CPU", "float32", "amp"
WAYS = {CPU: ["hardware=cpu"], SINGLE: ["hardware=auto"], AMP: ["hardware=auto", "opt=[amp]"]}
# The largest differences from the CPU: of the held-out measure before training, which is greedy, in
# points, and of the mean reward of the first step, which is sampled.
WANTED = {SINGLE: (2.0, 0.02), AMP: (8.0, 0.1)}


@dataclass(frozen=True)
class Numbers:
    """The numbers of a run.

    Attributes:
        before: the held-out measure before training.
        after: that after it.
        first: the mean reward of the first step.
    """

    before: float
    after: float
    first: float


def launch(algo: str, way: str, folder: Path, quick: bool) -> Numbers:
    """Make a run. Raises: RuntimeError with the end of what it printed, if it fails."""
    settings = [f"algo={algo}", *STEPS[algo], *COMMON, *WAYS[way], *(QUICK if quick else [])]
    out = folder / f"{algo}-{way}".replace(" ", "-")
    # Three runs at a time share the cores.
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(WAYS)))}
    found = measure_run(settings, out, env)
    if "after" not in found:
        raise RuntimeError(f"{shlex.join(settings)}: {found['verdict']}")
    first = next(line for line in events(out / "metrics.jsonl") if "reward" in line)
    return Numbers(found["before"], found["after"], first["reward"])


def run(options: argparse.Namespace) -> measure.Report:
    """Make the runs, three at a time, and compare them with those on the CPU."""
    report = measure.Report("agreement", options, 1)
    ways = list(WAYS) if report.device.type == "cuda" else [CPU]
    algos = ["grpo"] if options.quick else list(STEPS)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(WAYS)) as pool:
        made = {
            (algo, way): pool.submit(launch, algo, way, Path(folder), options.quick)
            for algo in algos
            for way in ways
        }
        for (algo, way), future in made.items():
            try:
                found = future.result()
            except RuntimeError as error:  # the other runs stand
                report.notes.append(str(error))
                report.figures.append((f"{algo}, {way}: ends", ">= 1 run", "0 runs"))
                continue
            row = f"{algo}, {way}"
            report.add(row, found.before, "before")
            report.add(row, found.first, "reward of step 1")
            report.add(row, found.after, "after")
            if way == CPU or made[algo, CPU].exception():
                continue
            base = made[algo, CPU].result()
            points, reward = abs(found.before - base.before), abs(found.first - base.first)
            for name, apart, most in zip(
                ("before, points", "reward of step 1"), (points, reward), WANTED[way], strict=True
            ):
                report.figures.append((f"{row}: {name} from the CPU", f"<= {most}", f"{apart:.4f}"))
    if ways == [CPU]:
        report.notes.append("There is no GPU here: the runs on the CPU alone.")
    return report
