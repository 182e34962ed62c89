"""Run all algorithms in turn, and kill them: an hour of it is docs/reliability.md's last section.

    python -m tests.support.soak --minutes 60 --out soak.json

A round is one run of one algorithm, on one rank or two, with a new seed: once unbroken, then once
more with kills at random moments (SIGKILL, SIGTERM, SIGUSR1), logs cut short, and newest
checkpoints that are damaged before the run goes on. What the two leave must be equal bit for bit:
weights, metrics apart from times, samples, completions. The first difference ends the soak with 1.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.killing import RANKS, RUNS, command, differing, environment, unbroken, until_done

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)


class Soak:
    """What was done, and what was survived."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.counts, self.moments = cache, Counter(), Counter()

    def round(self, algorithm: str, ranks: int, seed: int, folder: Path) -> list[str]:
        """One run, unbroken and killed; returns what differs."""
        arguments = [*RUNS[algorithm], *RANKS[ranks], f"seed={seed}", "checkpoint.keep=3"]
        unbroken(arguments, folder / "whole", self.cache)
        killed = folder / "killed"
        kills = until_done(
            command(*arguments),
            killed,
            **{
                "seed": seed,
                "kills": 8,
                "signals": SIGNALS,
                "environment": environment(self.cache),
            },
            between=lambda draw: self.damage(killed, draw),
            timeout=3600,
        )
        log = (killed / "run.log").read_text(encoding="utf-8")
        self.counts.update(
            **{
                "runs": 1,
                f"runs of {algorithm}": 1,
                "runs on two ranks": int(ranks == 2),
                "kills": len(kills),
            },
            **{"kills in the middle of a save": sum(kill.half_written for kill in kills)},
            **{
                "checkpoints read": log.count("resuming after step"),
                "checkpoints passed over": log.count("is skipped"),
            },
            **{
                "rows compared": sum(
                    len(path.read_bytes().splitlines()) for path in killed.rglob("*.jsonl")
                )
            },
        )
        self.moments.update(kill.moment for kill in kills)
        return differing(folder / "whole", killed)

    def damage(self, folder: Path, draw: random.Random) -> None:
        """One time in three: flip a bit of the newest checkpoint, or cut a file of it short. An
        older one is left alone.
        """
        found = sorted(
            (folder / "checkpoints").glob("step-*"),
            key=lambda path: int(path.name.removeprefix("step-")),
        )
        if len(found) < 2 or draw.random() > 1 / 3:
            return
        path = draw.choice(sorted(file for file in found[-1].iterdir() if file.stat().st_size))
        content = bytearray(path.read_bytes())
        if draw.random() < 0.5:
            del content[draw.randrange(len(content)) :]
            self.counts["checkpoints cut short"] += 1
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            self.counts["checkpoints with a flipped bit"] += 1
        path.write_bytes(content)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Run all algorithms in turn, and kill them.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for what was done, JSON")
    given = parser.parse_args()
    began, number, rows_lost = time.monotonic(), given.seed, 0
    with tempfile.TemporaryDirectory() as scratch:
        soak = Soak(Path(scratch) / "cache")
        while time.monotonic() - began < 60 * given.minutes:
            algorithm, ranks = list(RUNS)[number % len(RUNS)], 1 + number // len(RUNS) % 2
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                different = soak.round(algorithm, ranks, number, Path(folder))
            rows_lost += sum("jsonl" in name for name in different)
            print(
                f"{(time.monotonic() - began) / 60:5.1f} min  {algorithm}, {ranks} rank(s), seed"
                f" {number}: {different or 'equal'}",
                flush=True,
            )
            number += 1
            if different:
                break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    minutes = round((time.monotonic() - began) / 60, 1)
    told = {
        "commit": commit,
        "minutes": minutes,
        **soak.counts,
        "rows lost": rows_lost,
        "moments": soak.moments,
    }
    text = json.dumps(told, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
