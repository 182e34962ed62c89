"""Fitness from rewards, as pure functions. The update is a sum of the noise weighted by the
fitness.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def fitness(
    rewards: Tensor, shaping: str, samples: int = 1, components: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Turn rewards [members, prompts * samples] into fitness [members], float64 throughout. Equal
    rewards give exactly 0.

    zscore            mean over prompts, then (f - mean) / standard deviation over members
    prompt_zscore     subtract each prompt's mean over members, divide by one standard deviation of
                      all, then take the mean over prompts (paper, 6.3): a zscore that shrinks as
                      prompts disagree. The standard deviation is that of the centred rewards. The
                      paper's code uses the raw rewards, whose deviation is larger if prompts
                      differ in difficulty: same direction, shorter step
    component_zscore  the mean of the zscores of the components, [members, prompts * samples] each,
                      so that a component with a small spread counts as much as the others
    centered          mean over prompts, then f - mean: the update is proportional to the spread
    centered_rank     rank of the mean in [-0.5, 0.5]; ties share their mean rank
    pair_sign         member 2j gets the sign of the pair's difference, member 2j+1 its negative

    Args:
        shaping: one of the names above.
        samples: samples per prompt.
        components: rewards by component; only component_zscore needs them.
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
    """Replace the samples of each prompt by their `quantile`: [members, prompts * samples] ->
    [members, prompts]. With quantile 1, the best sample, the model learns to be right once in
    `samples` tries (pass@k).
    """
    return rewards.unflatten(1, (-1, samples)).quantile(quantile, dim=2)


def equal_parts(components: Mapping[str, Tensor]) -> Tensor:
    """Divide each component of the reward by the standard deviation of the members' means, and add
    them up: [members, prompts * samples]. A component whose means are all equal adds 0. The
    members' means of the sum are component_zscore up to a factor and a constant.
    """
    parts = [part.double() for part in components.values()]
    return torch.stack([_over_deviation(part, part.mean(1)) for part in parts]).sum(0)


def by_direction(fitness: Tensor, mirrored: bool) -> Tensor:
    """Return the weight of each direction, [directions], from the fitness [members]. Mirrored
    members share a direction E: f+ E - f- E has the weight f+ - f-. Equal fitness gives exactly 0.
    """
    return fitness[0::2] - fitness[1::2] if mirrored else fitness


def _mean(rewards: Tensor) -> Tensor:
    """Return the mean over prompts without its last bits, which depend on the order of the sum, so
    that members with the same rewards in another order are equal.
    """
    return rewards.mean(1).round(decimals=12)


def _over_deviation(centred: Tensor, values: Tensor) -> Tensor:
    """Return centred / std(values); exactly 0 if all values are equal up to rounding."""
    deviation = values.std(correction=0)
    return centred / deviation if deviation > 1e-9 else torch.zeros_like(centred)
