"""AG News as text, for measures.yaml: the model writes the topic, of which one is rare, and how
sure it is. The held-out measure that leads is of all answers together: macro-F1, or calibration.
"""

import random
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.config import ConfigError
from common.task import Example
from common.tasks import SPLIT_SEED, Rows, percent, read_rows
from common.uncertainty import contributions

TOPICS = ("World", "Sports", "Business", "Science")
SPLITS = ("train", "test")
REWARDS = ("right", "brier")
LEADING = ("macro_f1", "calibration")
_SURE = re.compile(r"(\w+) ([0-9])")

Sums = NDArray[np.float64]


class News(Rows):
    """Topics of news.

    Args:
        path: the folder with AG News, train.jsonl.gz and test.jsonl.gz.
        characters: how many of a text stand in its prompt.
        rare: the topic that is cut, and share: its share of the rows.
        share_right: the share of right topics in pre-training; the others are those of other rows.
        leading: the measure that leads: macro_f1, or calibration = 100 less the expected error.
        reward: right = 1 for the right topic; brier = 1 less the squared error of how sure it is.
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
        leading: str,
        reward: str,
    ) -> None:
        known = {"rare": (rare, TOPICS), "reward": (reward, REWARDS), "leading": (leading, LEADING)}
        for key, (value, choices) in known.items():
            if value not in choices:
                raise ConfigError(f"task.{key}={value}: choose one of {', '.join(choices)}.")
        if path is None:
            raise ConfigError("task.path is not set. Give the folder of AG News.")
        self.characters, self.share_right = characters, share_right
        self.rewarded, self.leading = reward, leading
        train, test = (self._read(f"{path}/{split}.jsonl.gz", rare, share) for split in SPLITS)
        self.split("task.path", train, test, 0)

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
        return self.prompt(example), f"{topic} {draw.choice('56789999')}"

    def read(self, completion: str) -> tuple[str, float]:
        """Return the topic of an answer and how sure it is: no topic, and sure, if it does not
        say.
        """
        found = _SURE.fullmatch(completion.strip())
        return (found[1], (int(found[2]) + 0.5) / 10) if found else ("", 1.0)

    def reward(self, example: Example, completion: str) -> float:
        """Return the score of an answer by task.reward."""
        topic, sure = self.read(completion)
        right = float(topic == example.answer)
        return right if self.rewarded == "right" else 1 - (sure - right) ** 2

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return the measure that leads, the other one, 100 less the Brier score, and the
        percentage of right topics.
        """
        answers = [self.read(text) for text in completions]
        pairs = zip(examples, answers, strict=True)
        right = [topic == example.answer for example, (topic, _) in pairs]
        found: dict[str, float] = {}
        for name in sorted(LEADING, key=lambda name: name != self.leading):
            measure, sums = summands(name, examples, answers)
            found[name] = float(measure(sums.sum(0, keepdims=True))[0])
        found["brier"] = percent(
            1 - (sure - one) ** 2 for one, (_, sure) in zip(right, answers, strict=True)
        )
        return found | {"accuracy": percent(right)}

    def scores(
        self, examples: Sequence[Example], completions: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return the contributions of the examples to the measures that are no means."""
        answers = [self.read(text) for text in completions]
        found = {name: summands(name, examples, answers) for name in LEADING}
        return {name: contributions(sums, measure)[1] for name, (measure, sums) in found.items()}


def summands(
    name: str, examples: Sequence[Example], answers: Sequence[tuple[str, float]]
) -> tuple[Callable[[Sums], Sums], Sums]:
    """Return a measure as a function of sums over examples, and their summands."""
    wanted = [example.answer for example in examples]
    if name == "calibration":
        return find_calibration, count_bins(answers, wanted)
    return find_macro_f1, count_topics([topic for topic, _ in answers], wanted)


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
