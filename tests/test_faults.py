"""Runs that go wrong from outside: a full disk, ranks that were started differently."""

import os
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL

from common import checkpoint


def command(*arguments):
    return [sys.executable, str(ROOT / "launch.py"), "algo=eggroll", *SMALL, *arguments]


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["opt=[ddp]", "opt.ddp.ranks=2"], marks=pytest.mark.slow)],
    ids=["one rank", "two ranks"],
)
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(launch, cache, tmp_path, more):
    """A limit on the size of files stands for it: the log fits, weights do not."""
    out = tmp_path / "out"
    settings = [*more, f"hydra.run.dir={out}", "checkpoint.every=1"]
    launch("algo=eggroll", *SMALL, *settings, "algo.steps=2")
    before = checkpoint.latest(out / "checkpoints")
    limited = ["bash", "-c", 'ulimit -f 40; exec "$@"', "bash", *command(*settings, "algo.steps=4", "resume=auto")]
    environment = os.environ | {"CLUTCH_CACHE": str(cache)}
    done = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr
    assert "Earlier checkpoints stand. Make room, then go on with hydra.run.dir=" in done.stderr
    assert "Traceback" not in done.stderr
    after = checkpoint.latest(out / "checkpoints")
    assert (after.path, after.step) == (before.path, 2)
    launch("algo=eggroll", *SMALL, *settings, "algo.steps=4", "resume=auto")
    assert checkpoint.latest(out / "checkpoints").step == 4


def test_ranks_with_other_settings_are_named_before_they_start(cache, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"TORCHELASTIC_RUN_ID": "x", "CLUTCH_CACHE": str(cache)}
    ranks = [
        subprocess.Popen(
            command(f"hydra.run.dir={tmp_path}/out", f"algo.sigma={sigma}"),
            cwd=tmp_path,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, sigma in enumerate((0.01, 0.02))
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    assert "error: algo.sigma is 0.01 on rank 0 and 0.02 on rank 1. Start all ranks with the same command" in errors[0]


def test_a_finished_run_without_its_checkpoints_is_not_overwritten(launch, tmp_path):
    out = tmp_path / "out"
    launch("algo=eggroll", *SMALL, f"hydra.run.dir={out}", "algo.steps=1")
    shutil.rmtree(out / "checkpoints")
    before = (out / "result.json").read_bytes()
    for more in ("seed=7", "resume=auto"):
        done = launch("algo=eggroll", *SMALL, f"hydra.run.dir={out}", "algo.steps=1", more, code=2)
        assert "holds a run that has ended, without its checkpoints" in done.stderr
    assert (out / "result.json").read_bytes() == before
