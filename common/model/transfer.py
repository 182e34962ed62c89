"""Copies between the host and the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one dtype to the device in a single transfer, which the host does not wait
    for.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(model: nn.Module) -> None:
    """Move a model to the host, where the device copies it from without a wait."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_cuda:
            tensor.data = tensor.data.cpu().pin_memory()


@contextmanager
def on_device(model: nn.Module, device: torch.device, lent: bool) -> Iterator[None]:
    """Have a model that lies on the host on the device for the block, if it is `lent`. What is on
    the host stays there: nothing is copied back, so nothing may change in the block.
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
