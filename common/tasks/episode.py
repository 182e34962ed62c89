"""The interface of an episode of several turns: what a task with environments gives to the sampler
(common/episodes/episodes.py), and what the two say to each other.
"""

from typing import Any, Protocol

from common.config import ConfigError
from common.task import Example, Messages

ENDED = ("completed", "environment_done")  # how an episode stops that is not cut off
CLOSING = 10.0  # seconds that an environment has to close


class FormError(ConfigError):
    """An environment's method returns what no form has, as it would in every episode."""


class Episode(Protocol):
    """One play of an environment."""

    def start(self, example: Example, seed: int) -> Messages:
        """Begin, and return the prompt: the same for the same example and seed."""
        ...

    def reply(self, message: dict[str, Any]) -> Messages | None:
        """Return what comes after the model's message, which has its calls of tools under
        `tool_calls`; None where the episode is over.
        """
        ...

    def reward(self) -> float | None:
        """Return what was earned, in [0, 1]; None where that is not known."""
        ...

    def components(self) -> dict[str, float]:
        """Return what is shown beside the reward, each in [0, 1]."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
