"""A measure of all answers of a member together as its fitness, such as corpus BLEU, macro-F1, a
calibration error or the worst group.

Evolution needs one number per member, so this number may be a function of all its answers together.
Methods that use gradients need a reward per answer, and a mean of rewards is not such a measure.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.config import ConfigError
from common.distributed import Context
from common.rollout import Rollout
from common.system import import_named, wording
from common.task import Example, TaskFeatures, class_name

log = logging.getLogger("clutch")

Score = Callable[[Sequence[Example], Sequence[str]], float]


def find_measure(task: Any, wanted: str | None) -> Score:
    """Return the function of (examples, completions) that is the fitness of a member.

    Args: wanted: a name among the task's `metrics`, or MODULE.FUNCTION of a user; None = the task's
    method `score`, or else its headline.
    Raises: ConfigError for a name that the task does not measure, or that cannot be imported.
    """
    if wanted is None and (score := TaskFeatures(task).score) is not None:
        return score
    some = list(task.examples("train"))[:2]
    names = list(task.metrics(some, [example.answer for example in some]))
    if wanted is None or wanted in names:
        name = wanted or names[0]
        return lambda examples, completions: task.metrics(examples, completions)[name]
    module, _, function = wanted.rpartition(".")
    if not module:
        raise ConfigError(
            f"algo.measure={wanted} is no measure of {class_name(task)}. It has {', '.join(names)}."
            " Give one of them, or a function of your own as MODULE.FUNCTION."
        )
    advice = "Give a measure of the task, or MODULE.FUNCTION with its folder on PYTHONPATH."
    return import_named(f"algo.measure={wanted}", module, function, advice)


class Measured:
    """Measures members, each by all its completions.

    Args:
        score: a function of (examples, completions); any range.
        what: its name, for errors.
    """

    def __init__(self, score: Score, what: str) -> None:
        self.score, self.what = score, what

    def members(self, rollout: Rollout, samples: int) -> list[float]:
        """Return the measure of each member of a rollout: with several samples per prompt the mean
        over them. NaN = it is not known.

        Args: samples: completions per prompt of a member.
        """
        each = len(rollout.examples) * samples
        texts = [rollout.texts[i : i + each] for i in range(0, len(rollout.texts), each)]
        return [self._of_one(rollout.examples, own, samples) for own in texts]

    def _of_one(self, examples: Sequence[Example], texts: Sequence[str], samples: int) -> float:
        values = []
        for sample in range(samples):
            with wording(self.what, ""):
                value = self.score(examples, texts[sample::samples])
            if not isinstance(value, (int, float)):
                raise ConfigError(
                    f"{self.what} returned {value!r:.60}. Return a number for all completions"
                    " together."
                )
            values.append(float(value))
        return math.fsum(values) / samples


def gather(values: Tensor, places: Sequence[int], context: Context) -> Tensor:
    """Return the values of all members on every rank, [members, ...], in the order of the members.

    Args:
        values: those of this rank's members, [n, ...]; a rank may have none.
        places: the member of each.
    """
    shares = context.gather_objects((values, list(places)))
    order = torch.tensor([place for _, share in shares for place in share]).argsort()
    return torch.cat([part for part, _ in shares])[order]


def leave_out(measures: Tensor, mirrored: bool) -> Tensor:
    """Return measures [members] in which those that are not finite, and with mirrored noise those
    of their pair, are the mean of the others, so that they move nothing.
    """
    finite = torch.isfinite(measures)
    if mirrored:
        finite = finite.unflatten(0, (-1, 2)).all(1).repeat_interleave(2)
    if not finite.any():
        return torch.zeros_like(measures)
    return torch.where(finite, measures, measures[finite].mean())
