"""The record of a run's updates, RUN/run.egg, from which any of its models can be rebuilt.

plugins/replay writes it and reads it; without that folder a run writes none.
"""

from torch import Tensor

from common.config import REPLAY, explain_removed
from common.parts import Parts
from common.report import Result
from common.session import Session
from common.system import import_named
from eggroll.population import Tried
from eggroll.weights import Weights


class Recorder:
    """The recorder of a run that is not recorded: it does nothing. Every method is called on all
    ranks.
    """

    def add(
        self, number: int, draw: int, sigma: float, lr: float, fitness: Tensor, tried: Tried
    ) -> None:
        """Record an update, after the weights have been updated.

        Args:
            number: the step, from 1.
            draw: the number of its noise.
            sigma: the standard deviation of the noise.
            lr: the learning rate, as it was applied.
            fitness: [members], as it entered the update.
            tried: the outcome of the members, for the components of the reward.
        """

    def end(self, result: Result) -> None:
        """Record the end of the run, when the weights are those of the exported model."""


def open_recorder(parts: Parts, weights: Weights, session: Session) -> Recorder:
    """Return the recorder of a run that begins or resumes.

    Raises: ConfigError with algo.record=true if the run cannot be recorded.
    """
    if not parts.run.algo.record and explain_removed(REPLAY):
        return Recorder()
    make = import_named("algo.record=true", REPLAY, "make_recorder", "Leave it out.")
    return make(parts, weights, session) or Recorder()
