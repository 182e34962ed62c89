"""Prompts and answers from the user's own rows, with a reward chosen by name. No code needed.

    python launch.py algo=NAME task=custom task.path=data.jsonl task.prompt_field=question
    task.answer_field=answer

Everything that can be wrong with the rows is found before the model is loaded, and named with file,
row and field.
"""

import inspect
import logging
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.config import ConfigError, at_least, build, choice, share
from common.tasks import Example, Messages, answers, gsm8k, plain
from common.tasks.data import Row, read_csv, read_dataset, read_jsonl, read_parquet, read_tsv
from common.tasks.similarity import SIMILARITIES, text_metrics
from common.tasks.splits import SPLIT_SEED

log = logging.getLogger("clutch")

MOST_HELD_OUT = 1000  # rows, where task.test_share does not say
NUMERIC = ("numeric", "math")
REWARDS = ("exact", *NUMERIC, *(name for name in SIMILARITIES if name != "exact"))
READERS: dict[str, Callable[[str, str], list[Row]]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
_SCIENTIFIC = re.compile(rf"(?<![\w.])-?(?:{answers.SCIENTIFIC})(?!\w)")
# The held-out measure that leads, where it is not the reward's namesake: one that the reward does
# not train.
_HEADLINE = {"bleu": "chrf", "chrf": "bleu"}


@dataclass(kw_only=True)
class CustomConfig:
    """The settings of conf/task/custom.yaml, where each is explained."""

    name: str
    path: str | None
    test_path: str | None
    test_share: float | None
    dataset_config: str | None
    dataset_split: str | None
    dataset_test_split: str | None
    prompt_field: str | None
    answer_field: str | None
    template: str | None
    chat: bool
    system: str
    reward: str
    tolerance: float
    share_right: float

    def __post_init__(self) -> None:
        choice("task.reward", self.reward, REWARDS)
        if self.path is None:
            raise ConfigError(
                f"task.path is not set. Give a file ({', '.join(READERS)}, or one of these with"
                " .gz), or an id or a folder for the datasets library: task.path=data.jsonl."
            )
        if self.answer_field is None:
            raise ConfigError(
                "task.answer_field is not set. Name the field of the right answer:"
                " task.answer_field=answer."
            )
        if self.prompt_field is None and self.template is None:
            raise ConfigError(
                "task.prompt_field is not set. Name the field of the prompt:"
                " task.prompt_field=question."
            )
        names = template_fields(self.template) if self.template is not None else []
        if self.template is not None and not names:
            raise ConfigError(
                f"task.template={self.template!r} holds no field, so all prompts would be the same."
                f" Put one in braces, as in '{{{self.prompt_field or 'question'}}}'."
            )
        if (
            self.prompt_field is not None
            and self.template is not None
            and self.prompt_field not in names
        ):
            raise ConfigError(
                f"task.prompt_field={self.prompt_field!r} has no effect:"
                f" task.template={self.template!r} does not hold {{{self.prompt_field}}}. Add it"
                " there, or leave task.prompt_field out."
            )
        if self.answer_field in (names or [self.prompt_field]):
            raise ConfigError(
                f"task.answer_field={self.answer_field!r} also stands in the prompt, so there is"
                " nothing to find. Name another field, or leave it out of the prompt."
            )
        if self.system and not self.chat:
            raise ConfigError(
                "task.system has no effect with task.chat=false. Put its text into task.template."
            )
        at_least("task.tolerance", self.tolerance, 0)
        if self.tolerance and self.reward not in NUMERIC:
            raise ConfigError(
                f"task.tolerance={self.tolerance} has no effect with task.reward={self.reward}. Use"
                " task.reward=numeric."
            )
        share("task.test_share", self.test_share or 0)
        share("task.share_right", self.share_right)
        self._check_test()

    def _check_test(self) -> None:
        assert self.path is not None
        hub = _reader(self.path) is None
        for key in ("dataset_config", "dataset_split", "dataset_test_split"):
            if getattr(self, key) is not None and not hub:
                raise ConfigError(
                    f"task.{key} has no effect: task.path={self.path!r} is a file. Leave it out."
                )
        given = [
            key
            for key in ("test_path", "dataset_test_split", "test_share")
            if getattr(self, key) is not None
        ]
        if len(given) > 1:
            raise ConfigError(
                f"task.{given[0]} and task.{given[1]} both say which rows are held out. Leave out"
                " one of the two."
            )


class Custom:
    """The task. Settings are those of conf/task/custom.yaml, as keywords.

    Raises: ConfigError for settings that are unknown, of a wrong type, contradictory or without
    effect, for data that is missing or broken, and if task.reward needs a package that is not
    installed.
    """

    # what help() and common.tasks.build see, instead of **settings
    __signature__ = inspect.signature(CustomConfig)

    def __init__(self, **settings: Any) -> None:
        self.config = config = build(CustomConfig, settings, "task")
        self.name = config.name
        if config.reward == "math":
            gsm8k.math_verify("task.reward=math", "task.reward=numeric")
        assert config.path is not None
        train = self._examples(config.path, "task.path", config.dataset_split or "train")
        if config.test_path is not None:
            test = self._examples(config.test_path, "task.test_path", "test")
        elif config.dataset_test_split is not None:
            test = self._examples(config.path, "task.path", config.dataset_test_split)
        else:
            train, test = self._hold_out(train)
        tested = {example.question for example in test}
        kept = [example for example in train if example.question not in tested]
        if dropped := len(train) - len(kept):
            log.info(
                "%s: %d train rows are dropped: their prompt also stands in the test rows",
                self.name,
                dropped,
            )
        if not kept:
            raise ConfigError(
                f"task.path={config.path!r} leaves no train row: the prompts of all {len(train)}"
                " stand in the test rows too. Give others."
            )
        self._splits = {
            split: [replace(example, id=position) for position, example in enumerate(found)]
            for split, found in (("train", kept), ("test", test))
        }

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of `split`, "train" or "test": `question` is the prompt with its fields filled
        in.
        """
        return self._splits[split]

    def prompt(self, example: Example) -> str | Messages:
        """With task.chat a conversation: the system text, if there is one, and the prompt; else the
        prompt.
        """
        if not self.config.chat:
            return example.question
        system = [{"role": "system", "content": self.config.system}] if self.config.system else []
        return [*system, {"role": "user", "content": example.question}]

    def hint(self, example: Example) -> str | Messages:
        """The prompt with the answer told, for a model that is to find the way that leads to it."""
        return self.prompt(
            replace(example, question=f"{example.question} (The answer is {example.answer}.)")
        )

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """The right answer with probability task.share_right, else the same backwards (twice, where
        that is no other text).

        So the base has learnt what the answers are, and says them the wrong way round more often
        than not.
        """
        completion = example.answer
        if draw.random() >= self.config.share_right:
            backwards = completion[::-1]
            completion = backwards if backwards != completion else completion * 2
        return plain(self.prompt(example)), completion

    def reward(self, example: Example, completion: str) -> float:
        """Score in [0, 1] by task.reward."""
        if self.config.reward not in NUMERIC:
            return SIMILARITIES[self.config.reward](_whole(completion), example.answer)
        found, wanted = self.answer(completion), example.extra["value"]
        if found is None:
            return 0.0
        value = self._value(found)
        if value is not None and wanted is not None:
            return float(abs(value - wanted) <= Fraction(str(self.config.tolerance)) * abs(wanted))
        if self.config.reward == "numeric":
            return 0.0
        final = example.extra["final"]
        return float(found == final or gsm8k.same(final, found))

    def _value(self, answer: str) -> Fraction | None:
        r"""The number that an answer is. With math it must be a number and nothing else: \sqrt{16}
        is not 16.
        """
        text = answer.strip(" $%.")
        if _SCIENTIFIC.fullmatch(text):
            value = answers.decimal(text.lstrip("-"))
            return -value if value is not None and text.startswith("-") else value
        return gsm8k.number(answer) if self.config.reward == "numeric" else None

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """`reward` of each completion."""
        return [
            self.reward(example, text) for example, text in zip(examples, completions, strict=True)
        ]

    def answer(self, completion: str) -> str | None:
        """Return the part of a completion that counts; None where there is none."""
        text = _whole(completion)
        if self.config.reward == "numeric":
            found = gsm8k.answer(text)
            marked = gsm8k.MARK in text or "\\boxed{" in text
            exponents = [] if marked or found is None else list(_SCIENTIFIC.finditer(text))
            # gsm8k.answer knows no exponents: of 6e3 it has the 3, and of 6e-3 the -3 or the 3.
            return (
                exponents[-1][0] if exponents and exponents[-1][0].endswith(found or "") else found
            )
        return _final(text) if self.config.reward == "math" else text or None

    def path_key(self, completion: str) -> str:
        """With numeric and math the calculations on the way, see common.tasks.answers; else "", so
        that texts tell.
        """
        return answers.path_key(completion) if self.config.reward in NUMERIC else ""

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """In [0, 100]. numeric, math: right answers and answers found; else corpus BLEU, corpus
        chrF and equal answers.
        """
        if self.config.reward in NUMERIC:
            answered = sum(self.answer(text) is not None for text in completions)
            return {
                "accuracy": (
                    100 * sum(self.rewards(examples, completions)) / max(1, len(completions))
                ),
                "answered": 100 * answered / max(1, len(completions)),
            }
        found = text_metrics(
            [_whole(text) for text in completions], [example.answer for example in examples]
        )
        first = _HEADLINE.get(self.config.reward, "exact")
        return {first: found.pop(first), **found}

    # --- rows

    def _examples(self, path: str, key: str, split: str) -> list[Example]:
        reader = _reader(path)
        if reader is not None:
            rows = reader(path, key)
        elif Path(path).expanduser().is_file():
            raise ConfigError(
                f"{key}={path!r} is of no known kind. Give a file that ends in"
                f" {', '.join(READERS)}, or the same with .gz."
            )
        else:
            rows = read_dataset(path, self.config.dataset_config, split, key)
        return [self._example(row) for row in rows]

    def _example(self, row: Row) -> Example:
        config = self.config
        assert config.answer_field is not None
        if config.prompt_field is not None:
            question = row.text(config.prompt_field, "task.prompt_field", numbers=True)
        if config.template is not None:
            values = {
                name: row.text(name, "task.template", numbers=True, blank=True)
                for name in template_fields(config.template)
            }
            parts = string.Formatter().parse(config.template)
            question = "".join(
                before + (values[name] if name else "") for before, name, _, _ in parts
            )
            if not question.strip():
                raise ConfigError(
                    f"task.template={config.template!r} makes an empty prompt of {row.where}. Mend"
                    " the row."
                )
        answer = row.text(config.answer_field, "task.answer_field", numbers=True).strip()
        extra: dict[str, Any] = {}
        if config.reward in NUMERIC:
            final = self.answer(answer)
            extra = {"final": final, "value": None if final is None else self._value(final)}
            if final is None or (config.reward == "numeric" and extra["value"] is None):
                raise ConfigError(
                    f"task.answer_field={config.answer_field!r} has no number in {row.where}:"
                    f" {answer[-60:]!r}. Mend the row, or use another reward, such as"
                    f" task.reward=exact. Fields there: {', '.join(row.fields)}."
                )
        return Example(0, question, answer, extra)

    def _hold_out(self, rows: list[Example]) -> tuple[list[Example], list[Example]]:
        """Split at random, the same way at every call."""
        share = self.config.test_share
        count = (
            min(MOST_HELD_OUT, max(1, len(rows) // 5))
            if share is None
            else round(share * len(rows))
        )
        if not 0 < count < len(rows):
            raise ConfigError(
                f"task.path={self.config.path!r} has {len(rows)} rows, of which {count} would be"
                " held out. "
                + (
                    "Give more rows."
                    if share is None
                    else "Give another task.test_share, or more rows."
                )
            )
        shuffled = list(rows)
        random.Random(SPLIT_SEED).shuffle(shuffled)
        return shuffled[count:], shuffled[:count]


def template_fields(template: str) -> list[str]:
    """Names in braces, in order. Raises: ConfigError for braces that do not fit."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"task.template={template!r} has braces that do not fit: {error}. A field is {{NAME}};"
            " write a brace twice to have it in the text."
        ) from None
    names = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name or form or conversion:
            raise ConfigError(
                f"task.template={template!r}: braces hold the name of a field, as in {{question}},"
                " and nothing else. Write a brace twice to have it in the text."
            )
        names.append(name)
    return names


def _reader(path: str) -> Callable[[str, str], list[Row]] | None:
    """The reader of a file by its name; None for what the datasets library loads."""
    return READERS.get(Path(path.removesuffix(".gz")).suffix.lower())


def _whole(completion: str) -> str:
    """The text between the last tags, else all of it; stripped."""
    tagged = answers.tagged(completion)
    return (completion if tagged is None else tagged).strip()


def _final(text: str) -> str | None:
    r"""The final answer of a solution: after the last ####, else in the last \boxed{}, else the
    last line that is not blank.
    """
    if gsm8k.MARK in text or "\\boxed{" in text:
        return gsm8k.answer(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][: gsm8k.LONGEST] if lines else None
