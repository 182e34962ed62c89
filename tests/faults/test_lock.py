"""Two live processes in one run folder: the second is refused, and nothing of the first is lost."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.system import lock
from tests.support import CONF, ROOT, SMALL, SMALL_RFT

pytestmark = pytest.mark.faults


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="anew", marks=pytest.mark.thorough),
        pytest.param(["resume=auto"], id="auto"),
    ],
)
def test_the_second_run_is_refused_and_names_the_first(launch, tmp_path, more):
    out = tmp_path / "out"
    command = ["algo=eggroll", *SMALL, f"hydra.run.dir={out}", "algo.steps=1"]
    launch(*command)
    with lock.locked(out):
        before = contents(out)
        done = launch(*command, *more, "seed=3", code=2)
        assert contents(out) == before, "not even what Hydra writes"
    assert (
        f"error: {out} is in use: process {os.getpid()} on {socket.gethostname()} has run there"
        " since 20" in done.stderr
    )
    assert "Two runs in one folder would overwrite each other." in done.stderr
    launch(*command, "resume=auto")


def test_a_run_holds_its_folder_until_it_is_killed(launch, begin, tmp_path):
    out = tmp_path / "out"
    command = ["algo=eggroll", *SMALL, f"hydra.run.dir={out}", "checkpoint.every=1"]
    process = begin(*command, "algo.steps=100000")
    wait_for(out / "checkpoints" / "step-00000001")
    with pytest.raises(lock.InUseError, match=f"process {process.pid} on "), lock.locked(out):
        raise AssertionError("it is held")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert json.loads((out / ".lock").read_text())["process"] == process.pid, "it said no farewell"
    launch(*command, "algo.steps=100000", "budget.seconds=0.2", "resume=auto")
    assert "resuming after step" in (out / "run.log").read_text()
    assert (out / ".lock").read_text() == ""


@pytest.mark.thorough
def test_two_commands_at_the_same_moment(cache, tmp_path):
    """Each in an interpreter of its own: one trains to its end, the other exits with 2."""
    out = tmp_path / "out"
    settings = ["algo=eggroll", *SMALL, f"hydra.run.dir={out}", "algo.steps=200", "resume=auto"]
    both = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *settings],
            cwd=tmp_path,
            env=os.environ | {"CLUTCH_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    refused = said[codes.index(2)]
    assert f"is in use: process {both[codes.index(0)].pid} on " in refused
    assert "Traceback" not in "".join(said)
    assert json.loads((out / "result.json").read_text())["steps"] == 200


@pytest.mark.thorough
def test_shards_share_a_folder_and_a_whole_run_does_not(launch, tmp_path):
    out = tmp_path / "out"
    command = ["--config-dir", CONF, *SMALL_RFT, f"hydra.run.dir={out}"]
    with lock.locked(out, "1/2"):
        launch(*command, "algo.stage=generate", "algo.shard=2/2", "algo.prompts=8")
        done = launch(*command, "algo.stage=generate", "algo.shard=1/2", "algo.prompts=8", code=2)
        assert f"is in use: process {os.getpid()} on " in done.stderr
        done = launch(*command, "resume=auto", code=2)
        assert f"error: {out} is in use: " in done.stderr


def test_a_job_of_slurm_waits_for_one_that_dies(monkeypatch, tmp_path, caplog):
    """A file server keeps the lock of a node that is gone for a while."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(lock, "MOMENT", 0.1)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time; from pathlib import Path; from common.system import lock\n"
            "with lock.locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(1.5)",
            str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    with process as held:
        assert held.stdout is not None
        assert held.stdout.readline() == b"held\n"
        with lock.locked(tmp_path):
            assert json.loads((tmp_path / ".lock").read_text())["job"] == "77"
    assert held.returncode == 0
    assert f"process {held.pid} on {socket.gethostname()} (Slurm job 77) has run" in caplog.text
    assert "Waiting 120 s at most." in caplog.text


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    out, take = tmp_path / "out", lock.take_lock

    def late(descriptor, path, kind):
        take(descriptor, path, kind)
        monkeypatch.setattr(lock, "take_lock", take)
        shutil.rmtree(out)

    monkeypatch.setattr(lock, "take_lock", late)
    with lock.locked(out):
        assert json.loads((out / ".lock").read_text())["process"] == os.getpid()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with lock.locked(tmp_path):
        pass
    assert "keeps no locks (No locks available), so nothing stops a second run" in caplog.text
