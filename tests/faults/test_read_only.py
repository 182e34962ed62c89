"""Folders that may not be written: each command says which, and what to give instead."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, SMALL

pytestmark = pytest.mark.faults

# Root may write anywhere, unless it gives that right up.
RIGHTS = "-dac_override,-dac_read_search,-fowner"
AS_OTHERS = ["setpriv", f"--bounding-set={RIGHTS}", f"--inh-caps={RIGHTS}"]


def attempt(*command: str, folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may write anywhere, and setpriv (util-linux) is not there")
    return subprocess.run(
        [*(AS_OTHERS if os.geteuid() == 0 else ()), sys.executable, *command],
        cwd=folder,
        env=os.environ | {"CLUTCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def locked(tmp_path):
    """A folder that may not be written, until the test has ended."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


COMMANDS = {
    "no folder is given": ([], "a run folder in {locked}/outputs cannot be made", "hydra.run.dir"),
    "no folder of a sweep": (
        ["-m", "seed=1,2"],
        "a run folder in {locked}/multirun cannot be made",
        "Give hydra.sweep.dir.",
    ),
    "a run folder": (
        ["hydra.run.dir={locked}/run"],
        "hydra.run.dir={locked}/run cannot be made",
        "Choose another folder.",
    ),
    "a script": (
        ["slurm.script={locked}/job.sh"],
        "slurm.script={locked}/job.sh cannot be written",
        "Choose another file.",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_may_not_be_written_is_named(name, locked, cache):
    arguments, told, advice = COMMANDS[name]
    given = [text.format(locked=locked) for text in arguments]
    done = attempt(str(ROOT / "launch.py"), *SMALL, *given, folder=locked, cache=cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{told.format(locked=locked)}: Permission denied." in done.stderr
    assert advice in done.stderr
    assert "Traceback" not in done.stderr
    assert list(locked.iterdir()) == []


@pytest.mark.thorough
def test_a_read_only_run_can_be_read(launch, cache, tmp_path):
    run = tmp_path / "run"
    launch(*SMALL, f"hydra.run.dir={run}")
    launcher = str(ROOT / "launch.py")
    for path in (*run.rglob("*"), run):
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        again = [launcher, *SMALL, f"hydra.run.dir={run}", "resume=auto"]
        done = attempt(*again, folder=tmp_path, cache=cache)
        assert done.returncode == 2
        assert f"hydra.run.dir={run} cannot be written: Permission denied." in done.stderr
        done = attempt("-m", "common.report", str(run), folder=tmp_path, cache=cache)
        assert done.returncode == 2
        assert (
            "cannot be written: Permission denied. Make its folder writable, or copy the run."
            in done.stderr
        )
        out = str(tmp_path / "other")
        done = attempt("-m", "common.compare", str(run), "--out", out, folder=tmp_path, cache=cache)
        assert done.returncode == 0, done.stderr
        other = f"hydra.run.dir={tmp_path / 'on'}"
        more = [launcher, *SMALL, "algo.steps=6", f"resume={run}", other]
        done = attempt(*more, folder=tmp_path, cache=cache)
        assert done.returncode == 0, done.stderr
    finally:
        for path in (run, *run.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
