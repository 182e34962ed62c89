"""Rows for which no run has been tuned: sums, weekdays and reversed words."""

import csv
import random
from collections.abc import Callable
from pathlib import Path

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = "apple bread chair dance eagle flame grape house igloo juice knife lemon mouse night ocean"


def add(draw: random.Random) -> tuple[str, str]:
    """Return a sum of two numbers."""
    left, right = draw.randrange(100), draw.randrange(100)
    return f"{left} + {right} =", str(left + right)


def count_days(draw: random.Random) -> tuple[str, str]:
    """Return a question about weekdays."""
    day, later = draw.randrange(7), draw.randrange(1, 30)
    return f"{later} days after {DAYS[day]} is", DAYS[(day + later) % 7]


def reverse(draw: random.Random) -> tuple[str, str]:
    """Return a pair of words to write backwards."""
    words = " ".join(draw.sample(WORDS.split(), 2))
    return f"{words} backwards:", words[::-1]


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": add,
    "weekdays": count_days,
    "reversed": reverse,
}


def write(folder: Path) -> None:
    """Write 400 rows of each kind, or as many as exist, as FOLDER/KIND.csv."""
    for kind, make in KINDS.items():
        draw, answers = random.Random(0), dict[str, str]()
        for _ in range(10_000):
            if len(answers) < 400:
                answers.update([make(draw)])
        with (folder / f"{kind}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("question", "answer"), *answers.items()])
