"""Whole runs on a CUDA device, where there is one: what the stand-in cannot show."""

import json

import pytest
import torch

from tests.support import CONF, SMALL, SMALL_CLASSIFY, SMALL_GRPO, events
from tests.unit.test_graphs import needs_ampere

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
RUNS = {
    "eggroll": ["algo=eggroll", *SMALL],
    "grpo": SMALL_GRPO,
    "classify": SMALL_CLASSIFY,
}
GPU = "hardware=auto"


def started(launch, folder, algo, *more, **options):
    arguments = [GPU if text == "hardware=cpu" else text for text in RUNS[algo]]
    return launch(*arguments, *more, f"hydra.run.dir={folder}", fresh=True, **options)


@pytest.mark.parametrize(
    ("algo", "switches"),
    [
        ("eggroll", "amp"),
        ("eggroll", "amp,offload"),
        ("grpo", "amp"),
        pytest.param("grpo", "tf32", marks=needs_ampere),
        ("grpo", "amp,checkpointing,deterministic"),
        ("grpo", "fsdp,amp"),
        ("classify", "amp"),
    ],
)
def test_a_run_ends_well(algo, switches, launch, tmp_path):
    started(launch, tmp_path / "out", algo, f"opt=[{switches}]")
    assert (tmp_path / "out" / "result.json").exists()


def test_float16_with_a_grad_scaler(launch, tmp_path):
    started(launch, tmp_path / "out", "grpo", "opt=[amp]", "opt.amp.dtype=float16")
    assert all("loss_scale" in event for event in events(tmp_path / "out"))


@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_a_run_repeats_to_the_bit_and_goes_on_so(algo, launch, tmp_path):
    """With opt=deterministic, on one device of one kind."""
    switch = ["opt=[deterministic]"] if algo == "grpo" else []
    for name in ("one", "other", "resumed"):
        more = ["algo.steps=2"] if name == "resumed" else []
        started(launch, tmp_path / name, algo, *switch, "checkpoint.every=1", *more)
    started(launch, tmp_path / "resumed", algo, *switch, "checkpoint.every=1", "resume=auto")
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("one", "other", "resumed")
    ]
    assert weights[0] == weights[1] == weights[2]


def test_more_rows_than_fit_are_halved(launch, tmp_path):
    more = ["algo.rollout_rows=4000000", "algo.members=4096", "algo.prompts_per_step=256"]
    more += ["algo.steps=1", "evaluate.examples=2"]
    done = started(launch, tmp_path / "out", "eggroll", *more)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 1
    assert "does not fit" in done.stdout or "out of memory: repeating" in done.stdout


@two_devices
@pytest.mark.parametrize("switch", ["ddp", "fsdp"])
@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_two_ranks_with_nccl(algo, switch, launch, tmp_path):
    started(launch, tmp_path / "out", algo, f"opt=[{switch}]", f"opt.{switch}.ranks=2")
    assert json.loads((tmp_path / "out" / "result.json").read_text())["steps"] == 4


@two_devices
def test_an_error_on_one_rank_ends_both_with_nccl(launch, tmp_path):
    """One rank has the example whose reward raises, and the other waits for it in vain."""
    more = ["opt=[ddp]", "opt.ddp.ranks=2", "task=letters", "task.fault=raises", "task.fault_id=1"]
    more += ["algo.prompts_per_step=600", "--config-dir", CONF]
    done = started(launch, tmp_path / "out", "grpo", *more, code=2)
    assert "no such letter" in done.stderr
