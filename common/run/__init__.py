"""The parts of a session: budget, timer, checkpoints, resume, and the policy for numbers that are
not finite.
"""

from common.run import resume
from common.run.budget import Budget, describe_length, warn_if_overshot
from common.run.checkpoints import Checkpointed, Checkpoints
from common.run.nonfinite import NonFinitePolicy
from common.run.resume import check_newest
from common.run.state import RunState
from common.run.timer import Timer

__all__ = [
    "Budget",
    "Checkpointed",
    "Checkpoints",
    "NonFinitePolicy",
    "RunState",
    "Timer",
    "check_newest",
    "describe_length",
    "resume",
    "warn_if_overshot",
]
