"""The value of an arithmetic text that a model wrote: + - * / and parentheses over whole numbers,
with exact fractions, so that 1/3*3 is 1.

Python's parser makes a tree of the text, and nothing is executed. All sizes are limited before the
computation: the characters, the length of the text, the digits of a number. There are no powers, so
no result has more digits than the text has characters.
"""

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

LONGEST = 200  # characters of a text
DIGITS = 12  # of a number

_SPELLINGS = str.maketrans(
    {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\N{NO-BREAK SPACE}": " "}
)
_ALLOWED = re.compile(rf"(?:[-+*/() ]|(?<![0-9])[0-9]{{1,{DIGITS}}}(?![0-9]))+")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The exact value of a text, and the numbers in it, in order.

    If it has no value, `problem` is the reason, `value` is None and `numbers` is empty.
    """

    value: Fraction | None
    numbers: tuple[int, ...]
    problem: str | None = None


def evaluate(text: str) -> Arithmetic:
    """Return the value of `text` by the usual precedence; never raises. `×`, `·`, `÷`, `−` are read
    as `*`, `*`, `/`, `-`.
    """
    if len(text) > LONGEST:
        return Arithmetic(None, (), f"longer than {LONGEST} characters")
    return _evaluate(text)


# Cached, since the components of a reward evaluate the same text repeatedly.
@lru_cache(maxsize=8192)
def _evaluate(text: str) -> Arithmetic:
    plain = text.translate(_SPELLINGS).strip(" \t\r\n")
    if not _ALLOWED.fullmatch(plain):
        return Arithmetic(None, (), f"not whole numbers of up to {DIGITS} digits with + - * / ( )")
    numbers: list[int] = []
    try:
        tree = ast.parse(re.sub(r"\b0+(?=[0-9])", "", plain), mode="eval")
        value = _value(tree.body, numbers)
    except (SyntaxError, KeyError, MemoryError, RecursionError):
        return Arithmetic(None, (), "no expression")
    except ZeroDivisionError:
        return Arithmetic(None, (), "a division by zero")
    return Arithmetic(value, tuple(numbers))


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    """Return the value of a tree, and add its numbers. Raises: KeyError for other operators."""
    if isinstance(node, ast.Constant):
        numbers.append(int(node.value))  # type: ignore[arg-type]
        return Fraction(numbers[-1])
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, numbers))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return _OPERATORS[type(node.op)](left, right)
    raise KeyError(type(node))
