"""The interface of a reward task. Each task is one file; none of them knows an algorithm."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.system import instantiate

# A conversation in the format of chat templates: each message is {"role": "system" | "user" |
# "assistant" | "tool", "content": text}; an assistant's message may have `tool_calls`.
Messages = list[dict[str, Any]]
# Keys of a task's file that model=tiny (conf/model/tiny.yaml), conf/algo and thoughts.py read.
FOR_OTHERS = ("pretrain_steps", "tiny", "max_new_tokens", "after")


@dataclass(frozen=True)
class Example:
    """One row of a task.

    Attributes:
        id: the row's position in its split, which keys random draws.
        question: the text of the question.
        answer: the text of the right answer.
        extra: other fields that the task needs to score a completion.
    """

    id: int
    question: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


class Conversation(list):
    """Messages whose reader may call tools.

    Attributes:
        tools: the definitions of the tools, in the format of chat templates.
    """

    def __init__(self, messages: Messages, tools: list[dict[str, Any]]) -> None:
        super().__init__(messages)
        self.tools = tools


def plain(prompt: str | Messages) -> str:
    """Return a prompt as plain text. A conversation becomes the contents of its messages, one per
    line, with a blank line after each answer of the assistant.
    """
    if isinstance(prompt, str):
        return prompt
    return "".join(m["content"] + ("\n\n" if m["role"] == "assistant" else "\n") for m in prompt)


class Task(Protocol):
    """The methods that a task has. A user's own class needs no base class, only these methods.

    What else a task may have, with what holds if it has not: `TaskFeatures`.
    """

    def examples(self, split: str) -> Sequence[Example]:
        """Return the rows of `split`, "train" or "test" (held out), the same at every call."""
        ...

    def prompt(self, example: Example) -> str | Messages:
        """Return the text that the model completes, or the conversation that it answers.

        Messages go through the tokenizer's chat template; without one they are plain lines.
        """
        ...

    def reward(self, example: Example, completion: str) -> float:
        """Return the reward, a finite number; 1 or more means right, None means no score. The
        method is pure, never raises and never runs text that a model wrote.
        """
        ...

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return held-out measures of all examples together, in [0, 100]; the first is the
        headline.
        """
        ...


class TaskFeatures:
    """The optional features of a task, each read when it is asked for, or what holds without it."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def _read(self, name: str, default: Any) -> Any:
        found = getattr(self.task, name, None)
        return default if found is None else found

    @property
    def rewards(self) -> Callable[..., Any] | None:
        """`rewards(examples, completions) -> list[float]`: the batched form of `reward`."""
        return self._read("rewards", None)

    @property
    def components(self) -> Mapping[str, Any]:
        """The parts of the reward by name, each a function of (examples, completions)."""
        return self._read("components", {})

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the components in the reward."""
        return self._read("weights", {})

    @property
    def shown(self) -> Sequence[str]:
        """The names of components that episodes report in addition to their reward."""
        return self._read("shown", ())

    @property
    def right_at(self) -> float:
        """The least reward of a right completion."""
        return self._read("right_at", 1.0)

    @property
    def answer(self) -> Callable[[str], str | None] | None:
        """`answer(completion)`: the answer that was read from a completion; None if it has none."""
        return self._read("answer", None)

    @property
    def path_key(self) -> Callable[[str], str] | None:
        """`path_key(completion)`: equal for completions with the same reasoning; "" = unknown."""
        return self._read("path_key", None)

    @property
    def hint(self) -> Callable[[Example], Any] | None:
        """`hint(example)`: the prompt with the right answer in it."""
        return self._read("hint", None)

    @property
    def pretraining(self) -> Callable[..., Any] | None:
        """`pretraining(example, draw)`: a prompt and a completion to pre-train the tiny model on,
        in which the right behaviour is one of several.
        """
        return self._read("pretraining", None)

    @property
    def teach(self) -> Callable[..., Messages] | None:
        """`teach(example, draw) -> Messages`: an episode that is played well, to fine-tune on."""
        return self._read("teach", None)

    @property
    def score(self) -> Callable[..., float] | None:
        """`score(examples, completions) -> float`: a measure of all completions together, for
        algo.fitness_of=measure; more is better.
        """
        return self._read("score", None)

    @property
    def scores(self) -> Callable[..., Any] | None:
        """`scores(examples, completions) -> dict[str, list[float]]`: what each example adds to
        measures that are not means over the examples.
        """
        return self._read("scores", None)

    @property
    def episode(self) -> Callable[[Example], Any] | None:
        """`episode(example)`: an environment that replies (common/episodes/episodes.py), with
        `max_turns`, `reply_tokens` and `tools` of the task.
        """
        return self._read("episode", None)

    @property
    def max_turns(self) -> int:
        """The most answers of a model in an episode."""
        return self._read("max_turns", 1)

    @property
    def repeatable(self) -> bool:
        """Whether the same example and text always earn the same reward, so that equal texts are
        scored once.
        """
        return self._read("repeatable", False)

    @property
    def logs(self) -> bool:
        """Whether reward functions may log numbers."""
        return self._read("logs", False)

    @property
    def drawn(self) -> bool:
        """Whether the test rows are in an order of chance already."""
        return self._read("drawn", True)

    @property
    def dropped(self) -> int:
        """The number of training rows that the task left out, as they are test rows too."""
        return self._read("dropped", 0)

    @property
    def solution(self) -> Callable[[Example], str | None] | None:
        """`solution(example)`: a completion that is right, such as a worked solution; None if the
        example has none. Completions may be as long, and can be fine-tuned on.
        """
        return self._read("solution", None)

    @property
    def dialogues(self) -> bool:
        """Whether the conversations of rows end with their answers, so that all of the assistant's
        turns can be fine-tuned on.
        """
        return self._read("dialogues", False)

    @property
    def signatures(self) -> Mapping[str, str]:
        """The signatures of measures that follow a standard, such as sacreBLEU's."""
        return self._read("signatures", {})


def build(node: dict[str, Any]) -> Task:
    """Make the reward task that a configuration names. Raises: ConfigError for a class or settings
    that cannot work.
    """
    methods = ("examples", "prompt", "reward", "metrics")
    # The keys in FOR_OTHERS configure the tiny model and sampling, not the task.
    settings = {key: value for key, value in node.items() if key not in FOR_OTHERS}
    return instantiate("task", settings, methods, "common/tasks/__init__.py")


def task_name(task: Any) -> str:
    """Return the `name` of a task, or the name of its class if it has none."""
    return getattr(task, "name", class_name(task))


def class_name(task: Any) -> str:
    """Return the name of a task's class, without the wrappers around the task."""
    while hasattr(task, "own"):
        task = task.own
    return type(task).__name__


# --- hashes of rows


def digest(task: Task) -> str:
    """Return a SHA-256 hash of all rows of a task, training and test."""
    splits = [task.examples(split) for split in ("train", "test")]
    return hash_rows(row for examples in splits for row in describe_rows(examples))


def describe_rows(examples: Sequence[Example]) -> Iterator[Any]:
    """Yield (id, question, answer, extra as JSON) per example. A value in `extra` that JSON cannot
    hold is replaced by its type's name, since its text may contain a memory address.
    """
    for one in examples:
        extra = json.dumps(one.extra, skipkeys=True, default=_kind) if one.extra else "{}"
        yield one.id, one.question, one.answer, extra


def _kind(value: Any) -> str:
    return type(value).__qualname__


def hash_rows(rows: Iterable[Any]) -> str:
    """Return the SHA-256 hash of the text of a list of the rows, without holding the whole text in
    memory.
    """
    found, between = hashlib.sha256(b"["), ""
    for row in rows:
        found.update(f"{between}{row!r}".encode("utf-8", "replace"))
        between = ", "
    found.update(b"]")
    return found.hexdigest()
