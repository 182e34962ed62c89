"""The interface of an episode of several turns, between a task with environments and the code that
plays them (common/episodes/episodes.py).
"""

from typing import Any, Protocol

from common.config import ConfigError
from common.task import Example, Messages

ENDED = ("completed", "environment_done")  # the ends of an episode that is not cut off
CLOSING = 10.0  # seconds for an environment to close


class FormError(ConfigError):
    """A method of an environment returns a value of the wrong form, as it would in
    every episode.
    """


class Episode(Protocol):
    """One episode of an environment."""

    def start(self, example: Example, seed: int) -> Messages:
        """Start, and return the prompt, which depends only on the example and the seed."""
        ...

    def reply(self, message: dict[str, Any]) -> Messages | None:
        """Return the messages that follow the model's message, which has its tool calls under
        `tool_calls`; None if the episode is over.
        """
        ...

    def reward(self) -> float | None:
        """Return the reward in [0, 1]; None if it is not known."""
        ...

    def components(self) -> dict[str, float]:
        """Return further scores in [0, 1], which are reported next to the reward."""
        ...

    def close(self) -> None:
        """Free the resources of the environment."""
        ...
