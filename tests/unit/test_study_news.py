"""The measures of benchmarks/study/news.py, beside naive loops."""

import gzip
import json
import random

import pytest

from benchmarks.study.news import TOPICS, News
from common.config import ConfigError

SETTINGS = {"characters": 20, "rare": "Science", "share": 0.1, "share_right": 0.4}


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 400), ("test", 200)):
        with gzip.open(tmp_path / f"{split}.jsonl.gz", "wt") as file:
            for row in range(count):
                file.write(json.dumps({"text": f"{split} {row}", "label": row % 4}) + "\n")
    return str(tmp_path)


def naive_f1(wanted, texts, topic):
    both = sum(w == t == topic for w, t in zip(wanted, texts, strict=True))
    precision, recall = both / texts.count(topic), both / wanted.count(topic)
    return 2 * precision * recall / (precision + recall)


def test_macro_f1_is_that_of_a_naive_loop(folder):
    task = News(folder, **SETTINGS, leading="macro_f1", reward="right")
    examples, draw = task.examples("test"), random.Random(0)
    assert sum(example.answer == "Science" for example in examples) == round(0.1 / 0.9 * 150)
    texts = [draw.choice([example.answer, *TOPICS]) for example in examples]
    found = task.metrics(examples, [f"{text} 5" for text in texts])["macro_f1"]
    wanted = [example.answer for example in examples]
    assert found == pytest.approx(25 * sum(naive_f1(wanted, texts, one) for one in TOPICS))
    scores = task.scores(examples, [f"{text} 5" for text in texts])["macro_f1"]
    assert sum(scores) / len(scores) == pytest.approx(found)


def test_calibration_is_that_of_a_naive_loop(folder):
    task = News(folder, **SETTINGS, leading="calibration", reward="brier")
    examples, draw = task.examples("test"), random.Random(0)
    texts = [f"{draw.choice(TOPICS)} {draw.randrange(10)}" for _ in examples]
    texts[3] = "no idea"  # counts as a wrong answer that is sure
    bins, brier = {}, 0.0
    for example, text in zip(examples, texts, strict=True):
        topic, _, digit = text.partition(" ")
        sure = 1.0 if text == "no idea" else (int(digit) + 0.5) / 10
        bins.setdefault(sure, []).append(sure - (topic == example.answer))
        brier += (sure - (topic == example.answer)) ** 2
    error = sum(abs(sum(gaps)) for gaps in bins.values()) / len(texts)
    found = task.metrics(examples, texts)
    assert found["calibration"] == pytest.approx(100 - 100 * error)
    assert found["brier"] == pytest.approx(100 - 100 * brier / len(texts))
    rewards = task.rewards(examples, texts)
    assert sum(rewards) / len(rewards) == pytest.approx(found["brier"] / 100)


def test_settings_that_cannot_be_are_refused(folder):
    with pytest.raises(ConfigError, match=r"task\.rare=Cooking"):
        News(folder, **(SETTINGS | {"rare": "Cooking"}), leading="macro_f1", reward="right")
