"""Run every benchmark in one go, and print two sets of results next to each other.

    python -m benchmarks all --out results
    python -m benchmarks compare benchmarks/results/cpu-2core results

`all` runs what fits the device within its time; unfinished benchmarks are listed. `compare` joins
rows by benchmark, row and unit, and names the conditions that differ: a ratio between two machines,
or two days of one machine, says nothing about the code.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import find_device, number
from common.config import ConfigError
from ddp_bench.report.tables import align

# By device, the commands in their order, with the repeats that fit the time on two cores or one
# data-centre GPU.
RUNS: dict[str, dict[str, str]] = {
    "cpu": {
        "sampler": "sampler --repeats 2",
        "grpo": "grpo --brief --beta 0 --repeats 2",
        "eggroll": "eggroll --repeats 2",
        "population": "population --repeats 2",
        "loader": "loader --repeats 2",
        "memory": "memory",
        "rft": "rft --repeats 1",
    },
    "cuda": {
        "sampler-0.5b": "sampler --model 0.5b --repeats 3",
        "sampler-gpt2": "sampler --model gpt2 --repeats 3",
        "grpo-gpt2": "grpo --model gpt2 --brief --beta 0",
        "population-0.5b": "population --model 0.5b --repeats 3",
        "population-gpt2": "population --model gpt2 --repeats 3",
        "eggroll": "eggroll --repeats 5",
        "memory": "memory",
        "rft": "rft --repeats 3",
        "loader": "loader --repeats 3",
    },
}
# Conditions that tell two measurements apart.
CONDITIONS = ("device", "threads", "load_average", "torch", "transformers", "python", "commit")
CONDITIONS += ("dtype", "sizes", "repeats")


def run_all(options: argparse.Namespace) -> None:
    """Run every benchmark of this device, print one table, and write one JSON file each into
    `options.out`.
    """
    kind = find_device(options.device).type
    options.out.mkdir(parents=True, exist_ok=True)
    ended, remarks = time.monotonic() + options.seconds, []
    lines = [["row / against", "value", "unit", "ratio"]]
    for name, arguments in RUNS[kind].items():
        left = ended - time.monotonic()
        target, log = options.out / f"{name}.json", options.out / f"{name}.log"
        target.unlink(missing_ok=True)  # of an earlier run
        if left < 10:
            remarks.append(f"{name}: not run, {options.seconds} s were over")
            continue
        print(f"{name} ({left:.0f} s left)", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks", *arguments.split(), "--device", kind]
        command += ["--json", str(target), *(["--quick"] if options.quick else [])]
        settings: Any = {"stderr": subprocess.STDOUT, "timeout": left, "check": True}
        try:
            with log.open("w") as out:
                subprocess.run(command, stdout=out, **settings)
        except subprocess.SubprocessError as error:
            remarks.append(f"{name}: {error}; see {log}")
            continue
        for row in results(target)[name]["rows"]:
            if row["ratio"] is not None:
                label = f"{name}: {row['row']} / {row['against']}"
                lines.append([label, number(row["value"]), row["unit"], f"{row['ratio']:.2f}"])
    print("\n".join([*align(lines, left=1), "", *remarks, f"written to {options.out}"]))
    if remarks:
        sys.exit(1)


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file or folder, by file name."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise ConfigError(f"{path} holds no results. Give a folder or a file that --json wrote.")
    found = {}
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            found[file.stem] = {"conditions": content["conditions"], "rows": content["rows"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file} is no result of a benchmark ({error}). Give what --json wrote."
            ) from None
    return found


def run_compare(options: argparse.Namespace) -> None:
    """Print the rows of both sides with their quotient, and the conditions that differ."""
    left, right = results(options.left), results(options.right)
    # two files are compared, whatever their names
    if options.left.is_file() and options.right.is_file():
        right = dict(zip(left, right.values(), strict=True))
    if not left.keys() & right.keys():
        raise ConfigError(f"{options.left} and {options.right} have no benchmark in common.")
    for name in left:
        if name not in right:
            continue
        values, others = (
            {(r["benchmark"], r["row"], r["unit"]): r["value"] for r in side[name]["rows"]}
            for side in (left, right)
        )
        lines = [["", "A", "B", "unit", "B / A"]]
        for key, value in values.items():
            other = others.get(key)
            quotient = f"{other / value:.2f}" if value and other is not None else "-"
            lines.append([key[1], number(value), number(other), key[2], quotient])
        print("\n".join([name, *align(lines, left=1)]))
        for key in CONDITIONS:
            a, b = (side[name]["conditions"].get(key) for side in (left, right))
            if a != b:
                print(f"differs: {key}: {a} | {b}")
        print()
    for name in sorted(left.keys() ^ right.keys()):
        print(f"{name}: in {'A' if name in left else 'B'} alone")
