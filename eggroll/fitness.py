"""Rewards -> fitness. Pure functions; what they return multiplies the noise in the update."""

from collections.abc import Mapping

import torch
from torch import Tensor


def fitness(
    rewards: Tensor, shaping: str, samples: int = 1, components: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Shape rewards [members, prompts * samples] into fitness [members], float64 throughout. Equal
    rewards give exactly 0.

    zscore            mean over prompts, then (f - mean) / deviation
    prompt_zscore     minus each prompt's mean over members, over one deviation of all, then the
                      mean over prompts (paper, 6.3): a zscore that shrinks as prompts disagree.
                      The deviation is of the centred rewards; the paper's code takes that of the
                      raw ones, which is larger where prompts differ in difficulty: same direction,
                      shorter step
    component_zscore  the mean of the components' own zscores, [members, prompts * samples] each, so
                      that one that differs little between members counts as much as the others
    centered          mean over prompts, then f - mean: an update grows and falls with the spread
    centered_rank     rank of the mean in [-0.5, 0.5], ties share their mean rank
    pair_sign         members 2j and 2j+1 get the sign of their difference, and its negative
    """
    rewards = rewards.double()
    mean = _mean(rewards)
    if shaping == "zscore":
        return _over_deviation(mean - mean.mean(), mean)
    if shaping == "component_zscore":
        means = [_mean(part.double()) for part in (components or {}).values()]
        scores = torch.stack([_over_deviation(m - m.mean(), m) for m in means])
        return scores.mean(0)
    if shaping == "centered":
        return _over_deviation(mean - mean.mean(), mean) * mean.std(correction=0)
    if shaping == "prompt_zscore":
        by_prompt = rewards.unflatten(1, (-1, samples))  # [members, prompts, samples]
        centred = (by_prompt - by_prompt.mean((0, 2), keepdim=True)).flatten(1)
        return _mean(_over_deviation(centred, centred))
    if shaping == "centered_rank":
        below = (mean[None, :] < mean[:, None]).sum(1)
        equal = (mean[None, :] == mean[:, None]).sum(1) - 1
        return (below + equal / 2) / (len(mean) - 1) - 0.5
    assert shaping == "pair_sign", shaping
    sign = torch.sign(mean[0::2] - mean[1::2])
    return torch.stack((sign, -sign), dim=1).flatten()


def over_samples(rewards: Tensor, samples: int, quantile: float) -> Tensor:
    """Return for rewards [members, prompts * samples] those that count: a quantile of the samples
    of each prompt, [members, prompts]. 1 is the best of them, so that what is learnt is to be right
    once in `samples` tries (pass@k).
    """
    return rewards.unflatten(1, (-1, samples)).quantile(quantile, dim=2)


def equal_parts(components: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the components of a reward [members, prompts * samples], each over the
    deviation of its members' means: the reward whose mean component_zscore follows.
    """
    parts = [part.double() for part in components.values()]
    return torch.stack([_over_deviation(part, part.mean(1)) for part in parts]).sum(0)


def by_direction(fitness: Tensor, mirrored: bool) -> Tensor:
    """Fitness [members] -> the weight of each direction [directions]: mirrored members share one,
    f+ E - f- E. Equal fitness gives exactly 0.
    """
    return fitness[0::2] - fitness[1::2] if mirrored else fitness


def _mean(rewards: Tensor) -> Tensor:
    """Return the mean over prompts, without the last bits, which depend on their order: members
    that earn the same on other prompts are equal.
    """
    return rewards.mean(1).round(decimals=12)


def _over_deviation(centred: Tensor, values: Tensor) -> Tensor:
    """Return centred / std(values); exactly 0 where all values are equal to rounding."""
    deviation = values.std(correction=0)
    return centred / deviation if deviation > 1e-9 else torch.zeros_like(centred)
