"""A plugin of pytest that writes a row per test: -p benchmarks.on_gpu.plugin."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_gpu.rows import FAIL, NOT_RUN, PASS, Rows

FILE, CHECK, UNTIL = "ON_GPU_ROWS", "ON_GPU_CHECK", "ON_GPU_UNTIL"
LAST = 20  # seconds before the end from which no test begins
NOT_REACHED, NO_TIME = "cut off before it", "the time was over before it"


def pytest_collection_finish(session: Any) -> None:
    """Write a row for each test to come; a test that never ends counts as not run."""
    for item in session.items:
        _tell(item.nodeid, NOT_REACHED, NOT_RUN)


def pytest_runtest_setup(item: Any) -> None:
    """Skip a test for which there is no time left."""
    if time.time() > float(os.environ.get(UNTIL, "inf")) - LAST:
        pytest.skip(NO_TIME)


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
    name, rows = test.removeprefix("tests/"), Rows(Path(os.environ[FILE]).parent)
    rows.add(os.environ[CHECK], name, "passes", measured[:2000], result)
