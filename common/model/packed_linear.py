"""Linear layers with packed weights on a CPU, and the plain or merged weight of a layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from common.device import AnyDevice, dtype_of
from common.model.quantized import QuantizedLinear
from common.model.wide_layers import WIDENED, WideBias

# The number of rows that the packed layout is optimized for; it works for any number.
PACKED_ROWS = 64


def packs(device: AnyDevice, dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` are packed on `device` for sampling (`packed`)."""
    bf16 = device.type == "cpu" and dtype == torch.bfloat16
    return (
        bf16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Pack the bfloat16 weights of linear layers on a CPU in oneDNN's layout for the block.
    Otherwise every product, of a few rows per token, would convert them again.

    The weights may not change in the block. It takes 2 bytes per parameter; products are equal up
    to rounding. An adapter is merged into the packed weights unless it is perturbed. Quantized
    layers are packed as well: dequantizing them at each token would take longer than the products.
    """
    modules: list[Any] = list(model.modules())
    linear = [m for m in modules if type(m) in (*WIDENED, *WIDENED.values())]
    merged = [module for module in modules if is_adapted(module) and not perturbed(module)]
    inside = {id(part) for layer in merged for part in layer.modules()}
    layers = [layer for layer in linear if id(layer) not in inside] + merged
    layers = [layer for layer in layers if packs(layer.weight.device, _dtype(layer, model))]
    plain = [layer for layer in layers if "forward" not in layer.__dict__]  # unperturbed
    try:
        for layer in layers:
            base = layer.base_layer if is_adapted(layer) else layer
            weight = plain_weight(base, torch.bfloat16)
            weight = merged_weight(layer, weight) if is_adapted(layer) else weight
            weight = weight.T if isinstance(base, Conv1D) else weight
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)
        for layer in plain:
            layer.forward = partial(multiply, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("packed", None)
        for layer in plain:
            layer.__dict__.pop("forward", None)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with an enabled adapter
    (common/model/adapter.py).
    """
    return hasattr(module, "lora_A") and not module.disable_adapters


def perturbed(layer: Any) -> bool:
    """Return whether the forwards of an adapter's matrices have been replaced."""
    parts = layer.lora_A["default"], layer.lora_B["default"]
    return any("forward" in part.__dict__ for part in parts)


def plain_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight of a linear layer; a quantized weight is dequantized to `dtype`."""
    if isinstance(layer, QuantizedLinear):
        return layer.plain(dtype)
    return layer.weight.detach()


def _dtype(layer: Any, model: nn.Module) -> torch.dtype:
    """Return the dtype of a layer's products; that of quantized weights is the model's."""
    dtype = layer.weight.dtype
    return dtype if dtype.is_floating_point else dtype_of(model)


def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """Return the weight of an adapted layer plus its adapter, rounded to the weight's dtype."""
    change = adapter_change(layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    return (weight.float() + change).to(weight.dtype)


def adapter_change(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """Return the product of an adapter's matrices [rank, in] and [out, rank] that is added to a
    layer's weight: float32, in the layout of the weight.
    """
    change = (up.detach().float() @ down.detach().float()).mul_(layer.scaling["default"])
    return change.T if layer.fan_in_fan_out else change


def multiply(
    layer: Any, x: Tensor, add: Tensor | None = None, to_bias: Tensor | float = 0.0
) -> Tensor:
    """Return the output of a packed layer for x [..., in], plus `add` [..., out].

    Args: to_bias: noise that is added to the bias of a `WideBias`.
    """
    x, weight, wide = x.to(torch.bfloat16), layer.packed, isinstance(layer, WideBias)
    bias = None if wide or layer.bias is None else layer.bias.to(torch.bfloat16)
    if add is None:
        y = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    else:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, add, weight, bias, "add")
    return layer.add_bias(y, to_bias) if wide else y
