"""The value of an arithmetic text that a model wrote, without running it: + - * / and parentheses
over whole numbers.

A recursive descent over tokens of our own, with exact fractions: 1/3*3 is 1. Nothing is handed to
Python's evaluator, and everything is bounded before it is computed: the length of the text, the
digits of a number, the depth of nesting. No power is allowed, so no result has more digits than the
text has characters. Hostile texts cost what a short one costs.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

LONGEST = 200  # characters of a text
DEEPEST = 20  # parentheses and signs inside each other
DIGITS = 12  # of a number

_SPELLINGS = str.maketrans(
    {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\N{NO-BREAK SPACE}": " "}
)
_TOKEN = re.compile(r" *(?:([0-9]+)|([-+*/()]))")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The exact value that a text comes to, and the numbers in it (each as often as it stands
    there, in order).

    Or `problem`, the reason why it has none; then `value` is None and `numbers` is empty.
    """

    value: Fraction | None
    numbers: tuple[int, ...]
    problem: str | None = None


class _Refused(Exception):
    """The text has no value; the argument says why."""


def evaluate(text: str) -> Arithmetic:
    """The value of `text` by the usual precedence, left to right. Pure; never raises; microseconds
    for any text.

    `×`, `·`, `÷`, `−` are read as `*`, `*`, `/`, `-`; a sign may stand before a number or a
    parenthesis.
    """
    if len(text) > LONGEST:
        return Arithmetic(None, (), f"longer than {LONGEST} characters")
    return _evaluate(text)


# The components of a reward ask for the same text again and again.
@lru_cache(maxsize=8192)
def _evaluate(text: str) -> Arithmetic:
    try:
        parser = _Parser(_tokens(text.translate(_SPELLINGS)))
        value = parser.sum(0)
        if parser.next is not None:
            raise _Refused(f"{parser.next!r} where an operator should stand")
    except _Refused as refused:
        return Arithmetic(None, (), str(refused))
    return Arithmetic(value, tuple(parser.numbers))


def _tokens(text: str) -> list[str]:
    text = text.strip(" \t\r\n")
    if not text:
        raise _Refused("empty")
    for sign, problem in (("**", "a power"), ("^", "a power"), ("//", "a whole-number division")):
        if sign in text:
            raise _Refused(f"{problem} ({sign})")
    tokens, position = [], 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            letter = text[position:].lstrip(" ")[0]
            raise _Refused("a decimal number" if letter == "." else f"the character {letter!r}")
        number, sign = found.groups()
        if number is not None and len(number) > DIGITS:
            raise _Refused(f"a number with more than {DIGITS} digits")
        tokens.append(number or sign)
        position = found.end()
    return tokens


class _Parser:
    """sum = product {+|- product}; product = operand {*|/ operand}; operand = number, (sum), or a
    sign and an operand.
    """

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position = tokens, 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self.next) in ("+", "-"):
            self.position += 1
            right = self.product(depth)
            value = value + right if sign == "+" else value - right
        return value

    def product(self, depth: int) -> Fraction:
        value = self.operand(depth)
        while (sign := self.next) in ("*", "/"):
            self.position += 1
            right = self.operand(depth)
            if sign == "/" and right == 0:
                raise _Refused("a division by zero")
            value = value * right if sign == "*" else value / right
        return value

    def operand(self, depth: int) -> Fraction:
        if depth > DEEPEST:
            raise _Refused(f"nested deeper than {DEEPEST}")
        token = self.next
        self.position += 1
        if token is None:
            raise _Refused("it ends where a number should stand")
        if token in ("+", "-"):
            value = self.operand(depth + 1)
            return value if token == "+" else -value
        if token == "(":
            value = self.sum(depth + 1)
            if self.next != ")":
                raise _Refused("a parenthesis that is not closed")
            self.position += 1
            return value
        if token in ("*", "/", ")"):
            raise _Refused(f"{token!r} where a number should stand")
        self.numbers.append(int(token))
        return Fraction(int(token))
