"""Attention masks."""

import torch
from torch import Tensor


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool mask (True = attend) -> 0 and the most negative number; made once, not in each layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )
