"""make gpu: the checks that need a GPU, in parts of nine minutes at most.

    python -m benchmarks.on_gpu     # all parts; or some: 1 2; --quick to see that it works

First the kernels, which everything else depends on, then whole runs, then benchmarks. It uses the
current interpreter, and needs no network. Rows are written immediately, so that a part that is cut
off leaves its rows; its processes end with it. The table at the end lists the target and the
measured value per row: PASS, FAIL or NOT RUN, and only FAIL is a failure. Everything is in one
file, to be sent in: benchmarks/results/DEVICE/on_gpu.json.

As a plugin of pytest, this module writes a row per test.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 540  # seconds of a part
LAST = 60  # seconds before a part's end from which no test begins
GRACE = 10  # seconds that processes have to end by themselves
ROWS, PART = "ON_GPU_ROWS", "ON_GPU_PART"  # for the plugin: the file of rows, the part
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
KERNELS = "tests/oracles/test_philox.py tests/oracles/test_varlen.py tests/unit/test_flash.py"
KERNELS += " tests/unit/test_graphs.py tests/unit/test_hardware.py"
TESTS = "pytest -q -m gpu --tb=short -p no:cacheprovider -p benchmarks.on_gpu"
TESTS += " -o filterwarnings=default "  # a warning of another version is no failure here
# By part: tests, or benchmarks by name with their arguments.
PARTS: dict[int, str | dict[str, str]] = {
    1: TESTS + KERNELS,
    2: TESTS + "tests/runs/test_gpu.py",
    3: {"sampler-0.5b": "sampler --model 0.5b", "sampler-gpt2": "sampler --model gpt2"},
    4: {"population-0.5b": "population --model 0.5b", "population-gpt2": "population --model gpt2"},
    5: {
        "grpo-gpt2": "grpo --model gpt2 --brief --beta 0",
        "eggroll": "eggroll",
        "memory": "memory",
    },
    6: {"rft": "rft --repeats 3", "loader": "loader --repeats 3"},
}
ABOUT = ("kernels", "whole runs", "sampling", "a population", "a step of GRPO and EGGROLL", "RFT")
CARRY = """\
Install: {python} -m pip install --editable '.[dev]'
Without a network, carry what the lock lists. On a machine with one and the same Python:
    pip wheel --wheel-dir wheels --requirement requirements.lock
and here, beside that folder:
    {python} -m pip install --no-index --find-links wheels --requirement requirements.lock"""


def main() -> int:
    """Run the requested parts, by default all. Returns 1 if a row failed."""
    parser = argparse.ArgumentParser("make gpu", description="What a machine with a GPU can show.")
    about = "; ".join(f"{part}: {text}" for part, text in zip(PARTS, ABOUT, strict=True))
    parser.add_argument("part", nargs="*", type=int, metavar="PART", help=f"{about}. Default: all")
    parser.add_argument("--quick", action="store_true", help="tiny benchmarks, which judge nothing")
    limit = "seconds of a part; default: %(default)s"
    parser.add_argument("--seconds", type=int, default=LIMIT, metavar="N", help=limit)
    place = "default: benchmarks/results/DEVICE"
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"for the results; {place}")
    options = parser.parse_args()
    if unknown := set(options.part) - set(PARTS):
        sys.exit(f"error: PART={unknown.pop()} is not one of 1 to {len(PARTS)} ({about}).")
    check_interpreter()
    out = open_folder(options.out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes end with this one
    ended = 0
    for part in options.part or list(PARTS):
        print(f"part {part} of {len(PARTS)}: {ABOUT[part - 1]}", flush=True)
        drop(out, part)
        try:
            run_part(out, part, options)
        except KeyboardInterrupt:
            ended = 128 + int(signal.SIGINT)
        send = gather(out)
        if ended:
            break
    rows = list(read(out))
    print("\n".join(table(rows)))
    print(f"\nto be sent in: {send}")
    return ended or int(any(row["result"] == FAIL for row in rows))


def check_interpreter() -> None:
    """Exit at once if packages or a device are missing."""
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
    import torch

    from common.device import hardware

    if not torch.cuda.is_available():
        why = hardware.why_no_device() or "make gpu needs a CUDA device, and there is none here."
        sys.exit(f"error: {why}")


def open_folder(out: Path | None) -> Path:
    """Return the folder of this device's results; rows of another commit are removed."""
    import torch

    from benchmarks.measure import conditions, find_device
    from common.device import hardware

    found = conditions(find_device("cuda"))
    found |= {"cuda": torch.version.cuda, "driver": hardware.driver()}
    name = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    out = out or ROOT / "benchmarks" / "results" / name
    out.mkdir(parents=True, exist_ok=True)
    before = out / "conditions.json"
    if before.exists() and json.loads(before.read_text())["commit"] != found["commit"]:
        (out / "rows.jsonl").unlink(missing_ok=True)
    before.write_text(json.dumps(found, indent=2))
    print(f"{found['device']}, driver {found['driver']}, torch {found['torch']}")
    return out


# --- a part


def run_part(out: Path, part: int, options: argparse.Namespace) -> None:
    """Run the tests or the benchmarks of a part, and write rows."""
    until, work = time.time() + options.seconds, PARTS[part]
    if isinstance(work, str):
        log = out / f"part-{part}.log"
        left = {"TESTS_UNTIL": str(until - LAST), ROWS: str(out / "rows.jsonl"), PART: str(part)}
        code = run(work.split(), log, until, left)
        if code is None or code not in (0, 1):  # of tests that failed there are rows
            cut = f"cut off after {options.seconds} s; see {log.name}"
            what = cut if code is None else f"pytest ended with {code}: {tail(log, 1)}"
            add(
                out,
                part,
                "the tests come to their end",
                "yes",
                what,
                NOT_RUN if code is None else FAIL,
            )
        return
    for name, arguments in work.items():
        left = until - time.time()
        if left < GRACE:
            add(out, part, name, "ends", f"the {options.seconds} s of the part were over", NOT_RUN)
            continue
        log, result = out / f"{name}.log", out / f"{name}.json"
        result.unlink(missing_ok=True)
        words = ["benchmarks", *arguments.split(), "--device", "cuda", "--json", str(result)]
        code = run([*words, *["--quick"][: options.quick]], log, until, {})
        took = f"{options.seconds - (until - time.time()):.0f} s after the part began"
        ends = {0: (took, PASS), None: (f"cut off, {took}", NOT_RUN)}
        add(out, part, name, "ends", *ends.get(code, (tail(log, 1), FAIL)))
        for what, wanted, measured in figures(result):
            verdict = PASS if meets(wanted, measured) else FAIL
            add(
                out,
                part,
                f"{name}: {what}",
                wanted,
                measured,
                NOT_RUN if options.quick else verdict,
            )
        print(f"  {name}: {tail(log, 1)}", flush=True)


def run(words: list[str], log: Path, until: float, more: dict[str, str]) -> int | None:
    """Run a Python module with its output in `log`, and end all that it started. Returns its exit
    code; None if it was cut off.
    """
    with log.open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | more,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started, which would keep the device's memory."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def tail(log: Path, lines: int) -> str:
    """Return the last lines of a log that are not blank."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])[-4000:]


# --- rows


def add(out: Path, part: int, name: str, wanted: str, measured: str, result: str) -> None:
    """Write a row."""
    row = {"part": part, "name": name, "wanted": wanted, "measured": measured, "result": result}
    _append(out / "rows.jsonl", row)


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "rows.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def drop(out: Path, part: int) -> None:
    """Remove the rows of a part that is run again."""
    rows = [json.dumps(row, ensure_ascii=False) for row in _lines(out) if row["part"] != part]
    (out / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def read(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the last row of each name, part by part; parts without rows have not been run."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in _lines(out):
        rows[row["part"], row["name"]] = row
    for part in PARTS:
        of_part = [row for row in rows.values() if row["part"] == part]
        none = {"part": part, "name": ABOUT[part - 1], "wanted": "", "measured": f"PART={part}"}
        yield from of_part or [none | {"result": NOT_RUN}]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the closing table, and the number of rows per result."""
    from ddp_bench.report.tables import align

    lines = [["", "what", "wanted", "measured", "result"]]
    for row in rows:
        short = [
            str(row[key]).splitlines()[0][:60] if row[key] else "" for key in ("wanted", "measured")
        ]
        lines.append([str(row["part"]), row["name"][:70], *short, row["result"]])
    results = [row["result"] for row in rows]
    counts = ", ".join(f"{results.count(name)} {name}" for name in (PASS, FAIL, NOT_RUN))
    return ["", *align(lines, left=5), "", counts]


def gather(out: Path) -> Path:
    """Put conditions, rows, results of benchmarks and the ends of logs into one file."""
    from common.system import write_text

    content = {
        "conditions": json.loads((out / "conditions.json").read_text()),
        "rows": list(read(out)),
        "benchmarks": {path.stem: json.loads(path.read_text()) for path in _results(out)},
        "logs": {path.name: tail(path, 60) for path in sorted(out.glob("*.log"))},
    }
    path = out / "on_gpu.json"
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def _results(out: Path) -> list[Path]:
    own = ("on_gpu.json", "conditions.json")
    return [path for path in sorted(out.glob("*.json")) if path.name not in own]


def figures(result: Path) -> list[tuple[str, str, str]]:
    """Return the targets and the measured values of a benchmark, as far as it came."""
    if not result.exists():
        return []
    found = json.loads(result.read_text(encoding="utf-8"))["conditions"].get("figures", {})
    return [(what, both["wanted"], both["measured"]) for what, both in found.items()]


def meets(wanted: str, measured: str) -> bool:
    """Return whether "97.1%" is ">= 95%"."""
    bound = re.match(r"(>=|<=|<|>)\s*([\d.]+)", wanted)
    assert bound is not None, f"{wanted!r} names no bound"
    number, limit = float(re.findall(r"[\d.]+", measured)[0]), float(bound[2])
    return {
        ">=": number >= limit,
        "<=": number <= limit,
        "<": number < limit,
        ">": number > limit,
    }[bound[1]]


# --- the plugin of pytest


def pytest_collection_finish(session: Any) -> None:
    """Write a row for each test to come; a test that never ends counts as not run."""
    for item in session.items:
        _tell(item.nodeid, "the part was cut off before it", NOT_RUN)


def pytest_runtest_logreport(report: Any) -> None:
    """Write the row of a test that has ended."""
    if report.skipped:
        _tell(report.nodeid, str(report.longrepr[-1]).removeprefix("Skipped: "), NOT_RUN)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _tell(report.nodeid, crash.message if crash else str(report.longrepr), FAIL)
    elif report.when == "call":
        _tell(report.nodeid, f"passed in {report.duration:.1f} s", PASS)


def _tell(test: str, measured: str, result: str) -> None:
    name = test.removeprefix("tests/")
    path, part = Path(os.environ[ROWS]), int(os.environ[PART])
    add(path.parent, part, name, "passes", measured[:2000], result)


if __name__ == "__main__":
    sys.exit(main())
