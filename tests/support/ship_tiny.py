"""Pre-train the tiny model of a command and put it into common/assets, in float16, so that a first
run need not.

    python -m tests.support.ship_tiny algo=grpo task=chess

It is found by the hash of its settings and of the stream it was taught, so a change of either
means: run this again.
"""

import sys

import torch
from safetensors.torch import load_file, save_file

from common.model.tiny import ASSETS, tiny_model
from common.task import build
from launch import compose

LARGEST = 2 << 20  # bytes


def main() -> None:
    """Build (or take from the cache), convert, write."""
    run = compose(sys.argv[1:])
    assert run.model.tiny is not None, "only model=tiny is shipped"
    built = tiny_model(run.model.tiny, build(run.task))
    target = ASSETS / built.name
    target.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.float16)
        for name, tensor in load_file(built / "model.safetensors").items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        if (built / name).exists():
            (target / name).write_bytes((built / name).read_bytes())
    size = sum(path.stat().st_size for path in target.iterdir())
    assert size <= LARGEST, f"{target} has {size} bytes, more than {LARGEST}"
    print(
        f"{target}: {size / 2**20:.2f} MB, made by: python -m tests.support.ship_tiny"
        f" {' '.join(sys.argv[1:])}"
    )


if __name__ == "__main__":
    main()
