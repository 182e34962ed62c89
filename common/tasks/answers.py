"""Read numbers, tagged answers and calculations from a model's text. Nothing is executed, and
nothing raises.
"""

import re
from decimal import Decimal
from fractions import Fraction

DIGITS = 40  # the most digits of a number; a longer one is no answer
LONGEST = 10_000  # characters of a reasoning that are read

# 1,000 | 1000 | 0.5 | .5 ; no exponents: 1e999999999 would be computed
DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![A-Za-z.])\.[0-9]+"
# The same, with an exponent of two digits at most.
SCIENTIFIC = rf"(?:{DECIMAL})(?:[eE][-+]?[0-9]{{1,2}}(?![0-9]))?"

# Words that change the value of the number before them.
MULTIPLES = "(?:hundred|thousand|million|billion|trillion|dozen)(?:s|ths?)?"

_OPEN, _CLOSE = "<answer>", "</answer>"
# A unit is one word with its own signs, as km/h, m**3 and cm^2, so that these are no calculations.
_WORD = r"[^\W\d_]+(?:(?:\^|\*\*)?[0-9](?![0-9.]))?"
_PART = re.compile(
    rf"(?P<number>{SCIENTIFIC})|(?P<sign>\*\*|[x×·](?=\s*[-+]?[.0-9])|[-+*/=−÷⋅∗])"
    rf"|(?P<word>{_WORD}(?:/{_WORD})*)|(?P<other>\S)"
)
_OPERATORS = {"+", "-", "*", "/"}
_SIGNS = {"x": "*", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "−": "-"}


def tagged(completion: str) -> str | None:
    """Return the text of the last complete pair of <answer> and </answer>."""
    start = completion.rfind(_OPEN, 0, max(0, completion.rfind(_CLOSE)))
    return None if start < 0 else completion[start + len(_OPEN) : completion.index(_CLOSE, start)]


def decimal(text: str) -> Fraction | None:
    """Return the value of a match of DECIMAL or SCIENTIFIC; None if it has too many digits."""
    plain = text.replace(",", "")
    return Fraction(plain if plain[0] != "." else f"0{plain}") if len(plain) <= DIGITS else None


def path_key(completion: str) -> str:
    """Return the calculations of a completion as a key: its equations with an operator in order
    ("7*1000=7000"), or else all its numbers in order ("1 1000 7000").

    White space, thousands separators, trailing zeros, the sign for multiplication, and words are
    ignored.
    """
    text = completion[:LONGEST].replace(_OPEN, " ").replace(_CLOSE, " ")
    equations: list[str] = []
    numbers: list[str] = []
    run: list[str] = []  # number, sign, number, ...
    negative = False  # the last sign belongs to the number that follows

    def close() -> None:
        if len(run) % 2 == 0:
            run[-1:] = []  # a sign that no number follows
        if "=" in run and not _OPERATORS.isdisjoint(run):
            equations.append("".join(run))
        run.clear()

    for part in _PART.finditer(text):
        kind = part.lastgroup
        after_number = len(run) % 2 == 1
        if kind == "number":
            value = Decimal(part[0].replace(",", "")).normalize()
            numbers.append(f"{'-' if negative and value else ''}{value:f}")
            if after_number:
                close()
            run.append(numbers[-1])
            negative = False
        elif kind == "sign":
            sign = _SIGNS.get(part[0], part[0])
            if after_number and sign != "**":
                run.append(sign)
            elif sign == "-" and not negative:
                negative = True
            else:
                close()
                negative = False
        elif kind == "other" and part[0] not in "()":
            close()
            negative = False
        # words are skipped: most are units
    close()
    return ";".join(equations) or " ".join(numbers)
