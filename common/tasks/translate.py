"""Translation: complete a prompt with the target text; scored by edit distance, chrF, BLEU or exact
match.

Without data the task makes its own: English number words below 1000 into Spanish. That suits a tiny
byte-level model: lines are short, the rule is learnable, and half-right answers earn half a reward.
Its pre-training text mixes Spanish with German, so the base model can do both and has to learn that
Spanish is wanted.

Rewards and held-out measures are those of common/tasks/similarity.py.
"""

import functools
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from num2words import num2words

from common.config import ConfigError, Count, Share, build, holds, one_of
from common.task import Example, Messages, plain
from common.tasks.base import Chat, Rows
from common.tasks.data import Incomplete, Reading
from common.tasks.similarity import (
    SIMILARITIES,
    find_similarity,
    find_tokenizer,
    signatures,
    text_metrics,
    text_scores,
)

NUMBERS = 1000  # the embedded rows: 0 to 999

# Settings that name a source of rows; without one the embedded rows are used.
_ORIGINS = ("source", "path", "dataset")
# Settings that have an effect only together with one of others.
_NEEDS = {
    "target": ("source",),
    "test_source": ("source",),
    "test_target": ("source",),
    "test_path": ("path",),
    "dataset_config": ("dataset",),
    "dataset_split": ("dataset",),
    "dataset_test_split": ("dataset",),
    "source_field": ("path", "dataset"),
    "target_field": ("path", "dataset"),
    "columns": ("path",),
}
# Settings that must be given together.
_TOGETHER = {
    "source": ("target",),
    "test_source": ("test_target",),
    "test_target": ("test_source",),
    "path": ("source_field", "target_field"),
    "dataset": ("source_field", "target_field"),
}
_TEST = ("test_source", "test_path", "dataset_test_split")


@dataclass(kw_only=True)
class TranslateConfig:
    """The settings of conf/task/translate.yaml, which documents each of them."""

    reward: Annotated[str, one_of(*SIMILARITIES)]
    target_language: str | None
    template: Annotated[str, holds("{source}")]
    chat: Chat
    system: str
    share_right: Share
    source: str | None
    target: str | None
    test_source: str | None
    test_target: str | None
    path: str | None
    test_path: str | None
    dataset: str | None
    dataset_config: str | None
    dataset_split: str | None
    dataset_test_split: str | None
    source_field: str | None
    target_field: str | None
    columns: list[str] | None
    format: dict[str, Any]
    incomplete: Incomplete
    holdout: Count | None

    def __post_init__(self) -> None:
        origins = [name for name in _ORIGINS if getattr(self, name) is not None]
        if len(origins) > 1:
            both = " and ".join(f"task.{name}={getattr(self, name)!r}" for name in origins)
            raise ConfigError(f"{both} both give the rows. Leave out the others.")
        for name, others in _NEEDS.items():
            value = getattr(self, name)
            if value is not None and all(getattr(self, other) is None for other in others):
                needed = " or ".join(f"task.{other}" for other in others)
                raise ConfigError(
                    f"task.{name}={value!r} has no effect without {needed}. Give it too, or leave"
                    " this out."
                )
        for name, others in _TOGETHER.items():
            for other in others:
                if getattr(self, name) is not None and getattr(self, other) is None:
                    raise ConfigError(
                        f"task.{other} is not set, but task.{name}={getattr(self, name)!r} needs"
                        f" it. Give it: task.{other}=VALUE."
                    )
        for name in _TEST:
            if self.holdout is not None and getattr(self, name) is not None:
                raise ConfigError(
                    f"task.holdout={self.holdout} has no effect with task.{name}, which gives the"
                    " test rows. Leave out one of the two."
                )


class Translate(Rows):
    """The task, with the settings of conf/task/translate.yaml. `question` is the source text,
    `answer` the target.
    """

    name = "translate"
    # the signature for help() and common.tasks.build, in place of **settings
    __signature__ = inspect.signature(TranslateConfig)

    def __init__(self, **settings: Any) -> None:
        self.config = config = build(TranslateConfig, settings, "task")
        self.chat, self.system = config.chat, config.system
        self.check_system()
        self.reading = Reading(config.columns, config.format, config.incomplete)
        train, test = self._read("") or _number_words(), self._read("test_")
        origin = next((name for name in _ORIGINS if getattr(config, name) is not None), "holdout")
        held_out = config.holdout or min(1000, max(1, len(train) // 5))
        self.drawn = not test  # files are often sorted
        self.split(f"task.{origin}={getattr(config, origin)!r}", train, test, held_out)
        wanted = [row.answer for row in (*train, *test)]
        self.tokenizer = find_tokenizer(config.target_language, wanted, "task.target_language")
        self.signatures = signatures(self.tokenizer)
        self._similarity = find_similarity(config.reward, self.tokenizer)

    def _read(self, prefix: str) -> list[Example]:
        """Return the rows of the settings with a prefix; empty if none of them is set."""
        config, names = self.config, ("source_field", "target_field")
        split = config.dataset_test_split if prefix else config.dataset_split or "train"
        origins = ("source", "target", "path")
        source, target, path = (getattr(config, f"{prefix}{name}") for name in origins)
        if source is not None:
            keys = (f"task.{prefix}source", f"task.{prefix}target")
            pairs = self.reading.parallel((source, target), keys)
            return [_example(*pair) for pair in pairs]
        if path is not None:
            rows = self.reading.rows(path, f"task.{prefix}path")
        elif config.dataset is not None and split is not None:
            rows = self.reading.rows(config.dataset, "task.dataset", config.dataset_config, split)
        else:
            return []
        return self.reading.convert(
            rows,
            lambda row: _example(
                *(row.text(getattr(config, name), f"task.{name}") for name in names)
            ),
        )

    def prompt(self, example: Example) -> str | Messages:
        """Return the template with the source in it; with task.chat as a conversation."""
        return self.ask(self.config.template.replace("{source}", example.question))

    def reward(self, example: Example, completion: str) -> float:
        """Return the score by task.reward. White space around the completion does not count."""
        return self._similarity(completion.strip(), example.answer)

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return corpus BLEU and chrF, and the percentage of exact answers."""
        hypotheses = [completion.strip() for completion in completions]
        return text_metrics(hypotheses, [e.answer for e in examples], self.tokenizer)

    def scores(
        self, examples: Sequence[Example], completions: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return the contribution of each example to the measures."""
        hypotheses = [completion.strip() for completion in completions]
        return text_scores(hypotheses, [e.answer for e in examples], self.tokenizer)

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return the right target with probability task.share_right, else the German word, or
        with data of one's own the target of another train row.
        """
        if draw.random() < self.config.share_right:
            completion = example.answer
        elif "german" in example.extra:
            completion = example.extra["german"]
        else:
            rows = self._splits["train"]
            other = draw.randrange(len(rows) - 1)
            completion = rows[other if other < example.id else other + 1].answer
        return plain(self.prompt(example)), completion


@functools.cache  # 3000 numbers in words take as long as a small run
def _number_words() -> list[Example]:
    words = (
        [num2words(n, lang=language) for language in ("en", "es", "de")] for n in range(NUMBERS)
    )
    return [Example(0, english, spanish, {"german": german}) for english, spanish, german in words]


def _example(source: str, target: str) -> Example:
    return Example(0, source.strip(), target.strip())
