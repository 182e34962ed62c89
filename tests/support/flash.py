"""PyTorch's operators of flash attention, computed on a CPU sequence by sequence: what a GPU has a
kernel for. As there, types are checked, and keys beyond those that count are not read.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.model import varlen


def parts(query, key, starts, keys, used):
    """The slices of each sequence: queries and keys."""
    for tensor in (starts, keys, *([] if used is None else [used])):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    queries, keys = starts.tolist(), keys.tolist()
    assert (queries[0], queries[-1]) == (0, len(query))
    assert keys[-1] <= len(key)
    for n in range(len(queries) - 1):
        end = keys[n + 1] if used is None else keys[n] + int(used[n])
        assert end <= keys[n + 1], "more keys are used than there are"
        yield slice(queries[n], queries[n + 1]), slice(keys[n], end)


def weights(query, key, scale, causal):
    """Scores [heads, queries, keys], in float32; query heads share key heads."""
    each = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(each, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if causal:  # the last query and the last key are level
        n, m = scores.shape[1:]
        behind = torch.ones(n, m, device=scores.device).triu(1 + m - n).bool()
        scores = scores.masked_fill(behind, -math.inf)
    return scores


def forward(query, key, value, starts, keys, longest, most, dropout, causal, debug, **options):
    """Stand in for aten::_flash_attention_forward on sequences."""
    scale, used = options.pop("scale", None), options.pop("seqused_k", None)
    assert not any(options.values()), options
    assert (dropout, debug) == (0.0, False)
    assert query.dtype == key.dtype == value.dtype != torch.float64
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(query)
    total = torch.full((query.shape[1], len(query)), math.inf, device=query.device)
    for at, of in parts(query, key, starts, keys, used):
        assert at.stop - at.start <= longest
        assert of.stop - of.start <= most
        scores = weights(query[at], key[of], scale, causal)
        each = query.shape[1] // key.shape[1]
        spread = value[of].float().repeat_interleave(each, dim=1)
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), spread).to(out.dtype)
        total[:, at] = scores.logsumexp(-1)
    draws = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out, total, draws, draws, total[:0]


def backward(
    grad,
    query,
    key,
    value,
    out,
    total,
    starts,
    keys,
    longest,
    most,
    dropout,
    causal,
    *draws,
    **options,
):
    """Stand in for aten::_flash_attention_backward: the softmax is made from `total`."""
    scale = options.pop("scale", None)
    assert not any(options.values()), options
    assert dropout == 0.0
    assert grad.dtype == query.dtype == out.dtype
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    each = query.shape[1] // key.shape[1]
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for at, of in parts(query, key, starts, keys, None):
        p = (weights(query[at], key[of], scale, causal) - total[:, at, None]).exp()
        d = grad[at].float()
        spread = [x[of].float().repeat_interleave(each, dim=1) for x in (key, value)]
        level = (d * out[at].float()).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", d, spread[1]) - level) * scale
        gradients[0][at] += torch.einsum("hqk,khd->qhd", ds, spread[0])
        of_key = torch.einsum("hqk,qhd->khd", ds, query[at].float())
        of_value = torch.einsum("hqk,qhd->khd", p, d)
        for total_, part in zip(gradients[1:], (of_key, of_value), strict=True):
            total_[of] += part.unflatten(1, (-1, each)).sum(2)
    return tuple(x.to(query.dtype) for x in gradients)


def forward_shape(query, *_, **__):
    """Return what `forward` does, of any content."""
    total = torch.empty(query.shape[1], len(query), device=query.device)
    draws = torch.empty(2, dtype=torch.uint64, device=query.device)
    return torch.empty_like(query), total, draws, draws, total[:0]


def backward_shape(grad, query, key, value, *_, **__):
    """Return what `backward` does, of any content."""
    return tuple(torch.empty_like(x) for x in (query, key, value))


@contextmanager
def emulated(device: str = "CPU", hollow: bool = False) -> Iterator[None]:
    """Have the operators on the device for the block, and say that they are there. hollow: nothing
    is computed, results have their shapes alone.
    """
    library, inner = torch.library.Library("aten", "IMPL"), varlen.has_flash
    made = (forward_shape, backward_shape) if hollow else (forward, backward)
    library.impl("_flash_attention_forward", made[0], device)
    library.impl("_flash_attention_backward", made[1], device)
    varlen.has_flash = lambda config, device, dtype: True
    try:
        yield
    finally:
        varlen.has_flash = inner
        library._destroy()
