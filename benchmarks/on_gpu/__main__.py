"""make gpu: the checks that need a GPU, in one call of nine minutes.

    python -m benchmarks.on_gpu                  # as many as fit, in their order
    python -m benchmarks.on_gpu --more           # go on with those that are not run yet
    python -m benchmarks.on_gpu kernels layer    # these

It uses the current interpreter, and needs no network. Rows are written as they come, so that a call
that is cut off leaves its rows; all processes end with it. The table at the end has what was wanted
and what was measured: PASS, FAIL or NOT RUN, and only FAIL is a failure. Everything is in one file,
to be sent in: benchmarks/results/DEVICE/on_gpu.json.

Without a GPU nothing is measured: it collects the tests and imports the benchmarks, to see that
nothing is missing, and ends with an error.
"""

import argparse
import importlib.metadata
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.on_gpu.checks import CHECKS, NAMES

ROOT = Path(__file__).resolve().parents[2]
CARRY = """\
Install: {python} -m pip install --editable '.[dev]'
Without a network, carry what the lock lists. On a machine with one and the same Python:
    pip wheel --wheel-dir wheels --requirement requirements.lock
and here, beside that folder:
    {python} -m pip install --no-index --find-links wheels --requirement requirements.lock"""


def main() -> int:
    """Run the checks. Returns 1 if a row failed, or without a GPU."""
    options = parse()
    check_packages()
    import torch

    from benchmarks.on_gpu.rows import FAIL, Rows, table
    from benchmarks.on_gpu.run import rehearse, run_check
    from common.device import hardware

    until = time.time() + 60 * options.minutes
    if not torch.cuda.is_available():
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(table(rehearse(Path(folder)))))
        why = hardware.why_no_device() or "make gpu needs a CUDA device, and there is none here."
        print(f"error: {why}", file=sys.stderr)
        return 1
    rows = Rows(open_folder(options))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes end with this one
    ended = 0
    for check in [NAMES[name] for name in options.check] or CHECKS:
        left = until - time.time()
        if left < check.least or (options.more and rows.has_ended(check.name)):
            continue
        print(f"{check.name}: {check.about} ({left:.0f} s left)", flush=True)
        rows.drop(check.name)
        try:
            run_check(rows, check, min(until, time.time() + check.seconds), options.quick)
        except KeyboardInterrupt:
            ended = 128 + int(signal.SIGINT)
            break
        finally:
            rows.gather()
    send = rows.gather()
    print("\n".join(table(rows.all())))
    print(f"\nto be sent in: {send}")
    return ended or int(any(row["result"] == FAIL for row in rows.all()))


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser("make gpu", description="What a machine with a GPU can show.")
    about = "; ".join(f"{check.name!r}: {check.about}" for check in CHECKS)
    parser.add_argument("check", nargs="*", metavar="CHECK", help=f"{about}. Default: all")
    parser.add_argument("--minutes", type=float, default=9, metavar="N", help="of the call (9)")
    parser.add_argument("--more", action="store_true", help="only those that have not ended yet")
    parser.add_argument("--quick", action="store_true", help="tiny benchmarks, which judge nothing")
    place = "default: benchmarks/results/DEVICE"
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"for the results; {place}")
    options = parser.parse_args()
    if unknown := set(options.check) - set(NAMES):
        known = ", ".join(repr(name) for name in NAMES)
        parser.exit(2, f"error: {unknown.pop()!r} is none of {known}.\n")
    if not 0.5 <= options.minutes < float("inf"):
        parser.exit(
            2, f"error: --minutes {options.minutes:g} is no time for a call: give 0.5 or more.\n"
        )
    return options


def check_packages() -> None:
    """Exit at once if packages are missing."""
    python = sys.executable
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever reads this may have an older one)
        sys.exit(f"error: {python} is Python {sys.version.split()[0]}; 3.11 or later is needed.")
    import tomllib  # which older ones lack

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    missing = []
    for name in [*names, "pytest"]:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        sys.exit(f"error: {python} lacks {', '.join(missing)}.\n" + CARRY.format(python=python))


def open_folder(options: argparse.Namespace) -> Path:
    """Return the folder of this device's results. Rows of an earlier call stay with --more, or if
    some checks are named, unless they were quick and these are not.
    """
    import torch

    from benchmarks.measure import conditions, find_device
    from common.device import hardware

    found = conditions(find_device("cuda"))
    found |= {"cuda": torch.version.cuda, "driver": hardware.driver(), "quick": options.quick}
    name = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    out: Path = options.out or ROOT / "benchmarks" / "results" / name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: --out {out}: {error.strerror}. Give a folder.", file=sys.stderr)
        sys.exit(2)
    before, keeps = out / "conditions.json", options.more or options.check
    earlier = json.loads(before.read_text()) if before.exists() else {}
    if not keeps or earlier.get("quick", options.quick) != options.quick:
        for name in ("rows.jsonl", "on_gpu.json", *(f"{one}.json" for one in NAMES)):
            (out / name).unlink(missing_ok=True)
    before.write_text(json.dumps(found, indent=2))
    print(f"{found['device']}, driver {found['driver']}, torch {found['torch']}")
    return out


if __name__ == "__main__":
    sys.exit(main())
