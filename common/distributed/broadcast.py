"""Send a model that rank 0 has loaded to the other ranks."""

import copy
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common.distributed.context import Context

M = TypeVar("M", bound=nn.Module)


def without_weights(model: M) -> M:
    """Return a copy of `model` with parameters and buffers on meta, small enough to be sent to
    other ranks.
    """
    empty = {id(t): torch.empty_like(t, device="meta") for t in model.buffers()}
    for p in model.parameters():
        empty[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, empty)


def send_weights(part: nn.Module, context: Context, home: torch.device | None = None) -> None:
    """Broadcast the parameters and buffers of `part` from rank 0 to all ranks, on their device, or
    finally at `home`; sharded ones are skipped. All buffers are sent, also those outside of the
    state dict, such as rotary frequencies.
    """
    for tensor in (*part.parameters(), *part.buffers()):
        if isinstance(tensor, DTensor):
            continue
        if not context.main:  # in place, so that tied weights stay tied
            empty = torch.empty_like(tensor, device=context.device.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            empty = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            torch.utils.swap_tensors(tensor, empty)
        tensor.data = tensor.data.to(context.device.device)
        dist.broadcast(tensor.data, 0)
        tensor.data = tensor.data.to(home or context.device.device)
