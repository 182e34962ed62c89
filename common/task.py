"""The interface of a reward task. Each task is one file; none of them knows an algorithm."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.system import instantiate

# A conversation, as chat templates take it: {"role": "system" | "user" | "assistant" | "tool",
# "content": text} each; an assistant's message may have `tool_calls`.
Messages = list[dict[str, Any]]
# Keys of a task's file that model=tiny (conf/model/tiny.yaml), conf/algo and thoughts.py read.
FOR_OTHERS = ("pretrain_steps", "tiny", "max_new_tokens", "after")


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


class Conversation(list):
    """Messages whose reader may call tools. tools: as chat templates take them."""

    def __init__(self, messages: Messages, tools: list[dict[str, Any]]) -> None:
        super().__init__(messages)
        self.tools = tools


def plain(prompt: str | Messages) -> str:
    """Return a prompt as text: a conversation is its contents, a blank line after each answer."""
    if isinstance(prompt, str):
        return prompt
    return "".join(m["content"] + ("\n\n" if m["role"] == "assistant" else "\n") for m in prompt)


class Task(Protocol):
    """The methods that a task has. A user's own class needs no base class, only these.

    Optional beside them: `rewards(examples, completions) -> list[float]`: the same as `reward`,
    batched; `pretraining(example, draw) -> tuple[str, str]`: prompt and completion to teach the
    `tiny` model, the right behaviour among others; `answer(completion) -> str | None`: the answer
    that was read from a completion; `path_key(completion) -> str`: the same for completions that
    reason alike, "" where that cannot be told; `hint(example)`: the prompt with the answer told;
    `scores(examples, completions) -> dict[str, list[float]]`: what each example adds to measures
    that are no means over the examples; `right_at = 1.0`: the least
    reward of a right completion; `repeatable = True`: a promise that the same example and
    text earn the same at every call, so that equal texts are scored once; `episode(example)`: an
    environment that replies (common/episodes/episodes.py), with `max_turns` and `reply_tokens`.
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
        """Return a finite number, of which 1 or more is right; None = no score. Pure; never raises
        and never runs text that a model wrote.
        """
        ...

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return held-out measures of a whole set, in [0, 100]; the first is the headline."""
        ...


def build(node: dict[str, Any]) -> Task:
    """Make the reward task that a configuration names. Raises: ConfigError as `instantiate`."""
    methods = ("examples", "prompt", "reward", "metrics")
    # What a task's file says for the tiny model and for sampling is theirs to read.
    settings = {key: value for key, value in node.items() if key not in FOR_OTHERS}
    return instantiate("task", settings, methods, "common/tasks/__init__.py")


def task_name(task: Any) -> str:
    """Return the name that a task gives itself, or else its class's."""
    return getattr(task, "name", class_name(task))


def class_name(task: Any) -> str:
    """Return the name of a task's class, as its author wrote it."""
    while hasattr(task, "own"):
        task = task.own
    return type(task).__name__


# --- hashes of rows


def digest(task: Task) -> str:
    """Return a hash of the rows of a task."""
    splits = [task.examples(split) for split in ("train", "test")]
    return hash_rows(row for examples in splits for row in describe_rows(examples))


def describe_rows(examples: Sequence[Example]) -> Iterator[Any]:
    """Yield what tells each example apart; of what JSON does not know in `extra` the kind alone, as
    its text may hold an address.
    """
    for one in examples:
        extra = json.dumps(one.extra, skipkeys=True, default=_kind) if one.extra else "{}"
        yield one.id, one.question, one.answer, extra


def _kind(value: Any) -> str:
    return type(value).__qualname__


def hash_rows(rows: Iterable[Any]) -> str:
    """Return the hash of the text of a list of the rows, which is never held whole."""
    found, between = hashlib.sha256(b"["), ""
    for row in rows:
        found.update(f"{between}{row!r}".encode("utf-8", "replace"))
        between = ", "
    found.update(b"]")
    return found.hexdigest()
