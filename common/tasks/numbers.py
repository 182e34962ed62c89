r"""Numbers as people and models write them: 1,234.5, 2 1/2, 5e3, $ 5, 50%, \frac{3}{4}.

`read` parses a whole text as one number, or as none. `find_answer` finds the answer of a
completion, which is the last number of a sentence unless a mark shows another; it counts only if it
stands alone. Nothing here raises or is executed, and the time is linear in the text. amounts.py has
the grammar, sentence.py the contexts in which a number stands alone, sides.py those in which it
belongs to an equation, spoken.py those in which a sentence rejects it.

    text     = [label ("=" | ":" | ...)] signed [tail]
    signed   = [sign] [currency] [sign] amount           also "minus" and "negative"
    tail     = [%, °, a currency or brackets] [words of a unit, with its powers]
    label    = words and brackets, which hold no digit, no operator and no name of a function
    amount   = simple [exponent | "/" simple] | mixed | fraction
    mixed    = whole " " whole "/" whole | whole fraction      2 1/2: the fraction is below 1
    fraction = \frac arg arg                                   also \dfrac, \tfrac, \cfrac
    arg      = "{" [sign] simple "}" | one digit
    exponent = "e" [sign] whole | times "10" "^" ["{"] [sign] whole ["}"]
    simple   = [whole | grouped] ["." whole]
    grouped  = 1 to 3 digits, then groups of 3                 all with "," or all with a thin space
    whole    = digits

A point is the decimal point, and a comma separates thousands. Texts that are another number by the
conventions of another language (3,5 and 1.234,50 and 12'000) are no number.
"""

import re
from fractions import Fraction

from common.tasks.amounts import split, words
from common.tasks.sentence import Answer
from common.tasks.spoken import REJECTS, Spoken

MARK = "####"
LONGEST = 200  # the most characters of an answer
NEAR = 2_000  # characters before the last digit of a text that are read
BOLD = re.compile(r"(?<![\w)])\*\*([^*\n]+)\*\*(?![\w(])")  # of Markdown, and no power
_UNDERLINED = re.compile(r"(?<![\w)}])(__?)([^_\n{}]+)\1(?![\w(])")
_ANGLED = re.compile(r"(?<![\w)<])(?<![\d)] )<([-−+$]?\d[\d.,/]*)>(?! ?[\d>])")
_SAID = re.compile(r"(?i)\banswers?\b[^$\\\n\d:=]{0,40}?(?:\bis\b|\bequals\b|\bbe\b|:|=)\s*:?")
_FORMULA = re.compile(r"\$(?![\s$])([^$\n]+)(?<!\s)\$(?!\d)|\\\((.+?)\\\)")
_WORD = re.compile(r"[^\W\d_]+")
_OPERATION = re.compile(r"[-+*/^=<>×·|&~±]")
_CONCLUDES = words("so thus hence therefore gives get then is equals yields obtain means")
_MORE = words("or and times plus minus half twice than least most per each")
_STRUCK = re.compile(r"~~[^~\n]+~~")
_BOX = "\\boxed{"


def without_type(text: str) -> str:
    """Return a text without the marks of bold, italics and angle brackets, and without struck-out
    parts.
    """
    text = BOLD.sub(r"\1", _STRUCK.sub(" ", text))
    return _ANGLED.sub(r"\1", _UNDERLINED.sub(r"\2", text))


def is_marked(completion: str) -> bool:
    r"""Return whether a completion marks its answer, by #### or \boxed{...}."""
    return MARK in completion or _BOX in completion


def find_answer(completion: str) -> str | None:
    r"""Return the text after the last `####`, else in the last \boxed{...}, else the last number. A
    mark decides even if no answer follows it.
    """
    if MARK in completion:
        rest = completion[completion.rfind(MARK) + len(MARK) :].lstrip()
        line = rest[: LONGEST + 1].split("\n", 1)[0].strip()
        return line if len(line) <= LONGEST and any(map(str.isalnum, line)) else None
    if _BOX not in completion:
        return find_alone(completion)
    depth, begin = 1, completion.rfind(_BOX) + len(_BOX)
    for position in range(begin, min(len(completion), begin + LONGEST)):
        depth += {"{": 1, "}": -1}.get(completion[position], 0)
        if depth == 0:
            return completion[begin:position].strip() or None
    return None  # not closed


def find_alone(text: str) -> str | None:
    """Return the last number of a text; None if it is part of another number, as in "42x" and "4
    thousand", of a calculation, as in "7-3", or one of several, as in "3 to 5".
    """
    last = max(map(text.rfind, "0123456789"))
    if last < 0:
        return None
    text = without_type(text[max(0, last - NEAR) : last + LONGEST])
    sentence = Spoken(split(text))
    amount = sentence.amounts[-1] if sentence.amounts else None
    if amount is None or amount.value is None:
        return None
    sign = sentence.find_sign(amount)
    if sign is None or not (sentence.is_alone(amount, sign) and sentence.is_said(amount, sign)):
        return None
    tokens = sentence.tokens
    found = text[tokens[sign.first].start : tokens[amount.end - 1].end]
    return found if len(found) <= LONGEST else None


def find_formula(line: str) -> str | None:
    r"""Return the answer in a line of mathematics: the text after "the answer is", or the only, or
    last, $...$ of a sentence, else the whole line.
    """
    text = line.strip()
    said = list(_SAID.finditer(text))
    if said:
        text = text[said[-1].end() :].strip().removesuffix(".")
    text = text.removesuffix("\\]").removeprefix("\\[").strip()
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return text or None
    first = formulas[-2].end() if len(formulas) > 1 else 0
    between, behind = text[first : formulas[-1].start()], text[formulas[-1].end() :]
    concludes = not _CONCLUDES.isdisjoint(_WORD.findall(between.lower()))
    outside = set(_WORD.findall(text[: formulas[-1].start()].lower() + " " + behind.lower()))
    mixed = (
        any(map(str.isdigit, between + behind))
        or any(map(str.isalnum, between[-1:] + behind[:1]))
        or _OPERATION.search(between[-3:] + behind[:3])
    )
    if mixed or (first and not concludes) or outside & (REJECTS | _MORE):
        return text or None
    return (formulas[-1][1] or formulas[-1][2]).strip() or None


def is_unread(completion: str, answer: str | None) -> bool:
    """Return whether a completion has an answer that is no number, or, without a mark, a number
    that does not stand alone.

    Args: answer: the answer that was found in it.
    """
    if answer is None:
        return not is_marked(completion) and any(map(str.isdigit, completion))
    return read(answer) is None


def read(text: str, *, variables: bool = False) -> Fraction | None:
    r"""Return the exact number that a text stands for, ignoring a label, a unit, a currency and
    brackets; None if it is something else, or has several numbers.

    "1,234.50" is 1234.5; "x = -3/4", "\frac{3}{4}", "2 1/2", "$ 5", "5e3", "5 \text{ cm}^2" and
    "50%" (which is 50) are numbers too.
    Args: variables: whether a single letter after a number is a variable and not a unit, so that 3m
    is no number.
    """
    text = text.strip()
    if len(text) > LONGEST:
        return None
    sentence = Answer(split(without_type(text)), variables=variables).take_result()
    amount = sentence.find_only() if sentence is not None else None
    if sentence is None or amount is None or amount.value is None:
        return None
    sign = sentence.find_sign(amount, whole=True)
    if sign is None or not sentence.is_alone(amount, sign, whole=True):
        return None
    plain = sentence.is_label(sign.first) and sentence.is_tail(amount.end, amount.value)
    return sign.factor * amount.value if plain else None
