"""Countdown: reach a target from a few numbers with + - * / and parentheses.

Many expressions are right, and each is checked in microseconds, so the task suits every algorithm.
Reaching the target takes search, so a model can write valid expressions and still have everything
to learn. A completion is read by `common.tasks.safe_arithmetic`, never run. Problems are made here
from seeded random expressions, and so are solvable, or are read from JSON Lines.
"""

import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Annotated, Any

from annotated_types import Ge, Le

from common.config import ConfigError, Count, Nonnegative, Share, Whole, holds
from common.task import Example
from common.tasks import (
    SPLIT_SEED,
    Arithmetic,
    Chat,
    Incomplete,
    IncompleteError,
    Reading,
    Row,
    Weighted,
    evaluate,
    percent,
    safe_arithmetic,
    tagged,
)

DIGITS, LONGEST = safe_arithmetic.DIGITS, safe_arithmetic.LONGEST  # of a number; of a text

MOST_NUMBERS = 10  # of a problem; their expression must stay shorter than what the evaluator takes
SEARCHED = 5  # numbers of a problem that is solved by search; 6 take a hundred times as long
_TRIES = 20_000  # in a row without a new problem: there are no more


@dataclass(kw_only=True, eq=False)
class Countdown(Weighted):
    """The task, with the settings of conf/task/countdown.yaml.

    No two rows have the same numbers and target. `answer` is one of the right expressions, or "" if
    the data has none.
    """

    name = "countdown"
    repeatable = True
    generated = ("problems", "numbers", "largest_number", "largest_target")
    of_files = ("columns", "format")
    held_out = "test_problems"

    path: str | None
    test_path: str | None
    numbers_field: str
    target_field: str
    solution_field: str | None
    columns: list[str] | None
    format: dict[str, Any]
    incomplete: Incomplete
    problems: Annotated[Whole, Ge(2)]
    test_problems: Count
    numbers: Annotated[Whole, Ge(2), Le(MOST_NUMBERS)]
    largest_number: Annotated[Whole, Ge(2), Le(10**6)]
    largest_target: Annotated[Whole, Ge(2), Le(10**6)]
    use_all: bool
    template: Annotated[str, holds("{numbers}", "{target}")]
    chat: Chat = "auto"
    system: str = ""
    weights: dict[str, Nonnegative]
    share_right: Share

    def __post_init__(self) -> None:
        if self.path is None and self.solution_field is not None:
            raise ConfigError(
                f"task.solution_field={self.solution_field!r} has no effect without task.path. Give"
                " it too."
            )
        self.check_system()
        self.reading = Reading(self.columns, self.format, self.incomplete)
        self.weigh(right=self._right, numbers=self._numbers, valid=self._valid, close=self._close)
        self.fill(self._generate, self._read, self.problems, self.test_problems, _key)

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return a right expression with probability task.share_right, else one of the same numbers
        with another value; always the latter for a row without a solution and with more than
        SEARCHED numbers.
        """
        numbers, target = example.extra["numbers"], example.extra["target"]
        if draw.random() < self.share_right:
            right = example.answer or solve(numbers, target, use_all=self.use_all)
            if right is not None:
                return example.question, f" {right}"
        # ends: a plus of two numbers has another value than their minus
        while True:
            value, text = _random_expression(numbers, draw)
            if value != target:
                return example.question, f" {text}"

    def solution(self, example: Example) -> str | None:
        """Return a right expression; None if there is none."""
        numbers, target = example.extra["numbers"], example.extra["target"]
        right = example.answer or solve(numbers, target, use_all=self.use_all)
        return f" {right}" if right and not self.converses else right

    def answer(self, completion: str) -> str | None:
        """Return the expression as written."""
        return expression(completion) or None

    def path_key(self, completion: str) -> str:
        """Return the expression without spaces: in this task the path is the answer."""
        return "".join(expression(completion).split())

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return percentages of completions: solved; with a value; with the right numbers; with an
        answer.
        """
        return {
            "solved": percent(self._right(examples, completions)),
            "valid": percent(self._valid(examples, completions)),
            "numbers": percent(self._numbers(examples, completions)),
            "answered": percent(bool(expression(text)) for text in completions),
        }

    def _make(self, numbers: Sequence[int], target: int, solution: str) -> Example:
        """Return a row; its id is not set yet."""
        text = self.template.replace("{numbers}", " ".join(map(str, numbers)))
        extra = {"numbers": tuple(numbers), "target": target}
        return Example(0, text.replace("{target}", str(target)), solution, extra)

    # --- components: (examples, completions) -> scores in [0, 1]

    def _right(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [
            float(self._fits(e, expression) and expression.value == e.extra["target"])
            for e, expression in self._read_all(examples, completions)
        ]

    def _numbers(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [
            float(self._fits(e, expression))
            for e, expression in self._read_all(examples, completions)
        ]

    @staticmethod
    def _valid(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [float(evaluate(expression(text)).value is not None) for text in completions]

    def _close(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Return 1 at the target, 1/2 at twice the target, and 0 without the right numbers."""
        scores = []
        for example, expression in self._read_all(examples, completions):
            score = 0.0
            if self._fits(example, expression):
                assert expression.value is not None
                scale = max(1, abs(example.extra["target"]))
                score = float(scale / (scale + abs(expression.value - example.extra["target"])))
            scores.append(score)
        return scores

    def _fits(self, example: Example, found: Arithmetic) -> bool:
        return found.value is not None and self._uses(found.numbers, example.extra["numbers"])

    def _uses(self, used: Sequence[int], given: Sequence[int]) -> bool:
        if self.use_all:
            return Counter(used) == Counter(given)
        return bool(used) and Counter(used) <= Counter(given)

    @staticmethod
    def _read_all(
        examples: Sequence[Example], completions: Sequence[str]
    ) -> Iterator[tuple[Example, Arithmetic]]:
        for example, text in zip(examples, completions, strict=True):
            yield example, evaluate(expression(text))

    # --- problems

    def _generate(self, count: int) -> list[Example]:
        """Return distinct solvable problems, each with the expression that made it."""
        sizes = f"{self.numbers} {self.largest_number} {self.largest_target}"
        draw = random.Random(f"countdown {SPLIT_SEED} {sizes}")
        rows: dict[Any, Example] = {}
        failures = 0
        while len(rows) < count:
            numbers = [draw.randint(1, self.largest_number) for _ in range(self.numbers)]
            value, text = _random_expression(numbers, draw)
            row = self._make(numbers, int(value), text)
            # a text longer than the evaluator takes would not be right
            fits = 1 <= value <= self.largest_target and len(text) <= LONGEST
            if fits and _key(row) not in rows:
                rows[_key(row)], failures = row, 0
            else:
                failures += 1
            if failures == _TRIES:
                raise ConfigError(
                    f"task.problems and task.test_problems ask for {count} problems, but only"
                    f" {len(rows)} different ones were found with task.numbers={self.numbers},"
                    f" task.largest_number={self.largest_number} and"
                    f" task.largest_target={self.largest_target}. Ask for fewer, or raise these."
                )
        return list(rows.values())

    def _read(self, path: str, key: str) -> list[Example]:
        """Return the rows of a file or a folder. Raises: ConfigError with file and line."""
        return self.reading.convert(self.reading.rows(path, key), self._example)

    def _example(self, row: Row) -> Example:
        numbers = _as_numbers(row.get(self.numbers_field, "task.numbers_field"))
        if (
            not isinstance(numbers, list)
            or not 2 <= len(numbers) <= MOST_NUMBERS
            or not all(_whole(number) and number >= 1 for number in numbers)
        ):
            raise _missing(numbers)(
                f"task.numbers_field={self.numbers_field!r} in {row.where} is {numbers!r:.60}."
                f" Give a list of 2 to {MOST_NUMBERS} whole numbers from 1 to {DIGITS} digits."
            )
        target = _as_number(row.get(self.target_field, "task.target_field"))
        if not _whole(target):
            raise _missing(target)(
                f"task.target_field={self.target_field!r} in {row.where} is {target!r:.60}."
                f" Give a whole number of at most {DIGITS} digits."
            )
        solution = ""
        if self.solution_field is not None:
            solution = expression(row.text(self.solution_field, "task.solution_field"))
            evaluated = evaluate(solution)
            if evaluated.value != target or not self._uses(evaluated.numbers, numbers):
                of = list(evaluated.numbers)
                problem = evaluated.problem or f"it is {evaluated.value} of {of}"
                raise ConfigError(
                    f"task.solution_field={self.solution_field!r} in {row.where} is no solution"
                    f" for {target} from {numbers}: {problem}. Fix or remove the row."
                )
        return self._make(numbers, target, solution)


def _as_numbers(value: Any) -> Any:
    """Return the list of numbers that a table's cell has as text, in the notation of lists and
    arrays: [44, 19, 35] or [44 19 35]; other values unchanged.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*[\[(]?\s*(\d{1,20}(?:[\s,;]+\d{1,20})*)\s*[\])]?\s*", value)
    return [int(number) for number in re.split(r"[\s,;]+", found[1])] if found else value


def _as_number(value: Any) -> Any:
    """Return the whole number that a cell has as text; other values unchanged."""
    written = isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,20}\s*", value)
    return int(value) if written else value


def _missing(value: Any) -> type[ConfigError]:
    return IncompleteError if value is None or value == "" else ConfigError


def expression(completion: str) -> str:
    """Return the text of a completion's answer; "" if there is none.

    It is the text between the last <answer> and </answer>, else the first line that is not blank.
    The part from an equals sign on is dropped if it is numbers only: "7*3+12 = 33".
    """
    inside = tagged(completion)
    if inside is None:
        inside = completion.lstrip()[: 2 * LONGEST].split("\n", 1)[0]
    text = inside.strip()
    if len(text) > 2 * LONGEST:
        return text  # too long for an expression, whatever it says
    first, *rest = text.split("=")
    if all(part.strip(" .!").lstrip("-−").replace(".", "", 1).isdecimal() for part in rest):
        return first.strip(" .!")
    return text


@lru_cache(maxsize=100_000)
def solve(numbers: tuple[int, ...], target: int, *, use_all: bool) -> str | None:
    """Search for an expression of `numbers` with the value `target`; None if there is none, or more
    than SEARCHED numbers.
    """
    if len(numbers) > SEARCHED:
        return None
    return _search([_leaf(number) for number in numbers], target, use_all)


# --- making expressions

# (value, text, how tightly its outermost operator binds: 1 for + and -, 2 for * and /, 3 for a
# number)
_Term = tuple[Fraction, str, int]
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2}
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _leaf(number: int) -> _Term:
    return Fraction(number), str(number), 3


def _join(left: _Term, sign: str, right: _Term) -> _Term:
    """Return `left sign right` with no more parentheses than needed. Sums and products start with
    their larger half.

    One spelling for operands that commute makes the rule easier to learn for a tiny model. A
    divisor must not be 0.
    """
    if sign in "+*" and left[0] < right[0]:
        left, right = right, left
    binds = _BINDS[sign]
    first = left[1] if left[2] >= binds else f"({left[1]})"
    tight = binds if sign in "+*" else binds + 1  # a-(b-c), a/(b*c)
    second = right[1] if right[2] >= tight else f"({right[1]})"
    return _COMPUTE[sign](left[0], right[0]), f"{first}{sign}{second}", binds


def _random_expression(numbers: Sequence[int], draw: random.Random) -> tuple[Fraction, str]:
    """Join the numbers two at a time at random, each once. No step divides with a remainder or goes
    below 0, so all steps are whole numbers from 0 up, as in the television game.
    """
    terms = [_leaf(number) for number in numbers]
    while len(terms) > 1:
        left, right = (terms.pop(draw.randrange(len(terms))) for _ in range(2))
        if left[0] < right[0]:
            left, right = right, left
        whole = right[0] != 0 and left[0] % right[0] == 0
        sign = draw.choice("+-*/" if whole else "+-*")
        terms.append(_join(left, sign, right))
    return terms[0][:2]


def _search(terms: list[_Term], target: int, use_all: bool) -> str | None:
    """Search depth first over all ways to join two of the terms."""
    if len(terms) == 1 or not use_all:
        for value, text, _ in terms:
            if value == target:
                return text
    for i, j in combinations(range(len(terms)), 2):
        rest = terms[:i] + terms[i + 1 : j] + terms[j + 1 :]
        one, other = terms[i], terms[j]
        for left, sign, right in (
            (one, "+", other),
            (one, "*", other),
            (one, "-", other),
            (other, "-", one),
            (one, "/", other),
            (other, "/", one),
        ):
            if sign == "/" and right[0] == 0:
                continue
            solution = _search([_join(left, sign, right), *rest], target, use_all)
            if solution is not None:
                return solution
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**DIGITS


def _key(row: Example) -> tuple[tuple[int, ...], int]:
    """Return a key that does not depend on the order of a problem's numbers."""
    return tuple(sorted(row.extra["numbers"])), row.extra["target"]
