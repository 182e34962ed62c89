"""A held-out measurement: what it found, and the check of the model's logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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


# Models trained in bfloat16 may have activations beyond what float16 holds.
OVERFLOW = (
    " In float16 (the largest number is 65,504) models that were trained in bfloat16 may overflow,"
    " such as Qwen2.5: leave out opt=amp, or use a device with native bfloat16."
)


def check_logits(broken: Sequence[Any], count: int, compute: torch.dtype) -> None:
    """Raise RunStopped where logits were not finite: `broken` holds the ids of such examples, of
    `count` in all.
    """
    if broken:
        advice = OVERFLOW if compute == torch.float16 else ""
        raise RunStopped(
            f"evaluation: the model's logits are not finite, on {len(broken)} of {count} test"
            f" examples (the first: {broken[0]}). The model is broken: go back to a checkpoint with"
            f" a lower algo.lr, or leave out opt=amp.{advice}",
            EXIT_NUMBERS,
        )
