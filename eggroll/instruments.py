"""Looks at what a step has measured: how much of it is signal, and what it is a signal of.

An update is linear in the fitness, so the update of a part (half of the prompts, half of the
members, one component of the reward) is the same sum over the same noise with other weights. The
product of two updates needs no update then: with the directions' products K = <E_i, E_j>, that of
weights u and v is u K v.
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
    """Return what a step's fitness [members] and its update tell; what cannot be told is left out.

    zero_fitness      the share of members that move nothing
    prompt_agreement  of the updates of two halves of the prompts: see `agree_prompts`
    Only `closely`, from the directions' products:
    member_agreement  the cosine of the updates of two halves of the directions. Of D directions in
                      d dimensions it is expected to be at most D / 2 d, with a deviation of
                      1 / sqrt(d): few members agree on little
    component_cosine  of the update that one component of the reward would make with the whole's
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
    """Return the share of members that move nothing: their fitness [members] is 0, or equal to that
    of their mirrored one.
    """
    return (by_direction(shaped, mirrored) == 0).double().mean().item()


def agree_prompts(rewards: Tensor, mirrored: bool, samples: int = 1) -> float | None:
    """Return the cosine of the updates of two halves of the prompts, on average over all ways to
    halve them; None where rewards do not differ, or there is one prompt and one sample.

    It is told from the weights of the directions alone, to an accuracy of 1 / sqrt(directions).
    Where members differ by what they are and not by luck, it is near 1.

    Args: rewards: [members, prompts * samples]; samples: of a prompt; with one prompt its samples
    are halved.
    """
    if rewards.shape[1] > samples:
        rewards = rewards.unflatten(1, (-1, samples)).mean(2)
    count = rewards.shape[1]
    weights = by_direction(rewards - rewards.mean(0), mirrored)  # [directions, prompts]
    square = weights.square().mean().item()
    if count < 2 or square < 1e-30:
        return None
    # The product of two different prompts' weights: what they have in common.
    common = (weights.sum(1).square().mean().item() / count - square) / (count - 1)
    return common / (common + (square - common) * 2 / count)


def cosine(u: Tensor, v: Tensor, gram: Tensor) -> float | None:
    """Return the cosine of u and v, [D], under the products `gram` [D, D] of directions; None where
    one of them is 0.
    """
    k_u, k_v = gram @ u, gram @ v
    size = (u @ k_u) * (v @ k_v)
    return (u @ k_v / size.sqrt()).item() if size > 1e-30 else None
