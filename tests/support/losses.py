"""Numbers on which losses are compared."""

from dataclasses import replace
from functools import cache

import torch

from launch import compose

# One group of four completions; the numbers that three other implementations agree on to six
# decimals.
NEW = torch.tensor(
    [[-0.5, -1, -0.2, -0.7], [-1.2, -0.3, -0.9, 0], [-0.4, -0.6, 0, 0], [-2, -0.1, -0.8, -1.5]]
)
OLD = torch.tensor(
    [[-0.7, -1, -0.5, -0.6], [-1, -0.4, -0.9, 0], [-0.4, -1.1, 0, 0], [-1.6, -0.2, -0.8, -1.4]]
)
REF = torch.tensor(
    [[-0.6, -0.9, -0.4, -0.7], [-1.1, -0.5, -0.8, 0], [-0.5, -0.8, 0, 0], [-1.8, -0.1, -1, -1.3]]
)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
REWARDS = torch.tensor([[1, 0, 0.5, 0]])
# Rewards with which completions of negative advantage have the large ratios, where the bounds act.
BOUNDED = torch.tensor([[0, 1, 0, 0.5]])
SEQUENCE = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}


@cache
def composed(loss, beta):
    given = [
        f"algo.loss={loss}",
        "algo.sampling.max_new_tokens=8",
        f"algo.kl.beta={beta}",
        "algo.num_iterations=2",
    ]
    return compose(["algo=grpo", *given]).algo


def settings(loss="grpo", beta=0.0, unbiased=False, **changes):
    config = composed(loss, beta)
    return replace(config, kl=replace(config.kl, unbiased=unbiased or not beta), **changes)
