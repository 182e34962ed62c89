"""Rewards of a GRPO step: scored one after the other, in threads, and in processes.

    python -m benchmarks scoring --json scoring.json

A step has 8 prompts with K = 4, 8, 16 or 32 samples. One reward waits for 20 ms per completion
without processor time, like a judge at the other end of a network. The other computes in Python for
some milliseconds, which holds the interpreter's lock. A pool has 4 workers, as in the document on
an RTX 4090. The pool is the one that runs use (common.scoring), started beforehand.
"""

import argparse
import time
from typing import Any

from benchmarks.measure import Case, Report
from common.config import ScoringConfig
from common.scoring import Scorer
from common.task import Example

PROMPTS, WORKERS = 8, 4
SAMPLES, QUICK = (4, 8, 16, 32), (4,)
WAIT_SECONDS, ADDITIONS = 0.02, 100_000
KINDS = ("serial", "threads", "processes")


class Waiting:
    """A task whose reward waits."""

    name = "waits"

    def reward(self, example: Example, completion: str) -> float:
        """Return the same reward for every completion, after a delay."""
        time.sleep(WAIT_SECONDS)
        return 1.0 if completion == example.answer else 0.0


class Computing:
    """A task whose reward computes in Python."""

    name = "computes"

    def reward(self, example: Example, completion: str) -> float:
        """Return the same reward for every completion, after many additions."""
        total = 0
        for number in range(ADDITIONS):
            total += number
        return 1.0 if completion == example.answer and total else 0.0


def score(scorer: Scorer, samples: int) -> list[float]:
    """Return the rewards of a step's completions."""
    examples = [Example(id=i, question="", answer=str(i)) for i in range(PROMPTS)]
    each = [example for example in examples for _ in range(samples)]
    return (
        scorer.submit(each, [str(number % PROMPTS) for number in range(len(each))]).result().rewards
    )


def run(options: argparse.Namespace) -> Report:
    """Score steps of each size in each way, in turn."""
    report = Report("scoring", options, 5)
    report.conditions["sizes"] = {
        "prompts": PROMPTS,
        "workers": WORKERS,
        "wait_seconds": WAIT_SECONDS,
        "additions": ADDITIONS,
    }
    tasks: list[Any] = [Waiting(), Computing()]
    scorers = {
        (task.name, kind): Scorer(
            task, ScoringConfig(kind=kind, workers=WORKERS, timeout_seconds=600)
        )
        for task in tasks
        for kind in KINDS
    }
    try:
        for task in tasks:
            for samples in QUICK if options.quick else SAMPLES:
                compare(report, task.name, samples, scorers)
    finally:
        for scorer in scorers.values():
            scorer.close()
    report.notes.append(f"s: of {PROMPTS} x K completions; ratio: against serial.")
    return report


def compare(
    report: Report, task: str, samples: int, scorers: dict[tuple[str, str], Scorer]
) -> None:
    """Add the rows of one reward and one size, whose rewards must be equal in each way."""
    names = {kind: f"{task}, K={samples}, {kind}" for kind in KINDS}
    cases = [
        Case(names[kind], lambda kind=kind: score(scorers[task, kind], samples)) for kind in KINDS
    ]
    timings = report.time(cases)
    found = [timing.first for timing in timings.values()]
    assert all(rewards == found[0] for rewards in found), "a pool gives the rewards of one process"
    taken = {name: timing.seconds for name, timing in timings.items()}
    report.compare(taken, "s", names["serial"], less=True)
