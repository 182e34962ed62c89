"""Units: convert a quantity from one unit to another, with the reasoning before the answer.

The questions are those of a course's homework on rejection sampling: "How many gram are there per 6
kg?". An answer is a number between <answer> and </answer>, right within a tolerance. Many ways of
calculating lead to it, so a model that knows some of them, and wrong ones too, has samples of its
own to learn from. Factors are exact fractions; questions are made here, or read from JSON.
"""

import math
import operator
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import chain, product
from typing import Annotated, Any

from annotated_types import Ge

from common.config import (
    ConfigError,
    Count,
    Natural,
    Nonnegative,
    Share,
    Whole,
    holds,
    one_of,
)
from common.task import Example, Messages, plain
from common.tasks.answers import MULTIPLES, SCIENTIFIC, decimal, path_key, tagged
from common.tasks.base import SPLIT_SEED, Chat, Weighted, converse, percent, tell
from common.tasks.checked import is_finite
from common.tasks.data import Reading

LONGEST = 200  # characters between the tags
# A number followed by the name of a unit, which begins with a letter and has no digits except the
# powers in m^2 and cm3. Words that are numbers and the x of a product are no units.
_ANSWER = re.compile(
    rf"\s*[=≈~]?\s*([-+−]?)\s*({SCIENTIFIC})"
    rf"\s*[.,;]?\s*(?:(?![²³¹¼-¾⅐-⅟]|[xX]\s*[0-9]|k\s+[a-z]|e[0-9]\b|(?:{MULTIPLES}|times|and)\b)[°%]?[^\W\d_](?:[^0-9]|(?<=[A-Za-z^*])[23])*)?",
    re.DOTALL | re.IGNORECASE,
)

_METRE = _KILOGRAM = _LITRE = _SECOND = Fraction(1)
_HOUR = Fraction(3600)
_INCH, _POUND, _GALLON = Fraction("0.0254"), Fraction("0.45359237"), Fraction("3.785411784")
_MILE = 63360 * _INCH
_YEAR = Fraction("31556925.9747")  # the tropical year, as the homework's data has it

# By kind: names of a unit, the shortest first, and its size in the kind's base unit. Fluid measures
# are those of the US; a ton is metric, and kB is 1000 bytes, as in the homework's data.
UNITS: dict[str, dict[tuple[str, ...], Fraction]] = {
    "length": {
        ("mm", "millimeter", "millimeters"): _METRE / 1000,
        ("cm", "centimeter", "centimeters"): _METRE / 100,
        ("m", "meter", "meters", "metre", "metres"): _METRE,
        ("km", "kilometer", "kilometers"): _METRE * 1000,
        ("in", "inch", "inches"): _INCH,
        ("ft", "foot", "feet"): 12 * _INCH,
        ("yd", "yard", "yards"): 36 * _INCH,
        ("mi", "mile", "miles"): _MILE,
    },
    "mass": {
        ("mg", "milligram", "milligrams"): _KILOGRAM / 10**6,
        ("g", "gram", "grams"): _KILOGRAM / 1000,
        ("kg", "kilogram", "kilograms"): _KILOGRAM,
        ("ton", "tonne", "metric ton", "tons", "tonnes"): _KILOGRAM * 1000,
        ("ounce", "oz", "ounces"): _POUND / 16,
        ("pound", "lb", "pounds"): _POUND,
    },
    "time": {
        ("ms", "millisecond", "milliseconds"): _SECOND / 1000,
        ("s", "sec", "second", "seconds"): _SECOND,
        ("min", "minute", "minutes"): 60 * _SECOND,
        ("h", "hour", "hours"): _HOUR,
        ("day", "days"): 24 * _HOUR,
        ("week", "weeks"): 168 * _HOUR,
        ("month", "months"): _YEAR / 12,
        ("year", "years"): _YEAR,
        ("decade", "decades"): 10 * _YEAR,
        ("century", "centuries"): 100 * _YEAR,
    },
    "volume": {
        ("mm^3", "mm**3"): _LITRE / 10**6,
        ("ml", "mL", "milliliter", "millilitre", "cc", "cm^3", "cm**3"): _LITRE / 1000,
        ("l", "L", "liter", "litre", "liters", "litres"): _LITRE,
        ("m^3", "m**3"): _LITRE * 1000,
        ("fluid ounce", "ounce"): _GALLON / 128,
        ("pint", "pints"): _GALLON / 8,
        ("quart", "quarts"): _GALLON / 4,
        ("gallon", "gallons"): _GALLON,
    },
    "speed": {
        ("cm/s",): _METRE / 100,
        ("in/s",): _INCH,
        ("ft/s",): 12 * _INCH,
        ("m/s",): _METRE,
        ("km/h", "kmh"): 1000 / _HOUR,
        ("mph", "mi/h"): _MILE / _HOUR,
    },
    "data": {
        ("bit", "bits"): Fraction(1, 8),
        ("B", "byte", "bytes"): Fraction(1),
        ("kB", "KB"): Fraction(10**3),
        ("MB", "M"): Fraction(10**6),
        ("GB", "G"): Fraction(10**9),
    },
    "temperature": {
        ("C", "celsius"): Fraction(1),
        ("K", "kelvin"): Fraction(1),
        ("F", "fahrenheit"): Fraction(5, 9),
    },
}
# The value of a unit at the zero of its kind; only temperatures differ from 0.
_AT_ZERO = {"K": Fraction("273.15"), "F": Fraction(32)}


@dataclass(frozen=True)
class Unit:
    """A unit of measurement.

    Attributes:
        name: its shortest name.
        kind: its kind, such as length.
        size: its size in the kind's base unit.
        zero: its value at the zero of the base unit.
    """

    name: str
    kind: str
    size: Fraction
    zero: Fraction


_BY_KIND: dict[str, list[Unit]] = {kind: [] for kind in UNITS}
# An ounce is of mass or of volume: the other unit of the question decides.
_BY_NAME: dict[str, list[Unit]] = {}
for _kind, _units in UNITS.items():
    for _names, _size in _units.items():
        _unit = Unit(_names[0], _kind, _size, _AT_ZERO.get(_names[0], Fraction(0)))
        _BY_KIND[_kind].append(_unit)
        for _name in _names:
            _BY_NAME.setdefault(_name, []).append(_unit)

# (value, from, to)
_Quantity = tuple[Fraction, Unit, Unit]
# An operator and its right operand.
_Step = tuple[str, Fraction]


@dataclass(kw_only=True, eq=False)
class Units(Weighted):
    """The task, with the settings of conf/task/units.yaml."""

    name = "units"
    generated = (
        *("problems", "kinds", "largest_value", "largest_factor", "factor_digits"),
        *("answer_digits", "question"),
    )
    held_out = "test_problems"

    path: str | None
    test_path: str | None
    problems: Annotated[Whole, Ge(2)]
    test_problems: Count
    kinds: list[Annotated[str, one_of(*UNITS)]]
    largest_value: Count
    largest_factor: Annotated[Whole, Ge(2)]
    factor_digits: Natural
    answer_digits: Count
    question: Annotated[str, holds("{value}", "{from}", "{to}")]
    template: Annotated[str, holds("{question}")]
    chat: Chat
    system: str
    few_shot: list[dict[str, str]]
    tolerance: Share
    absolute_tolerance: Nonnegative
    weights: dict[str, Nonnegative]
    share_right: Share

    def __post_init__(self) -> None:
        for position, shot in enumerate(self.few_shot, start=1):
            if set(shot) != {"question", "answer"}:
                raise ConfigError(
                    f"task.few_shot: example {position} has the keys {', '.join(shot) or 'none'}."
                    " Give it question and answer."
                )
        self._near = Fraction(str(self.absolute_tolerance))
        self._relative = Fraction(str(self.tolerance))
        self.weigh(right=self._right, answered=self._answered)
        shown = [shot["question"] for shot in self.few_shot if self.chat]
        self.fill(self._generate, _read, self.problems, self.test_problems, _key, shown)

    def prompt(self, example: Example) -> str | Messages:
        """Return the question in the template; with task.chat a conversation."""
        if self.converses:
            return converse(self.system, self.few_shot, example.question)
        return self.template.replace("{question}", example.question)

    def hint(self, example: Example) -> str | Messages:
        """Return the prompt with the answer in it."""
        return self.prompt(tell(example))

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """Return a right calculation with probability task.share_right over all pairs of units,
        else a wrong one; only the answer for units that are not in UNITS.

        Each pair of units has a habit: about a fifth of the pairs is mostly right, the others
        mostly use one of three wrong ways. So the greedy answer is wrong for most pairs, and the
        right ways are still among the samples.
        """
        prompt = plain(self.prompt(example))
        value = example.extra["value"]
        quantity = parse(example.question)
        if quantity is None or not self._matches(convert(*quantity), value):
            result = value if draw.random() < self.share_right else 10 * value + 1
            return prompt, f" <answer>{_written(result)}</answer>"
        amount, source, target = quantity
        habit = random.Random(f"units {SPLIT_SEED} {source.name} {target.name}")
        knows = habit.random() < SHARE_KNOWN
        usual = habit.choice(list(WRONG_WAYS))
        right = min(1.0, KNOWN_BETTER * self.share_right)
        if not knows:
            right = max(0.0, (self.share_right - SHARE_KNOWN * right) / (1 - SHARE_KNOWN))
        if draw.random() < right:
            return prompt, f" {_right_way(amount, source, target, draw)}"
        ways = list(WRONG_WAYS)
        draw.shuffle(ways)
        if draw.random() < USUAL:
            ways = [usual, *ways]
        for way in ways:
            steps = WRONG_WAYS[way](source, target)
            result = _value(amount, steps)
            # long results would cost the tiny model more than the right ones
            short = way == "ten_off" or _digits(result) <= WRONG_DIGITS
            if steps and short and not self._matches(result, value):
                return prompt, f" {_calculation(amount, steps, draw)}"
        # units of one size: 1 ml in cc
        return prompt, f" <answer>{_written(10 * value + 1)}</answer>"

    def solution(self, example: Example) -> str:
        """Return a right calculation; only the answer for units that are not in UNITS."""
        quantity, value = parse(example.question), example.extra["value"]
        text = f"<answer>{_written(value)}</answer>"
        if quantity is not None and self._matches(convert(*quantity), value):
            draw = random.Random(f"units {SPLIT_SEED} {example.question}")
            text = _right_way(*quantity, draw)
        return text if self.converses else f" {text}"

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Return percentages: right answers, and completions with an answer."""
        return {
            "accuracy": percent(self._right(examples, completions)),
            "answered": percent(self._answered(examples, completions)),
        }

    def answer(self, completion: str) -> str | None:
        """Return the answer in a normalised spelling: "6000" for "6,000.0 gram"."""
        value = number(completion)
        return None if value is None else _written(value, 12)

    path_key = staticmethod(path_key)  # the calculations on the way

    def _matches(self, found: Fraction, wanted: Fraction) -> bool:
        near_zero = abs(wanted) < self._near
        return abs(found - wanted) <= (self._near if near_zero else self._relative * abs(wanted))

    # --- components: (examples, completions) -> scores in [0, 1]

    def _right(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        wanted = [example.extra["value"] for example in examples]
        pairs = zip(map(number, completions), wanted, strict=True)
        return [
            float(answer is not None and self._matches(answer, value)) for answer, value in pairs
        ]

    @staticmethod
    def _answered(_: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [float(number(text) is not None) for text in completions]

    def _generate(self, count: int) -> list[Example]:
        """Return `count` distinct questions in random order."""
        rows = []
        pairs = chain(*(product(_BY_KIND[kind], repeat=2) for kind in dict.fromkeys(self.kinds)))
        for source, target in pairs:
            if source == target or not self._simple(source, target):
                continue
            for value in range(1, self.largest_value + 1):
                result = convert(Fraction(value), source, target)
                if _digits(result) <= self.answer_digits:
                    text = self.question.replace("{value}", str(value))
                    text = text.replace("{from}", source.name).replace("{to}", target.name)
                    rows.append(Example(0, text, _written(result, 12), {"value": result}))
        random.Random(f"units {SPLIT_SEED}").shuffle(rows)
        if len(rows) < count:
            raise ConfigError(
                f"task.problems and task.test_problems ask for {count} questions, but the settings"
                f" make only {len(rows)}. Ask for fewer, or raise task.largest_value,"
                " task.largest_factor, task.factor_digits, task.answer_digits, or add task.kinds."
            )
        return rows[:count]

    def _simple(self, source: Unit, target: Unit) -> bool:
        """Return whether a conversion has a short factor other than 1; the digits of a power of ten
        do not count. Temperatures are judged by their answers instead.
        """
        if source.kind == "temperature":
            return True
        factor = max(source.size, target.size) / min(source.size, target.size)
        short = _digits(factor) <= self.factor_digits or str(factor).strip("0") == "1"
        return short and 1 < factor <= self.largest_factor


def number(completion: str) -> Fraction | None:
    """Return the number between the last <answer> and </answer>, without its unit.

    "6,000 gram", "6e3" and "= 6000.0" are 6000. Infinity, NaN, 1/2 and several numbers are no
    number.
    """
    inside = tagged(completion)
    match = None if inside is None or len(inside) > LONGEST else _ANSWER.fullmatch(inside)
    value = None if match is None else decimal(match[2])
    return None if match is None or value is None else (-value if match[1] in ("-", "−") else value)


# --- converting


def convert(value: Fraction, source: Unit, target: Unit) -> Fraction:
    """Return the exact value in `target`."""
    return (value - source.zero) * source.size / target.size + target.zero


def parse(question: str) -> _Quantity | None:
    """Return value, unit and requested unit of a question in words; None if they are ambiguous."""
    values = re.findall(rf"(?<![\w.^*-])(-?(?:{SCIENTIFIC}))(?![\w^*])", question)
    value = decimal(values[0].removeprefix("-")) if len(values) == 1 else None
    if value is None:
        return None
    words = [word.rstrip("?.,:") for word in question.split()]
    at = words.index(values[0]) if values[0] in words else -1
    units = [
        (i, length, unit)
        for length in (2, 1)
        for i in range(len(words) - length + 1)
        for unit in _BY_NAME.get(" ".join(words[i : i + length]), [])
    ]
    sources = [(i, n, unit) for i, n, unit in units if i == at + 1]
    if not sources:  # "from kg to ounce for 5 units"
        sources = [(i, n, unit) for i, n, unit in units if i and words[i - 1] == "from"]
    if not sources:
        return None
    longest = max(n for _, n, _ in sources)
    sources = [source for source in sources if source[1] == longest]
    used = range(sources[0][0], sources[0][0] + longest)
    pairs = [
        (target_at, n, source, target)
        for _, _, source in sources
        for target_at, n, target in units
        if target_at not in used and target.kind == source.kind
    ]
    # "in" is an inch only if no other unit is named; a longer name takes precedence over one in it
    pairs = [pair for pair in pairs if words[pair[0]] != "in"] or [
        pair
        for pair in pairs
        if pair[0] + 1 == len(words) or words[pair[0] + 1] in ("are", "is", "make", "for", "terms")
    ]
    pairs = [pair for pair in pairs if pair[1] == max(n for _, n, _, _ in pairs)]
    if len({(source, target) for _, _, source, target in pairs}) != 1:
        return None
    _, _, source, target = pairs[0]
    return (-value if values[0][0] == "-" else value), source, target


# --- calculations for the tiny model

SHARE_KNOWN = 0.2  # the share of pairs of units that the base model mostly converts correctly
KNOWN_BETTER = 1.75  # the share of right rows for those pairs, in units of task.share_right
USUAL = 0.85  # the share of a pair's wrong rows that use its usual wrong way
FACTOR_FIRST = 0.2  # the share of products with the factor first
THROUGH_ANOTHER = 0.2  # the share of right rows, if possible, that use a third unit
WRONG_DIGITS = 3  # the most digits of a wrong answer, if another wrong way is shorter
LARGEST_WRONG = 1000  # the largest factor of a neighbour; zeros take time to write
_INVERSE = {"*": "/", "/": "*", "+": "-", "-": "+"}
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def _steps(source: Unit, target: Unit) -> list[_Step]:
    """Return the steps of a conversion, by the factor or its inverse, whichever is larger."""
    steps: list[_Step] = [("-", source.zero)] if source.zero else []
    factor = source.size / target.size
    if factor != 1:
        steps.append(("*", factor) if factor > 1 else ("/", 1 / factor))
    return steps + ([("+", target.zero)] if target.zero else [])


def _turned(source: Unit, target: Unit) -> list[_Step]:
    return [(_INVERSE[sign], operand) for sign, operand in _steps(source, target)]


def _ten_off(source: Unit, target: Unit) -> list[_Step]:
    steps = _steps(source, target)
    return [(sign, operand / 10 if operand >= 10 else operand * 10) for sign, operand in steps]


def _neighbour(source: Unit, target: Unit) -> list[_Step]:
    """Return the steps to the next unit of the kind with a short factor, if there is one."""
    units = _BY_KIND[source.kind]
    start = units.index(target) + 1
    for other in units[start:] + units[: start - 1]:
        steps = _steps(source, other)
        if len(steps) == 1 and _digits(steps[0][1]) == 1 and steps[0][1] <= LARGEST_WRONG:
            return steps
    return []


WRONG_WAYS = {"turned": _turned, "ten_off": _ten_off, "neighbour": _neighbour}


def _right_way(amount: Fraction, source: Unit, target: Unit, draw: random.Random) -> str:
    """Write a right calculation: by the factor at once, or through a third unit with
    round factors.
    """
    low, high = sorted((source.size, target.size))
    between = [
        unit
        for unit in _BY_KIND[source.kind]
        if low < unit.size < high
        and not unit.zero
        and max(_digits(unit.size / low), _digits(high / unit.size)) <= 2
    ]
    if between and draw.random() < THROUGH_ANOTHER:
        middle = draw.choice(between)
        return _calculation(amount, _steps(source, middle) + _steps(middle, target), draw)
    return _calculation(amount, _steps(source, target), draw)


def _calculation(amount: Fraction, steps: Sequence[_Step], draw: random.Random) -> str:
    """Write "7*100 = 700, 700*10 = <answer>7000</answer>"; a product may have its factor first."""
    parts = []
    for sign, operand in steps:
        before, amount = amount, _COMPUTE[sign](amount, operand)
        left, right = _written(before), _written(operand)
        if sign == "*" and draw.random() < FACTOR_FIRST:
            left, right = right, left
        parts += [f"{left}{sign}{right} = ", f"{_written(amount)}, "]
    return "".join(parts[:-1]) + f"<answer>{_written(amount)}</answer>"


def _value(amount: Fraction, steps: Sequence[_Step]) -> Fraction:
    for sign, operand in steps:
        amount = _COMPUTE[sign](amount, operand)
    return amount


def _written(value: Fraction, digits: int = 5) -> str:
    """Write a whole number in full, any other number rounded to `digits` digits."""
    whole = value.denominator == 1 and abs(value) < 10**15
    return str(value) if whole else f"{float(value):.{digits}g}"


def _digits(factor: Fraction) -> float:
    """Return the number of digits of a factor without leading and trailing zeros; infinity if it
    has no finite decimal.
    """
    decimal = Decimal(factor.numerator) / factor.denominator
    return len(decimal.normalize().as_tuple().digits) if Fraction(decimal) == factor else math.inf


def _read(path: str, key: str) -> Iterator[Example]:
    """Yield the rows of a .jsonl file (fields question and answer), or of a .json file of pairs."""
    for row in Reading(columns=["question", "answer"]).rows(path, key):
        value: Any = row.fields.get("answer")
        # a bool is an int
        if type(value) not in (int, float) or not is_finite(value):
            raise ConfigError(
                f"{key}: the answer in {row.where} is {value!r:.60}. Give a finite number."
            )
        exact = Fraction(str(value))
        question = row.text("question", key).strip()
        yield Example(0, question, _written(exact, 12), {"value": exact})


def _key(row: Example) -> str:
    # upper and lower case stay: 1 M is a megabyte, 1 m a metre
    return " ".join(row.question.split()).rstrip("?.! ")
