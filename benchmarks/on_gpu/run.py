"""Run a check with its time limit, in processes that end with it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu import plugin
from benchmarks.on_gpu.checks import CHECKS, TESTS, Check
from benchmarks.on_gpu.rows import ENDS, FAIL, NOT_RUN, PASS, Row, Rows, meets, tail
from common.report import gpu_usage

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10  # seconds that processes have to end by themselves
PATIENCE = 50  # seconds of the rehearsal


def run_check(rows: Rows, check: Check, until: float, quick: bool) -> None:
    """Run a check until a time at most, and write its rows."""
    began, log = time.time(), rows.folder / f"{check.name}.log"
    result = rows.folder / f"{check.name}.json"
    result.unlink(missing_ok=True)
    told = {plugin.FILE: str(rows.path), plugin.CHECK: check.name, plugin.UNTIL: str(until)}
    command = check.command
    if not check.is_test:
        command += ["--json", str(result), *(["--quick"] if quick else [])]
    reader = gpu_usage.open_reader(torch.device("cuda", 0))
    code = run(command, log, until, told)
    took = f"{time.time() - began:.0f} s"
    if reader is not None:
        joules = reader.take(time.time() - began).joules
        reader.close()
        took += "" if joules is None else f", {joules:.0f} J"
    left = {plugin.NOT_REACHED, plugin.NO_TIME} & {row["measured"] for row in rows.of(check.name)}
    if code is None or left:
        rows.add(check.name, ENDS, "", f"cut off after {took}", NOT_RUN)
    elif code in ((0, 1) if check.is_test else (0,)):  # failed tests have rows of their own
        rows.add(check.name, ENDS, "", took, PASS)
    else:
        rows.add(check.name, ENDS, "", f"exit code {code}: {tail(log, 1)}", FAIL)
    for what, wanted, measured in read_figures(result):
        verdict = NOT_RUN if quick else PASS if meets(wanted, measured) else FAIL
        rows.add(check.name, what, wanted, measured, verdict)
    print(f"  {took}: {tail(log, 1)[:100]}", flush=True)


def read_figures(result: Path) -> list[tuple[str, str, str]]:
    """Return the targets and the measured values of a benchmark, as far as it came."""
    if not result.exists():
        return []
    found = json.loads(result.read_text(encoding="utf-8"))["conditions"].get("figures", {})
    return [(what, both["wanted"], both["measured"]) for what, both in found.items()]


def run(words: list[str], log: Path, until: float, more: dict[str, str]) -> int | None:
    """Run Python with these arguments and its output in `log`, and end all that it started. Returns
    its exit code; None if it was cut off.
    """
    with log.open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, *words],
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


def rehearse(out: Path) -> list[Row]:
    """Return the rows of a machine without a GPU: nothing is run. A check whose tests or benchmark
    cannot even be imported has failed.

    Args: out: a folder for logs.
    """
    modules = [f"benchmarks.{check.words.split()[0]}" for check in CHECKS if not check.is_test]
    files = [word for check in CHECKS if check.is_test for word in check.words.split()]
    commands = {
        False: ["-c", "\n".join(f"import {module}" for module in modules)],
        True: [*TESTS, "--collect-only", *files],
    }
    until = time.time() + PATIENCE
    told = {plugin.FILE: str(out / "rows.jsonl"), plugin.CHECK: ""}

    def probe(is_test: bool) -> tuple[str, str]:
        log = out / f"rehearsal-{is_test}.log"
        code = run(commands[is_test], log, until, told)
        if code is None:
            return f"no GPU; not known whether it can be imported: {PATIENCE} s over", NOT_RUN
        return (tail(log, 1), FAIL) if code else ("no GPU", NOT_RUN)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip((False, True), pool.map(probe, (False, True)), strict=True))
    rows = []
    for check in CHECKS:
        measured, result = found[check.is_test]
        row = {"check": check.name, "name": check.about, "wanted": ""}
        rows.append(row | {"measured": measured, "result": result})
    return rows
