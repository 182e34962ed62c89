"""The losses and advantages of GRPO and its variants, as pure functions.

Sources: GRPO arXiv:2402.03300 · Dr. GRPO 2503.20783 · DAPO 2503.14476 · GSPO 2507.18071 · CISPO
2506.13585 · SAPO 2511.20347 · DPPO 2602.04879 · dual clip 1912.09729 · off-policy mask and unbiased
KL: DeepSeek-V3.2, 2512.02556 · KL estimators: Schulman, "Approximating KL divergence". BNPO is
TRL's name for a mean over a micro-batch's tokens.

Every loss is a sum divided by a count of the whole optimizer step, so that it and its gradient do
not depend on micro-batches or ranks (except bnpo, by its definition).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.config import GrpoConfig


@dataclass(frozen=True)
class Counts:
    """Denominators of one optimizer step, over all micro-batches and ranks.

    Attributes:
        rows: the number of completions that carry loss.
        tokens: the number of completion tokens that carry loss.
        micro_batches: the number of micro-batches.
        prompts: the number of prompts with a completion that carries loss.
        of_prompt: [B], per row of one micro-batch, the number of tokens that carry loss in all
            completions of the row's prompt.
    """

    rows: int
    tokens: int
    micro_batches: int
    prompts: int = 0
    of_prompt: Tensor | None = None


# The aggregation of token losses for each loss if algo.aggregate is auto.
USUAL_AGGREGATE = {
    **dict.fromkeys(("grpo", "gspo", "sapo"), "completions"),
    **dict.fromkeys(("dapo", "cispo", "dppo"), "tokens"),
    "dr_grpo": "constant",
    "bnpo": "micro_batches",
}
# Bounds of the importance weights against the sampler: IcePop's, and TRL's for all other kinds.
BOUNDS = {"icepop": (0.5, 5.0)}
USUAL = (0.0, 3.0)
SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05  # temperatures, from its paper


def advantages(rewards: Tensor, kind: str, k: int = 1, scored: Tensor | None = None) -> Tensor:
    """Return the advantages of rewards [prompts, G], in the same shape; 0 for a group of equal
    rewards.

    Standard deviations are unbiased (G - 1), with 1e-4 added, as in TRL.

    Args:
        kind: group, batch or none; scalerl (arXiv:2510.13786), with the standard deviation of the
            batch's centred rewards; rloo (2402.14740), relative to the mean of the group's other
            rewards; maxrl (2602.02710), divided by the mean; pass_at_k (2505.15201).
        k: the number of samples of pass_at_k.
        scored: whether a sample has a reward, bool [prompts, G]; None = all have one. A sample
            without a reward has the advantage 0 and does not affect the others.
    """
    scored = torch.ones_like(rewards, dtype=torch.bool) if scored is None else scored
    rewards, dead = _fill(rewards, scored)
    mean = rewards.mean(1, keepdim=True)
    # The mean of equal rewards may differ from them by rounding.
    centred = (rewards - mean).masked_fill(dead | ~scored, 0.0)
    if kind == "group":
        return centred / (_deviation(rewards, scored) + 1e-4)
    if kind in ("batch", "scalerl"):
        of_batch = (rewards if kind == "batch" else centred)[scored]
        return centred / (of_batch.std() + 1e-4) if of_batch.numel() > 1 else centred
    if kind == "rloo":
        known = scored.sum(1, keepdim=True).to(rewards.dtype)
        return centred * (known / (known - 1).clamp(min=1))
    if kind == "maxrl":
        return (centred / mean).masked_fill(dead | ~scored, 0.0)
    if kind == "pass_at_k":
        gains = torch.zeros_like(rewards)
        for row, known in enumerate(scored):
            if known.sum() >= k:
                gains[row, known] = gain_of_best(rewards[row, known][None], k)[0]
        return gains
    assert kind == "none", kind
    return centred


def decoupled_advantages(parts: Tensor, weights: Tensor, known: Tensor) -> Tensor:
    """Return advantages [prompts, G] from several rewards (GDPO, arXiv:2601.05242): each reward is
    divided by its standard deviation in the group, their weighted sum by its standard deviation in
    the batch.

    Args:
        parts: the rewards, [prompts, G, rewards].
        weights: the weights of the rewards, [rewards].
        known: whether a sample has a reward, bool like `parts`. A missing reward does not affect
            the others.
    """
    parts, equal = _fill(parts, known)
    centred = (parts - parts.mean(1, keepdim=True)).masked_fill(equal | ~known, 0.0)
    deviation = _deviation(parts, known)
    summed = (centred / (deviation + 1e-4) * weights).sum(2)
    return summed / (summed[known.any(2)].std() + 1e-4)


def _fill(values: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [prompts, G, ...] with the missing ones replaced by the mean of their group's
    known values, and whether the known values of a group are all equal, bool [prompts, 1, ...].

    Args: scored: whether a value is known, bool like `values`.
    """
    count = scored.sum(1, keepdim=True).clamp(min=1)
    mean = values.masked_fill(~scored, 0.0).sum(1, keepdim=True) / count
    most = values.masked_fill(~scored, -math.inf).amax(1, keepdim=True)
    least = values.masked_fill(~scored, math.inf).amin(1, keepdim=True)
    return torch.where(scored, values, mean), most <= least


def _deviation(values: Tensor, scored: Tensor) -> Tensor:
    """Return the standard deviation of each group over its known values, [prompts, 1, ...], from
    values [prompts, G, ...] in which the missing ones are at the mean.
    """
    known = scored.sum(1, keepdim=True).to(values.dtype)
    return values.std(1, keepdim=True) * ((values.shape[1] - 1) / (known - 1).clamp(min=1)).sqrt()


def gain_of_best(rewards: Tensor, k: int) -> Tensor:
    """Return G times the amount by which each sample raises the best reward of k samples, averaged
    over all sets of k of its group that contain it. This is an unbiased policy gradient of the
    expected best of k.

    Args:
        rewards: [prompts, G].
        k: the size of a set, from 2 to G.
    Returns: [prompts, G], not negative.
    """
    size = rewards.shape[1]
    ordered, places = rewards.sort(1)
    # The sets in which it is the best and the second best has place m: the other k - 2 are below m.
    sets = torch.tensor([math.comb(m, k - 2) for m in range(size)], dtype=torch.float64)
    gaps = ordered[:, :, None] - ordered[:, None, :]  # [prompts, best, second best]
    gains = (gaps.tril(-1).double() * sets).sum(2) * (size / math.comb(size, k))
    return torch.zeros_like(rewards).scatter(1, places, gains.to(rewards.dtype))


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """Return DAPO's soft punishment (its equation 13): 0 up to `limit - buffer` tokens, then
    linearly down to -1 at `limit`.
    """
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def kl(logp: Tensor, ref: Tensor, estimator: str, clamp: float) -> Tensor:
    """Estimate KL(policy || reference) at each token, from samples of the policy. The exponent of
    k3 is clamped to [-clamp, clamp].
    """
    x = logp - ref
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    assert estimator == "k3", estimator
    return torch.exp((-x).clamp(-clamp, clamp)) + x - 1


def sampler_weights(
    old: Tensor, sampled: Tensor, mask: Tensor, kind: str, bounds: tuple[float, float] = USUAL
) -> Tensor:
    """Return bounded importance weights p_old / p_sampled per token or per sequence, which correct
    for an engine whose probabilities differ from the trainer's. The names of the kinds and the
    upper bound are TRL's.

    Args:
        old: the trainer's log-probabilities, [B, T].
        sampled: the engine's log-probabilities, [B, T].
        mask: the tokens that carry loss, bool [B, T].
        kind: token_truncate, token_mask, sequence_truncate, sequence_mask, or icepop, which is
            token_mask with other bounds. Truncating clamps weights to the bounds; masking sets
            weights outside them to 0.
        bounds: the lowest and the highest weight.
    Returns: [B, T]; a sequence has the same weight at each token.
    """
    level, _, bound = kind.replace("icepop", "token_mask").partition("_")
    difference = (old - sampled).masked_fill(~mask, 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(difference)
    weight = torch.exp(difference.clamp(-20.0, 20.0))
    if bound == "truncate":
        return weight.clamp(*bounds)
    return weight.masked_fill((weight < bounds[0]) | (weight > bounds[1]), 0.0)


def off_policy_mask(
    logp: Tensor, sampled: Tensor, advantage: Tensor, mask: Tensor, bound: float
) -> Tensor:
    """Return whether each row carries loss, 1 or 0, float [B, 1]. A row carries none if its
    advantage is negative and the policy has moved away from it: mean(log p_sampled - log p) >
    bound.

    Args:
        logp: log-probabilities under the policy, [B, T].
        sampled: log-probabilities under the sampler, [B, T].
        advantage: [B].
        mask: the tokens that carry loss, bool [B, T].
    """
    gone = (sampled - logp.detach()).masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    return ((advantage >= 0) | (gone <= bound)).to(logp.dtype)[:, None]


def policy_loss(
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
    """Return a micro-batch's part of the optimizer step's loss, a scalar, and sums over its tokens
    for the log. The parts of all micro-batches add up to the loss.

    Args:
        logp: log-probabilities under the policy, [B, T].
        old: log-probabilities under the policy that sampled, [B, T].
        advantage: [B].
        mask: the tokens that carry loss, bool [B, T].
        counts: the denominators of the whole optimizer step.
        ref: log-probabilities under the reference model, [B, T]; None = no reference.
        entropy: the entropy of each token's distribution, [B, T].
        weight: the factors of the tokens' losses, [B, T], such as `sampler_weights`; None = 1.
    """
    weights = mask.to(logp.dtype)
    lengths = weights.sum(1).clamp(min=1)  # [B]
    # exp of larger differences would overflow
    log_ratio = (logp - old).masked_fill(~mask, 0.0).clamp(-20.0, 20.0)
    advantage = advantage[:, None]  # [B, 1]
    ratio_BT = ratio = torch.exp(log_ratio)
    if settings.loss == "gspo":
        # [B, 1], one per sequence
        ratio = torch.exp((log_ratio * weights).sum(1, keepdim=True) / lengths[:, None])
    loss, outside = _surrogate(logp, old, ratio, advantage, settings)
    loss = loss.expand_as(logp) if weight is None else loss * weight

    divergence = (
        kl(logp, ref, settings.kl.estimator, settings.kl.clamp) if ref is not None else None
    )
    if divergence is not None and settings.kl.where == "loss":
        # With the ratio of the token, whatever ratio the loss has, the gradient is that of the
        # expected KL. The gradient of k2 is right at ratio 1 and needs the ratio as a weight only.
        ratio = ratio_BT.detach() if settings.kl.estimator == "k2" else ratio_BT
        pull = divergence * ratio if settings.kl.unbiased else divergence
        loss = loss + settings.kl.beta * pull
    if settings.entropy_bonus:
        assert entropy is not None
        loss = loss - settings.entropy_bonus * entropy
    loss = loss.masked_fill(~mask, 0.0)

    total = _aggregate(loss, weights, counts, settings)
    with torch.no_grad():
        # samples come from the old policy
        sums = {
            "clip_fraction": (outside.expand_as(mask) & mask).sum(),
            "approx_kl": ((kl(old, logp, "k3", settings.kl.clamp) * weights).sum()),
            "entropy": (entropy * weights).sum() if entropy is not None else logp.new_zeros(()),
            "kl": (divergence * weights).sum() if divergence is not None else logp.new_zeros(()),
        }
    return total, sums


def _surrogate(
    logp: Tensor, old: Tensor, ratio: Tensor, advantage: Tensor, settings: GrpoConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and whether its bound (such as the clip range) is active
    there.

    Args:
        ratio: [B, T]; for gspo [B, 1].
        advantage: [B, 1].
    """
    if settings.loss == "cispo":
        loss = -ratio.detach().clamp(max=settings.cispo_max) * advantage * logp
        return loss, (ratio > settings.cispo_max) & (advantage > 0)
    if settings.loss == "dppo":
        moved = (torch.exp(logp) - torch.exp(old)).detach()
        outside = moved * advantage.sign() > settings.dppo_delta
        return (-ratio * advantage).masked_fill(outside, 0.0), outside
    if settings.loss == "sapo":
        warmth = torch.where(advantage > 0, SAPO_POSITIVE, SAPO_NEGATIVE)
        loss = -torch.sigmoid(warmth * (ratio - 1)) * (4 / warmth) * advantage
        return loss, torch.zeros_like(loss, dtype=torch.bool)  # a soft gate, so no bound
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    outside = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
    unclipped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    loss = -torch.minimum(unclipped * advantage, ratio.clamp(low, high) * advantage)
    if settings.dual_clip is not None:
        most = -settings.dual_clip * advantage
        loss = torch.where(advantage < 0, torch.minimum(loss, most), loss)
    return loss, outside


def _aggregate(loss: Tensor, kept: Tensor, counts: Counts, settings: GrpoConfig) -> Tensor:
    """Divide the sum of the tokens' losses by the count that algo.aggregate names."""
    how = USUAL_AGGREGATE[settings.loss] if settings.aggregate == "auto" else settings.aggregate
    if how == "completions":
        return (loss.sum(1) / kept.sum(1).clamp(min=1)).sum() / counts.rows
    if how == "constant":
        return loss.sum() / (counts.rows * settings.sampling.max_new_tokens)
    if how == "micro_batches":
        return loss.sum() / kept.sum().clamp(min=1) / counts.micro_batches
    if how == "prompts":
        assert counts.of_prompt is not None
        return (loss.sum(1) / counts.of_prompt.clamp(min=1)).sum() / counts.prompts
    assert how == "tokens", how
    return loss.sum() / counts.tokens
