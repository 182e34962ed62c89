"""A model's device, dtype, blocks and size, whether its weights are sharded or not."""

from typing import Any

import torch
from torch import nn

from common.device.hardware import AnyDevice


def device_of(model: Any) -> torch.device:
    """Return the device of `model`'s forward passes. A model whose parameters are elsewhere between
    them has it as `forward_device`.
    """
    return getattr(model, "forward_device", None) or next(model.parameters()).device


def target_of(model: Any) -> AnyDevice:
    """Return the device of `model`'s forward passes; for a model on meta, the device of its
    plan.
    """
    return getattr(model, "planned_for", None) or device_of(model)


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of the weights in `model`'s forward passes. A model whose parameters have
    another one between them has it as `forward_dtype`.
    """
    return getattr(model, "forward_dtype", None) or next(model.parameters()).dtype


def autocast_of(model: Any) -> torch.autocast:
    """Return the autocast context of dummy forward passes: an adapter is float32, and the weights
    may be in 16 bits.
    """
    dtype = dtype_of(model)
    return torch.autocast(device_of(model).type, dtype, enabled=dtype != torch.float32)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the members of its outermost module lists."""
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return blocks


def count_parameters(model: nn.Module) -> int:
    """Return the number of weights of the full model."""
    return sum(parameter.numel() for parameter in model.parameters())
