"""Filter the tokens that sampling may draw: top_p, top_k and min_p."""

import torch
from torch import Tensor

from common.config import SamplingConfig


def keep_drawable(logits: Tensor, ids: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return logits [n, V] with -inf at the tokens that are never drawn, so that their softmax is
    the policy that samples. The tokens `ids` [n], which were drawn, are always kept: another kernel
    may round one beyond the edge.
    """
    # torch has no deterministic cumulative sum for CUDA and would raise, also if a backward pass
    # with opt=deterministic recomputes this.
    repeatable = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with torch.no_grad():
            drawable = cut(torch.softmax(logits, dim=-1, dtype=torch.float32), sampling) > 0
            drawable.scatter_(1, ids[:, None], True)
    finally:
        torch.use_deterministic_algorithms(repeatable)
    return logits.masked_fill(~drawable, -torch.inf)


def cut(probability: Tensor, sampling: SamplingConfig) -> Tensor:
    """Zero the probabilities [n, V] of tokens that sampling never draws: those below min_p of the
    most likely, then all but the top_k most likely, then all outside of the smallest set with top_p
    of the probability. Returns [n, V].
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    if sampling.min_p:
        least = sampling.min_p * probability.amax(-1, keepdim=True)
        probability = torch.where(probability >= least, probability, 0.0)
    if top_k:
        return _cut_to_few(probability, min(top_k, probability.shape[1]), top_p)
    if top_p == 1:
        return probability
    ordered, index = probability.sort(dim=-1, descending=True, stable=True)
    share = ordered / ordered.sum(-1, keepdim=True)
    ordered.masked_fill_(share.cumsum(-1).sub_(share) >= top_p, 0)
    del share  # before there is one more of its size
    return torch.zeros_like(probability).scatter_(1, index, ordered)


def _cut_to_few(probability: Tensor, top_k: int, top_p: float) -> Tensor:
    """Apply top_k and top_p without sorting the vocabulary. Ties are broken as by a stable sort."""
    values = probability.topk(top_k).values
    share = values / values.sum(-1, keepdim=True)
    # At least one, also if all are NaN.
    count = (share.cumsum(-1).sub_(share) < top_p).sum(-1, keepdim=True).clamp_(min=1)
    if top_p == 1:
        count.fill_(top_k)
    least = values.gather(1, count - 1)
    alike = probability == least
    of_alike = count - (values > least).sum(-1, keepdim=True)
    keeps = (probability > least) | (alike & (alike.cumsum(-1, dtype=torch.int32) <= of_alike))
    return torch.where(keeps, probability, 0.0)
