"""make gpu: what a stranger gets from it. Here it runs on the stand-in for a CUDA device, or on
none.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.on_gpu import __main__ as command
from benchmarks.on_gpu import run
from benchmarks.on_gpu.checks import CHECKS, NAMES, Check
from benchmarks.on_gpu.rows import Rows, meets, table
from tests.support import ROOT
from tests.support.standin import build

pytestmark = pytest.mark.thorough  # no part of the product
EVERYWHERE = ROOT / "tests/support/standin/everywhere"
MODULE = [sys.executable, "-m", "benchmarks.on_gpu"]


def results(rows):
    return {row["name"].rpartition("::")[2]: row["result"] for row in rows}


def test_all_tests_that_need_a_gpu_are_run():
    marked = {
        str(path.relative_to(ROOT))
        for folder in ("tests", "plugins")
        for path in (ROOT / folder).rglob("test_*.py")
        if re.search(r"^(@pytest\.mark\.gpu| +pytest\.mark\.gpu,)$", path.read_text(), re.M)
    }
    # whose test is part of a benchmark that is run
    marked -= {"tests/runs/test_benchmarks.py"}
    assert marked == {file for one in CHECKS if one.is_test for file in one.words.split()}


@pytest.mark.parametrize(
    ("wanted", "measured", "right"),
    [
        (">= 95%", "97.1%", True),
        (">= 95%", "94.9%", False),
        ("<= 1.2x", "1.19x", True),
        ("<= 0.02", "3.1e-05", True),
        (">= 22000 tokens/s", "2.5e+04 tokens/s", True),
        (">= 5%", "-50%", False),
        (">= 1.03e+06 tokens/s", "2 tokens/s", False),
        ("<= 2.0x", "nanx", False),
    ],
)
def test_a_measured_value_is_held_against_its_bound(wanted, measured, right):
    assert meets(wanted, measured) == right


def test_what_is_missing_is_said_at_once(monkeypatch):
    def version(name):
        if name in ("hydra-core", "chess"):
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match=r"lacks hydra-core, chess\.\n[\s\S]*--find-links") as told:
        command.check_packages()
    assert "pip wheel" in str(told.value)


@pytest.mark.parametrize("wrong", [["kernel"], ["--minutes", "0"], ["--minutes", "nan"]])
def test_a_wrong_argument_is_an_error(wrong):
    done = subprocess.run([*MODULE, *wrong], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert wrong[-1] in done.stderr


def test_without_a_gpu_all_rows_are_there_and_none_is_run():
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        MODULE, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stdout.splitlines()[-1] == f"0 PASS, 0 FAIL, {len(CHECKS)} NOT RUN"


def test_a_benchmark_that_cannot_be_imported_has_failed(monkeypatch, tmp_path):
    checks = [Check("a", 9, "nowhere", "one"), Check("b", 9, "tests/unit/test_flash.py", "other")]
    monkeypatch.setattr(run, "CHECKS", checks)
    rows = run.rehearse(tmp_path)
    assert [row["result"] for row in rows] == ["FAIL", "NOT RUN"]
    assert "No module named 'benchmarks.nowhere'" in rows[0]["measured"]


TESTS = """
import subprocess, sys, time
import pytest

pytestmark = pytest.mark.gpu

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


def test_a_check_that_is_cut_off_keeps_rows_without_processes(monkeypatch, tmp_path):
    told, folder = tmp_path / "pid", ROOT / "tests" / "runs"
    file = folder / f"test_cut_off_{os.getpid()}.py"
    monkeypatch.setattr(run, "GRACE", 1)
    rows, check = Rows(tmp_path), Check("kernels", 40, f"tests/runs/{file.name}", "")
    file.write_text(TESTS.format(told=str(told)))
    try:
        run.run_check(rows, check, time.time() + 80, quick=True)  # a busy machine imports slowly
    finally:
        file.unlink()
    found = {row["name"].rpartition("::")[2]: row for row in rows.of("kernels")}
    assert results(found.values()) == {
        "test_quick": "PASS",
        "test_wrong": "FAIL",
        "test_more": "NOT RUN",
        "test_long": "NOT RUN",
        "test_later": "NOT RUN",
        "ends": "NOT RUN",
    }
    assert found["test_wrong"]["measured"] == "assert 1 == 2"
    assert found["test_more"]["measured"] == "needs two devices"
    assert not rows.has_ended("kernels")
    child = Path("/proc", told.read_text(), "stat")
    for _ in range(50):  # until whoever adopted it has noticed
        if not child.exists() or child.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the child of a test goes on")
    assert table(rows.of("kernels"))[-1] == "1 PASS, 1 FAIL, 4 NOT RUN"


@pytest.fixture
def on_stand_in():
    """Return a function that runs Python with the stand-in for a GPU."""
    try:
        build()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    env = os.environ | {"PYTHONPATH": f"{EVERYWHERE}:{ROOT}"}

    def call(words):
        return subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )

    return call


@pytest.mark.standin
def test_a_second_call_goes_on_with_what_is_left(on_stand_in, tmp_path):
    """Kernels that the stand-in lacks fail, which is what the table is for."""
    words = [*MODULE[1:], "--quick", "--out", str(tmp_path)]
    first = on_stand_in([*words, "kernels", "loader"])
    lines = first.stdout.splitlines()
    assert first.returncode == 1, first.stderr
    assert lines[-1] == f"to be sent in: {tmp_path}/on_gpu.json"
    assert re.fullmatch(r"\d+ PASS, \d+ FAIL, \d+ NOT RUN", lines[-3])
    (tmp_path / "loader.json").unlink()  # on another machine only rows and the file come along
    second = on_stand_in([*words, "--more", "kernels", "loader", "layer"])
    assert "layer:" in second.stdout
    assert "loader:" not in second.stdout
    sent = json.loads((tmp_path / "on_gpu.json").read_text())
    rows = {(row["check"], row["name"]): row["result"] for row in sent["rows"]}
    assert rows["kernels", "oracles/test_philox.py::test_cuda_draws_the_same"] == "PASS"
    assert rows["loader", "ends"] == rows["layer", "ends"] == "PASS"
    assert rows["memory", "memory of EGGROLL's training beside sampling"] == "NOT RUN"
    assert sent["benchmarks"]["loader"]["rows"]
    assert sent["conditions"]["device"] == "NVIDIA A100-SXM4-80GB"


@pytest.mark.standin
@pytest.mark.parametrize(
    "name",
    ["agreement", "population-1.5b", "grpo-0.5b", "grpo-1.5b-nf4", "distance", "deterministic"],
)
def test_benchmarks_for_a_gpu_go_through_its_branches(name, on_stand_in, tmp_path):
    """Without the limit of a check, which a busy machine may need."""
    result = tmp_path / "result.json"
    words = [*NAMES[name].command, "--quick", "--json", str(result)]
    done = on_stand_in(words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["conditions"]["device_type"] == "cuda"
    assert found["rows"]
