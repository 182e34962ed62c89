"""The batch scripts against a real Slurm. They skip where none is up."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, events

TINY = ["hardware=cpu", "algo.epochs=1", "task.rows=300", "task.test_rows=60", "algo.model.size=32"]
TINY += ["algo.model.feedforward=64", "algo.tokenizer.vocabulary=600"]


def nodes() -> int:
    """Idle nodes of a Slurm that answers here; 0 where there is none."""
    if shutil.which("sbatch") is None:
        return 0
    done = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, timeout=20)
    return sum(map(int, done.stdout.split())) if done.returncode == 0 else 0


def submit(script: str, out: Path, cache: Path, count: int) -> str:
    """Run a script of this project as a user would, on CPUs; returns what the job printed."""
    printed = out.parent / "job.out"
    resources = [f"--nodes={count}", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={printed}"]
    done = subprocess.run(
        ["sbatch", "--wait", *resources, f"scripts/{script}", *TINY, f"hydra.run.dir={out}"],
        cwd=ROOT,
        env=os.environ | {"CLUTCH_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    text = printed.read_text() if printed.exists() else ""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{text}"
    return text


@pytest.mark.slurm
def test_two_nodes_train_together(cache, tmp_path):
    if nodes() < 2:
        pytest.skip("no Slurm with two idle nodes is up")
    text = submit("classify_ddp.sbatch", tmp_path / "out", cache, 2)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["world_size"] == 2
    assert len(events(tmp_path / "out")) == result["steps"], "one rank writes"
    assert (tmp_path / "out" / "rank-1.log").exists(), "both ranks have one folder"
    assert text.count("held-out accuracy") == 1


@pytest.mark.slurm
def test_one_device(cache, tmp_path):
    if nodes() < 1:
        pytest.skip("no Slurm with an idle node is up")
    submit("classify.sbatch", tmp_path / "out", cache, 1)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["world_size"] == 1
