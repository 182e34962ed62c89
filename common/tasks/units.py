"""Units: convert a quantity from one unit to another, with the reasoning before the answer.

The questions are those of a course's homework on rejection sampling: "How many gram are there per 6
kg?". An answer is a number between <answer> and </answer>, right within a tolerance. Many ways of
calculating lead to it, so a model that knows some of them, and wrong ones too, has samples of its
own to learn from. Factors are exact fractions; questions are made here, or read from JSON.
"""

import logging
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from common.config import ConfigError, at_least, holds, share
from common.tasks import Example, Messages
from common.tasks.answers import SCIENTIFIC, decimal, path_key, tagged
from common.tasks.components import chosen, weighted
from common.tasks.data import Row, read_jsonl, read_pairs
from common.tasks.splits import SPLIT_SEED, check_needs_path, split_rows

log = logging.getLogger("clutch")

LONGEST = 200  # characters between the tags
# A number, and behind it the name of a unit, which begins with a letter: no further number, but the
# powers in m^2 and cm3. Words that are numbers and the x of a product are no units.
_ANSWER = re.compile(
    rf"\s*[=≈~]?\s*([-+−]?)\s*({SCIENTIFIC})"
    r"\s*[.,;]?\s*(?:(?![²³¹]|[xX]\s*[0-9]|(?:hundred|thousand|[mb]illion|dozen)\b)[°%]?[^\W\d_](?:[^0-9]|(?<=[A-Za-z^*])[23])*)?",
    re.DOTALL | re.IGNORECASE,
)

_METRE, _KILOGRAM, _LITRE, _SECOND, _HOUR = (
    Fraction(1),
    Fraction(1),
    Fraction(1),
    Fraction(1),
    Fraction(3600),
)
_INCH, _POUND, _GALLON = Fraction("0.0254"), Fraction("0.45359237"), Fraction("3.785411784")
_MILE, _YEAR = (
    63360 * _INCH,
    Fraction("31556925.9747"),
)  # the tropical year, as the homework's data has it

# By kind: names of a unit, the shortest first, and how much it is in the kind's base unit. Fluid
# measures are of the US; a ton is metric, and kB is 1000 bytes, as in the homework's data.
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
# What the unit reads at the kind's zero; only temperatures do not start there.
_AT_ZERO = {"K": Fraction("273.15"), "F": Fraction(32)}


@dataclass(frozen=True)
class Unit:
    """name: the shortest; size: in the kind's base unit; zero: what it reads where the base unit
    reads 0.
    """

    name: str
    kind: str
    size: Fraction
    zero: Fraction


_BY_KIND = {
    kind: [
        Unit(names[0], kind, size, _AT_ZERO.get(names[0], Fraction(0)))
        for names, size in units.items()
    ]
    for kind, units in UNITS.items()
}
# An ounce is of mass or of volume: the other unit of the question decides.
_BY_NAME: dict[str, list[Unit]] = {}
for _kind, _units in UNITS.items():
    for _names, _unit in zip(_units, _BY_KIND[_kind], strict=True):
        for _name in _names:
            _BY_NAME.setdefault(_name, []).append(_unit)

# (value, from, to)
_Quantity = tuple[Fraction, Unit, Unit]
# An operator and what it takes on its right.
_Step = tuple[str, Fraction]


class Units:
    """The task.

    `overlap` counts the train rows of a file that were dropped because their question also stands
    in the test rows.

    Args: as in conf/task/units.yaml. `weights` by component: right, answered.
    Raises: ConfigError for settings that cannot work and for data that is missing or broken.
    """

    name = "units"

    # Settings come from YAML by keyword.
    def __init__(  # noqa: PLR0913
        self,
        *,
        path: str | None,
        test_path: str | None,
        problems: int,
        test_problems: int,
        kinds: list[str],
        largest_value: int,
        largest_factor: int,
        factor_digits: int,
        answer_digits: int,
        question: str,
        template: str,
        chat: bool,
        system: str,
        few_shot: list[dict[str, str]],
        tolerance: float,
        absolute_tolerance: float,
        weights: dict[str, float],
        share_right: float,
    ) -> None:
        for key, value, least in (
            ("problems", problems, 2),
            ("test_problems", test_problems, 1),
            ("largest_value", largest_value, 1),
            ("largest_factor", largest_factor, 2),
            ("factor_digits", factor_digits, 0),
            ("answer_digits", answer_digits, 1),
        ):
            at_least(f"task.{key}", value, least)
        check_needs_path(path, test_path=test_path)
        share("task.tolerance", tolerance)
        share("task.share_right", share_right)
        if not 0 <= absolute_tolerance < math.inf:
            raise ConfigError(
                f"task.absolute_tolerance={absolute_tolerance} is out of range. Give a number from"
                " 0 up, such as 0.001."
            )
        _check_kinds(kinds)
        holds("task.question", question, ("{value}", "{from}", "{to}"))
        holds("task.template", template, ("{question}",))
        _check_shots(few_shot)
        self.template, self.chat, self.system, self.few_shot = template, chat, system, few_shot
        self.tolerance = Fraction(str(tolerance))
        self.absolute_tolerance = Fraction(str(absolute_tolerance))
        self.components = chosen({"right": self._right, "answered": self._answered}, weights)
        self.weights, self.share_right = weights, share_right
        if path is None:
            digits = (factor_digits, answer_digits)
            rows = _generated(
                problems + test_problems, kinds, largest_value, largest_factor, digits, question
            )
            test, train = rows[:test_problems], rows[test_problems:]
        else:
            train = _distinct(_read(path, "task.path"))
            test = [] if test_path is None else _distinct(_read(test_path, "task.test_path"))
        train, test, self.overlap = split_rows(path, train, test, test_problems, _key)
        if self.overlap:
            log.info(
                "units: %d train rows are dropped: their question also stands in the test rows.",
                self.overlap,
            )
        self._splits = {
            split: [Example(i, row.question, row.answer, row.extra) for i, row in enumerate(found)]
            for split, found in (("train", train), ("test", test))
        }

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of `split`, "train" or "test"; `answer` is the number as text. No test question
        is in train.
        """
        return self._splits[split]

    def prompt(self, example: Example) -> str | Messages:
        """The question in the template; with task.chat the system text, the few-shot examples and
        the question.
        """
        if not self.chat:
            return self.template.replace("{question}", example.question)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for shot in self.few_shot:
            messages.append({"role": "user", "content": shot["question"]})
            messages.append({"role": "assistant", "content": shot["answer"]})
        return [*messages, {"role": "user", "content": example.question}]

    def hint(self, example: Example) -> str | Messages:
        """The prompt with the answer told, for a model that is to find the calculation that leads
        to it.
        """
        return self.prompt(
            replace(example, question=f"{example.question} (The answer is {example.answer}.)")
        )

    def pretraining(self, example: Example, draw: random.Random) -> tuple[str, str]:
        """A right calculation with probability task.share_right over all pairs of units, else a
        wrong one.

        A pair of units has its habit: about a fifth of the pairs is mostly right, the others mostly
        take one wrong way of three (the operator turned round, ten times off, another unit's
        factor). So the greedy answer is wrong where the habit is, and the right ways are still
        among the samples. In a row that names no units that are known here, the answer stands
        alone.
        """
        prompt = self.prompt(example)
        if not isinstance(prompt, str):
            raise ConfigError(
                "task.chat=true is for instruction models, and model=tiny is none. Leave"
                " task.chat=false, or give a model: model=hf model.path=FOLDER_OR_HUB_ID."
            )
        value = example.extra["value"]
        quantity = parse(example.question)
        if quantity is None or not self._matches(convert(*quantity), value):
            found = value if draw.random() < self.share_right else 10 * value + 1
            return prompt, f" <answer>{_written(found)}</answer>"
        amount, source, target = quantity
        habit = random.Random(f"units {SPLIT_SEED} {source.name} {target.name}")
        knows = habit.random() < SHARE_KNOWN
        usual = habit.choice(list(_WRONG))
        known = min(1.0, KNOWN_BETTER * self.share_right)
        right = (
            known
            if knows
            else max(0.0, (self.share_right - SHARE_KNOWN * known) / (1 - SHARE_KNOWN))
        )
        if draw.random() < right:
            return prompt, f" {_right_way(amount, source, target, draw)}"
        ways = list(_WRONG)
        draw.shuffle(ways)
        if draw.random() < USUAL:
            ways = [usual, *ways]
        for way in ways:
            steps = _WRONG[way](source, target)
            found = _value(amount, steps)
            # long results would cost the tiny model more than the right ones
            if (
                steps
                and not self._matches(found, value)
                and (way == "ten_off" or _digits(found) <= WRONG_DIGITS)
            ):
                return prompt, f" {_calculation(amount, steps, draw)}"
        return (
            prompt,
            f" <answer>{_written(10 * value + 1)}</answer>",
        )  # units of one size: 1 ml in cc

    def reward(self, example: Example, completion: str) -> float:
        """Weighted mean of the components, in [0, 1]; 1 if and only if the answer is right."""
        return self.rewards([example], [completion])[0]

    def rewards(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """`reward` of each completion."""
        return weighted(
            {name: one(examples, completions) for name, one in self.components.items()},
            self.weights,
        )

    def metrics(self, examples: Sequence[Example], completions: Sequence[str]) -> dict[str, float]:
        """Percent: right answers first, then completions in which an answer was found."""
        return {
            "accuracy": 100 * sum(self._right(examples, completions)) / max(1, len(completions)),
            "answered": 100 * sum(self._answered(examples, completions)) / max(1, len(completions)),
        }

    def answer(self, completion: str) -> str | None:
        """The answer in one spelling ("6000" for "6,000.0 gram"); None if there is none."""
        value = number(completion)
        return None if value is None else _written(value, 12)

    def path_key(self, completion: str) -> str:
        """Key of the calculation; texts that calculate the same have the same. "" without any
        number.
        """
        return path_key(completion)

    def _matches(self, found: Fraction, wanted: Fraction) -> bool:
        near_zero = abs(wanted) < self.absolute_tolerance
        return abs(found - wanted) <= (
            self.absolute_tolerance if near_zero else self.tolerance * abs(wanted)
        )

    # --- components: (examples, completions) -> scores in [0, 1]

    def _right(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """The answer is within the tolerance."""
        found = (
            (example, number(text)) for example, text in zip(examples, completions, strict=True)
        )
        return [
            float(value is not None and self._matches(value, e.extra["value"]))
            for e, value in found
        ]

    @staticmethod
    def _answered(_: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """There is a number between the tags."""
        return [float(number(text) is not None) for text in completions]


def number(completion: str) -> Fraction | None:
    """The number between the last <answer> and </answer>; a unit behind it is dropped. None if
    there is none.

    "6,000 gram", "6e3" and "= 6000.0" are 6000. Infinity, NaN, 1/2 and a second number are no
    number.
    """
    inside = tagged(completion)
    found = None if inside is None or len(inside) > LONGEST else _ANSWER.fullmatch(inside)
    value = None if found is None else decimal(found[2])
    return None if found is None or value is None else (-value if found[1] in ("-", "−") else value)


# --- converting


def convert(value: Fraction, source: Unit, target: Unit) -> Fraction:
    """The exact value in `target`."""
    return (value - source.zero) * source.size / target.size + target.zero


def parse(question: str) -> _Quantity | None:
    """Value, unit and wanted unit of a question in plain words; None if they are not clear."""
    values = re.findall(rf"(?<![\w.^*-])(-?(?:{SCIENTIFIC}))(?![\w^*])", question)
    value = decimal(values[0].removeprefix("-")) if len(values) == 1 else None
    if value is None:
        return None
    words = [word.rstrip("?.,:") for word in question.split()]
    at = words.index(values[0]) if values[0] in words else -1
    units = [(i, length, unit) for i, length, unit in _mentions(words)]
    sources = [(i, n, unit) for i, n, unit in units if i == at + 1]
    if not sources:  # "from kg to ounce for 5 units"
        sources = [(i, n, unit) for i, n, unit in units if i and words[i - 1] == "from"]
    if not sources:
        return None
    longest = max(n for _, n, _ in sources)
    sources = [found for found in sources if found[1] == longest]
    used = range(sources[0][0], sources[0][0] + longest)
    pairs = [
        (target_at, n, source, target)
        for _, _, source in sources
        for target_at, n, target in units
        if target_at not in used and target.kind == source.kind
    ]
    # "in" is an inch only where no other unit is named; a longer name goes before one inside it
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


def _mentions(words: Sequence[str]) -> Iterator[tuple[int, int, Unit]]:
    """(position, words, unit) of every name of a unit."""
    for length in (2, 1):
        for i in range(len(words) - length + 1):
            for unit in _BY_NAME.get(" ".join(words[i : i + length]), []):
                yield i, length, unit


# --- calculations for the tiny model

SHARE_KNOWN = 0.2  # of the pairs of units, that the base converts rightly more often than not
KNOWN_BETTER = 1.75  # times task.share_right, for them
USUAL = 0.85  # of the wrong ones of a pair, that take its usual wrong way
FACTOR_FIRST = 0.2  # of the products
THROUGH_ANOTHER = 0.2  # of the right ones that can, that go through a third unit
WRONG_DIGITS = 3  # of a wrong answer, where another wrong way is shorter
LARGEST_WRONG = 1000  # factor of a neighbour; zeros take time to write
_INVERSE = {"*": "/", "/": "*", "+": "-", "-": "+"}


def _scaled(factor: Fraction) -> list[_Step]:
    """Times the factor, or divided by its inverse, whichever is the larger number."""
    return [("*", factor)] if factor >= 1 else [("/", 1 / factor)]


def _steps(source: Unit, target: Unit) -> list[_Step]:
    steps: list[_Step] = [("-", source.zero)] if source.zero else []
    if source.size != target.size:
        steps += _scaled(source.size / target.size)
    return steps + ([("+", target.zero)] if target.zero else [])


def _turned(source: Unit, target: Unit) -> list[_Step]:
    return [(_INVERSE[sign], operand) for sign, operand in _steps(source, target)]


def _ten_off(source: Unit, target: Unit) -> list[_Step]:
    steps = _steps(source, target)
    return [(sign, operand / 10 if operand >= 10 else operand * 10) for sign, operand in steps]


def _neighbour(source: Unit, target: Unit) -> list[_Step]:
    """Return the steps of the next unit of the kind whose factor is as short as the right one; none
    if there is no such unit.
    """
    units = _BY_KIND[source.kind]
    start = units.index(target) + 1
    for other in units[start:] + units[: start - 1]:
        steps = _steps(source, other)
        if len(steps) == 1 and _digits(steps[0][1]) == 1 and steps[0][1] <= LARGEST_WRONG:
            return steps
    return []


_WRONG = {"turned": _turned, "ten_off": _ten_off, "neighbour": _neighbour}


def _right_way(amount: Fraction, source: Unit, target: Unit, draw: random.Random) -> str:
    """The factor at once, or through a third unit between the two where both factors are round."""
    between = [
        unit
        for unit in _BY_KIND[source.kind]
        if min(source.size, target.size) < unit.size < max(source.size, target.size)
        and not unit.zero
        and all(
            _digits(max(a.size, b.size) / min(a.size, b.size)) <= 2
            for a, b in ((source, unit), (unit, target))
        )
    ]
    if between and draw.random() < THROUGH_ANOTHER:
        middle = draw.choice(between)
        return _calculation(amount, _steps(source, middle) + _steps(middle, target), draw)
    return _calculation(amount, _steps(source, target), draw)


def _calculation(amount: Fraction, steps: Sequence[_Step], draw: random.Random) -> str:
    """ "7*100 = 700, 700*10 = <answer>7000</answer>"; a product may have its factor first."""
    parts = []
    for sign, operand in steps:
        before, amount = amount, _apply(amount, sign, operand)
        left, right = _written(before), _written(operand)
        if sign == "*" and draw.random() < FACTOR_FIRST:
            left, right = right, left
        parts += [f"{left}{sign}{right} = ", f"{_written(amount)}, "]
    return "".join(parts[:-1]) + f"<answer>{_written(amount)}</answer>"


def _value(amount: Fraction, steps: Sequence[_Step]) -> Fraction:
    for sign, operand in steps:
        amount = _apply(amount, sign, operand)
    return amount


def _apply(value: Fraction, sign: str, operand: Fraction) -> Fraction:
    if sign in "*/":
        return value * operand if sign == "*" else value / operand
    return value + operand if sign == "+" else value - operand


def _written(value: Fraction, digits: int = 5) -> str:
    """A whole number in full, any other rounded to some digits."""
    return (
        str(value)
        if value.denominator == 1 and abs(value) < 10**15
        else f"{float(value):.{digits}g}"
    )


def _digits(factor: Fraction) -> float:
    """Count the digits of a factor without zeros at its ends; infinity if they do not end."""
    found = Decimal(factor.numerator) / factor.denominator
    return len(found.normalize().as_tuple().digits) if Fraction(found) == factor else math.inf


# --- questions


def _generated(
    count: int,
    kinds: Sequence[str],
    largest_value: int,
    largest_factor: int,
    digits: tuple[int, int],
    question: str,
) -> list[Example]:
    """Distinct questions in random order; ids are not set yet. `digits`: at most, of a factor and
    of an answer.
    """
    rows = []
    for source, target in (
        (a, b) for kind in dict.fromkeys(kinds) for a in _BY_KIND[kind] for b in _BY_KIND[kind]
    ):
        if source == target or not _simple(source, target, largest_factor, digits[0]):
            continue
        for value in range(1, largest_value + 1):
            found = convert(Fraction(value), source, target)
            if _digits(found) <= digits[1]:
                text = question.replace("{value}", str(value)).replace("{from}", source.name)
                text = text.replace("{to}", target.name)
                rows.append(Example(0, text, _written(found, 12), {"value": found}))
    random.Random(f"units {SPLIT_SEED}").shuffle(rows)
    if len(rows) < count:
        raise ConfigError(
            f"task.problems and task.test_problems ask for {count} questions, but there are only"
            f" {len(rows)} with task.largest_value={largest_value},"
            f" task.largest_factor={largest_factor}, task.factor_digits={digits[0]},"
            f" task.answer_digits={digits[1]} and task.kinds={','.join(kinds)}. Ask for fewer, or"
            " raise one of these."
        )
    return rows[:count]


def _simple(source: Unit, target: Unit, largest_factor: int, digits: int) -> bool:
    """Whether a conversion is one to ask for: of a short factor that is not 1. Temperatures go by
    their answers.

    A power of ten has no digits to calculate with.
    """
    if source.kind == "temperature":
        return True
    factor = max(source.size, target.size) / min(source.size, target.size)
    if factor == 1 or factor > largest_factor:
        return False
    return _digits(factor) <= digits or str(factor).strip("0") == "1"


def _read(path: str, key: str) -> Iterator[Example]:
    """Rows of a .jsonl file (fields question and answer), or of a .json file (pairs). Raises:
    ConfigError.
    """
    lines = path.removesuffix(".gz").endswith(".jsonl")
    for row in (read_jsonl if lines else read_pairs)(path, key):
        value = _finite(row, key)
        question = row.text("question", key).strip()
        yield Example(0, question, _written(value, 12), {"value": value})


def _finite(row: Row, key: str) -> Fraction:
    value: Any = row.fields.get("answer")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(
            f"{key}: the answer in {row.where} is {value!r:.60}. Give a finite number."
        )
    return Fraction(str(value))


def _check_kinds(kinds: list[str]) -> None:
    if not kinds:
        raise ConfigError(f"task.kinds is empty. Give at least one of {', '.join(UNITS)}.")
    for kind in kinds:
        if kind not in UNITS:
            raise ConfigError(
                f"task.kinds: {kind!r} is no kind of unit. Kinds: {', '.join(UNITS)}."
            )


def _check_shots(shots: list[dict[str, str]]) -> None:
    for position, shot in enumerate(shots, start=1):
        if set(shot) != {"question", "answer"}:
            raise ConfigError(
                f"task.few_shot: example {position} has the keys {', '.join(shot) or 'none'}. "
                "Give it question and answer."
            )


def _key(row: Example) -> str:
    # upper and lower case stay: 1 M is a megabyte, 1 m a metre
    return " ".join(row.question.split()).rstrip("?.! ")


def _distinct(rows: Iterator[Example]) -> list[Example]:
    found: dict[str, Example] = {}
    for row in rows:
        found.setdefault(_key(row), row)
    return list(found.values())
