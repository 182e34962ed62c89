"""Half-precision copies of a model for sampling, and contexts for forwards: without dropout,
or compiled."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.distributed import sharding_of
from common.model.packed_linear import is_adapted, merged_weight, plain_weight
from common.model.wide_layers import WideHead, _keep_biases, has_wide_head

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


def narrowed(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of the model with its parameters in `dtype`, to sample from; for float32 and
    for a sharded model, the model itself.

    Norms and the vectors of recurrent layers (A_log, dt_bias) stay float32, and a `WideHead` keeps
    the model's own weights. Under autocast the weights would be cast again for every token. Buffers
    keep their dtype: rotary frequencies in bf16 are off by 0.4 %.
    """
    if dtype == torch.float32 or sharding_of(model).shared:
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
    if sharding_of(model).shared:
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
