"""Rewards for a batch of completions, in order."""

from collections.abc import Sequence

from common.config import ConfigError
from common.tasks import Example, Task


def score(task: Task, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """The task's reward of each completion. NaN and infinity pass through: the caller names the step.

    Raises: ConfigError naming the example where a reward raises, is no number, or a batch has another length.
    """
    batched = getattr(task, "rewards", None)
    if batched is not None:
        rewards = batched(examples, completions)
        if len(rewards) != len(completions):
            raise ConfigError(
                f"{type(task).__name__}.rewards returned {len(rewards)} rewards for {len(completions)} completions. "
                "Return one for each, in order."
            )
    else:
        rewards = [_one(task, example, text) for example, text in zip(examples, completions, strict=True)]
    for example, reward in zip(examples, rewards, strict=True):
        if not isinstance(reward, (int, float)):
            raise ConfigError(
                f"the reward of {type(task).__name__} for example {example.id} is {reward!r}, not a number in [0, 1]."
            )
    return [float(reward) for reward in rewards]


def _one(task: Task, example: Example, text: str) -> float:
    try:
        return task.reward(example, text)
    except Exception as error:
        raise ConfigError(
            f"{type(task).__name__}.reward raised {type(error).__name__}: {error}, on example {example.id} with the "
            f"completion {text[:80]!r}. A reward must score any text; give 0 where it cannot."
        ) from error
