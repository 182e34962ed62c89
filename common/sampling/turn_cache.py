"""The cache of episodes between turns: an engine keeps keys and values, so that a turn prefills
only the tokens since the last turn, and not the whole conversation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TurnCache:
    """Keys and values of the episodes of a rollout, [episodes, heads, columns, size] per layer,
    left-aligned.

    Args:
        episodes: the number of episodes, the same per member of a population, member 0 first.
        columns: the most tokens of an episode.
    Attributes:
        lengths: the number of tokens of each episode that are cached so far, 0 = none.
    """

    def __init__(self, episodes: int, columns: int, members: int = 1) -> None:
        self.columns, self.each = columns, episodes // members
        self.lengths = [0] * episodes
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def drop(self) -> None:
        """Discard all keys and values: the next turn prefills whole conversations."""
        self.lengths = [0] * len(self.lengths)
        self.keys, self.values = [], []

    def write(
        self, cache: Any, slots: Sequence[int], episodes: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copy the new keys and values of episodes from slots of a cache; the episodes are now
        `lengths` tokens long.
        """
        begun = [self.lengths[episode] for episode in episodes]
        new = max(length - begin for length, begin in zip(lengths, begun, strict=True))
        device = cache.used.device
        token = torch.tensor(begun, device=device)[:, None] + torch.arange(new, device=device)
        # An episode never fills the last column: excess tokens are written there, and never read.
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
