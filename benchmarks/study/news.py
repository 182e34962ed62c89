"""AG News as text, for measures.yaml: the model writes the topic, of which one is rare, and if it
is asked to also how sure it is. Its held-out measures are of all answers together: macro-F1, or
calibration.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import ConfigError
from common.task import Example
from common.tasks.base import SPLIT_SEED, Rows, percent
from common.tasks.data import read_rows
from common.uncertainty import contributions

TOPICS = ("World", "Sports", "Business", "Science")
REWARDS = ("right", "balanced", "brier")
_SURE = re.compile(r"(\w+) ([0-9])")

Sums = NDArray[np.float64]


class News(Rows):
    """Topics of news.

    Args:
        path: the folder with AG News, train.jsonl.gz and test.jsonl.gz.
        characters: how many of a text stand in its prompt.
        rare: the topic that is cut, and share: its share of the rows.
        share_right: the share of right topics in pre-training; the others are those of other rows.
        sure: whether an answer says how sure it is, from 0 to 9 for 5 to 95 %.
        reward: right = 1 for the right topic; balanced = divided by the share of the topic; brier =
            1 less the square of the error of what the answer says it is sure of.
    """

    name = "news"
    chat = False
    repeatable = True

    def __init__(
        self,
        path: str | None,
        characters: int,
        rare: str,
        share: float,
        share_right: float,
        sure: bool,
        reward: str,
    ) -> None:
        if path is None or rare not in TOPICS or reward not in REWARDS:
            raise ConfigError(
                f"task.path={path}, task.rare={rare} and task.reward={reward}: the path is the"
                f" folder of AG News, the topic one of {', '.join(TOPICS)}, and the reward one of"
                f" {', '.join(REWARDS)}. Set them."
            )
        self.characters, self.share_right, self.sure = characters, share_right, sure
        self.rewarded = reward
        train, test = (self._read(f"{path}/{split}.jsonl.gz", rare, share) for split in SPLITS)
        self.split("task.path", train, test, 0)
        counts = Counter(example.answer for example in self.examples("train"))
        most = sum(counts.values()) / len(counts)
        self.balance = {topic: most / count for topic, count in counts.items()}

    def _read(self, path: str, rare: str, share: float) -> list[Example]:
        """Return the rows of a file, in random order, with the share of the rare topic cut."""
        rows = [
            Example(0, str(row["text"])[: self.characters].strip(), TOPICS[int(row["label"])])
            for row in (found.fields for found in read_rows(path, "task.path"))
        ]
        draw = random.Random(SPLIT_SEED)
        draw.shuffle(rows)
        few = [row for row in rows if row.answer == rare]
        rest = [row for row in rows if row.answer != rare]
        rows = rest + few[: round(share / (1 - share) * len(rest))]
        draw.shuffle(rows)
        return rows

    def prompt(self, example: Example) -> str:
        """Return the beginning of a text, and the question."""
        return f"{example.question}\nTopic: "

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return the right topic or that of another row, mostly said to be sure."""
        right = draw.random() < self.share_right
        rows = self.examples("train")
        topic = example.answer if right else rows[draw.randrange(len(rows))].answer
        return self.prompt(example), f"{topic} {draw.choice('56789999')}" if self.sure else topic

    def read(self, completion: str) -> tuple[str, float]:
        """Return the topic of an answer, and how sure it is: 1 if it does not say."""
        if not self.sure:
            return completion.strip(), 1.0
        found = _SURE.fullmatch(completion.strip())
        return (found[1], (int(found[2]) + 0.5) / 10) if found else ("", 1.0)

    def reward(self, example: Example, completion: str) -> float:
        """Return the score of an answer by task.reward."""
        topic, sure = self.read(completion)
        right = float(topic == example.answer)
        if self.rewarded == "brier":
            return 1 - (sure - right) ** 2
        return right * (self.balance[example.answer] if self.rewarded == "balanced" else 1.0)

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return macro-F1 and the percentage of right topics; with task.sure 100 less the expected
        calibration error, 100 less the Brier score, and the percentage of right topics.
        """
        right = [self._right(*pair) for pair in zip(examples, completions, strict=True)]
        measure, sums = self._whole(examples, completions)
        first = {self._leading: float(measure(sums.sum(0, keepdims=True))[0])}
        if self.sure:
            pairs = zip(right, completions, strict=True)
            first["brier"] = percent(1 - (self.read(text)[1] - one) ** 2 for one, text in pairs)
        return {**first, "accuracy": percent(right)}

    def scores(
        self, examples: Sequence[Example], completions: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return the contributions of the examples to the measure that leads."""
        measure, sums = self._whole(examples, completions)
        return {self._leading: contributions(sums, measure)[1]}

    @property
    def _leading(self) -> str:
        return "calibration" if self.sure else "macro_f1"

    def _right(self, example: Example, completion: str) -> bool:
        return self.read(completion)[0] == example.answer

    def _whole(self, examples: Sequence[Example], completions: Sequence[str]) -> tuple[Any, Sums]:
        """Return the measure that leads, as a function of sums over examples, and the summands."""
        answers = [self.read(text) for text in completions]
        wanted = [example.answer for example in examples]
        if self.sure:
            return find_calibration, count_bins(answers, wanted)
        return find_macro_f1, count_topics([topic for topic, _ in answers], wanted)


SPLITS = ("train", "test")


def count_topics(answers: Sequence[str], wanted: Sequence[str]) -> Sums:
    """Return per example, and per topic, whether it was rightly answered, answered, and wanted."""
    said = np.array([[answer == topic for topic in TOPICS] for answer in answers], dtype=float)
    true = np.array([[one == topic for topic in TOPICS] for one in wanted], dtype=float)
    return np.concatenate([said * true, said, true], axis=1)


def find_macro_f1(sums: Sums) -> Sums:
    """Return the mean of F1 over the topics that are answered or wanted, in percent."""
    both, said, true = np.split(sums, 3, axis=1)
    there = said + true > 0
    f1 = np.divide(2 * both, said + true, out=np.zeros_like(both), where=there)
    return 100 * f1.sum(1) / there.sum(1)


def count_bins(answers: Sequence[tuple[str, float]], wanted: Sequence[str]) -> Sums:
    """Return per example, and per step of how sure an answer is, how sure less how right."""
    table = np.zeros((len(answers), 12))
    table[:, -1] = 1
    for row, ((topic, sure), one) in enumerate(zip(answers, wanted, strict=True)):
        table[row, int(sure * 10)] = sure - (topic == one)
    return table


def find_calibration(sums: Sums) -> Sums:
    """Return 100 less the expected calibration error in percent."""
    return 100 - 100 * np.abs(sums[:, :-1]).sum(1) / sums[:, -1]
