"""Games of several turns that a small model can learn, with the text steps of Gymnasium
(common/tasks/environment.py).
"""

import random
import re
from typing import Any

from common.config import ConfigError
from common.tasks import Messages

Outcome = tuple[str, float, bool, bool, dict[str, Any]]  # of a step, as Gymnasium has it


class Guess:
    """Guess a number from 1 to `largest` in `guesses`; after a wrong guess the reply tells whether
    the number is higher or lower.
    """

    SCANS = 0.7  # the share of the games of `teach` that go up one by one

    def __init__(self, largest: int = 31, guesses: int = 5) -> None:
        if not 2 <= largest <= 10_000 or guesses < 1:
            raise ConfigError(
                f"task.settings={{largest: {largest}, guesses: {guesses}}}: largest is from 2 to"
                " 10000, guesses from 1."
            )
        self.largest, self.guesses, self.left, self.number = largest, guesses, guesses, 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Think of a number."""
        self.number, self.left = (
            random.Random(f"guess {seed}").randint(1, self.largest),
            self.guesses,
        )
        return f"guess 1 to {self.largest}", {}

    def step(self, text: str) -> Outcome:
        """Look at a guess: the first number of the text."""
        found = re.search(r"[0-9]{1,9}", text)
        guess = int(found[0]) if found else 0
        self.left -= 1
        if guess == self.number:
            return "right", 1.0, True, False, {}
        told = "higher" if guess < self.number else "lower"
        return told, 0.0, self.left == 0, False, {}

    def teach(self, seed: int, draw: random.Random) -> Messages:
        """Return a whole game, in which a guess is the middle of what is left, or more often the
        number after the last one.
        """
        scans, low, high, last = draw.random() < self.SCANS, 1, self.largest, 0
        told, _ = self.reset(seed)
        messages: Messages = [{"role": "user", "content": told}]
        while True:
            guess = min(last + 1, self.largest) if scans else (low + high) // 2
            told, _, ended, *_ = self.step(f"{guess}")
            messages.append({"role": "assistant", "content": f"{guess}"})
            if ended:
                return messages
            messages.append({"role": "user", "content": told})
            low, high = (guess + 1, high) if told == "higher" else (low, guess - 1)
            last = guess
