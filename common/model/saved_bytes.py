"""The bytes that a forward saves for its backward pass, counted on the meta device, for models with
recurrent layers.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from common.device import blocks_of
from common.model.masks import KEYED, RECURRENT
from common.model.recurrent import in_plain_torch

COUNTED = "clutch_counted"  # an attention implementation that computes shapes only


def count_saved(model: PreTrainedModel, tokens: int) -> list[int]:
    """Return per block the bytes that a row of `tokens` tokens keeps for the backward pass, in
    float32.

    Recurrent layers differ too much between models for a formula, and compute in float32 under
    autocast as well; so the bytes are counted in a forward on the meta device.
    """
    known = model.__dict__.setdefault("counted", {})
    if tokens not in known:
        known[tokens] = count_saved_of(model.config, tokens)
    return known[tokens]


class _Attention(torch.autograd.Function):
    """Fused attention on meta tensors, which saves its inputs and its output for the
    backward pass.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """[rows, heads, T, size] -> [rows, T, heads, size]."""
        out = query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out)
        return out


def _attend(module: Any, *states: Tensor, **_: Any) -> tuple[Tensor, None]:
    return _Attention.apply(*states[:3]), None


AttentionInterface.register(COUNTED, _attend)


def count_saved_of(config: Any, tokens: int) -> list[int]:
    """Return the bytes that are saved for a backward pass, of the layers before the blocks and per
    block, of a model of `config` with `tokens` tokens.
    """
    counts = [0]  # the first count is of the layers before the blocks
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:  # a meta tensor has no address
            kept[storage._cdata] = storage
            counts[-1] += storage.nbytes()
        return tensor

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=COUNTED
        )
        model = whole.base_model
        # Grouped products of experts support meta tensors in bfloat16 only.
        mixture = any(".experts." in name for name, _ in model.named_parameters())
        model.to(torch.bfloat16 if mixture else torch.float32)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    kept |= {p.untyped_storage()._cdata: p for p in model.parameters()}
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda *_: counts.append(0))
    masks = dict.fromkeys((*KEYED, *RECURRENT))
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with in_plain_torch(), torch.enable_grad(), keeping:
        model(input_ids=ids, position_ids=ids, attention_mask=masks, use_cache=False)
    return [count * (2 if mixture else 1) for count in counts]
