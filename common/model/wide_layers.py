"""Layers of a half-precision model that compute in float32: the output layer, and biases."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.config import ConfigError
from common.model.quantized import QuantizedLinear


class WideHead(nn.Linear):
    """An output layer that multiplies in float32, also under autocast.

    Logits in 16 bits have a rounding error relative to their size, so that the sampler and the
    trainer disagree about rare tokens (arXiv:2506.13585; ScaleRL, arXiv:2510.13786).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 logits [..., V] of hidden states [..., d]."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def widen_head(model: PreTrainedModel) -> None:
    """Make a model's output layer multiply in float32. Raises: ConfigError if it is not a plain
    linear layer.
    """
    head: Any = model.get_output_embeddings()
    if type(head) not in (nn.Linear, WideHead):
        raise ConfigError(
            f"opt.amp.head=float32 needs an output layer that is a plain linear one, and that of"
            f" {type(model).__name__} is {type(head).__name__}. Leave it out."
        )
    head.__class__ = WideHead


def has_wide_head(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are float32 whatever the dtype of its hidden states."""
    return isinstance(model.get_output_embeddings(), WideHead)


class WideBias:
    """A linear layer in half precision with a float32 bias, like a norm's weights: if the bias is
    large, as in Qwen2, small updates would be lost. The sum is rounded once.
    """

    bias: Any
    multiply: Callable[[Tensor], Tensor]  # x W^T

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b [..., out] in the dtype of x [..., in]."""
        return self.with_noise(x, 0.0)

    def with_noise(self, x: Tensor, noise: Tensor | float) -> Tensor:
        """Return x W^T + (b + noise)."""
        return self.add_bias(self.multiply(x), noise)

    def add_bias(self, y: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Return y + (b + noise) in the dtype of y [..., out]."""
        return (y + (self.bias + noise)).to(y.dtype)


class WideBiasLinear(WideBias, nn.Linear):
    """An nn.Linear with a float32 bias."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        return F.linear(x, self.weight)


class WideBiasQuantized(WideBias, QuantizedLinear):
    """A quantized linear layer with a float32 bias."""


class WideBiasConv1D(WideBias, Conv1D):
    """The linear layer of GPT-2, with weight [in, out], and a float32 bias."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W."""
        return x @ self.weight


WIDENED = {
    nn.Linear: WideBiasLinear,
    Conv1D: WideBiasConv1D,
    QuantizedLinear: WideBiasQuantized,
}


def _keep_biases(model: PreTrainedModel, dtype: torch.dtype) -> set[int]:
    """Make linear layers with weights in `dtype` add their biases in float32. Return the ids of
    these biases.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) in WIDENED]
    wide = [one for one in layers if one.bias is not None and one.bias.dtype != dtype]
    for layer in wide:
        layer.__class__ = WIDENED[type(layer)]
    return {id(layer.bias) for layer in wide}
