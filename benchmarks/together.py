"""Every benchmark in one go, and two sets of results side by side.

    python -m benchmarks all --out results
    python -m benchmarks compare benchmarks/results/cpu-2core results
    python -m benchmarks compare a/grpo.json b/grpo.json

`all` runs what fits the device within its time, each in a process of its own and one after the
other; what does not finish is listed, not left out. `compare` joins rows by benchmark, row and
unit, and says which conditions differ: a ratio between two machines, or two days of one machine, is
no statement about the code.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import measure
from common.config import ConfigError

# By device, the runs in their order and the repeats that fit the time on two cores or one
# data-centre GPU.
RUNS: dict[str, dict[str, list[str]]] = {
    "cpu": {
        "sampler": ["sampler", "--repeats", "2"],
        "grpo": ["grpo", "--brief", "--beta", "0", "--repeats", "2"],
        "eggroll": ["eggroll", "--repeats", "2"],
        "population": ["population", "--repeats", "2"],
        "loader": ["loader", "--repeats", "2"],
        "memory": ["memory"],
        "rft": ["rft", "--repeats", "1"],
    },
    "cuda": {
        "sampler-0.5b": ["sampler", "--model", "0.5b", "--repeats", "3"],
        "sampler-gpt2": ["sampler", "--model", "gpt2", "--repeats", "3"],
        "grpo-gpt2": ["grpo", "--model", "gpt2", "--brief", "--beta", "0"],
        "population-0.5b": ["population", "--model", "0.5b", "--repeats", "3"],
        "population-gpt2": ["population", "--model", "gpt2", "--repeats", "3"],
        "eggroll": ["eggroll", "--repeats", "5"],
        "memory": ["memory"],
        "rft": ["rft", "--repeats", "3"],
        "loader": ["loader", "--repeats", "3"],
    },
}
# Conditions that tell two measurements apart.
CONDITIONS = (
    "device",
    "threads",
    "load_average",
    "torch",
    "transformers",
    "python",
    "commit",
    "dtype",
    "sizes",
    "repeats",
)


def run_all(options: argparse.Namespace) -> None:
    """Run every benchmark of this device, print one table, leave one JSON each in `options.out`."""
    device = measure.find_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    ended, remarks = time.monotonic() + options.seconds, {}
    for name, arguments in RUNS[device.type].items():
        left = ended - time.monotonic()
        target, log = options.out / f"{name}.json", options.out / f"{name}.log"
        target.unlink(missing_ok=True)  # of an earlier run
        if left < 10:
            remarks[name] = f"not run: {options.seconds} s were over"
            continue
        print(f"{name} ({left:.0f} s left)", file=sys.stderr, flush=True)
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            *arguments,
            "--device",
            device.type,
            "--json",
            str(target),
        ]
        command += ["--quick"] if options.quick else []
        with log.open("w") as out:
            try:
                code = subprocess.run(
                    command, stdout=out, stderr=subprocess.STDOUT, timeout=left
                ).returncode
            except subprocess.TimeoutExpired:
                remarks[name] = f"stopped: {options.seconds} s were over"
                continue
        if code:
            remarks[name] = f"failed with exit code {code}; see {log}"
    lines: list[list[str]] = []
    for name in RUNS[device.type]:
        if name in remarks:
            lines.append([name, remarks[name]])
            continue
        for row in json.loads((options.out / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
            if row["ratio"] is not None and row["against"] is not None:
                label = f"{name}: {row['row']} / {row['against']}"
                value = measure.number(row["value"])
                lines.append([label, value, row["unit"], f"{row['ratio']:.2f}"])
    print(measure.table(["row / against", "value", "unit", "ratio"], lines))
    print(f"\nwritten to {options.out}")
    if remarks:
        sys.exit(1)


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file or folder, by file name."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise ConfigError(
            f"{path} holds no results. Give a folder or a file that python -m benchmarks ... --json"
            " wrote."
        )
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
    """Print rows of both sides with their quotient, and the conditions that differ."""
    left, right = results(options.left), results(options.right)
    # two files are compared, whatever their names
    if options.left.is_file() and options.right.is_file():
        right = dict(zip(left, right.values(), strict=True))
    both = [name for name in left if name in right]
    if not both:
        raise ConfigError(
            f"{options.left} holds {', '.join(left)}; {options.right} holds {', '.join(right)}:"
            " none in common."
        )
    for name in both:
        sides = [
            {(r["benchmark"], r["row"], r["unit"]): r["value"] for r in side[name]["rows"]}
            for side in (left, right)
        ]
        lines = []
        for key, value in sides[0].items():
            other = sides[1].get(key)
            if value is None and other is None:
                continue
            quotient = f"{other / value:.2f}" if value and other is not None else "-"
            lines.append([key[1], measure.number(value), measure.number(other), key[2], quotient])
        print(f"{name}\n" + measure.table(["", "A", "B", "unit", "B / A"], lines))
        for key in CONDITIONS:
            a, b = (side[name]["conditions"].get(key) for side in (left, right))
            if a != b:
                print(f"differs: {key}: {a} | {b}")
        print()
    for name in sorted(set(left) ^ set(right)):
        print(f"{name}: in {'A' if name in left else 'B'} alone")
