"""Linear layers with frozen weights in a few bits, trained through an adapter.

int8: a row of W is q * scale, with integers q from -127 to 127. nf4 (QLoRA, arXiv:2305.14314): W is
cut into blocks of 64 numbers; each number is one of 16 quantiles of a normal distribution times the
largest number of its block, and two numbers share a byte. A product dequantizes the weight to the
dtype of its inputs, and the backward pass does so again, so that only the few bits are kept.
Embeddings and the head are not quantized.

It is plain PyTorch, not bitsandbytes or torchao, because a sample may not depend on its neighbours
(LLM.int8() selects columns by the rows of a batch), and a plan needs layers on the meta device. The
numbers of nf4 are those of bitsandbytes (tests/unit/test_quantized.py).
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from common.config import ConfigError

BLOCK = 64  # numbers of nf4 that share a scale
METHOD = "clutch"  # our name among transformers' ways to quantise
# The quantiles of nf4, as in QLoRA, appendix E.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
NF4 += (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
NF4 += (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
NF4 += (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


def quantize(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of a weight [out, in]: int8 [out, in] and float32 [out,
    1], or for nf4 uint8 [blocks, 32] and float32 [blocks, 1].
    """
    weight = weight.float()
    if kind == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale.clamp(min=1e-30)).round_().to(torch.int8), scale
    flat = weight.flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4, device=weight.device)
    nearest = torch.bucketize(
        blocks / scale.clamp(min=1e-30), (table[1:] + table[:-1]) / 2, out_int32=True
    )
    high, low = nearest.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return high * 16 + low, scale


# Bytes per weight that a forward in 16 bits reads and writes: the packed bits, the temporaries of
# `dequantize` (for nf4, 32-bit indices of pairs, and float32), and the product's input.
FORWARD_BYTES = {"int8": 1 + 2 + 2, "nf4": 0.5 + 2 + 2 + 4 + 4 + 2 + 2}


def dequantize(whole: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in], as rounded by `quantize`, in `dtype`.

    Args: shape: out and in.
    """
    if whole.dtype == torch.int8:
        return torch.mul(whole, scale, out=torch.empty(shape, dtype=dtype, device=whole.device))
    numbers = _pairs(whole.device)[whole.int()].flatten(1)  # [blocks, 64]
    product = torch.empty(numbers.shape, dtype=dtype, device=whole.device)
    torch.mul(numbers, scale, out=product)
    return product.flatten()[: shape[0] * shape[1]].view(shape)


class QuantizedLinear(nn.Linear):
    """A frozen quantized linear layer.

    Args: layer: the layer to quantize; kind: int8 | nf4.
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        nn.Module.__init__(self)
        self.kind = kind
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight
        if weight.is_meta:  # as `quantize` would return them
            blocks = -(-weight.numel() // BLOCK)
            int8 = kind == "int8"
            shape = tuple(weight.shape) if int8 else (blocks, BLOCK // 2)
            whole = torch.empty(shape, dtype=torch.int8 if int8 else torch.uint8, device="meta")
            scale = torch.empty(shape[0], 1, dtype=torch.float32, device="meta")
        else:
            whole, scale = quantize(weight.detach(), kind)
        self.weight = nn.Parameter(whole, requires_grad=False)
        # A buffer, which stays float32 when parameters change their dtype.
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in) of the weight."""
        return self.out_features, self.in_features

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`."""
        return dequantize(self.weight, self.scale, self.shape, dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T, in the dtype of x."""
        return _Product.apply(x, self.weight, self.scale, self.shape, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, in the autocast dtype."""
        if self.weight.is_floating_point():  # merged with an adapter (packed_linear.py)
            return super().forward(x)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return _Product.apply(x, self.weight, self.scale, self.shape, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes and the kind, for `repr`."""
        return f"{super().extra_repr()}, {self.kind}"


class _Product(torch.autograd.Function):
    """x W^T + b, whose backward pass dequantizes W again: autograd would keep it from
    the forward.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        whole: Tensor,
        scale: Tensor,
        shape: tuple[int, int],
        bias: Tensor | None,
    ) -> Tensor:
        """x [..., in] -> [..., out]; shape: that of W."""
        ctx.save_for_backward(whole, scale)
        ctx.shape = shape
        bias = None if bias is None else bias.to(x.dtype)
        return F.linear(x, dequantize(whole, scale, shape, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of x; all other inputs are frozen."""
        whole, scale = ctx.saved_tensors
        return grad @ dequantize(whole, scale, ctx.shape, grad.dtype), None, None, None, None


def replace_layers(model: PreTrainedModel, kind: str, key: str) -> None:
    """Replace the linear layers of `model`, except its head, by quantized layers.

    Args: key: the setting, for the error.
    Raises: ConfigError if there are none.
    """
    head = model.get_output_embeddings()
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]
    if not linear:
        raise ConfigError(
            f"{key}={kind} has no effect on {type(model).__name__}: it has no plain linear layers"
            " beside its head (GPT-2 has layers of its own kind). Leave it out."
        )
    for name, module in linear:
        model.set_submodule(name, QuantizedLinear(module, kind))


def shape_of(layer: Any) -> tuple[int, int]:
    """Return the shape (out, in) of a linear layer's weight, quantized or not."""
    return layer.shape if isinstance(layer, QuantizedLinear) else tuple(layer.weight.shape)


def layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def plain_weights(model: nn.Module, held: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return all weights of a model, float32 on the CPU, with quantized ones dequantized, and the
    buffers that are saved, such as the bias of a router.

    Args: held: the gathered weights of a sharded model; None = the model's own.
    """
    packed = layers(model)
    if held is None:
        saved = model.state_dict().keys() - {f"{name}.scale" for name in packed}
        held = dict(model.named_parameters())
        held |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    weights = {
        name: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None)
        for name, tensor in held.items()
    }
    for name, layer in packed.items():
        weights[f"{name}.weight"] = layer.plain(torch.float32).cpu()
    return weights


def packed_away(model: nn.Module) -> int:
    """Return the number of weights minus the number of elements in the model's parameters, which is
    positive for nf4.
    """
    packed = layers(model).values()
    return sum(x.in_features * x.out_features - x.weight.numel() for x in packed)


def forward_bytes(model: nn.Module, parameters: int, size: int) -> float:
    """Return the bytes of weights that a forward reads and writes.

    Args: parameters: the number of the model's weights; size: bytes of a weight that is not
    quantized.
    """
    packed = {layer: layer.in_features * layer.out_features for layer in layers(model).values()}
    few = sum(count * FORWARD_BYTES[layer.kind] for layer, count in packed.items())
    return few + size * (parameters - sum(packed.values()))


def remade_bytes(model: nn.Module, dtype: torch.dtype) -> float:
    """Return the bytes that dequantizing the largest weight takes, for a product in `dtype`."""
    each = {"int8": dtype.itemsize, "nf4": 4 + dtype.itemsize}  # nf4 by way of float32
    sizes = (x.in_features * x.out_features * each[x.kind] for x in layers(model).values())
    return float(max(sizes, default=0))


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two numbers of each byte of nf4: float32 [256, 2]."""
    with torch.inference_mode(False):
        table = torch.tensor(NF4, device=device)
        return torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)


# --- while a model is loaded, layer by layer


class Quantization(QuantizationConfigMixin):
    """Makes `from_pretrained` quantize a model.

    Args: kind: int8 | nf4; key: the setting, for errors.
    """

    def __init__(self, kind: str, key: str) -> None:
        self.quant_method: Any = METHOD
        self.kind, self.key = kind, key


class Quantizer(HfQuantizer):
    """Quantizes each weight as it is read, so that only one at a time exists in its own dtype."""

    quantization_config: Any

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        replace_layers(model, self.quantization_config.kind, self.quantization_config.key)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is the weight of a quantized layer."""
        name, _, last = param_name.rpartition(".")
        return last == "weight" and isinstance(model.get_submodule(name), QuantizedLinear)

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes such a weight."""
        return _Quantize(self.quantization_config.kind)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for scale in (layer.scale for layer in layers(model).values()):
            assert not scale.is_meta, "each weight has been read"
        self.remove_quantization_config(model)  # exports are not quantized

    def is_serializable(self) -> bool:
        """Return False: the quantized weights are never saved."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Return True: the model is trained through an adapter."""
        return True


register_quantization_config(METHOD)(Quantization)
register_quantizer(METHOD)(Quantizer)


class _Quantize(ConversionOps):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the integers and the scale of a layer, by name.

        Args: input_dict: the weight, by its name.
        """
        ((name, weight),) = input_dict.items()
        whole, scale = quantize(weight[0] if isinstance(weight, list) else weight, self.kind)
        return {name: whole, f"{name.removesuffix('weight')}scale": scale}
