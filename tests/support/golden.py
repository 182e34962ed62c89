"""Numbers and weights of short runs, to compare two states of the code:

    python -m tests.support.golden before.json      # at one commit
    python -m tests.support.golden after.json --against before.json

Numbers depend on the machine, so the files are kept by whoever compares. What a clock or the
machine's memory tells is left out; all else is equal bit for bit, or is printed.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import CONF, MOVING, ROOT, SMALL_GRPO, SMALL_RFT, SMALL_SFT

MEASURED = re.compile(
    r"second|per_minute|tokens_per|samples_per|memory|_gb|time|joules|watts|gpu|commit|host"
)
FILES = ("metrics.jsonl", "evaluations.jsonl")
RFT = ["--config-dir", CONF, *SMALL_RFT]
TWO_RANKS = ["opt=[ddp]", "opt.ddp.ranks=2"]

RUNS: dict[str, list[str]] = {
    "eggroll": [*MOVING, "algo=eggroll"],
    "eggroll, int8": [*MOVING, "algo=eggroll", "model.quantize=int8"],
    "eggroll, two ranks": [*MOVING, "algo=eggroll", *TWO_RANKS],
    "grpo": [*SMALL_GRPO],
    "grpo, two passes and KL": [*SMALL_GRPO, "algo.num_iterations=2", "algo.kl.beta=0.1"],
    "grpo, adapter": [*SMALL_GRPO, "model.adapter.rank=4"],
    "grpo, amp": [*SMALL_GRPO, "opt=[amp]"],
    "grpo, two ranks": [*SMALL_GRPO, *TWO_RANKS],
    "grpo, fsdp": [*SMALL_GRPO, "opt=[fsdp]", "opt.fsdp.ranks=2"],
    "grpo, episodes": [*SMALL_GRPO, "task=guess", "algo.samples_per_prompt=2"],
    "rft": RFT,
    "sft": [*SMALL_SFT],
    "sft, games": [*SMALL_SFT, "task=guess"],
    "classify": ["algo=classify", "hardware=cpu", "algo.epochs=1", "task.rows=600"],
}
HALF = {"grpo": ["algo.steps=2"], "eggroll": ["algo.steps=2"]}  # these are resumed, too


def launch(folder: Path, overrides: list[str]) -> None:
    """Make a run in a process of its own, as a user does."""
    command = [sys.executable, "launch.py", *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def numbers(value: Any) -> Any:
    """Return a line of metrics without what a clock or the machine tells."""
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items() if not MEASURED.search(k)}
    return [numbers(one) for one in value] if isinstance(value, list) else value


def collect(folder: Path) -> dict[str, Any]:
    """Return what a run came to: its lines, and the hashes of its weights."""
    found: dict[str, Any] = {}
    for name in FILES:
        path = folder / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found[name] = [numbers(json.loads(line)) for line in lines]
    for path in sorted((folder / "model").rglob("*.safetensors")):
        found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    """Return the places where two values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [
            line
            for key in keys
            for line in differences(before.get(key), after.get(key), f"{at}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for n, (b, a) in pairs for line in differences(b, a, f"{at}[{n}]")]
    return [] if before == after else [f"{at}: {before!r:.60} -> {after!r:.60}"]


def main() -> None:
    """Make the runs, write what they came to, and compare."""
    parser = argparse.ArgumentParser("python -m tests.support.golden")
    parser.add_argument("file", type=Path, help="where to write the numbers")
    parser.add_argument("--against", type=Path, help="numbers of another state of the code")
    parser.add_argument("--only", default="", help="runs whose name holds this")
    given = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as home:
        for number, (name, overrides) in enumerate(RUNS.items()):
            if given.only not in name:
                continue
            print(name, flush=True)
            folder = Path(home) / str(number)
            if name in HALF:
                launch(folder, [*overrides, *HALF[name]])
                launch(folder, [*overrides, "resume=auto"])
                found[f"{name}, resumed"] = collect(folder)
                folder = Path(home) / f"{number}-whole"
            launch(folder, overrides)
            found[name] = collect(folder)
    given.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if given.against is not None:
        before = json.loads(given.against.read_text(encoding="utf-8"))
        lines = differences({name: before.get(name) for name in found}, found)
        print("\n".join(lines) or f"all {len(found)} runs are equal")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
