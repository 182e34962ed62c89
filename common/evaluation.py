"""A held-out measurement: what it found, and the check of the model's logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.signals import EXIT_NUMBERS, RunStopped


@dataclass
class Evaluation:
    """metrics: all measures, the headline first. completions: one for each example, in order."""

    metrics: dict[str, float]
    completions: list[str]
    generated: int

    @property
    def name(self) -> str:
        """The name of the headline measure."""
        return next(iter(self.metrics))

    @property
    def value(self) -> float:
        """The headline measure."""
        return self.metrics[self.name]


def check_logits(broken: Sequence[Any], count: int) -> None:
    """Raise RunStopped where logits were not finite: `broken` holds the ids of such examples, of
    `count` in all.
    """
    if broken:
        raise RunStopped(
            f"evaluation: the model's logits are not finite, on {len(broken)} of {count} test"
            f" examples (the first: {broken[0]}). The model is broken: go back to a checkpoint with"
            " a lower algo.lr, or leave out opt=amp.",
            EXIT_NUMBERS,
        )
