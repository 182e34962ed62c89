"""Keys and values that an engine keeps of episodes from one turn to the next, so that a turn
prefills what has come since the last one, and not the whole conversation again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Kept:
    """Keys and values of the episodes of a rollout, [episodes, heads, columns, size] a layer, each
    from column 0 on.

    Args: episodes: how many, as many of each member of a population, those of member 0 first;
    columns: tokens of the longest episode at most.
    Attributes: lengths: tokens of each episode that are kept so far, 0 = none.
    """

    def __init__(self, episodes: int, columns: int, members: int = 1) -> None:
        self.columns, self.each = columns, episodes // members
        self.lengths = [0] * episodes
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def drop(self) -> None:
        """Forget everything: the next turn prefills whole conversations."""
        self.lengths = [0] * len(self.lengths)
        self.keys, self.values = [], []

    def write(
        self, cache: Any, slots: Sequence[int], episodes: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copy from slots of a cache what is new of episodes, which are `lengths` tokens long."""
        begun = [self.lengths[episode] for episode in episodes]
        new = max(length - begin for length, begin in zip(lengths, begun, strict=True))
        device = cache.used.device
        token = torch.tensor(begun, device=device)[:, None] + torch.arange(new, device=device)
        # An episode never fills the last column: what is written there counts nowhere.
        place = token.clamp(max=self.columns - 1)
        rows = torch.tensor(episodes, device=device)[:, None]
        layers = cache.read(torch.tensor(slots, device=device)[:, None], token)
        for layer, parts in enumerate(layers):
            for stored, part in zip((self.keys, self.values), parts, strict=True):
                if layer == len(stored):
                    shape = (len(self.lengths), part.shape[2], self.columns, part.shape[3])
                    stored.append(part.new_zeros(shape))
                stored[layer][rows, :, place] = part
        for episode, length in zip(episodes, lengths, strict=True):
            self.lengths[episode] = length
