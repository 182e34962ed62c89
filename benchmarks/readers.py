"""Readers of answers, on long repetitive texts: time should grow linearly with the text.

    python -m benchmarks readers --json readers.json

A model that repeats itself writes "0.(0.(0.(" or a thousand brackets. Each reader gets texts of
10,000 and of 40,000 characters that repeat parts of numbers, formulas and tags. Reported per
reader: the slowest of the short texts, and the factor by which four times the characters take
longer: 4 for linear time, 16 for quadratic time.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import Report, progress
from common.tasks import answers, equality, numbers, safe_arithmetic, similarity

LENGTH, TIMES, SLOWEST = 10_000, 4, 5
SECONDS = 0.05  # wanted: no text of LENGTH takes longer
PARTS = (
    *("7", "0.", "1,", "1 ", "1/", "10^", "e5", "a", "x", "é", "中", "the ", "kg ", "\u0305", "½"),
    *(" ", "\t", "\n", "\r\n", "\N{NO-BREAK SPACE}", ".", ",", ";", ":", "!", "?", "'", '"', "`"),
    *("-", "−", "+", "*", "**", "/", "^", "_", "=", "<", ">", "|", "~", "%", "#", "$", "\\", "&"),
    *("(", ")", "[", "]", "{", "}", "\\{", "{,}", "\\frac", "\\boxed{", "\\text{", "\\sqrt{"),
    *("####", "<answer>", "</answer>", "<|", "<<", "- ", " or ", "× 10^", "\\,", "8/8/", "<b>"),
)
READERS: dict[str, Callable[[str], Any]] = {
    "find_answer": numbers.find_answer,
    "find_alone": numbers.find_alone,
    "read": numbers.read,
    "is_unread": lambda text: numbers.is_unread(text, None),
    "normalize": equality.normalize,
    "comparable": equality.comparable,
    "tagged": answers.tagged,
    "path_key": answers.path_key,
    "evaluate": safe_arithmetic.evaluate,
    **{
        name: lambda text, one=one: one(text, "two words and more")
        for name, one in similarity.SIMILARITIES.items()
    },
}


def long_texts(length: int) -> list[str]:
    """Return texts of about `length` characters: one part repeated, two that alternate, and a draw
    of three; the single parts also with a number before and after, and in tags.
    """
    draw = random.Random(0)
    pairs = draw.sample(list(itertools.permutations(PARTS, 2)), 50)
    triples = [tuple(draw.sample(PARTS, 3)) for _ in range(20)]
    repeated = ["".join(parts) for parts in [*((one,) for one in PARTS), *pairs, *triples]]
    long = [(part * (length // len(part) + 1))[:length] for part in repeated]
    around = [f"7{text}7" for text in long[: len(PARTS)]]
    tagged = [f"<answer>{text}</answer>" for text in long[: len(PARTS)]]
    boxed = [f"\\boxed{{{part * (length // 100)}}}" for part in PARTS]
    return [*long, *around, *tagged, *boxed]


def run(options: argparse.Namespace) -> Report:
    """Read every text with every reader; the slowest texts once more, and at four times the
    length.
    """
    report = Report("readers", options, 3)
    length = LENGTH // 10 if options.quick else LENGTH
    short, long = long_texts(length), long_texts(TIMES * length)
    report.conditions["sizes"] = {"characters": length, "texts": len(short), "times": TIMES}
    worst = 0.0
    for name, reader in READERS.items():
        progress(name)
        first = [spend(reader, text, 1) for text in short]
        slowest = sorted(range(len(short)), key=lambda n: -first[n])[:SLOWEST]
        again = {n: spend(reader, short[n], report.repeats) for n in slowest}
        growth = max(spend(reader, long[n], report.repeats) / again[n] for n in slowest)
        worst = max(worst, *again.values())
        report.add(name, 1000 * max(again.values()), "ms")
        report.add(name, growth, "times as long")
    progress("")
    report.figures.append(("the slowest text", f"< {1000 * SECONDS:.0f} ms", f"{1000 * worst:.1f}"))
    report.notes.append(
        f"ms: the slowest of {len(short)} texts of {length:,} characters; times as long: with"
        f" {TIMES} times the characters, the largest of the {SLOWEST} slowest texts."
    )
    return report


def spend(reader: Callable[[str], Any], text: str, repeats: int) -> float:
    """Return the processor seconds that a text takes, the minimum of `repeats` tries."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        reader(text)
        taken.append(time.process_time() - started)
    return max(min(taken), 1e-9)
