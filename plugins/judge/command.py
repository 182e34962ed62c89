"""Judge a changed setting against the one before it: keep, discard or not yet.

    python -m common.judge "algo=grpo task=chess" "algo=grpo task=chess algo.lr=2e-4"
    python -m common.judge base.txt new.txt --seeds 8 --budget 300

Runs what is missing, pairs the runs by held-out prompt and by seed, and corrects for all proposals
in the ledger.
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.config import ConfigError, find_config_dir, name_folder, show
from common.report import Run, read_runs, run_folder
from common.system import (
    EXIT_CONFIG,
    EXIT_NUMBERS,
    EXIT_SIGNAL,
    EXIT_WRITE,
    RunStopped,
    ending_tool,
    visible,
)
from common.uncertainty import Spread, pair_seeds, show_interval
from launch import compose
from plugins.judge.ledger import Pair, opened
from plugins.judge.statistics import DISCARD, KEEP, NOT_YET, bound, find_share, foresee

ROOT = Path(__file__).resolve().parents[2]
CODES = {KEEP: 0, DISCARD: 1, NOT_YET: EXIT_SIGNAL}
BUDGET = 300.0  # seconds of training of a run, if neither side has a budget
MOST_SECONDS = 365 * 86_400  # of --budget
MOST_SEEDS = 1000  # of --seeds
MOST_EFFECT = 1e9  # of --effect: points, or units of a reward of one's own
LONGEST = 1 << 20  # bytes of a file of settings
# Settings that this command gives itself, or that make no run.
OWN = ("seed", "resume", "plan", "hydra.run.dir", "hydra.sweep.dir", "slurm.script")


@dataclass(frozen=True)
class Side:
    """One of the two settings.

    Attributes:
        name: BASE or NEW.
        arguments: the arguments of launch.py, without seed and run folder.
        digest: a hash of all settings; two spellings of the same settings have the same.
    """

    name: str
    arguments: tuple[str, ...]
    digest: str

    def find_folder(self, out: Path, seed: int) -> Path:
        """Return the run folder of a seed."""
        return out / self.digest[:16] / f"seed-{seed}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Judge a changed setting: keep (exit code 0), discard (1) or not yet (75)."
    command_line = argparse.ArgumentParser("python -m common.judge", description=about)
    form = "settings in quotes, a file with one per line, or a run folder"
    command_line.add_argument("base", metavar="BASE", help=f"what to beat: {form}")
    command_line.add_argument("new", metavar="NEW", help="the proposal, in the same form")
    options: dict[str, dict[str, Any]] = {
        "--seeds": {"type": int, "default": 3, "help": "runs per side, seeds 1, 2, ... (3)"},
        "--budget": {"type": float, "help": "budget.seconds of a run (300, or the settings')"},
        "--effect": {"type": float, "default": 2.0, "help": "smallest gain of use, points (2)"},
        "--out": {"type": Path, "default": Path("outputs/judge"), "help": "folder of the runs"},
        "--ledger": {"type": Path, "help": "file of all proposals (OUT/ledger.jsonl)"},
        "--json": {"action": "store_true", "help": "print one JSON object"},
    }
    for name, option in options.items():
        command_line.add_argument(name, **option)
    return command_line


def read_settings(given: str) -> list[str]:
    """Return the arguments of launch.py that BASE or NEW gives. Raises: ConfigError."""
    path = Path(given)
    try:
        if not given.strip():
            raise ConfigError("BASE or NEW is empty. Give settings in quotes, such as algo=grpo.")
        if os.path.isdir(path):  # pathlib raises errors for long texts
            if not (path / ".hydra" / "overrides.yaml").is_file():
                text = f"{given} holds no settings of a command: it is no run folder, or of Python."
                raise ConfigError(f"{text} Give the settings in quotes.")
            found = run_folder.arguments(path)
            return [text for text in found if not _key(text).startswith((*OWN, "budget."))]
        if os.path.isfile(path):
            if path.stat().st_size > LONGEST:
                raise ConfigError(f"{given} is larger than 1 MiB: it is no file of settings.")
            return shlex.split(path.read_text(encoding="utf-8"), comments=True)
        if "=" not in given:
            raise ConfigError(f"{given!r:.80} is neither a file, a run folder nor KEY=VALUE.")
        return shlex.split(given)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:  # an open quote, or no text
        raise ConfigError(f"{given!r:.80} cannot be read as settings: {error}.") from None


def _key(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]


def check_options(given: argparse.Namespace) -> None:
    """Raise ConfigError for values of options that cannot work, before they become settings."""
    if not 2 <= given.seeds <= MOST_SEEDS:
        why = "one seed says nothing of others" if given.seeds == 1 else "it is out of range"
        raise ConfigError(f"--seeds {given.seeds}: {why}. Give a number from 2 to {MOST_SEEDS}.")
    if not 0 <= given.effect <= MOST_EFFECT:
        raise ConfigError(
            f"--effect {show(given.effect)} is no gain in points. Give a number from 0 to"
            f" {show(MOST_EFFECT)}."
        )
    if given.budget is not None and not 0 < given.budget <= MOST_SECONDS:
        raise ConfigError(
            f"--budget {show(given.budget)} is no number of seconds to train for. Give one above 0,"
            f" at most {MOST_SECONDS} (a year)."
        )


def find_sides(given: argparse.Namespace) -> tuple[Side, Side]:
    """Return both sides, with the same budget. Raises: ConfigError for wrong settings."""
    both = [read_settings(text) for text in (given.base, given.new)]
    for name, arguments in zip(("BASE", "NEW"), both, strict=True):
        for argument in arguments:
            if _key(argument) in OWN or argument in ("-m", "--multirun"):
                text = f"{name} has {argument}: seeds, folders and sweeps are this command's."
                raise ConfigError(f"{text} Leave it out, or see --seeds and --out.")
    budgeted = any(_key(text).startswith("budget.") for side in both for text in side)
    if given.budget is not None and budgeted:
        raise ConfigError(f"--budget {show(given.budget)} and budget.* in the settings. Give one.")
    if not budgeted:
        seconds = BUDGET if given.budget is None else given.budget
        both = [[*side, f"budget.seconds={show(seconds)}"] for side in both]
    base, new = (_make(*side) for side in zip(("BASE", "NEW"), both, strict=True))
    if base.digest == new.digest:
        raise ConfigError("BASE and NEW are the same settings. Give NEW a change.")
    return base, new


def _make(name: str, arguments: list[str]) -> Side:
    """Compose the settings, so that a mistake is found before the first run."""
    folder, plain, skip = find_config_dir(arguments), list[str](), False
    for argument in arguments:
        named = argument in ("--config-dir", "-cd")
        if not skip and not named and not argument.startswith("--config-dir="):
            plain.append(argument)
        skip = named
    try:
        settings = asdict(compose([*plain, "seed=1"], folder))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    text = json.dumps(settings, sort_keys=True, default=str)
    return Side(name, tuple(arguments), hashlib.sha256(text.encode()).hexdigest())


def make_runs(sides: Sequence[Side], out: Path, seeds: int) -> None:
    """Make the runs without a result, one after the other; interrupted ones are resumed.

    Raises: RunStopped if one does not end well.
    """
    missing = [
        (side, seed, folder)
        for seed in range(1, seeds + 1)
        for side in sides
        if not ((folder := side.find_folder(out, seed)) / "result.json").is_file()
    ]
    for number, (side, seed, folder) in enumerate(missing, 1):
        print(f"run {number} of {len(missing)}: {side.name} seed={seed}", file=sys.stderr)
        extra = [f"seed={seed}", *shlex.split(name_folder(folder.resolve())), "resume=auto"]
        code, said = _launch([*side.arguments, *extra])
        if code == 0 and (folder / "result.json").is_file():
            continue
        # 1 and 75 are verdicts of this command; only a signal leaves "not yet", too.
        known = (EXIT_NUMBERS, EXIT_WRITE, EXIT_SIGNAL)
        tail = "\n".join(said.strip().splitlines()[-8:])
        text = f"{side.name} seed={seed} ended with exit code {code}, in {folder}:\n{tail}"
        again = "The same command goes on from there." if code == EXIT_SIGNAL else ""
        raise RunStopped(f"{text}\n{again}".rstrip(), code if code in known else EXIT_CONFIG)


def _launch(arguments: Sequence[str]) -> tuple[int, str]:
    """Run launch.py; signals to stop are passed on, so that the run saves. Returns its exit code
    and what it printed.
    """
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, errors="replace", **pipe) as process:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        earlier = {
            number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in numbers
        }
        try:
            said, _ = process.communicate()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
    return process.returncode, said


def read_sides(sides: Sequence[Side], out: Path, seeds: int) -> list[list[Run]]:
    """Return the runs of both sides, in the order of their seeds. Raises: ConfigError if they
    cannot be compared prompt by prompt.
    """
    folders = [side.find_folder(out, seed) for side in sides for seed in range(1, seeds + 1)]
    runs, failures = read_runs(folders)
    if failures:
        raise ConfigError(f"{failures[0]}. Remove that folder: the same command makes it again.")
    first, count = runs[0], len(runs[0].scores)
    for run in runs:
        if run.result["metric"] != first.result["metric"]:
            names = f"{first.result['metric']} and {run.result['metric']}"
            raise ConfigError(f"BASE and NEW measure {names}. Give both the same task.")
        if count < 2 or len(run.scores) != count or run.prompts != first.prompts:
            raise ConfigError(
                f"{run.folder} and {first.folder} do not have scores of the same held-out prompts."
                " Give both the same task and evaluate.examples, at least 2."
            )
    return [runs[:seeds], runs[seeds:]]


def judge(given: argparse.Namespace) -> dict[str, Any]:
    """Return the verdict with its numbers, after making the runs and writing the ledger."""
    check_options(given)
    sides = find_sides(given)
    path, pair = given.ledger or given.out / "ledger.jsonl", Pair(*(side.digest for side in sides))
    with opened(path) as ledger:
        due = ledger.needs_runs(pair, given.seeds)
    found = _measure(sides, given.out, given.seeds) if due else None
    with opened(path) as ledger:
        entry = ledger.look(pair, given.effect, found)
        next_level = ledger.find_level(entry["place"]) * find_share(entry["look"] + 1)
    return _describe(entry, next_level, path, [side.arguments for side in sides])


def _measure(sides: Sequence[Side], out: Path, seeds: int) -> dict[str, Any]:
    """Make the runs that are missing, and return what the ledger notes of them."""
    make_runs(sides, out, seeds)
    runs = read_sides(sides, out, seeds)
    base, new = (np.array([run.scores for run in side]) for side in runs)
    facts = {"metric": runs[0][0].result["metric"], "prompts": base.shape[1]}
    facts["settings"] = [shlex.join(side.arguments) for side in sides]
    return {"seeds": seeds, "spread": asdict(pair_seeds(base, new)), **facts}


def _describe(
    entry: dict[str, Any], next_level: float, path: Path, sides: list[tuple[str, ...]]
) -> dict[str, Any]:
    spread, seeds, answer = Spread(**entry["spread"]), entry["seeds"], entry["answer"]
    needed = foresee(spread, seeds, next_level, entry["effect"]) if answer == NOT_YET else None
    return {
        "answer": answer,
        "exit_code": CODES[answer],
        "gain": spread.gap,
        "interval": list(spread.find_interval()),
        "corrected_lower_bound": bound(spread, entry["level"]),
        "level": entry["level"],
        "place": entry["place"],
        "look": entry["look"],
        "seeds": seeds,
        "seeds_needed": needed,
        "effect": entry["effect"],
        "metric": entry.get("metric"),
        "prompts": entry.get("prompts"),
        "base": list(sides[0]),
        "new": list(sides[1]),
        "ledger": str(path),
    }


def explain(found: dict[str, Any]) -> str:
    """Return the verdict as text."""
    shown = show_interval(found["interval"], signed=True)
    what = f"{found['metric']} of {found['prompts']} prompts and {found['seeds']} seeds"
    lines = [
        f"{found['answer']}: {found['gain']:+.2f} points (95 % {shown}), {what}",
        f"place {found['place']} of {found['ledger']}, look {found['look']}: at its level,"
        f" {found['level']:.2g}, the gain is at least {found['corrected_lower_bound']:+.2f}",
    ]
    if found["answer"] == KEEP:
        lines.append("NEW is the next BASE.")
    elif found["answer"] == DISCARD:
        lines.append(f"A gain of {found['effect']:g} points or more is excluded (95 %).")
    elif found["seeds_needed"] is None:
        lines.append("More seeds are unlikely to decide: give more examples (evaluate.examples).")
    else:
        lines.append(f"Likely to be decided with --seeds {found['seeds_needed']}.")
    return "\n".join(lines)


def main() -> None:
    """Run the command. Exit codes: 0 keep, 1 discard, 75 not yet, 2 a mistake or a run that failed,
    3 and 4 those of a run.
    """
    given = parser().parse_args()
    with ending_tool("give another --out or --ledger"):
        try:
            found = judge(given)
        except RunStopped as error:
            print(visible(f"error: {error}", kept="\n"), file=sys.stderr)
            sys.exit(error.code)
        print(json.dumps(found, indent=2) if given.json else visible(explain(found), kept="\n"))
    sys.exit(found["exit_code"])


if __name__ == "__main__":
    main()
