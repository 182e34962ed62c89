"""The table of numbers (numbers.jsonl): what is read in answers and completions."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from common.tasks import numbers
from tests.support import ROOT

LINES = (Path(__file__).parent / "numbers.jsonl").read_text(encoding="utf-8").splitlines()
TABLE = [json.loads(line) for line in LINES]
# How answers stand behind a mark, and in a sentence.
MARKED = ("#### {}", "So it is\n#### {}\n", "\\boxed{{{}}}", "$\\boxed{{{}}}$ as said")
SPOKEN = ("The answer is {}.", "The answer is: {}", "Answer: {}", "x = {}", "{}")


def find(completion: str) -> Fraction | None:
    answer = numbers.find_answer(completion)
    return None if answer is None else numbers.read(answer)


def parts(kind: str) -> list[tuple[str, Fraction | None]]:
    rows = [row for row in TABLE if row["kind"] == kind]
    return [(r["text"], None if r["value"] is None else Fraction(r["value"])) for r in rows]


def test_the_table_is_large_and_half_of_it_is_real():
    real = [row for row in TABLE if row["like"] != "form"]
    assert len(TABLE) >= 150
    assert len(real) >= 150


@pytest.mark.parametrize(("text", "value"), parts("answer"))
def test_an_answer_is_one_number_or_none(text, value):
    assert numbers.read(text) == value


@pytest.mark.parametrize(("text", "value"), parts("answer"))
def test_an_answer_behind_a_mark_is_read_as_it_is(text, value):
    for form in MARKED:
        completion = form.format(text)
        assert find(completion) == value, completion


@pytest.mark.parametrize(("text", "value"), parts("answer"))
def test_an_answer_in_a_sentence_is_never_another_number(text, value):
    """It may be none: what stands alone is harder to tell in a sentence."""
    if text.endswith("!"):
        return  # no factorial, where a sentence ends so
    forms = SPOKEN if "=" not in text else [form for form in SPOKEN if "=" not in form]
    found = {form: find(form.format(text)) for form in forms}
    assert set(found.values()) <= {value, None}, found


@pytest.mark.parametrize(("text", "value"), parts("completion"))
def test_the_number_of_a_completion(text, value):
    tagged = text.replace("<answer>", "").replace("</answer>", "")
    assert find(tagged) == value


def test_the_table_of_the_docs_is_true():
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+`) \| (none|-?[0-9./]+)(?:\W.*)?\|$", page, re.MULTILINE)
    assert len(rows) > 15
    for texts, value in rows:
        wanted = None if value == "none" else Fraction(value)
        for text in texts.strip("`").split("` · `"):
            for form in ("{}", "#### {}", "The answer is {}."):
                if not text.endswith("!") or form == "#### {}":
                    assert find(form.format(text)) == wanted, form.format(text)


@pytest.mark.parametrize("number", ["-31", "- 31", "−31", "$- 31$", "\\(- 31\\)"])
def test_a_minus_is_read_in_all_usual_wordings(number):
    wordings = ("The answer is {}.", "The answer is: {}", "Answer: {}", "**{}**", "x = {}", "{}")
    wordings += ("Therefore x = {}.", "The final answer is {}", "so it is {}", "#### {}")
    wordings += ("\\boxed{{{}}}", "we get x = {}", "The result equals {}.", "The value is {} .")
    assert {w: find(w.format(number)) for w in wordings} == dict.fromkeys(wordings, Fraction(-31))
