"""The losses and advantages of GRPO and its kin, as pure functions.

Sources: GRPO arXiv:2402.03300 · Dr. GRPO 2503.20783 · DAPO 2503.14476 · GSPO 2507.18071 · CISPO
2506.13585 · dual clip 1912.09729 · KL estimators: Schulman, "Approximating KL divergence". BNPO is
TRL's name for a mean over a micro-batch's tokens.

Every loss is a sum divided by a count of the whole optimizer step, so that it and its gradient do
not depend on micro-batches or ranks (bnpo alone does, by its definition).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.config import GrpoConfig


@dataclass(frozen=True)
class Counts:
    """Denominators of one optimizer step, over all micro-batches and ranks."""

    rows: int  # completions
    tokens: int  # completion tokens that carry loss
    micro_batches: int


CAP = 3.0  # of the weights against the sampler's difference


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards [prompts, G] -> advantages of the same shape; 0 for a group of equal rewards.

    scale: group, batch, none. Deviations are unbiased (G - 1), with 1e-4 added, as in TRL.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    dead = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    centred = centred.masked_fill(dead, 0.0)  # a mean of equal numbers is off by rounding
    if scale == "group":
        return centred / (rewards.std(1, keepdim=True) + 1e-4)
    if scale == "batch":
        return centred / (rewards.std() + 1e-4) if rewards.numel() > 1 else centred
    assert scale == "none", scale
    return centred


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """DAPO's soft punishment (its equation 13): 0 up to limit - buffer tokens, then linearly to -1
    at the limit.
    """
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def kl(logp: Tensor, ref: Tensor, estimator: str, clamp: float) -> Tensor:
    """Estimate of KL(policy || reference) at each token, from samples of the policy; k3's exponent
    is clamped.
    """
    x = logp - ref
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    assert estimator == "k3", estimator
    return torch.exp((-x).clamp(-clamp, clamp)) + x - 1


def sampler_weights(
    old: Tensor, sampled: Tensor, mask: Tensor, kind: str, cap: float = CAP
) -> Tensor:
    """Return importance weights against an engine whose probabilities are not quite the trainer's:
    p_old / p_sampled of each token or each sequence, bounded. The names and the bound are TRL's.

    Args: old, sampled: log-probabilities [B, T]; mask: bool [B, T], tokens that carry loss; kind:
    token_truncate, token_mask, sequence_truncate, sequence_mask.
    Returns: [B, T], of a sequence the same at each token.
    """
    level, _, bound = kind.partition("_")
    difference = (old - sampled).masked_fill(~mask, 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(difference)
    weight = torch.exp(difference.clamp(-20.0, 20.0))
    if bound == "truncate":
        return weight.clamp(max=cap)
    return weight.masked_fill(weight > cap, 0.0)


def policy_loss(  # noqa: PLR0913 (the tensors of one formula)
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    counts: Counts,
    settings: GrpoConfig,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch: its part of the optimizer step's loss. The parts add up.

    Args:
        logp, old, ref: [B, T], of the policy, of the policy that sampled, of the reference.
        entropy: [B, T], of the distribution. weight: [B, T], of `sampler_weights`.
        advantage: [B]. mask: bool [B, T], tokens that carry loss.
        counts: of the whole optimizer step.
    Returns: a scalar, and sums over this micro-batch's tokens for the log.
    """
    weights = mask.to(logp.dtype)
    lengths = weights.sum(1).clamp(min=1)  # [B]
    # exp of more would be infinite soon
    log_ratio = (logp - old).masked_fill(~mask, 0.0).clamp(-20.0, 20.0)
    advantage = advantage[:, None]  # [B, 1]
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high

    if settings.loss == "gspo":
        # [B, 1], one per sequence
        ratio = torch.exp((log_ratio * weights).sum(1, keepdim=True) / lengths[:, None])
    else:
        ratio = torch.exp(log_ratio)  # [B, T]
    clipped = ratio.clamp(low, high)
    if settings.loss == "cispo":
        loss = -ratio.detach().clamp(max=settings.cispo_max) * advantage * logp
    else:
        unclipped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
        loss = -torch.minimum(unclipped * advantage, clipped * advantage)
        if settings.dual_clip is not None:
            loss = torch.where(
                advantage < 0, torch.minimum(loss, -settings.dual_clip * advantage), loss
            )
    loss = loss.expand_as(logp) if weight is None else loss * weight

    divergence = (
        kl(logp, ref, settings.kl.estimator, settings.kl.clamp) if ref is not None else None
    )
    if divergence is not None and settings.kl.where == "loss":
        loss = loss + settings.kl.beta * divergence
    if settings.entropy_bonus:
        assert entropy is not None
        loss = loss - settings.entropy_bonus * entropy
    loss = loss.masked_fill(~mask, 0.0)

    total = _aggregate(loss, weights, counts, settings)
    with torch.no_grad():
        if settings.loss == "cispo":
            low, high = 0.0, settings.cispo_max
        outside = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
        # samples come from the old policy
        sums = {
            "clip_fraction": (outside.expand_as(mask) & mask).sum(),
            "approx_kl": ((kl(old, logp, "k3", settings.kl.clamp) * weights).sum()),
            "entropy": (entropy * weights).sum() if entropy is not None else logp.new_zeros(()),
            "kl": (divergence * weights).sum() if divergence is not None else logp.new_zeros(()),
        }
    return total, sums


def _aggregate(loss: Tensor, kept: Tensor, counts: Counts, settings: GrpoConfig) -> Tensor:
    """Divide the sum of the tokens' losses by the count of the loss's definition."""
    if settings.loss in ("grpo", "gspo"):
        return (loss.sum(1) / kept.sum(1).clamp(min=1)).sum() / counts.rows
    if settings.loss == "dr_grpo":
        return loss.sum() / (counts.rows * settings.sampling.max_new_tokens)
    if settings.loss == "bnpo":
        return loss.sum() / kept.sum().clamp(min=1) / counts.micro_batches
    return loss.sum() / counts.tokens  # dapo, cispo
