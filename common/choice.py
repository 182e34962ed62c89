"""The choice of the model that a run exports: the latest one that is not worse on validation
examples than the best one.

Small models often peak in the middle of a run and get worse after it. Validation examples are
training examples that are set aside: they choose the model, and held-out examples, which choose
nothing, measure it.

A model is worse than the best one so far if it is at least a point of 100 below it and the paired
test on the same examples says so, one-sided at 10 % (common/uncertainty.py). The latest model that
is not worse is chosen. A maximum of means would favour a lucky measurement on few examples, and the
last model ignores a loss that is plain to see.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from common.evaluation import Evaluation
from common.uncertainty import find_loss

LEVEL = 0.1  # of the one-sided test that a model is worse
# The least difference that counts, of 100: a base with a BLEU of 0.5 has nothing to lose.
POINT = 1.0
# The headline of tasks whose rewards are the user's own, of any range.
OWN_SCALE = "reward"


def is_worse(scores: Sequence[float], best: Sequence[float], least: float = 0.0) -> bool:
    """Return whether `scores` are worse than those of `best`, scores of the same examples.

    Scores that cannot be tested, as of one example, are compared by their means.
    Args: least: the least difference of the means that counts.
    """
    lost = float(np.mean(best) - np.mean(scores))
    if lost <= 0 or lost < least:
        return False
    p = find_loss(best, scores)
    return p is None or p < LEVEL


@dataclass
class Choice:
    """The chosen model among those that were measured so far. All values are JSON.

    Attributes:
        step: the step of the chosen model; 0 = the model before the first step.
        value: its measure on the validation examples.
        metric: the name of that measure.
        examples: the number of validation examples.
        best: the step, "value" and "scores" of the model with the highest measure, which later
            models are compared with.
        fallen: how many measurements in a row, up to the last one, were worse than the best.
        values: all measurements so far, in order.
        measured: the step of the last one.
        cost: the number of generated tokens of the first measurement.
    """

    step: int
    value: float
    metric: str
    examples: int
    best: dict[str, Any]
    values: list[float]
    measured: int
    cost: int
    fallen: int = 0
    # The steps of the models that were chosen before, the newest one last.
    earlier: list[int] = field(default_factory=list)

    @classmethod
    def first(cls, step: int, found: Evaluation) -> "Choice":
        """Return the choice after the first measurement."""
        scores = _scores(found)
        best = {"step": step, "value": found.value, "scores": scores}
        count = len(found.completions)
        value = found.value
        return cls(step, value, found.name, count, best, [value], step, found.generated)

    def add(self, step: int, found: Evaluation) -> bool:
        """Consider the model of a later step. Returns whether it is chosen."""
        scores = _scores(found)
        self.measured, self.values = step, [*self.values, found.value]
        if found.value > self.best["value"]:
            self.best = {"step": step, "value": found.value, "scores": scores}
        if is_worse(scores, self.best["scores"], self._least(scores)):
            self.fallen += 1
            return False
        self.earlier = [*self.earlier[-1:], self.step]
        self.step, self.value, self.fallen = step, found.value, 0
        return True

    def _least(self, scores: Sequence[float]) -> float:
        """Return the least difference that counts: a hundredth of the measure's scale."""
        if self.metric == OWN_SCALE:
            return 0.0
        of_one = max(map(abs, [*scores, *self.best["scores"]])) <= 1  # a measure in [0, 1]
        return POINT / 100 if of_one else POINT

    @property
    def needed(self) -> list[int]:
        """The steps whose checkpoints must be kept: the chosen model's, and that of the model
        before it, which a checkpoint that is still on the disk may name.
        """
        return [*self.earlier[-1:], self.step]

    def content(self) -> dict[str, Any]:
        """Return the dict for a checkpoint."""
        return asdict(self)


def _scores(found: Evaluation) -> list[float]:
    """Return the scores of the headline, or its value alone if it has none per example."""
    return list(found.scores.get(found.name) or [found.value])
