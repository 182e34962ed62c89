r"""Numbers as people and models write them: 1,234.5, 2 1/2, 5e3, $ 5, 50%, \frac{3}{4}.

Nothing here raises or is run; where no number is, None is returned.
"""

import re
from collections import deque
from fractions import Fraction
from typing import Any

from common.instance import import_optional
from common.tasks.answers import DECIMAL, DIGITS, MULTIPLES, decimal
from common.tasks.bounded import call

MARK = "####"
LONGEST = 200  # characters of an answer that is looked at, after it was found

# A sign counts only where it is no subtraction; "/ 4" makes a fraction; the 2 of m2 is no number.
_EXPONENT = r"(?<=[a-wyz])[23](?!\.?\w)"
_NUMBER = re.compile(
    rf"((?<![0-9A-Za-z.)\]])[-−])?(?:\$(-?))?(?!{_EXPONENT})({DECIMAL})(?:/({DECIMAL}))?"
)
_POWER = re.compile(r"[eE]([-+]?[0-9]{1,2})(?!\w)")
_NUMBER_OR_POWER = re.compile(f"(?:{_NUMBER.pattern})(?:{_POWER.pattern})?")
_S = r"[^\S\n]*"  # spaces; another line is another sentence
_UNITS = (
    r"(?:h|hrs?|hours?|min|mins|minutes?|s|sec|seconds?|d|days?|weeks?|months?|years?|ft|feet|foot|in"
    r"|inch(?:es)?|lbs?|pounds?|oz|ounces?|kg|g|km|m|cm)\b"
)
_TIMES = r"(?:[*×·^+/;&±]|\*\*|\\times|\\cdot|\\pm)"
_OF_UNIT = r"(?:\\?%|[°$€£]|[^\S\n]?[A-Za-z]{1,12})?"  # in "5 km to 10 km"
# What makes another number of the one before it, or an answer of several.
_GOES_ON = re.compile(
    rf"{_S}(?:(?:{_TIMES}|,){_S}\{{?[-−$]?\{{?[0-9]"
    rf"|(?:\\text\{{{_S}(?:or|and|to){_S}\}}|or|and|to){_S}[-−$]?[0-9]"
    rf"|{_OF_UNIT}{_S}(?:[-−–—]|\b(?:or|to|minus|plus)\b){_S}[$€£]?[0-9]"
    rf"|\\sqrt|\\pi|[²³¹¼-¾⅐-⅞√π]|[xy](?![A-Za-z])|\}}{_S}\{{"
    rf"|(?:\\text\{{{_S})?(?:{MULTIPLES}|bn|mn|lakh|crore)\b"
    rf"|{_UNITS}{_S}(?:and\s)?[0-9.]+{_S}{_UNITS})"
    rf"|\?|:[0-9]|[^\S\n]+:{_S}[0-9]|[.'_][0-9]|[eE][-+]?[0-9]{{3}}|(?-i:[kKMB])(?![A-Za-z])"
    r"|[^\S\n]+[-−$]?[0-9]+(?![\w-])"
    # Of LaTeX: digits that repeat, a base, a polynomial, a bound.
    rf"|\.?\\(?:overline|dot|bar)\b|_\{{|[a-z]\+[0-9]|{_S}(?:\\(?:leq?|geq?|lt|gt)\b|[≤≥])",
    re.IGNORECASE,
)
# What a number is inside of: a root, a fraction of more than numbers, a function, an interval.
_INSIDE = re.compile(
    r"(?:\\sqrt(?:\[\w*\]?)?\{?|√|\\[cdt]?frac\s*(?:\{[^{}]*\}\s*)?\{"
    r"|\\(?:log|ln|lg|exp|sin|cos|tan|binom|leq?|geq?|lt|gt)\b[\s{(_]*|\\infty\s*,|[≤≥±]|\\pm"
    r"|\\(?:overline|dot|bar)\{|(?<![A-Za-z])[A-Za-z]\s?\+)\s*$"
)
# What a number of a sentence continues, or is one of several with.
_BEFORE = re.compile(
    rf"[0-9](?:{_S}(?:{_TIMES}|x)\{{?|,(?!\s)|:(?!\s)|[^\S\n]+:|[.'_]\{{?|[eE][-+]?|[^\S\n]+and"
    rf"|{_OF_UNIT}{_S}\b(?:or|to|minus|plus)|{_S}[%°]?{_S}[-−–—])?{_S}[$€£]?\Z",
    re.IGNORECASE,
)
# Before and behind the last number of "3 hours 20 minutes".
_OF_TWO = re.compile(rf"[0-9]{_S}{_UNITS}{_S}(?:and\s)?\Z", re.IGNORECASE)
_UNIT = re.compile(rf"{_S}{_UNITS}", re.IGNORECASE)
_MIXED = re.compile(r"(?<![0-9.,/])([0-9]{1,40}) +([0-9]{1,40})/([0-9]{1,40})(?![0-9/]|[.,][0-9])")
# Thousands, with spaces between them.
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]|,[0-9])")
BOLD = re.compile(r"(?<![\w)])\*\*([^*\n]+)\*\*(?![\w(])")  # of Markdown, and no power
_TEN_TO = re.compile(
    rf"(?<=[0-9]){_S}(?:[×x*·]|\\times|\\cdot){_S}10{_S}(?:\^|\*\*){_S}\{{?([-+]?[0-9]{{1,2}})\}}?"
    r"(?!\.?[0-9])"
)
_SIGNED = r"\s+(?=[$.0-9]|\\[cdt]?frac)"
_NEGATIVE = re.compile(rf"\bnegative{_SIGNED}", re.IGNORECASE)
# "minus 5" where that is no subtraction.
_MINUS = re.compile(
    rf"((?:^|\b(?:is|was|are|be|equals?|of|by|to)\s|[:=({{])\s*)minus{_SIGNED}",
    re.IGNORECASE | re.MULTILINE,
)
_OF_A_UNIT = re.compile(r"(?<=[A-Za-z])(\}?)(?:\^|\*\*)\{?[-−]?[0-9]\}?(?!\.?[0-9])")  # cm^2
_LATEX_FRACTION = re.compile(
    r"((?<![0-9.,])[0-9]{1,40}|)\\[cdt]?frac *"
    r"(?:\{(-?[0-9.,]{1,40})\}|([0-9])) *(?:\{(-?[0-9.,]{1,40})\}|([0-9]))"
)


def find_answer(completion: str) -> str | None:
    r"""Return what follows the last `####`, else the last \boxed{...}, else the last number.

    A mark decides even if no answer follows it.
    """
    if MARK in completion:
        rest = completion[completion.rfind(MARK) + len(MARK) :].lstrip()
        line = rest[:LONGEST].split("\n", 1)[0].strip()
        return line if any(letter.isalnum() for letter in line) else None
    start = completion.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for position in range(begin, min(len(completion), begin + LONGEST)):
            depth += {"{": 1, "}": -1}.get(completion[position], 0)
            if depth == 0:
                return completion[begin:position].strip() or None
        return None  # not closed
    cleaned = clean(completion)
    start, end = _find_last(cleaned)
    return cleaned[start:end] if 0 < end - start <= LONGEST else None


def find_alone(text: str) -> str | None:
    """Return the last number of a text, None where it is a part of another one, as in "42x" and "4
    thousand", or one of several, as in "3 to 5".
    """
    cleaned = clean(text)
    start, end = _find_last(cleaned)
    before = cleaned[max(0, start - LONGEST) : start]
    several = _OF_TWO.search(before) and _UNIT.match(cleaned, end)
    if several or _GOES_ON.match(cleaned, end) or _BEFORE.search(before) or _INSIDE.search(before):
        return None
    return cleaned[start:end] if 0 < end - start <= LONGEST else None


def _find_last(cleaned: str) -> tuple[int, int]:
    """Return where the last number of a text begins and ends, 0 and 0 where there is none."""
    last = next(iter(deque(_NUMBER_OR_POWER.finditer(cleaned), maxlen=1)), None)
    if last is None:
        return 0, 0
    wider = (match for kind in (_SPACED, _MIXED) for match in kind.finditer(cleaned))
    around = (m.span() for m in wider if m.start() <= last.start() < m.end())
    start, end = next(around, last.span())
    sign = start > 0 and cleaned[start - 1] in "-−" and not cleaned[start - 2 : start - 1].isalnum()
    return start - sign, end


def read(text: str) -> Fraction | None:
    r"""Return the first number in `text`, or the first behind the last "=", exactly; commas and
    spaces between thousands, $ and % do not count. None where another number or a calculation
    follows it, or a root is around it.

    "1,234.50" is 1234.5; "-3/4", "\frac{3}{4}", "2 1/2", "$ 5", "5e3" and "50%" (which is 50) are
    numbers too.
    """
    cleaned = clean(text[:LONGEST])
    behind = cleaned.rpartition("=")[2]
    cleaned = behind if _NUMBER.search(behind) else cleaned
    cleaned = re.sub(r"^(\s*)[-−–]\s+(?=[$.0-9])", r"\1-", cleaned)
    cleaned = re.sub(r"(?<=[0-9])\s*/\s*(?=[0-9])", "/", cleaned)
    cleaned = _SPACED.sub(lambda spaced: spaced[0].replace(" ", ""), cleaned)
    cleaned = _MIXED.sub(_improper, cleaned)
    match = _NUMBER.search(cleaned)
    if match is None or _INSIDE.search(cleaned[: match.start()]):
        return None
    rest = cleaned[match.end() :]
    exponent = _POWER.match(rest)
    rest = rest[exponent.end() :] if exponent else rest
    sign, inner, above, below = match.groups()
    value, divisor = decimal(above), Fraction(1) if below is None else decimal(below)
    if value is None or not divisor or _GOES_ON.match(rest):
        return None
    value *= Fraction(10) ** int(exponent[1]) if exponent else 1
    return (-1 if sign or inner else 1) * value / divisor


def clean(text: str) -> str:
    """Return a text whose LaTeX of numbers is plain."""
    text = text.replace("\\$", "$").replace("$ ", "$").replace("\\!", "").replace("{,}", ",")
    text = BOLD.sub(r"\1", text)
    text = re.sub(r"(?<![0-9])[‐‑–](?=[$.0-9])", "-", text)
    text = re.sub(r"(=\s*)[-−]\s+(?=[$.0-9])", r"\1-", text)
    text = _MINUS.sub(r"\1-", _NEGATIVE.sub("-", text))
    text = re.sub(r"(?<=[0-9][eE])−|(?<=\^)−|(?<=\^\{)−", "-", text).replace("⁄", "/")
    text = re.sub(r"(?:\\[,;:])?\s*(\\times|\\cdot)\s*(?:\\[,;:])?", r" \1 ", text)
    text = _OF_A_UNIT.sub(r"\1", _TEN_TO.sub(r"e\1", text))
    text = re.sub(r"(?<=[0-9])(?:\\[,;: ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", "", text)
    return _LATEX_FRACTION.sub(_plain, text)


def _improper(mixed: re.Match[str]) -> str:
    """Return a match of _MIXED as a/b, such as 5/2 of 2 1/2."""
    whole, above, below = map(int, mixed.groups())
    return f"{whole * below + above}/{below}" if above < below else mixed[0]


def _plain(fraction: re.Match[str]) -> str:
    r"""Return a match of _LATEX_FRACTION as a/b: of \frac{3}{4}, \frac34 and 1\frac{3}{4}."""
    whole, *parts = fraction.groups()
    above, below = (part for part in parts if part is not None)
    if below.startswith("-"):
        above, below = above[1:] if above.startswith("-") else f"-{above}", below[1:]
    if not whole:
        before = fraction.string[: fraction.start()][-1:]
        return f"{' ' * before.isdigit()}{above}/{below}"
    if not (above + below).isdigit():
        return fraction[0]
    return f"{int(whole) * int(below) + int(above)}/{below}"


# --- math-verify: answers that are equal as mathematics but not written as one number


def math_verify(
    key: str = "task.check='math_verify'", other: str = "task.check=numeric"
) -> tuple[Any, Any]:
    """Return math-verify's parse and verify. Raises: ConfigError for `key` where there is none."""
    package = import_optional(
        "math_verify",
        f"{key} needs the package math-verify. Install it: pip install"
        f" 'math-verify[antlr4_9_3]' (Hydra needs antlr 4.9.3 too). Or use {other}.",
    )
    return package.parse, package.verify


def equal(wanted: str, given: str) -> bool:
    """Return whether math-verify finds them equal; powers and factorials, which it would compute,
    are not.
    """
    costly = any(sign in given for sign in ("^", "**", "!", "e+", "E+"))
    if costly or sum(map(str.isdigit, given)) > DIGITS:
        return False
    return call("math_verify", verify_answer, wanted, given) == 1


def verify_answer(wanted: str, given: str) -> float:
    """Return 1 where math-verify finds them equal, for a process of its own (bounded.call)."""
    parse, verify = math_verify()
    texts = (f"${text.replace('$', '')}$" for text in (wanted, given))
    parsed = [parse(text, parsing_timeout=None) for text in texts]
    return float(all(parsed) and verify(*parsed, timeout_seconds=None))
