"""The order of training examples."""

import random
from collections.abc import Sequence

from common.config import ConfigError
from common.task import Example


class ExampleOrder:
    """Training examples, shuffled again in each epoch: a function of (seed, position) alone."""

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        if not examples:
            raise ConfigError(
                'the task has no training examples. Its examples("train") must return some.'
            )
        if type(examples[0].id) is not int:
            raise ConfigError(
                f"the id of the task's first example is {examples[0].id!r}. It must be an int: the"
                " row's position."
            )
        if len({example.id for example in examples}) < len(examples):
            raise ConfigError(
                "several of the task's training examples have the same id. Give each its position"
                " as id."
            )
        self.examples, self.seed = examples, seed
        self.epoch, self.shuffled = -1, list(range(len(examples)))

    def take(self, start: int, count: int) -> list[Example]:
        """Return `count` examples from 0-based position `start`."""
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> Example:
        epoch, index = divmod(position, len(self.examples))
        if epoch != self.epoch:
            self.epoch, self.shuffled = epoch, list(range(len(self.examples)))
            random.Random(f"order {self.seed} {epoch}").shuffle(self.shuffled)
        return self.examples[self.shuffled[index]]
