"""Rebuild a model from the numbers that a run of EGGROLL has recorded.

python -m eggroll.replay RUN                                 # the exported model, into RUN/replay
python -m eggroll.replay run.egg --base FOLDER_OR_ID --out mine
python -m eggroll.replay RUN --step 20
python -m eggroll.replay RUN --verify 3                      # sample three steps again, and compare
python -m eggroll.replay RUN --drop-steps 3,10-19            # what if these updates were left out
python -m eggroll.replay RUN --weights format=0              # ... or a component of the reward
python -m eggroll.replay run.egg --show                      # what is in the file
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import yaml

from common.config import ConfigError
from common.system import EXIT_CONFIG, EXIT_INTERRUPTED, CheckpointError
from plugins.replay import egg
from plugins.replay.rebuild import Changes, find_egg, rebuild
from plugins.replay.verify import ALIKE, verify

DIFFERS = 1  # exit code: it ran, and the weights or the fitness are not those of the run


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Rebuild a model of a run of EGGROLL from its run.egg and the base model."
    command_line = argparse.ArgumentParser("python -m eggroll.replay", description=about)
    options: dict[str, dict[str, Any]] = {
        "file": {"metavar": "RUN_OR_FILE", "help": "a run folder, or the file run.egg"},
        "overrides": {
            "nargs": "*",
            "metavar": "KEY=VALUE",
            "help": "with --verify: settings in place of the recorded ones, such as task.path",
        },
        "--base": {"metavar": "MODEL", "help": "folder or hub id of the base model (the run's)"},
        "--step": {"type": int, "help": "the step to rebuild (the one that the run exported)"},
        "--out": {"metavar": "FOLDER", "help": "where to write it (replay, beside the file)"},
        "--verify": {"type": int, "metavar": "K", "help": "sample K steps again, and compare"},
        "--drop-steps": {"metavar": "LIST", "help": "leave out these updates, such as 3,10-19"},
        "--weights": {
            "metavar": "NAME=W",
            "action": "append",
            "default": [],
            "help": "another weight of a component of the reward; may be repeated",
        },
        "--show": {"action": "store_true", "help": "print what is in the file, and end"},
        "--trust": {"action": "store_true", "help": "build the task that a file names (--verify)"},
        "--threads": {"type": int, "help": "threads (as many as the run had, for equal bits)"},
        "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto"},
    }
    for name, option in options.items():
        command_line.add_argument(name, **option)
    return command_line


def read_steps(text: str | None) -> set[int]:
    """Return the numbers of a list such as 3,10-19. Raises: ConfigError if it is none."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, dash, last = part.strip().partition("-")
        if not part.strip():
            continue
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--drop-steps {text}: {part.strip()!r} is no step. Give 3,10-19.")
        start, stop = int(first), int(last or first)
        if not 1 <= start <= stop <= egg.MOST:
            raise ConfigError(f"--drop-steps {text}: {part.strip()!r} is no range of steps.")
        found.update(range(start, stop + 1))
    return found


def read_weights(given: list[str]) -> dict[str, float]:
    """Return weights by component. Raises: ConfigError for a text that is not NAME=NUMBER."""
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--weights {text}: give NAME=NUMBER.") from None
        if not 0 <= found[name] < float("inf"):
            raise ConfigError(f"--weights {text}: give a weight of 0 or more.")
    return found


def show(held: egg.Egg) -> None:
    """Print the content of a file, for people."""
    header = dict(held.header)
    about = {
        "bytes": held.path.stat().st_size,
        "updates": len(held.steps),
        "last step": held.last,
        "end": held.end or ("cut off in the last record" if held.torn else "the run has not ended"),
        "went on": [{"after": at, **one} for at, one in held.machines],
    }
    print(yaml.safe_dump(about | header, sort_keys=False, allow_unicode=True).rstrip())


def check_options(given: argparse.Namespace) -> None:
    """Raise ConfigError for options without effect."""
    changes = {"--step": given.step, "--out": given.out, "--drop-steps": given.drop_steps}
    changes["--weights"] = given.weights or None
    if given.verify is not None:
        if vain := [name for name, value in changes.items() if value is not None]:
            raise ConfigError(f"{vain[0]} has no effect with --verify. Leave out one of them.")
    elif given.overrides or given.trust:
        vain = given.overrides[0] if given.overrides else "--trust"
        raise ConfigError(f"{vain} has no effect without --verify. Leave it out.")
    if given.threads is not None and not 1 <= given.threads <= egg.THREADS:
        raise ConfigError(f"--threads {given.threads} is out of range. Give 1 to {egg.THREADS}.")


def compare(held: egg.Egg, given: argparse.Namespace) -> int:
    """Sample steps again, print how their fitness compares, and return the exit code."""
    found, proof = verify(
        held,
        given.verify,
        base=given.base,
        trusted=given.trust,
        overrides=given.overrides,
        device=given.device,
        threads=given.threads,
    )
    for one in found:
        says = "equal" if one.equal else f"correlation {one.correlation:.4f}"
        print(f"step {one.number}: fitness of {held.header['directions']} directions, {says}")
    equal, alike = sum(one.equal for one in found), [one.correlation >= ALIKE for one in found]
    if not proof.holds:
        print(f"not verified: {proof.describe()}")
    elif equal == len(found):
        print(
            f"verified: all {equal} steps sampled again have the recorded fitness, bit for bit, and"
            f" {proof.equal} hashes of weights agree."
        )
    elif all(alike):
        print(
            f"alike: {equal} of {len(found)} steps are equal; the others correlate with"
            f" {min(one.correlation for one in found):.4f} or more, as on another kind of machine."
        )
    else:
        print("not verified: the recorded fitness does not come from this task and base model.")
    return 0 if all(alike) and proof.holds else DIFFERS


def run(given: argparse.Namespace) -> int:
    """Do what was asked; return the exit code. Raises: ConfigError for a mistake of the user."""
    check_options(given)
    held = egg.read(find_egg(given.file))
    if given.show:
        show(held)
        return 0
    if given.verify is not None:
        return compare(held, given)
    out = Path(given.out).expanduser() if given.out else held.path.parent / "replay"
    changes = Changes(read_steps(given.drop_steps), read_weights(given.weights))

    def progress(step: int, last: int) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step} of {last}", end="" if step < last else "\n", file=sys.stderr)

    written, step, proof = rebuild(
        held,
        out,
        base=given.base,
        step=given.step,
        changes=changes,
        device=given.device,
        threads=given.threads,
        progress=progress,
    )
    print(f"step {step}: {proof.describe()}")
    print(f"written to {written}")
    return 0 if proof.holds else DIFFERS


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, or the given arguments. Exit codes: 0 done and equal, 1 the weights or
    the fitness differ from the run's, 2 a mistake of the user, 130 Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return run(parser().parse_intermixed_args(arguments))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
