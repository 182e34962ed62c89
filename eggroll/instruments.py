"""Measures of a step for the log: the share of signal in the fitness, and the origin of that
signal.

An update is linear in the fitness. So the update of a part (half of the prompts, half of the
members, one component of the reward) is the same sum over the same noise with other weights, and
the inner product of two updates needs neither update: with the inner products of the directions, K
= <E_i, E_j>, updates with weights u and v have the product u K v.
"""

from typing import Any

import torch
from torch import Tensor

from eggroll.fitness import by_direction
from eggroll.noise import Noise
from eggroll.population import Tried


def look(
    tried: Tried, shaped: Tensor, noise: Noise, draw: int, samples: int, closely: bool
) -> dict[str, Any]:
    """Return measures of a step's fitness [members] and its update. Measures that cannot be
    computed are omitted.

    zero_fitness      the share of members without influence on the update: see `idle_share`
    prompt_agreement  how alike two halves of the prompts update the model: see `agree_prompts`

    With `closely`, from the inner products of the directions, also:

    member_agreement  the cosine between the updates of two halves of the directions. For D
                      directions in d dimensions its expectation is at most D / 2 d and its standard
                      deviation 1 / sqrt(d): few members agree on little
    component_cosine  per component of the reward, the cosine between its update and the whole one

    Args:
        draw: the number of the step's noise.
        samples: samples per prompt.
    """
    instruments: dict[str, Any] = {
        "zero_fitness": idle_share(shaped, noise.mirrored),
        "prompt_agreement": agree_prompts(tried.rewards, noise.mirrored, samples),
    }
    weights = by_direction(shaped, noise.mirrored).double().cpu()
    gram = noise.gram(draw, len(weights)) if closely else None
    if gram is not None:
        gram = gram.cpu()
        even = torch.arange(len(weights)) % 2 == 0
        instruments["member_agreement"] = cosine(weights * even, weights * ~even, gram)
        means = {name: part.mean(1) for name, part in tried.components.items()}
        parts = {n: by_direction(mean - mean.mean(), noise.mirrored) for n, mean in means.items()}
        cosines = {n: cosine(part, weights, gram) for n, part in parts.items()}
        instruments["component_cosine"] = {
            n: c for n, c in cosines.items() if c is not None
        } or None
    return {name: value for name, value in instruments.items() if value is not None}


def idle_share(shaped: Tensor, mirrored: bool) -> float:
    """Return the share of members without influence on the update: their fitness [members] is 0, or
    equal to the fitness of their mirrored member.
    """
    return (by_direction(shaped, mirrored) == 0).double().mean().item()


def agree_prompts(rewards: Tensor, mirrored: bool, samples: int = 1) -> float | None:
    """Return how alike two halves of the prompts would update the model: the mean cosine of their
    updates over all ways to halve the prompts. With one prompt, its samples are halved. None if
    rewards do not differ, or for one prompt with one sample.

    It is estimated from each direction's weight per prompt, with an error of about 1 /
    sqrt(directions). It is near 1 if members differ by their weights and not by luck.

    Args:
        rewards: [members, prompts * samples].
        samples: samples per prompt.
    """
    if rewards.shape[1] > samples:
        rewards = rewards.unflatten(1, (-1, samples)).mean(2)
    count = rewards.shape[1]
    weights = by_direction(rewards - rewards.mean(0), mirrored)  # [directions, prompts]
    square = weights.square().mean().item()
    if count < 2 or square < 1e-30:
        return None
    # The mean product of the weights from two different prompts: their common part.
    common = (weights.sum(1).square().mean().item() / count - square) / (count - 1)
    return common / (common + (square - common) * 2 / count)


def cosine(u: Tensor, v: Tensor, gram: Tensor) -> float | None:
    """Return the cosine of two updates with the weights u and v, [D], given the inner products
    `gram` [D, D] of the directions; None if one of the updates is 0.
    """
    k_u, k_v = gram @ u, gram @ v
    size = (u @ k_u) * (v @ k_v)
    return (u @ k_v / size.sqrt()).item() if size > 1e-30 else None
