"""The parts of a session: budget, timer, checkpoints, resume, and the handling of numbers that are
not finite.
"""

from common.run import resume
from common.run.budget import Budget, describe_length, warn_if_overshot
from common.run.checkpoints import Checkpointed, Checkpoints
from common.run.nonfinite import NonFiniteHandler
from common.run.resume import check_newest
from common.run.state import RunState
from common.run.timer import Timer

__all__ = [
    "Budget",
    "Checkpointed",
    "Checkpoints",
    "NonFiniteHandler",
    "RunState",
    "Timer",
    "check_newest",
    "describe_length",
    "resume",
    "warn_if_overshot",
]
