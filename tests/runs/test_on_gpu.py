"""make gpu: what a stranger gets from it. Here it runs on the stand-in for a CUDA device."""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import on_gpu
from common.device import hardware
from tests.support import ROOT
from tests.support.standin import build

pytestmark = pytest.mark.thorough  # no part of the product
EVERYWHERE = ROOT / "tests/support/standin/everywhere"


def test_make_gpu_covers_all_tests_and_figures():
    marked = {
        str(path.relative_to(ROOT))
        for folder in ("tests", "plugins")
        for path in (ROOT / folder).rglob("test_*.py")
        if re.search(r"^(@pytest\.mark\.gpu| +pytest\.mark\.gpu,)$", path.read_text(), re.M)
    }
    # whose test is part of a benchmark that is run
    marked -= {"tests/runs/test_benchmarks.py"}
    assert marked == {
        w
        for w in f"{on_gpu.PARTS[1]} {on_gpu.PARTS[2]}".split()
        if w.startswith(("tests/", "plugins/"))
    }
    for measured, right in (("97.1%", True), ("94.9%", False)):
        assert on_gpu.meets(">= 95%", measured) == right
    assert on_gpu.meets("<= 1.2x", "1.19x")


def test_what_is_missing_is_said_at_once(monkeypatch):
    def version(name):
        if name in ("hydra-core", "chess"):
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(
        SystemExit, match=r"lacks hydra-core, chess\.\n[\s\S]*--find-links wheels"
    ) as told:
        on_gpu.check_interpreter()
    assert "pip wheel" in str(told.value)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "why_no_device", lambda: "the driver is 470.82.")
    with pytest.raises(SystemExit, match=r"^error: the driver is 470\.82\.$"):
        on_gpu.check_interpreter()


TESTS = """
import subprocess, sys, time
import pytest

def test_quick(): ...

def test_wrong():
    assert 1 == 2

@pytest.mark.skip(reason="needs two devices")
def test_more(): ...

def test_long(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({told!r}, "w").write(str(child.pid))
    time.sleep(600)

def test_later(): ...
"""


def test_a_cut_off_part_keeps_rows_without_processes(monkeypatch, tmp_path):
    told, file = tmp_path / "pid", tmp_path / "test_parts.py"
    file.write_text(TESTS.format(told=str(told)))
    command = f"pytest -q -p no:cacheprovider -p benchmarks.on_gpu --rootdir {tmp_path} {file}"
    monkeypatch.setattr(on_gpu, "PARTS", {1: command, 2: {"loader": "loader"}})
    monkeypatch.setattr(on_gpu, "ABOUT", ("tests", "benchmarks"))
    monkeypatch.setattr(on_gpu, "LAST", 0)
    monkeypatch.setattr(on_gpu, "GRACE", 1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    on_gpu.run_part(tmp_path, 1, argparse.Namespace(seconds=25, quick=True))
    rows = {row["name"].rpartition("::")[2]: row for row in on_gpu.read(tmp_path)}
    found = {name: row["result"] for name, row in rows.items()}
    assert found == {
        "test_quick": "PASS",
        "test_wrong": "FAIL",
        "test_more": "NOT RUN",
        "test_long": "NOT RUN",
        "test_later": "NOT RUN",
        "the tests come to their end": "NOT RUN",
        "benchmarks": "NOT RUN",
    }
    assert rows["test_wrong"]["measured"] == "assert 1 == 2"
    assert rows["test_more"]["measured"] == "needs two devices"
    child = Path("/proc", told.read_text(), "stat")
    for _ in range(50):  # until whoever adopted it has noticed
        if not child.exists() or child.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the child of a test goes on")
    assert on_gpu.table(list(on_gpu.read(tmp_path)))[-1] == "1 PASS, 1 FAIL, 5 NOT RUN"


SHORT = """
import sys
from benchmarks import on_gpu
on_gpu.PARTS = {
    1: on_gpu.TESTS + "tests/oracles/test_philox.py tests/unit/test_flash.py",
    2: {"loader": "loader --repeats 1"},
    3: {"rft": "rft"},
}
on_gpu.ABOUT = on_gpu.ABOUT[:3]
sys.exit(on_gpu.main())
"""


@pytest.mark.standin
def test_on_the_stand_in_it_ends_with_its_table(tmp_path):
    """Kernels that the stand-in lacks fail, which is what the table is for."""
    try:
        build()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-c", SHORT, "--quick", "--out", str(tmp_path), "1", "2"]
    env = os.environ | {"PYTHONPATH": f"{EVERYWHERE}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[-1] == f"to be sent in: {tmp_path}/on_gpu.json"
    assert re.fullmatch(r"\d+ PASS, \d+ FAIL, \d+ NOT RUN", lines[-3])
    sent = json.loads((tmp_path / "on_gpu.json").read_text())
    rows = {(row["part"], row["name"]): row["result"] for row in sent["rows"]}
    assert rows[1, "oracles/test_philox.py::test_cuda_draws_the_same"] == "PASS"
    assert rows[2, "loader"] == "PASS"
    assert rows[3, "sampling"] == "NOT RUN"
    assert sent["benchmarks"]["loader"]["rows"]
    assert sent["conditions"]["device"] == "NVIDIA A100-SXM4-80GB"
