"""Train with defaults alone: the three algorithms on the model that the project brings, on rows
that nobody tuned them for, and on SmolLM2-135M-Instruct.

    python -m benchmarks defaults --part readme --json FILE               # their own tasks
    python -m benchmarks defaults --part rows --json FILE                 # own rows, 120 s each
    python -m benchmarks defaults --part real --weights DIR --json FILE   # units, 20 minutes each

Each run is a command of its own, and nothing else should use the machine. The runs that the JSON
holds are not run again, so that it is filled in over several sessions; it is written after each.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import measure
from benchmarks.measure import Report
from common.report.events import events
from common.signals import EXIT_CONFIG

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "README.md"  # whose bits per byte are measured
RUNS = "runs"  # of the conditions in the JSON
ALGORITHMS = ("eggroll", "grpo", "rft")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = "apple bread chair dance eagle flame grape house igloo juice knife lemon mouse night ocean"
SECONDS = {"readme": None, "rows": 120, "real": 1200}


def add(draw: random.Random) -> tuple[str, str]:
    """Return a sum of two numbers."""
    left, right = draw.randrange(100), draw.randrange(100)
    return f"{left} + {right} =", str(left + right)


def count_days(draw: random.Random) -> tuple[str, str]:
    """Return a question about weekdays."""
    day, later = draw.randrange(7), draw.randrange(1, 30)
    return f"{later} days after {DAYS[day]} is", DAYS[(day + later) % 7]


def reverse(draw: random.Random) -> tuple[str, str]:
    """Return a pair of words to write backwards."""
    words = " ".join(draw.sample(WORDS.split(), 2))
    return f"{words} backwards:", words[::-1]


ROWS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": add,
    "weekdays": count_days,
    "reversed words": reverse,
}


def list_runs(part: str, weights: Path | None, seeds: int, folder: Path) -> dict[str, list[str]]:
    """Return the overrides of each run of a part, by name; the rows go to files in `folder`."""
    tasks: dict[str, list[str]] = {"": []}
    if part == "real":
        tasks = {"units": ["task=units", "model=hf", f"model.path={weights}"]}
    elif part == "rows":
        tasks = {name: write_rows(name, folder / f"{name}.csv") for name in ROWS}
    every = [f"budget.seconds={SECONDS[part]}"] if SECONDS[part] else []
    every += [f"evaluate.text={TEXT}"] if part == "real" else []
    return {
        f"{algorithm}, {task or 'its own task'}, seed {seed}": [
            *(f"algo={algorithm}", *overrides, *every, f"seed={seed}")
        ]
        for seed in range(seeds)
        for task, overrides in tasks.items()
        for algorithm in ALGORITHMS
    }


def write_rows(name: str, path: Path) -> list[str]:
    """Write 400 rows of a kind, and return the overrides of a run on them."""
    draw, rows = random.Random(0), dict[str, str]()
    for _ in range(10_000):
        if len(rows) < 400:
            rows.update([ROWS[name](draw)])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "answer"), *rows.items()])
    return [
        *("task=custom", f"task.path={path}"),
        *("task.prompt_field=question", "task.answer_field=answer"),
    ]


def measure_run(overrides: list[str], folder: Path) -> dict[str, Any]:
    """Return what a run came to, and what it says of itself. bits: per byte of `TEXT`, before and
    after; drift: the largest of a run of EGGROLL. Of a run that is refused it is the reason.

    Raises: RuntimeError for another run that has left no result.
    """
    command = [sys.executable, str(ROOT / "launch.py"), *overrides, f"hydra.run.dir={folder}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if ended.returncode == EXIT_CONFIG:
        return {"code": ended.returncode, "verdict": ended.stderr.splitlines()[-1]}
    if not (folder / "result.json").exists():
        raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr[-500:]}")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    both = [result["metrics"][when] for when in ("before", "after")]
    drifts = [row["drift"] for row in events(folder / "metrics.jsonl") if "drift" in row]
    return {
        "code": ended.returncode,
        **{key: result[key] for key in ("metric", "before", "after", "steps", "seconds")},
        **{key: result[key] for key in ("generated_tokens", "ended_by", "verdict")},
        "interval": result["intervals"][result["metric"]]["change"],
        "bits": [metrics.get("text/bits_per_byte") for metrics in both],
        "drift": max(drifts, default=None),
    }


def run(options: argparse.Namespace) -> Report:
    """Make the runs that are missing. --repeats: seeds."""
    report = Report("defaults", options, 3, dtype="float32", part=options.part)
    runs = report.conditions[RUNS] = read_runs(options.json)
    with TemporaryDirectory() as folder:
        asked = list_runs(options.part, options.weights, report.repeats, Path(folder))
        missing = [name for name in asked if name not in runs]
        for name in missing[: options.runs]:
            measure.progress(name)
            runs[name] = measure_run(asked[name], Path(folder) / str(len(runs)))
            runs[name]["commit"] = report.conditions["commit"]
            if options.json is not None:
                report.save(options.json)
    measure.progress("")
    report.notes += [f"{name}: {values.get('verdict')}" for name, values in runs.items()]
    for name, values in runs.items():
        for key in ("before", "after"):
            if values.get(key) is not None:
                report.add(name, values[key], key)
    return report


def read_runs(path: Path | None) -> dict[str, Any]:
    """Return the runs of an earlier session."""
    if path is None or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))["conditions"][RUNS]
