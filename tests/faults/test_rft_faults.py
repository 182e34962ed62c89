"""RFT that runs out of memory, is killed, and gets a signal."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from common import finetune
from common.device import hardware
from common.device.hardware import Device
from common.sampling.native import Sampler
from common.system.signals import EXIT_SIGNAL
from tests.support import RFT_COMMAND, events, samples
from tests.support.models import same_weights, weights

pytestmark = pytest.mark.faults


@pytest.mark.thorough
def test_rows_are_those_that_fit_the_memory(letters, tmp_path, monkeypatch):
    """As if the machine were small: what the plan says is what is sampled, in every stage."""
    monkeypatch.setattr(
        hardware, "find", lambda *_: Device(torch.device("cpu"), "a small CPU", 3e-3, True)
    )
    real, rows_used = Sampler.generate_once, set()

    def generate(self, requests, sampling, rows, watch):
        rows_used.add(rows)
        return real(self, requests, sampling, rows, watch)

    monkeypatch.setattr(Sampler, "generate_once", generate)
    letters("algo.iterations=1", folder="small")
    log = (tmp_path / "small/run.log").read_text()
    (fitted,) = re.findall(r"algo.rollout_rows=256 does not fit 0 GB; going on with (\d+)", log)
    assert rows_used == {int(fitted)}
    assert f"{fitted} rows per forward" in log
    assert not (tmp_path / "small/sizes.json").exists(), "memory has not run out"


@pytest.mark.thorough
def test_memory_that_runs_out_halves_the_rows_for_good(
    letters, first_iteration, tmp_path, monkeypatch
):
    real = finetune.token_losses

    def scarce(model, trees, *others):
        if sum(len(tree.completions) for tree in trees) > 12:
            raise torch.OutOfMemoryError("out of memory")
        return real(model, trees, *others)

    monkeypatch.setattr(finetune, "token_losses", scarce)
    letters("algo.iterations=1", folder="scarce")
    assert json.loads((tmp_path / "scarce/sizes.json").read_text())["train_rows"] == 8
    wanted, found = weights(first_iteration), weights(tmp_path / "scarce")
    assert all(torch.allclose(found[k], wanted[k], atol=2e-3) for k in wanted)


def wait_for(what, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.said()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_at_several_points_and_resumed_it_ends_the_same(begin, launch, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    launch(*RFT_COMMAND, f"hydra.run.dir={whole}")
    path = killed / "iteration-1/samples-1-of-1.jsonl"
    points = [
        lambda: lines_of(path) > 40,
        lambda: any((killed / "iteration-1/checkpoints").glob("step-*")),
        lambda: lines_of(killed / "iteration-2/samples-1-of-1.jsonl") > 40,
    ]
    for number, point in enumerate(points):
        process = begin(
            *RFT_COMMAND, f"hydra.run.dir={killed}", *(["resume=auto"] if number else [])
        )
        wait_for(point, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if number == 0:  # and at a byte in the middle of a line
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 7)
    launch(*RFT_COMMAND, f"hydra.run.dir={killed}", "resume=auto")
    for iteration in (1, 2):
        assert samples(killed, iteration) == samples(whole, iteration)
    assert same_weights(killed, whole)
    assert [e["step"] for e in events(killed)] == list(range(1, len(events(killed)) + 1))
    trained = [
        (e["iteration"], e["train_step"]) for e in events(killed) if e["stage"] == "finetune"
    ]
    assert trained == [
        (e["iteration"], e["train_step"]) for e in events(whole) if e["stage"] == "finetune"
    ]


@pytest.mark.thorough
def test_sigterm_saves_and_says_how_to_go_on(begin, launch, tmp_path):
    folder = tmp_path / "run"
    process = begin(*RFT_COMMAND, "algo.iterations=1", "algo.epochs=12", f"hydra.run.dir={folder}")
    wait_for(lambda: any((folder / "iteration-1/checkpoints").glob("step-*")), process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    assert process.returncode == EXIT_SIGNAL, output
    assert "resume=auto" in output
    launch(
        *RFT_COMMAND,
        "algo.iterations=1",
        "algo.epochs=12",
        f"hydra.run.dir={folder}",
        "resume=auto",
    )
    assert (folder / "result.json").is_file()
