"""make gpu: on a machine with a GPU, the tests that need one, then the benchmarks that fit.

Parts of nine minutes at most, so that they can be run one after the other where time is lent in
pieces: `make gpu PART=2`. The numbers go to benchmarks/results/DEVICE/.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 540  # seconds of a part
PARTS = {
    1: "pytest -m gpu -q --durations=10 --junitxml={out}/tests.xml",
    2: "benchmarks all --out {out} --seconds 480",
    3: "benchmarks sampler --model 0.5b --json {out}/sampler-0.5b.json",
    4: "benchmarks population --model 0.5b --json {out}/population-0.5b.json",
    5: "benchmarks grpo --model gpt2 --json {out}/grpo-gpt2.json",
}


def main() -> int:
    """Run the parts that are asked for, all of them by default; return the number that failed."""
    parser = argparse.ArgumentParser(
        "make gpu", description="The tests and benchmarks of a GPU, in parts."
    )
    parser.add_argument("part", nargs="*", type=int, metavar="PART", help="1 to 5; default: all")
    chosen = parser.parse_args().part or list(PARTS)
    if not torch.cuda.is_available():
        sys.exit("error: make gpu needs a CUDA device, and PyTorch finds none here.")
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"error: PART={unknown.pop()} is not one of 1 to {len(PARTS)}.")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = ROOT / "benchmarks" / "results" / name
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in chosen:
        command = [sys.executable, "-m", *(word.format(out=out) for word in PARTS[part].split())]
        print(f"part {part} of {len(PARTS)}: {PARTS[part]}", flush=True)
        try:
            failed += subprocess.run(command, cwd=ROOT, timeout=LIMIT).returncode != 0
        except subprocess.TimeoutExpired:
            print(f"part {part} took more than {LIMIT} s and was ended.", flush=True)
            failed += 1
    print(f"written to {out}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
