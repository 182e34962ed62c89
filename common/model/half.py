"""Half-precision copies of a model for sampling, and contexts for forwards without dropout,
compiled or with packed weights.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.config import ConfigError
from common.device import AnyDevice
from common.distributed import fsdp
from common.model.quantized import QuantizedLinear

# The number of rows that the packed layout is optimized for; it works for any number.
PACKED_ROWS = 64
# torch.compile's modes without CUDA graphs.
WITHOUT_GRAPHS = {
    "default": "default",
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


@contextmanager
def evaluating(model: Any, attention: str | None = None) -> Iterator[None]:
    """Disable dropout in the block, and use another attention implementation if one is named."""
    training, before = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = attention or before
    try:
        yield
    finally:
        model.config._attn_implementation = before
        model.train(training)


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


def narrowed(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of the model with its parameters in `dtype`, to sample from; for float32 and
    for a sharded model, the model itself.

    Norms and the vectors of recurrent layers (A_log, dt_bias) stay float32, and a `WideHead` keeps
    the model's own weights. Under autocast the weights would be cast again for every token. Buffers
    keep their dtype: rotary frequencies in bf16 are off by 0.4 %.
    """
    if dtype == torch.float32 or fsdp.of(model):
        return model
    copied = copy.deepcopy(model).requires_grad_(False)
    keep = _keep_norms(copied, dtype) | _find_vectors_of_blocks(copied)
    for parameter in copied.parameters():
        if id(parameter) not in keep:
            parameter.data = parameter.data.to(dtype)
    if has_wide_head(model):
        wide: Any = model.get_output_embeddings()
        head: Any = copied.get_output_embeddings()
        head.weight = nn.Parameter(wide.weight.detach(), requires_grad=False)
    return copied


def narrow(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Move a model to `device` with its weights in `dtype`, one tensor at a time. Return the
    original tensors of the weights that were wider, by name, on their original device.

    Buffers keep their dtype, and so do norms, the biases of linear layers and quantized weights.
    """
    wide, keep = {}, _keep_norms(model, dtype) | _keep_biases(model, dtype)
    for name, parameter in model.named_parameters():
        data = parameter.data
        kept = id(parameter) in keep or not data.is_floating_point()
        parameter.data = data.to(device, data.dtype if kept else dtype)
        if parameter.dtype != data.dtype:
            wide[name] = data
    model.to(device)  # pyright: ignore[reportArgumentType]
    return wide


def _keep_norms(model: PreTrainedModel, dtype: torch.dtype) -> set[int]:
    """Make the norms of a model with other weights in `dtype` compute in float32. Return the ids of
    their weights.
    """
    norms = [module for module in model.modules() if _is_norm(module)]
    for norm in norms:
        if any(parameter.dtype != dtype for parameter in norm.parameters(recurse=False)):
            norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
            norm.register_forward_hook(lambda *of_norm: of_norm[2].to(dtype))
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}


def _find_vectors_of_blocks(model: PreTrainedModel) -> set[int]:
    """Return the ids of the vectors that are parameters of blocks themselves, not of their
    submodules.
    """
    blocks = (module for module in model.modules() if next(module.children(), None) is not None)
    own = (parameter for block in blocks for parameter in block.parameters(recurse=False))
    return {id(parameter) for parameter in own if parameter.ndim == 1}


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm with weights. These are small and close to 1, a range in
    which bfloat16 has steps of 1/128, so that small updates would be lost.
    """
    weights = list(module.parameters(recurse=False))
    vectors = bool(weights) and all(weight.ndim == 1 for weight in weights)
    return vectors and type(module).__name__.endswith(("Norm", "NormGated"))


def round_layers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights of linear layers to `dtype`, in place, for a model used under autocast to
    `dtype`. Autocast would round them at each product, so results are the same to the bit. A weight
    that is also the embedding is not rounded.
    """
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):
            for parameter in module.parameters(recurse=False):
                if parameter is not embedding:
                    parameter.data = parameter.data.to(dtype)


def keep_wide(model: PreTrainedModel) -> None:
    """Make a model with half-precision weights keep float32 hidden states between its layers, as
    float32 weights under autocast do. A sharded model is not changed.
    """
    if fsdp.of(model):
        return
    for parameter in model.parameters():  # norms and biases, which take no room
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, states: states.float())


def compiled(part: Any, mode: str) -> Any:
    """Compile a model, or a part of it, for inputs of any shape, without CUDA graphs, of which each
    shape would need its own.
    """
    return torch.compile(part, mode=WITHOUT_GRAPHS[mode], dynamic=True)


class Narrow:
    """A copy (`twin`) of a float32 model with linear layers in `dtype`, to sample from under
    autocast, which then casts no weights.

    All other tensors are shared, and so are weights that are already in `dtype`, so that results
    are those of autocast to the bit; a tied head is the twin's own. It takes 2 bytes per copied
    parameter.
    Args: once: whether to cast an input that several layers share once (`cast_once`); a compiler
    does so itself.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, once: bool) -> None:
        self.dtype = dtype
        shared = [*model.parameters(), *model.buffers()]
        self.twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # (model's, twin's) parameters
        self.adapted: list[tuple[Any, Any]] = []  # (model's, twin's) layers with an adapter
        for layer, twin in zip(model.modules(), self.twin.modules(), strict=True):
            if is_adapted(layer):
                self.adapted.append((layer, twin))
            if isinstance(layer, WideHead):  # weights in another dtype are frozen
                twin.weight = nn.Parameter(layer.weight.detach().float(), requires_grad=False)
            if not isinstance(layer, (nn.Linear, Conv1D)) or isinstance(layer, WideHead):
                continue
            if once:
                twin.register_forward_pre_hook(partial(cast_once, dtype))
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter.is_floating_point():  # not in few bits
                    narrowed = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                    setattr(twin, name, narrowed)
                    if parameter.dtype != dtype:
                        self.pairs.append((parameter, narrowed))

    @torch.no_grad()
    def refresh(self, merge: bool) -> None:
        """Copy the model's current weights into the twin.

        Args: merge: whether to merge the adapter into the twin's weights.
        """
        for parameter, narrowed in self.pairs:
            narrowed.copy_(parameter)
        for layer, twin in self.adapted if merge else ():
            weight = merged_weight(layer, plain_weight(layer.base_layer, self.dtype))
            if not twin.disable_adapters:
                twin.base_layer.weight = nn.Parameter(torch.empty_like(weight), requires_grad=False)
                twin.enable_adapters(False)
            twin.base_layer.weight.copy_(weight)  # in place, since recorded steps read this memory

    def part(self) -> None:
        """Drop merged weights: the twin computes the adapter separately again."""
        for layer, twin in self.adapted:
            twin.base_layer.weight = layer.base_layer.weight
            twin.enable_adapters(True)


def cast_once(dtype: torch.dtype, layer: nn.Module, inputs: tuple[Any]) -> Any:
    """Cast a layer's input as autocast does, but once for all layers that share it, such as q, k
    and v.
    """
    (states,) = inputs  # a new tensor in each forward
    if states.dtype == torch.float32 and not hasattr(states, "narrowed"):
        states.narrowed = states.to(dtype)
    return getattr(states, "narrowed", states)


def packs(device: AnyDevice, dtype: torch.dtype) -> bool:
    """Return whether weights of `dtype` are packed on `device` for sampling (`packed`)."""
    bf16 = device.type == "cpu" and dtype == torch.bfloat16
    return (
        bf16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


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
    return dtype if dtype.is_floating_point else fsdp.dtype(model)


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
