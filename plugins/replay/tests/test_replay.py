"""A run's models rebuilt from RUN/run.egg: bit for bit, whatever the run's settings."""

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from common.config import ConfigError
from common.model import load_model
from launch import compose, train
from plugins.replay import egg
from plugins.replay.rebuild import Changes, rebuild
from plugins.replay.verify import verify
from tests.support import MOVING, ROOT

pytestmark = pytest.mark.usefixtures("in_cache")

UNLIMITED = [text for text in MOVING if not text.startswith("algo.max_drift")]
# What a run may be made with, each by the settings that it adds.
WAYS = {
    "plain": [],
    "adapter": ["model.adapter.rank=2"],
    "int8": ["model.quantize=int8"],
    "momentum": ["algo.optimizer.kwargs={momentum: 0.9}"],
    "Adam": ["algo.optimizer.name=Adam", "algo.lr=0.01"],
    "schedules": ["algo.lr_schedule={kind: cosine, end: 0.1}", "algo.sigma_schedule={kind: linear, end: 0.5}"],
    "trust region": ["algo.max_drift=0.05"],
    "pull and shared noise": ["algo.weight_decay=0.3", "algo.noise_reuse=2"],
    "16 bits": ["opt=[amp]", "opt.amp.dtype=bfloat16"],
    "all kinds of noise": ["algo.noise.vectors=full", "algo.noise.embeddings=full", "algo.rank=3"],
    "single members": ["algo.mirrored=false", "algo.fitness=centered_rank"],
    "likelihood": ["algo.fitness_of=likelihood"],
    "two ranks": ["opt=[ddp]", "opt.ddp.ranks=2"],
    "sharded": ["opt=[fsdp]", "opt.fsdp.ranks=2"],
}
QUICK = ("plain", "int8", "two ranks")  # the others are as many promises once more


def settings(way: str) -> list[str]:
    asked = WAYS[way]
    dropped = ("algo.sampling.temp",) if way == "likelihood" else ()
    return [text for text in MOVING if not text.startswith(dropped or "-")] + asked


def run_in(folder: Path, *overrides: str):
    return train(compose([*overrides]), folder)


def exported(folder: Path) -> bytes:
    (path,) = folder.glob("*/*.safetensors")
    return path.read_bytes()


@pytest.mark.parametrize(
    "way",
    [way if way in QUICK else pytest.param(way, marks=pytest.mark.thorough) for way in WAYS],
)
def test_a_model_is_rebuilt_bit_for_bit(tmp_path, way):
    run_in(tmp_path, "algo=eggroll", *settings(way))
    held = egg.read(tmp_path / "run.egg")
    assert [record.number for record in held.steps] == [1, 2, 3, 4]
    folder, step, proof = rebuild(held, tmp_path / "again")
    assert (step, proof.result, proof.first_other) == (held.end["exported"], True, None)
    assert proof.holds
    if way != "sharded":  # which writes its files in another order
        assert exported(tmp_path / "again") == exported(tmp_path)


def test_the_model_of_a_step_is_the_checkpoint_of_that_step(tmp_path):
    run_in(tmp_path, "algo=eggroll", *MOVING, "checkpoint.every=1", "checkpoint.keep=9")
    held = egg.read(tmp_path / "run.egg")
    _, step, proof = rebuild(held, tmp_path / "two", step=2)
    assert (step, proof.equal, proof.result) == (2, 2, None)
    from safetensors.torch import load_file

    saved = load_file(next((tmp_path / "checkpoints").glob("*2/*.safetensors")))
    found = load_file(tmp_path / "two" / "model" / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, found[name]) for name, tensor in saved.items())
