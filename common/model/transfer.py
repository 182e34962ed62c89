"""Copies between the host and the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one dtype to the device in a single transfer, without blocking the host."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(model: nn.Module) -> None:
    """Move a model to pinned host memory, from which copies to the device do not block."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_cuda:
            tensor.data = tensor.data.cpu().pin_memory()


@contextmanager
def on_device(model: nn.Module, device: torch.device, lent: bool) -> Iterator[None]:
    """Copy a model from the host to the device for the block, if `lent`. Nothing is copied back, so
    the block must not change its weights.
    """
    tensors = (*model.parameters(), *model.buffers()) if lent else ()
    on_host = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device, non_blocking=True)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, on_host, strict=True):
            tensor.data = data
