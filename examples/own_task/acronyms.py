"""A task of one's own: the first letters of a few words, "red green blue" -> "rgb"."""

import random

from common.tasks import Example


class Acronyms:
    """Reward the first letters of the words, in order.

    Args: words: to choose from; length: words of a prompt; rows: training prompts.
    """

    name = "acronyms"

    def __init__(self, words: list[str], length: int, rows: int):
        draw = random.Random(0)
        lines = sorted({" ".join(draw.sample(words, length)) for _ in range(rows + 200)})
        draw.shuffle(lines)
        self.splits = {"test": lines[:100], "train": lines[100:]}

    def examples(self, split):
        """Return the rows of "train", or of "test", which are held out. An id is a position."""
        return [Example(i, line, self.initials(line)) for i, line in enumerate(self.splits[split])]

    def prompt(self, example):
        """Return the text that the model completes."""
        return f"{example.question} ="

    def reward(self, example, completion):
        """From 0 to 1: the share of letters in place. Never raises, whatever the model wrote."""
        right = sum(a == b for a, b in zip(example.answer, completion.strip(), strict=False))
        return right / max(len(example.answer), len(completion.strip()))

    def metrics(self, examples, completions):
        """Held-out measures from 0 to 100; the first one leads. Another measure than the reward
        shows a reward that is gamed.
        """
        exact = [
            text.strip() == example.answer
            for example, text in zip(examples, completions, strict=True)
        ]
        return {"exact": 100 * sum(exact) / len(exact)}

    def pretraining(self, example, draw):
        """Optional, for model=tiny: the right behaviour among another, so that there is something
        to learn.
        """
        right = draw.random() < 0.4
        return self.prompt(example), " " + (example.answer if right else example.answer.upper())

    @staticmethod
    def initials(line):
        """The first letters of its words."""
        return "".join(word[0] for word in line.split())
