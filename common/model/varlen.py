"""Attention over prompts and their completions with flash attention: concatenated sequences of any
length, key heads shared by query heads, and no masks.

Tokens are laid out as in `logprobs.Groups`: a row is a prompt followed by its completions, without
empty places. Two calls compute the attention of a row. Every sequence attends to itself, causally;
and the completions of a prompt, as one sequence of queries, attend to the whole prompt. If prompts
have a common opening, a third call lets all rows but the first attend to that opening, which only
the first row holds. A token gets the mean of its parts, weighted by the sums of their softmaxes: so
a prompt's keys are neither copied for its completions nor masked. In the backward pass, flash
attention recomputes the softmax from that sum; given the total sum and the mean, each call returns
its share of the gradients (as in Ring Attention, arXiv:2310.01889).

The kernels are FlashAttention-2's (arXiv:2307.08691), through the PyTorch operator that
`torch.nn.attention.varlen` (PyTorch 2.12 and later) calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from common.device import AnyDevice, hardware
from common.model.masks import keeps_states
from common.model.transfer import to_device

MOST = 256  # the largest head size that the kernels support


def each_layer(config: Any) -> Sequence[Any]:
    """Return the config of each layer; the layers of Gemma 4 have heads of two sizes."""
    if getattr(config, "is_heterogeneous", False):
        return config.per_layer_config
    return [config] * config.num_hidden_layers


def head_size(config: Any) -> int:
    """Return the width of an attention head; the largest one if layers differ."""
    if getattr(config, "is_heterogeneous", False):
        return max(map(head_size, each_layer(config)))
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def key_heads(config: Any) -> int:
    """Return the number of key heads, which query heads share; the largest one if layers differ."""
    if getattr(config, "is_heterogeneous", False):
        return max(map(key_heads, each_layer(config)))
    if given := getattr(config, "num_key_value_heads", None):
        return given
    falcon = getattr(config, "multi_query", False)
    alone = falcon and not getattr(config, "new_decoder_architecture", False)
    return 1 if alone else config.num_attention_heads


def has_flash(config: Any, device: AnyDevice, dtype: torch.dtype) -> bool:
    """Return whether PyTorch has flash attention for a model's heads: in 16 bits, on CUDA from
    compute capability 8.0 on.

    Args: config: the model's config; dtype: the dtype of its activations.
    """
    return why_not_flash(config, device, dtype) is None


def why_not_flash(config: Any, device: AnyDevice, dtype: torch.dtype) -> str | None:
    """Return the reason that PyTorch has no flash attention for a model's heads; None if it has."""
    if device.type != "cuda":
        return "not a CUDA device"
    if dtype == torch.float32:
        return "float32"
    if hasattr(config, "v_head_dim") or hasattr(config, "qk_rope_head_dim"):
        return "keys and values of unlike width"
    if keeps_states(config):
        return "layers that keep a state"
    size = head_size(config)
    if size > MOST:
        return f"heads of {size} numbers, more than {MOST}"
    if size % 8:  # PyTorch widens such heads; its operator does not
        return f"heads of {size} numbers, not a multiple of 8"
    if hardware.preset_of(device) is not None:
        has = hardware.capability(device) >= (8, 0)
    else:
        here = hardware.unwrap(device)
        has = _has_flash(here, dtype, config.num_attention_heads, key_heads(config), size)
    return None if has else "PyTorch has no kernel for the device and these heads"


@cache
def _has_flash(
    device: torch.device, dtype: torch.dtype, heads: int, shared: int, size: int
) -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        query, key = (
            torch.empty(1, n, 8, size, dtype=dtype, device=device, requires_grad=True)
            for n in (heads, shared)
        )
        return can_use_flash_attention(
            SDPAParams(query, key, key, None, 0.0, True, heads != shared)
        )


@dataclass(frozen=True)
class Sequences:
    """n concatenated sequences of queries, and n of their keys.

    Attributes:
        queries: int32 [n + 1], the offset of each sequence of queries, and their total.
        keys: int32 [n + 1], the offset of each sequence of keys, and their total.
        longest: the most tokens of a sequence, of queries and of keys.
        causal: whether a query attends to no later key; the last query and the last key are
            aligned.
    """

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]
    causal: bool


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float | None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of sequences, [queries, heads, size], and the logarithm of the sum of
    its softmax, float32 [heads, queries].

    Args:
        query: [queries, heads, size].
        key, value: [keys, key heads, size].
        used: int32 [n], the number of first keys of each sequence that are valid; the others are
            not read. None = all.
    """
    starts, ends = (sequences.queries, sequences.keys), sequences.longest
    out, total, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, *starts, *ends),
        *(0.0, sequences.causal, False),  # dropout, causal, whether to return the softmax
        scale=scale,
        seqused_k=used,
    )
    return out, total


def attend_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    made: tuple[Tensor, Tensor],
    sequences: Sequences,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        inputs: query, key and value.
        made: the outputs of `attend`, or these combined with the attention to other keys.
    """
    draws = torch.zeros(
        2, dtype=torch.uint64, device=grad.device
    )  # the random state of dropout, which is not used
    return torch.ops.aten._flash_attention_backward(
        *(grad, *inputs, *made, sequences.queries, sequences.keys, *sequences.longest),
        *(0.0, sequences.causal, draws, draws),
        scale=scale,
    )


@dataclass(frozen=True)
class Look:
    """Queries that attend to the keys of other sequences.

    Attributes:
        sequences: their offsets.
        queries: int64, the indices of the tokens that are queries.
        keys: int64, the indices of the tokens that are keys.
    """

    sequences: Sequences
    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Spans:
    """The sequences of prompts and their completions among T tokens.

    Attributes:
        own: every prompt and every completion, attending to itself.
        looks: the completions of each prompt, as one sequence of queries, attending to the prompt;
            and, if prompts have a common opening, all rows but the first attending to it.
    """

    own: Sequences
    looks: tuple[Look, ...]


def span(lengths: Sequence[Sequence[int]], opening: int, device: torch.device) -> Spans:
    """Lay out rows of a prompt and its completions.

    Args:
        lengths: the tokens of each prompt and its completions, by row; 0 = absent.
        opening: the number of first tokens of each prompt that only the first row holds.
    """
    rows = torch.tensor(lengths)  # [n, 1 + G]
    rows[1:, 0] -= opening
    prompts, completions = rows[:, 0], rows[:, 1:].sum(1)
    flat = rows.flatten()
    first = torch.arange(rows.shape[1]).expand_as(rows).flatten() == 0
    of_prompt = first.repeat_interleave(flat)  # [T]
    flat = flat[flat > 0]
    parts = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (flat, completions, prompts)]
    parts += [(~of_prompt).nonzero()[:, 0], of_prompt.nonzero()[:, 0]]
    others = torch.arange(int(rows[0].sum()), len(of_prompt))
    parts += [torch.tensor([0, len(others)]), torch.tensor([0, opening])]
    parts += [others, torch.arange(opening)]
    ends_of_all, queries, keys, at, of, *looking = to_device(parts, device)
    ends_of_all, queries, keys, *ends = (
        x.int() for x in (ends_of_all, queries, keys, *looking[:2])
    )
    longest = int(flat.max())
    to_prompt = Sequences(queries, keys, (int(completions.max()), int(prompts.max())), causal=False)
    looks = [Look(to_prompt, at, of)]
    if opening:
        to_opening = Sequences(ends[0], ends[1], (len(others), opening), causal=False)
        looks.append(Look(to_opening, looking[2], looking[3]))
    return Spans(Sequences(ends_of_all, ends_of_all, (longest, longest), causal=True), tuple(looks))


class InGroups(torch.autograd.Function):
    """The attention of completions to their prompts and themselves, and of prompts to themselves:
    [T, heads, size].

    Args: query: [T, heads, size]; key, value: [T, key heads, size].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None
    ) -> Tensor:
        """Combine the attention of all calls."""
        out, total = attend(query, key, value, spans.own, scale)
        for look in spans.looks:
            at, of = look.queries, look.keys
            other, other_total = attend(query[at], key[of], value[of], look.sequences, scale)
            own_total = total[:, at]  # [heads, queries]
            share = torch.sigmoid(other_total - own_total).T[..., None]
            out[at] = torch.lerp(out[at].float(), other.float(), share).to(out.dtype)
            total[:, at] = torch.logaddexp(own_total, other_total)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Add the gradient that came through the attention over other sequences' keys."""
        query, key, value, out, total = ctx.saved_tensors
        spans: Spans = ctx.spans
        gradients = attend_backward(grad, (query, key, value), (out, total), spans.own, ctx.scale)
        for look in spans.looks:
            at, of = look.queries, look.keys
            inputs, outputs = (query[at], key[of], value[of]), (out[at], total[:, at].contiguous())
            more = attend_backward(grad[at], inputs, outputs, look.sequences, ctx.scale)
            for gradient, where, other in zip(gradients, (at, of, of), more, strict=True):
                gradient[where] += other
        return *gradients, None, None
