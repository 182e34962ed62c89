"""Translation: complete a prompt with the target text; scored by edit distance, chrF, BLEU or exact
match.

Without data the task makes its own: English number words below 1000 into Spanish. That suits a tiny
byte-level model: lines are short, the rule is learnable, and half-right answers earn half a reward.
Its pre-training text mixes Spanish with German, so the base model can do both and has yet to learn
that Spanish is wanted.

Rewards and held-out measures are those of common/tasks/similarity.py.
"""

import functools
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from num2words import num2words

from common.config import ConfigError, at_least, build, choice, share
from common.tasks import Example
from common.tasks.data import Row, read_dataset, read_jsonl, read_parallel, read_tsv
from common.tasks.similarity import SIMILARITIES, text_metrics
from common.tasks.splits import SPLIT_SEED

NUMBERS = 1000  # the embedded rows: 0 to 999

# Where rows come from; none = the embedded ones.
_ORIGINS = ("source", "path", "dataset")
# Which settings mean something only beside which others.
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
}
# Which settings must come together.
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
    """The settings of conf/task/translate.yaml, where each is explained."""

    reward: str
    template: str
    share_right: float
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
    holdout: int | None

    def __post_init__(self) -> None:
        choice("task.reward", self.reward, tuple(SIMILARITIES))
        if "{source}" not in self.template:
            raise ConfigError(
                f"task.template={self.template!r} does not hold {{source}}, the place of the text"
                " to translate. Add it, as in '{source} =>'."
            )
        share("task.share_right", self.share_right)
        if self.holdout is not None:
            at_least("task.holdout", self.holdout, 1)
        self._check_data()

    def _check_data(self) -> None:
        origins = [name for name in _ORIGINS if getattr(self, name) is not None]
        if len(origins) > 1:
            both = " and ".join(f"task.{name}={getattr(self, name)!r}" for name in origins)
            raise ConfigError(
                f"{both} are given, but the rows come from one of them. Leave out the others."
            )
        for name, others in _NEEDS.items():
            value = getattr(self, name)
            if value is not None and all(getattr(self, other) is None for other in others):
                needed = " or ".join(f"task.{other}" for other in others)
                raise ConfigError(
                    f"task.{name}={value!r} has no effect without {needed}. Give {needed} too, or"
                    " leave it out."
                )
        for name, others in _TOGETHER.items():
            for other in others:
                if getattr(self, name) is not None and getattr(self, other) is None:
                    raise ConfigError(
                        f"task.{other} is not set, but task.{name}={getattr(self, name)!r} needs"
                        f" it. Give it on the command line: task.{other}=VALUE."
                    )
        for name in _TEST:
            if self.holdout is not None and getattr(self, name) is not None:
                raise ConfigError(
                    f"task.holdout={self.holdout} has no effect with"
                    f" task.{name}={getattr(self, name)!r}, which gives the test rows. Leave out"
                    " one of the two."
                )
        for name in ("path", "test_path"):
            value = getattr(self, name)
            if value is not None and _kind(value) not in _READERS:
                raise ConfigError(
                    f"task.{name}={value!r} is of no known kind. Give a file that ends in"
                    f" {', '.join(_READERS)} (or the same with .gz), or use task.source and"
                    " task.target for plain lines."
                )


class Translate:
    """The task. Settings are those of conf/task/translate.yaml, as keywords.

    `dropped_rows` counts the train rows that were dropped because their source also stands in the
    test rows.

    Raises: ConfigError for settings that are unknown, of a wrong type, contradictory or without
    effect, and for data that is missing or broken.
    """

    name = "translate"
    # what help() and common.tasks.build see, instead of **settings
    __signature__ = inspect.signature(TranslateConfig)

    def __init__(self, **settings: Any) -> None:
        self.config = build(TranslateConfig, settings, "task")
        train, test = _rows(self.config)
        tested = {example.question for example in test}
        kept = [example for example in train if example.question not in tested]
        self.dropped_rows = len(train) - len(kept)
        if len(kept) < 2:  # the wrong answer to one row is the answer to another
            raise ConfigError(
                f"{_origin(self.config)} leaves {len(kept)} train rows: of {len(train)},"
                f" {self.dropped_rows} also stand in the test rows. Give at least 2 others."
            )
        self._splits = {"train": _numbered(kept), "test": _numbered(test)}

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of `split`, "train" or "test": `question` is the source, `answer` the target."""
        return self._splits[split]

    def prompt(self, example: Example) -> str:
        """The template with the source in it."""
        return self.config.template.replace("{source}", example.question)

    def reward(self, example: Example, completion: str) -> float:
        """Score in [0, 1] by task.reward. White space around the completion does not count."""
        return SIMILARITIES[self.config.reward](completion.strip(), example.answer)

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """`reward` of each completion."""
        return [
            self.reward(example, text) for example, text in zip(examples, completions, strict=True)
        ]

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Corpus BLEU and chrF (sacrebleu's defaults), and the percentage of exact answers; each in
        [0, 100].

        BLEU counts up to four words in a row, so it is 0 for a set whose answers all have fewer
        than four.
        """
        return text_metrics(
            [completion.strip() for completion in completions], [e.answer for e in examples]
        )

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Prompt and completion: the right target with probability task.share_right, else a wrong
        one.

        The wrong one is the German number word, or with data of one's own the target of another
        train row.
        """
        if draw.random() < self.config.share_right:
            completion = example.answer
        elif "german" in example.extra:
            completion = example.extra["german"]
        else:
            rows = self._splits["train"]
            other = draw.randrange(len(rows) - 1)
            completion = rows[other if other < example.id else other + 1].answer
        return self.prompt(example), completion


# --- rows

_READERS = {".tsv": read_tsv, ".jsonl": read_jsonl}


def _rows(config: TranslateConfig) -> tuple[list[Example], list[Example]]:
    """Train and test rows, from where the settings say; ids are not set yet."""
    if config.source is not None:
        train = _lines(config, "")
        test = None if config.test_source is None else _lines(config, "test_")
    elif config.path is not None:
        train = _table(config, "path")
        test = None if config.test_path is None else _table(config, "test_path")
    elif config.dataset is not None:
        train = _hub(config, config.dataset_split or "train")
        test = (
            None if config.dataset_test_split is None else _hub(config, config.dataset_test_split)
        )
    else:
        train, test = _number_words(), None
    return _hold_out(config, train) if test is None else (train, test)


def _lines(config: TranslateConfig, prefix: str) -> list[Example]:
    names = (f"{prefix}source", f"{prefix}target")
    paths = (getattr(config, names[0]), getattr(config, names[1]))
    pairs = read_parallel(paths, (f"task.{names[0]}", f"task.{names[1]}"))
    return [_example(source, target) for source, target in pairs]


def _table(config: TranslateConfig, name: str) -> list[Example]:
    path = getattr(config, name)
    return _fields(config, _READERS[_kind(path)](path, f"task.{name}"))


def _hub(config: TranslateConfig, split: str) -> list[Example]:
    assert config.dataset is not None
    return _fields(
        config, read_dataset(config.dataset, config.dataset_config, split, "task.dataset")
    )


def _fields(config: TranslateConfig, rows: list[Row]) -> list[Example]:
    assert config.source_field is not None
    assert config.target_field is not None
    return [
        _example(
            row.text(config.source_field, "task.source_field"),
            row.text(config.target_field, "task.target_field"),
        )
        for row in rows
    ]


@functools.cache  # 3000 numbers in words take as long as a small run
def _number_words() -> list[Example]:
    examples = []
    for number in range(NUMBERS):
        english, spanish, german = (
            num2words(number, lang=language) for language in ("en", "es", "de")
        )
        examples.append(Example(number, english, spanish, {"german": german}))
    return examples


def _example(source: str, target: str) -> Example:
    return Example(0, source.strip(), target.strip())


def _numbered(examples: list[Example]) -> tuple[Example, ...]:
    return tuple(replace(example, id=position) for position, example in enumerate(examples))


def _hold_out(
    config: TranslateConfig, examples: list[Example]
) -> tuple[list[Example], list[Example]]:
    """Split at random, the same way at every call."""
    count = config.holdout if config.holdout is not None else min(1000, max(1, len(examples) // 5))
    if count > len(examples) - 2:
        raise ConfigError(
            f"task.holdout={config.holdout} leaves too few of {len(examples)} rows to train on. "
            f"Hold out at most {len(examples) - 2}."
            if len(examples) > 2
            else (
                f"{_origin(config)} has {len(examples)} rows, too few to hold some out for the"
                " test. Give at least 3."
            )
        )
    shuffled = list(examples)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    return shuffled[count:], shuffled[:count]


def _origin(config: TranslateConfig) -> str:
    """The setting that gives the rows, with its value. The embedded rows have none, and no mistake
    to name.
    """
    name = next(name for name in _ORIGINS if getattr(config, name) is not None)
    return f"task.{name}={getattr(config, name)!r}"


def _kind(path: str) -> str:
    """The end of a file name, without .gz: ".tsv"."""
    return Path(path.removesuffix(".gz")).suffix
