"""A small task for the tests, as a user would write one: its rewards differ at once, and it can go
wrong on purpose.
"""

import random
from collections.abc import Sequence

from common.task import Example

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """Repeat two letters: "ab =>" wants "abab". The base model writes them in capitals as often.

    Args: scoring: right = share of letters in place; smooth = any text earns something, so that
    random weights learn too. fault: how the reward of the row with the id fault_id goes wrong:
    infinite, raises or text; null = not at all. unscored: every third text has no reward.
    """

    name = "letters"

    def __init__(
        self,
        scoring: str = "right",
        fault: str | None = None,
        fault_id: int = 0,
        unscored: bool = False,
    ) -> None:
        self.scoring, self.fault, self.fault_id = scoring, fault, fault_id
        self.unscored = unscored

    def examples(self, split: str) -> Sequence[Example]:
        pairs = [first + second for first in LETTERS for second in LETTERS if first != second]
        random.Random(0).shuffle(pairs)
        chosen = pairs[:40] if split == "test" else pairs[40:]
        return [
            Example(id=index, question=pair, answer=pair * 2) for index, pair in enumerate(chosen)
        ]

    def prompt(self, example: Example) -> str:
        return f"{example.question} =>"

    def reward(self, example: Example, completion: str) -> float | None:
        if self.unscored and sum(map(ord, completion)) % 3 == 0:
            return None
        if self.fault and example.id == self.fault_id:
            if self.fault == "raises":
                raise KeyError("no such letter")
            return {"infinite": float("nan"), "text": "good"}[self.fault]  # type: ignore[return-value]
        if self.scoring == "smooth":
            return sum(ord(letter) % 7 for letter in completion) / (7 * max(1, len(completion)))
        return sum(a == b for a, b in zip(example.answer, completion.strip(), strict=False)) / len(
            example.answer
        )

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        exact = [
            text.strip() == example.answer
            for example, text in zip(examples, completions, strict=True)
        ]
        return {
            "exact": 100 * sum(exact) / len(exact),
            "characters": sum(map(len, completions)) / len(completions),
        }

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        right = example.answer
        return self.prompt(example), " " + (right if draw.random() < 0.4 else right.upper())


class Instructed(Letters):
    """With instructions and worked examples in front of every prompt."""

    def prompt(self, example: Example) -> str:
        return "Repeat two letters.\nab => abab\nxy => xyxy\n" + super().prompt(example)


class Planned(Letters):
    """The measure on 20 validation examples is planned, one value per measurement."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(scoring="smooth")
        self.values, self.asked = list(values), 0

    def metrics(self, examples, completions):
        if len(examples) == 20:
            self.asked += 1
            return {"exact": self.values[min(self.asked, len(self.values)) - 1]}
        return super().metrics(examples, completions)

    def scores(self, examples, completions):
        if len(examples) == 20:
            value = self.values[min(self.asked, len(self.values)) - 1]
            return {"exact": [value] * 20}
        return {}
