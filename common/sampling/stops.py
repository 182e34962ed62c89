"""Texts that end a completion (algo.sampling.stop), in addition to stop tokens.

A completion ends with the token that completes the first of these texts. The text stays part of the
completion: the reward reads it, and the policy is trained to write it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StopTexts:
    """The texts, and a decoder that turns token ids into texts.

    Attributes:
        texts: the texts that end a completion.
        decode: rows of token ids -> their texts.
    """

    texts: Sequence[str]
    decode: Callable[[Sequence[Sequence[int]]], list[str]]

    def find(self, tokens: Sequence[int], seen: int = 0) -> int | None:
        """Return the number of tokens up to the one that completes a stop text; None if no text is
        complete.

        Args: seen: the number of first tokens that are known to complete no text.
        """
        # A token is a byte or more, and the first of a window may be a part of a character.
        first = max(0, seen - max(len(text.encode()) for text in self.texts) - 4)
        if not self._ends(tokens[first:]):
            return None
        return next(n for n in range(seen + 1, len(tokens) + 1) if self._ends(tokens[first:n]))

    def _ends(self, tokens: Sequence[int]) -> bool:
        [decoded] = self.decode([tokens])
        return any(text in decoded for text in self.texts)


class StopWatch:
    """Looks for stop texts in completions in progress, and remembers how far it has looked in each.

    Attributes:
        ended: the places of completions that a text has ended.
    """

    def __init__(self, stops: StopTexts) -> None:
        self.stops = stops
        self.seen: dict[int, int] = {}
        self.ended: set[int] = set()

    def look(self, places: Tensor, counts: Tensor, tokens: Tensor) -> list[tuple[int, int]]:
        """Return the rows that a text has ended since the last look, each with the number of its
        tokens.

        Args: places, counts: int64 [R]; tokens: int64 [R, L].
        """
        found, rows = [], zip(places.tolist(), counts.tolist(), tokens.tolist(), strict=True)
        for row, (place, count, written) in enumerate(rows):
            if place in self.ended:
                continue
            end = self.stops.find(written[:count], self.seen.get(place, 0))
            if end is None:
                self.seen[place] = count
            else:
                self.ended.add(place)
                found.append((row, end))
        return found
