"""Runs with an adapter, and what they leave."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from launch import compose, train
from tests.support import CONF, MOVING, SMALL_GRPO, SMALL_RFT

ADAPTER = "model.adapter={rank: 4}"
GRPO = [*SMALL_GRPO, ADAPTER, "algo.lr=1e-2", "algo.kl.beta=0.1", "algo.resample_rounds=0"]
EGGROLL = [*MOVING, ADAPTER]
RFT = [*SMALL_RFT, ADAPTER, "algo.iterations=1", "algo.lr=5e-3"]
AMP = "opt=[amp]"


def run(folder: Path, *overrides: str) -> Any:
    """Train in this process; returns the result."""
    return train(compose([*overrides, "hardware=cpu"], CONF), folder)


def matrices(folder: Path) -> dict[str, torch.Tensor]:
    """Return what RUN/adapter holds."""
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that both hold the same bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
