"""Attention of completions to their shared prompt and to themselves, on a CPU, with PyTorch's fused
kernel: keys are copied neither for the heads nor for the completions that share them.
"""

from typing import Any

import torch
from torch import Tensor

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Sizes = tuple[int, int, int, int]


def fits(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether `SharedPrompt` supports these tensors: on a CPU, without dropout, with queries
    and values of one width.
    """
    return query.device.type == "cpu" and dropout == 0 and query.shape[-1] == value.shape[-1]


class SharedPrompt(torch.autograd.Function):
    """Attention within n prompts with G completions each: queries [n, heads, P + G * C, d], keys
    and values [n, key heads, P + G * C, d] -> [n, heads, P + G * C, d].

    A completion attends to its prompt and to itself separately; the two parts are combined by the
    sums of their softmaxes. The gradient of one part needs only the combined sum and result from
    the other (as in ring attention, arXiv:2310.01889). Gradients are computed in float32, since the
    kernel is slower in bfloat16.
    Args:
        prompt_mask: additive mask [n, 1, P, P]; None if no prompt is padded.
        completion_mask: additive mask [n * G, 1, C, P + C].
        sizes: n, P, G, C.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # autograd passes them one by one
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prompt_mask: Tensor | None,
        completion_mask: Tensor,
        sizes: Sizes,
        scale: float | None,
    ) -> Tensor:
        """Return the attention in the dtype of the queries."""
        masks = _cut_masks(prompt_mask, completion_mask, sizes, query.shape[1], key.shape[1])
        (prompt, rows), shared, within = _cut_all(query, key, value, sizes)
        causal, of = masks[0] is None, [{"attn_mask": mask, "scale": scale} for mask in masks]
        alone, alone_sum = _fused(prompt, *_expand(shared, prompt), is_causal=causal, **of[0])
        first, first_sum = _fused(_stack(rows), *shared, **of[1])
        second, second_sum = _fused(rows, *within, **of[2])
        whole = torch.logaddexp(first_sum.view_as(second_sum), second_sum)
        share = (second_sum - whole).exp()[..., None].to(second.dtype)
        out = _join(alone, torch.lerp(first.view_as(rows), second, share), sizes)
        ctx.save_for_backward(query, key, value, out, alone_sum, whole, completion_mask)
        ctx.prompt_mask, ctx.sizes, ctx.scale = prompt_mask, sizes, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of queries, keys and values."""
        *saved, alone_sum, whole, completion_mask = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        query, key, value, out = (x.to(wide) for x in saved)
        prompt_mask = None if ctx.prompt_mask is None else ctx.prompt_mask.to(wide)
        sizes, heads = ctx.sizes, (query.shape[1], key.shape[1])
        masks = _cut_masks(prompt_mask, completion_mask.to(wide), sizes, *heads)
        (prompt, rows), shared, within = _cut_all(query, key, value, sizes)
        (grad_prompt, grad_rows), (out_prompt, out_rows) = (
            _cut(x, sizes, heads[1]) for x in (grad.to(wide), out)
        )
        causal, of = masks[0] is None, [{"attn_mask": mask, "scale": ctx.scale} for mask in masks]
        parts = grad_prompt, prompt, *_expand(shared, prompt), out_prompt, alone_sum
        alone = _fused_backward(*parts, 0.0, causal, **of[0])
        parts = _stack(grad_rows), _stack(rows), *shared, _stack(out_rows)
        first = _fused_backward(*parts, whole.flatten(1, 2)[:, None], 0.0, False, **of[1])
        second = _fused_backward(grad_rows, rows, *within, out_rows, whole, 0.0, False, **of[2])
        of_query = _join(alone[0], first[0].view_as(rows) + second[0], sizes)
        of_key, of_value = (
            _join(alone[i].sum(1, keepdim=True) + first[i], second[i], sizes) for i in (1, 2)
        )
        gradients = (of_query, of_key, of_value)
        return *(x.to(grad.dtype) for x in gradients), None, None, None, None


def _cut(x: Tensor, sizes: Sizes, key_heads: int) -> tuple[Tensor, Tensor]:
    """Cut [n, heads, P + G * C, d] into prompts [n * key heads, each, P, d] and completions [n *
    key heads, G, each * C, d], with `each` query heads per key head.
    """
    _, prompt, size, length = sizes
    x = x.unflatten(1, (key_heads, -1))
    rows = x[..., prompt:, :].unflatten(3, (size, length)).transpose(2, 3)
    return x[..., :prompt, :].flatten(0, 1), rows.flatten(3, 4).flatten(0, 1)


def _cut_all(
    query: Tensor, key: Tensor, value: Tensor, sizes: Sizes
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the queries of prompts and completions, then keys and values of prompts, then keys and
    values of completions.
    """
    queries, keys, values = (_cut(x, sizes, key.shape[1]) for x in (query, key, value))
    return queries, (keys[0], values[0]), (keys[1], values[1])


def _join(prompt: Tensor, rows: Tensor, sizes: Sizes) -> Tensor:
    """Undo `_cut`: combine prompts and completions into [n, heads, P + G * C, d]."""
    n, _, _, length = sizes
    rows = rows.unflatten(2, (-1, length)).transpose(1, 2).flatten(2, 3)
    return torch.cat((prompt, rows), dim=2).unflatten(0, (n, -1)).flatten(1, 2)


def _stack(rows: Tensor) -> Tensor:
    """Return the queries of all completions of a prompt as one sequence: [.., 1, G * m, d]."""
    return rows.flatten(1, 2)[:, None]


def _expand(shared: tuple[Tensor, Tensor], prompt: Tensor) -> list[Tensor]:
    return [x.expand(-1, prompt.shape[1], -1, -1) for x in shared]


def _cut_masks(
    prompt_mask: Tensor | None,
    completion_mask: Tensor,
    sizes: Sizes,
    heads: int,
    key_heads: int,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the masks of prompts (None = causal), of completions attending to their prompt (None =
    to all of it), and of completions attending to themselves.
    """
    _, prompt, size, _ = sizes
    within = completion_mask[:1, :, :, prompt:].repeat(1, 1, heads // key_heads, 1)
    if prompt_mask is None:
        return None, None, within
    seen = completion_mask[::size, :, :1, :prompt]  # every completion sees its whole prompt
    alone, first = (mask.repeat_interleave(key_heads, dim=0) for mask in (prompt_mask, seen))
    return alone, first, within
