"""Find the answer in completions of a model that writes its thoughts first (task.after).

Reward functions of the user get whole completions, and so does `path_key`, which reads the
reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.config import ConfigError
from common.task import Example
from common.tasks.base import Component, weigh

AUTO = "auto"
# The marks that begin and end the thoughts of a model: the answer follows the second one.
MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}


@dataclass(frozen=True)
class Behind:
    """The rule that finds the answer after the model's thoughts.

    Attributes:
        close: the mark that ends the thoughts.
        open: the mark that begins them; "" if none is known.
        begun: whether the prompt contains the beginning of the thoughts, so that a completion
            without `close` has no answer.
    """

    close: str
    open: str = ""
    begun: bool = True

    def __call__(self, completion: str) -> str:
        """Return the text after the last `close`, up to the next `open`."""
        _, closed, answer = completion.rpartition(self.close)
        if self.begun and not closed:
            return ""
        return answer.partition(self.open)[0] if self.open else answer


def find(after: Any, template: str, prompt: str) -> Behind | None:
    """Return the rule of task.after for completions; None if the whole completion is the answer.

    Args:
        after: a text, null, or auto, which looks for known marks.
        template: the chat template.
        prompt: the text of a prompt, up to the beginning of a completion.
    Raises: ConfigError for task.after that is no text.
    """
    if after is None:
        return None
    if not isinstance(after, str) or not after.strip():
        raise ConfigError(
            f"task.after={after!r} is no text. Give what the answer stands behind, such as"
            " 'task.after=\"</think>\"', or auto, or null."
        )
    if after != AUTO:
        return Behind(after, next((begin for begin, end in MARKS.items() if end == after), ""))
    for begin, end in MARKS.items():
        if end in template or end in prompt:
            return Behind(end, begin, begun=prompt.rstrip().endswith(begin))
    return None


class Answering:
    """A task that gets the part of each completion after the thoughts; all other attributes are the
    task's own.

    Attributes:
        own: the task itself; its `whole` names the components that get whole completions.
        behind: the rule that finds the answer.
    """

    def __init__(self, task: Any, behind: Behind) -> None:
        self.own, self.behind = task, behind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("own", "behind"):
            raise AttributeError(name)
        found, whole = getattr(self.own, name), getattr(self.own, "whole", ())
        if name == "components" and found:
            return {part: one if part in whole else self._cut(one) for part, one in found.items()}
        if name in ("reward", "rewards") and whole:
            return self._weigh if name == "rewards" else self._weigh_one
        if name == "metrics" and getattr(self.own, "measures_whole", False):
            return found  # of functions of the user's
        if name in ("rewards", "metrics", "scores"):
            return self._cut(found)
        if name == "reward":
            return lambda example, completion: found(example, self.behind(completion))
        if name == "answer":
            return lambda completion: found(self.behind(completion))
        return found

    def _cut(self, function: Component) -> Component:
        return partial(_call, function, self.behind)

    def _weigh(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Any]:
        return weigh(self.components, self.own.weights, examples, completions)

    def _weigh_one(self, example: Example, completion: str) -> Any:
        return self._weigh([example], [completion])[0]


def _call(
    function: Component, behind: Behind, examples: Sequence[Example], completions: Sequence[str]
) -> Any:
    return function(examples, list(map(behind, completions)))
