"""Countdown: reach a target from a few numbers with + - * / and parentheses.

Many expressions are right and each is checked in microseconds, so the task suits every algorithm;
reaching the target takes search, so a model can be good at writing expressions and still have all
to learn. A completion is read by `common.tasks.safe_arithmetic`, never run. Problems are made here
from seeded random expressions, hence solvable, or read from JSON Lines.
"""

import operator
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from common.config import ConfigError, at_least, holds, share
from common.tasks import Example
from common.tasks.answers import tagged
from common.tasks.components import chosen, weighted
from common.tasks.data import Row, read_jsonl
from common.tasks.safe_arithmetic import DIGITS, LONGEST, Arithmetic, evaluate
from common.tasks.splits import SPLIT_SEED, check_needs_path, split_rows

MOST_NUMBERS = 10  # of a problem; their expression must stay shorter than what the evaluator takes
SEARCHED = (
    5  # numbers of a problem that is solved by search; one more takes about a hundred times as long
)
_TRIES = 20_000  # in a row without a new problem: there are no more

# (numbers, target, solution or ""); numbers in the order of the prompt
_Problem = tuple[tuple[int, ...], int, str]


class Countdown:
    """The task.

    Args: as in conf/task/countdown.yaml. `weights` by component: right, numbers, valid, close.
    Raises: ConfigError for settings that cannot work and for data that is missing or broken.
    """

    name = "countdown"

    # Settings come from YAML by keyword.
    def __init__(  # noqa: PLR0913
        self,
        *,
        path: str | None,
        test_path: str | None,
        numbers_field: str,
        target_field: str,
        solution_field: str | None,
        problems: int,
        test_problems: int,
        numbers: int,
        largest_number: int,
        largest_target: int,
        use_all: bool,
        template: str,
        weights: dict[str, float],
        share_right: float,
    ) -> None:
        at_least("task.problems", problems, 2)
        at_least("task.test_problems", test_problems, 1)
        for key, value, most in (
            ("numbers", numbers, MOST_NUMBERS),
            ("largest_number", largest_number, 10**6),
            ("largest_target", largest_target, 10**6),
        ):
            at_least(f"task.{key}", value, 2)
            if value > most:
                raise ConfigError(
                    f"task.{key}={value} is too large. Give a value of at most {most}."
                )
        check_needs_path(path, test_path=test_path, solution_field=solution_field)
        share("task.share_right", share_right)
        holds("task.template", template, ("{numbers}", "{target}"), "{numbers} -> {target} =>")
        known = {
            "right": self._right,
            "numbers": self._numbers,
            "valid": self._valid,
            "close": self._close,
        }
        self.components = chosen(known, weights)
        self.weights, self.template = weights, template
        self.share_right, self.use_all = share_right, use_all
        if path is None:
            rows = _generated(problems + test_problems, numbers, largest_number, largest_target)
            test, train = rows[:test_problems], rows[test_problems:]
        else:
            fields = (numbers_field, target_field, solution_field)
            train = _distinct(_read(path, "task.path", fields, use_all))
            held = _read(test_path, "task.test_path", fields, use_all) if test_path else ()
            test = _distinct(held)
        train, test, _ = split_rows(path, train, test, test_problems, _key)
        self._splits = {
            name: [
                Example(i, self._question(of, target), solution, {"numbers": of, "target": target})
                for i, (of, target, solution) in enumerate(rows)
            ]
            for name, rows in (("train", train), ("test", test))
        }

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of `split`, "train" or "test". No two rows, of one split or both, have the same
        numbers and target.

        `answer` is one right expression of the many, or "" where the data gives none.
        """
        return self._splits[split]

    def prompt(self, example: Example) -> str:
        """Numbers and target in the template."""
        return example.question

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """A right expression with probability task.share_right, else one of the same numbers with
        another value.

        A row whose solution is neither given nor found by search (it has more than 5 numbers) shows
        a wrong one always.
        """
        numbers, target = example.extra["numbers"], example.extra["target"]
        if draw.random() < self.share_right:
            right = example.answer or solve(numbers, target, use_all=self.use_all)
            if right is not None:
                return example.question, f" {right}"
        # ends: the numbers are 1 and more, so a plus of two of them has another value than their
        # minus
        while True:
            value, text = _random_expression(numbers, draw)
            if value != target:
                return example.question, f" {text}"

    def reward(self, example: Example, completion: str) -> float:
        """Weighted mean of the components, in [0, 1]."""
        return self.rewards([example], [completion])[0]

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """`reward` of each completion, in one pass."""
        return weighted(
            {name: one(examples, completions) for name, one in self.components.items()},
            self.weights,
        )

    def answer(self, completion: str) -> str | None:
        """The expression as written; None if there is none."""
        return expression(completion) or None

    def path_key(self, completion: str) -> str:
        """The expression without its spaces: here the way is the answer."""
        return "".join(expression(completion).split())

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Percent: solved first; expressions that have a value; the right numbers used; something
        given as an answer.
        """
        return {
            "solved": _percent(self._right(examples, completions)),
            "valid": _percent(self._valid(examples, completions)),
            "numbers": _percent(self._numbers(examples, completions)),
            "answered": _percent([float(bool(expression(text))) for text in completions]),
        }

    def _question(self, numbers: Sequence[int], target: int) -> str:
        text = " ".join(str(number) for number in numbers)
        return self.template.replace("{numbers}", text).replace("{target}", str(target))

    # --- components: (examples, completions) -> scores in [0, 1]

    def _right(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """The value is the target, and the numbers are those given."""
        return [
            float(self._fits(e, found) and found.value == e.extra["target"])
            for e, found in self._read_all(examples, completions)
        ]

    def _numbers(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """The numbers are those given, each once (task.use_all), or each at most once."""
        return [float(self._fits(e, found)) for e, found in self._read_all(examples, completions)]

    @staticmethod
    def _valid(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """It is an expression that has a value."""
        return [float(evaluate(expression(text)).value is not None) for text in completions]

    def _close(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """With the right numbers: |target| / (|target| + distance), so 1 at the target and 1/2 at
        twice it; else 0.
        """
        scores = []
        for example, found in self._read_all(examples, completions):
            score = 0.0
            if self._fits(example, found):
                assert found.value is not None
                scale = max(1, abs(example.extra["target"]))
                score = float(scale / (scale + abs(found.value - example.extra["target"])))
            scores.append(score)
        return scores

    def _fits(self, example: Example, found: Arithmetic) -> bool:
        return found.value is not None and _uses(
            found.numbers, example.extra["numbers"], self.use_all
        )

    @staticmethod
    def _read_all(
        examples: Sequence[Example], completions: Sequence[str]
    ) -> Iterator[tuple[Example, Arithmetic]]:
        for example, text in zip(examples, completions, strict=True):
            yield example, evaluate(expression(text))


def expression(completion: str) -> str:
    """The text that a completion gives as its answer; "" if none.

    It stands between the last <answer> and </answer> if they are there, else on the first line that
    is not blank. What follows an equals sign is dropped if it is numbers only: "7*3+12 = 33".
    """
    inside = tagged(completion)
    text = (
        completion.lstrip()[: 2 * LONGEST].split("\n", 1)[0] if inside is None else inside
    ).strip()
    if len(text) > 2 * LONGEST:
        return text  # too long for an expression, whatever it says
    first, *rest = text.split("=")
    return (
        first.strip()
        if all(part.strip(" .").lstrip("-−").replace(".", "", 1).isdecimal() for part in rest)
        else text
    )


def solve(numbers: tuple[int, ...], target: int, *, use_all: bool) -> str | None:
    """An expression of `numbers` with the value `target`, by search; None if there is none or over
    5 numbers.
    """
    return _solved(numbers, target, use_all) if len(numbers) <= SEARCHED else None


@lru_cache(maxsize=100_000)
def _solved(numbers: tuple[int, ...], target: int, use_all: bool) -> str | None:
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
    """`left sign right` with no more parentheses than needed; sums and products start with their
    larger half.

    One spelling for what commutes makes the rule easier to learn for a tiny model. A divisor must
    not be 0.
    """
    if sign in "+*" and left[0] < right[0]:
        left, right = right, left
    binds = _BINDS[sign]
    first = left[1] if left[2] >= binds else f"({left[1]})"
    tight = binds if sign in "+*" else binds + 1  # a-(b-c), a/(b*c)
    second = right[1] if right[2] >= tight else f"({right[1]})"
    return _COMPUTE[sign](left[0], right[0]), f"{first}{sign}{second}", binds


def _random_expression(numbers: Sequence[int], draw: random.Random) -> tuple[Fraction, str]:
    """Each number once, joined two at a time at random. No step divides with a remainder or goes
    below 0.

    So all steps are whole numbers from 0 up, as in the television game.
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
    """Depth first over all ways to join two of the terms."""
    if len(terms) == 1 or not use_all:
        for value, text, _ in terms:
            if value == target:
                return text
    for i in range(len(terms)):
        for j in range(i + 1, len(terms)):
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
                found = _search([_join(left, sign, right), *rest], target, use_all)
                if found is not None:
                    return found
    return None


def _generated(
    count: int, numbers: int, largest_number: int, largest_target: int
) -> list[_Problem]:
    """Distinct solvable problems in random order; the expression that made each is its solution."""
    draw = random.Random(f"countdown {SPLIT_SEED} {numbers} {largest_number} {largest_target}")
    found: dict[Any, _Problem] = {}
    failures = 0
    while len(found) < count:
        given = tuple(draw.randint(1, largest_number) for _ in range(numbers))
        value, text = _random_expression(given, draw)
        row = (given, int(value), text)
        # a text longer than the evaluator takes would not be right
        if 1 <= value <= largest_target and len(text) <= LONGEST and _key(row) not in found:
            found[_key(row)] = row
            failures = 0
        else:
            failures += 1
        if failures == _TRIES:
            raise ConfigError(
                f"task.problems and task.test_problems ask for {count} problems, but only"
                f" {len(found)} different ones were found with task.numbers={numbers},"
                f" task.largest_number={largest_number} and task.largest_target={largest_target}."
                " Ask for fewer, or raise one of these."
            )
    return list(found.values())


# --- reading problems


def _read(
    path: str, key: str, fields: tuple[str, str, str | None], use_all: bool
) -> Iterator[_Problem]:
    """Rows of a .jsonl file, plain or .gz. Raises: ConfigError with file and line."""
    for row in read_jsonl(path, key):
        numbers = _field(row, fields[0], "task.numbers_field")
        if (
            not isinstance(numbers, list)
            or not 2 <= len(numbers) <= MOST_NUMBERS
            or not all(_whole(number) and number >= 1 for number in numbers)
        ):
            raise ConfigError(
                f"task.numbers_field={fields[0]!r} in {row.where} is {numbers!r:.60}. "
                f"Give a list of 2 to {MOST_NUMBERS} whole numbers from 1 to {DIGITS} digits."
            )
        target = _field(row, fields[1], "task.target_field")
        if not _whole(target):
            raise ConfigError(
                f"task.target_field={fields[1]!r} in {row.where} is {target!r:.60}. "
                f"Give a whole number of at most {DIGITS} digits."
            )
        solution = ""
        if fields[2] is not None:
            solution = expression(row.text(fields[2], "task.solution_field"))
            found = evaluate(solution)
            if found.value != target or not _uses(found.numbers, numbers, use_all):
                problem = (
                    found.problem
                    or f"its numbers are {list(found.numbers)} and its value is {found.value}"
                )
                raise ConfigError(
                    f"task.solution_field={fields[2]!r} in {row.where} is no solution for {target}"
                    f" from {numbers}: {problem}. Mend or remove the row."
                )
        yield tuple(numbers), target, solution


def _field(row: Row, name: str, key: str) -> Any:
    if name not in row.fields:
        raise ConfigError(
            f"{key}={name!r} is not a field of {row.where}. Fields there: {', '.join(row.fields)}."
        )
    return row.fields[name]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**DIGITS


def _uses(used: Sequence[int], given: Sequence[int], use_all: bool) -> bool:
    return (
        Counter(used) == Counter(given)
        if use_all
        else bool(used) and Counter(used) <= Counter(given)
    )


def _key(row: _Problem) -> tuple[tuple[int, ...], int]:
    """The same for the same problem, however its numbers are ordered."""
    return tuple(sorted(row[0])), row[1]


def _distinct(rows: Iterable[_Problem]) -> list[_Problem]:
    found: dict[Any, _Problem] = {}
    for row in rows:
        found.setdefault(_key(row), row)
    return list(found.values())


def _percent(values: Sequence[float]) -> float:
    return 100 * sum(values) / max(1, len(values))
