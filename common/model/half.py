"""Copies of a model in half precision to sample from, and compiled forwards."""

import copy
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from common.distributed import fsdp

# torch.compile's modes without CUDA graphs.
WITHOUT_GRAPHS = {
    "default": "default",
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


def narrowed(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of the model with its parameters in `dtype`, to sample from; for float32, and
    where it is sharded, the model itself.

    Under autocast the weights would be cast anew for every token. Buffers stay: rotary frequencies
    in bf16 are off by 0.4 %.
    """
    if dtype == torch.float32 or fsdp.of(model):
        return model
    copied = copy.deepcopy(model).requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def compiled(part: Any, mode: str) -> Any:
    """Compile a model, or its inside, for inputs of any shape. It records no CUDA graphs, of which
    each shape would need its own.
    """
    return torch.compile(part, mode=WITHOUT_GRAPHS[mode], dynamic=True)


class Narrow:
    """A twin of a float32 model whose linear layers are in `dtype`, to sample from under autocast,
    which casts no more then.

    All else is shared, so that results are those of autocast to the bit (a tied head is the twin's
    own). 2 bytes a parameter.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        layers = [module for module in model.modules() if type(module) in (torch.nn.Linear, Conv1D)]
        shared = [*model.parameters(), *model.buffers()]
        self.twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
        twins = [
            module for module in self.twin.modules() if type(module) in (torch.nn.Linear, Conv1D)
        ]
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the model, of the twin
        for layer, twin in zip(layers, twins, strict=True):
            for name, parameter in layer.named_parameters(recurse=False):
                own = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                setattr(twin, name, own)
                self.pairs.append((parameter, own))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the model's weights as they are now."""
        for parameter, own in self.pairs:
            own.copy_(parameter)
