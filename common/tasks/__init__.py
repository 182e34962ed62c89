"""What a reward task is. One file a task; none of them knows an algorithm."""

import importlib
import inspect
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Protocol

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config import ConfigError
from common.config import build as build_settings

# A conversation, as chat templates take it: {"role": "system" | "user" | "assistant", "content":
# text} each.
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """One row of a task.

    `id` is the row's position in its split; random draws are keyed by it. `question` and `answer`
    are text; whatever else a task needs to score a completion is in `extra`.
    """

    id: int
    question: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


def plain(prompt: str | Messages) -> str:
    """A prompt as text: a conversation is its contents, a blank line after each answer, the next
    one to follow.
    """
    if isinstance(prompt, str):
        return prompt
    return "".join(m["content"] + ("\n\n" if m["role"] == "assistant" else "\n") for m in prompt)


class Task(Protocol):
    """The methods that a task has. A user's own class needs no base class, only these.

    Optional beside them: `rewards(examples, completions) -> list[float]`: the same as `reward`,
    batched; `pretraining(example, draw) -> tuple[str, str]`: prompt and completion to teach the
    `tiny` model. Its completions hold the right behaviour among others, so that the base model
    knows how and has yet to learn when; `answer(completion) -> str | None`: the answer that was
    read from a completion, None where there is none; `path_key(completion) -> str`: the same for
    completions that reason alike, "" where that cannot be told; `hint(example)`: the prompt with
    the answer told.
    """

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of `split`: "train", or "test" (held out). The same rows in the same order at
        every call.
        """
        ...

    def prompt(self, example: Example) -> str | Messages:
        """The text that the model completes, or the conversation that it answers.

        Messages go through the chat template of the model's tokenizer; without one they are plain
        lines.
        """
        ...

    def reward(self, example: Example, completion: str) -> float:
        """Score in [0, 1]. Pure; never raises and never runs text that a model wrote."""
        ...

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Held-out measures of a whole set, in [0, 100], that are not the reward; the first is the
        headline.
        """
        ...


class Teaches(Protocol):
    """A task that can also pre-train the `tiny` model."""

    def examples(self, split: str) -> Sequence[Example]:
        """As in `Task`."""
        ...

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Prompt and completion, chosen by `draw` among right and wrong behaviours."""
        ...


def build(node: dict[str, Any]) -> Task:
    """The reward task that a configuration names. Raises: ConfigError as `instance`."""
    return instance(node, ("examples", "prompt", "reward", "metrics"), "common/tasks/__init__.py")


def instance(node: dict[str, Any], methods: Sequence[str], see: str) -> Any:
    """What `_target_` and constructor arguments in a configuration make. The only node that is
    instantiated.

    Args: methods: that it must have; see: where they are explained.
    Raises: ConfigError for a target that cannot be found, an unknown argument, or an object that is
    no task.
    """
    target = str(node["_target_"])
    arguments = {
        key: value for key, value in node.items() if key not in ("_target_", "pretrain_steps")
    }
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"task._target_={target!r} cannot be imported: {type(error).__name__}: {error}. Check"
            " the name, and that its folder is on PYTHONPATH."
        ) from error
    parameters = inspect.signature(found).parameters
    if not any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    ):  # such a task checks by itself
        arguments = _checked(arguments, parameters.values())
    task = found(**arguments)
    missing = [name for name in methods if not callable(getattr(task, name, None))]
    if missing:
        raise ConfigError(
            f"task._target_={target!r} has no method {missing[0]}. See {see} for those it needs."
        )
    return task


def _checked(arguments: dict[str, Any], parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """Arguments converted to the annotated types, by the rules of every other setting. Raises:
    ConfigError.
    """
    fields = []
    for parameter in parameters:
        kind = Any if parameter.annotation is inspect.Parameter.empty else parameter.annotation
        try:
            OmegaConf.structured(make_dataclass("Settings", [(parameter.name, kind)]))
        except OmegaConfBaseException:
            kind = Any  # a type that YAML knows nothing of
        default = parameter.default
        fields.append(
            (parameter.name, kind)
            if default is inspect.Parameter.empty
            else (parameter.name, kind, field(default_factory=lambda value=default: value))
        )
    schema = make_dataclass("Settings", fields, kw_only=True)
    return vars(build_settings(schema, arguments, "task"))
