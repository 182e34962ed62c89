"""Take one to three of a heap of sticks, in turn with an opponent; who takes the last one wins."""

import random


class Nim:
    """A heap of 5 to `most` sticks."""

    def __init__(self, most: int = 21) -> None:
        self.most = most

    def reset(self, seed: int):
        """Lay out the sticks."""
        self.draw = random.Random(seed)
        self.sticks = self.draw.randint(5, self.most)
        return f"There are {self.sticks} sticks. Take 1, 2 or 3.", {}

    def step(self, text: str):
        """Take sticks, and let the opponent take some."""
        taken = int(text.strip()) if text.strip() in ("1", "2", "3") else 0
        if not 1 <= taken <= self.sticks:
            return "", 0.0, True, False, {}  # no move of the game: it is lost
        self.sticks -= taken
        if self.sticks == 0:
            return "", 1.0, True, False, {}
        theirs = self.draw.randint(1, min(3, self.sticks))
        self.sticks -= theirs
        return f"I take {theirs}. {self.sticks} are left.", 0.0, self.sticks == 0, False, {}
