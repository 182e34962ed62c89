r"""Mathematical equality of answers that are written differently, by the package math-verify.

Texts that it cannot parse completely are not compared: it would read `1 - \frac{1}{\mathrm{e}}` as
1. Nor are texts that it misreads, such as 2516_8 (2516), 5 6 (11), and words (products of their
letters). Texts that differ only in blanks and type are equal without it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from common.system import import_optional
from common.tasks.amounts import DASHES, FRACTIONS, POWERS, TEXT, TIMES, Amounts, Token, split
from common.tasks.answers import DIGITS
from common.tasks.limited_process import call
from common.tasks.sentence import CHANGES, DEGREES, FUNCTIONS
from common.tasks.sides import find_end, is_answer, is_product

log = logging.getLogger("clutch")

LOOK_SECONDS = 10.0  # the time to check the right answers before a run
LONGEST = 400  # characters that are compared
MOST_TOKENS = 120
MOST_DEPTH = 8  # of brackets within brackets
MOST_SIGNS = 2  # in a row, as in 3--5
MOST_ALIKE = 12  # tokens, or twice the period, that repeat those before them
LONGEST_PERIOD = 24
_ENDLESS = {"\\int", "\\lim", "\\sum", "\\prod", "\\oint", "\\iint"}  # one of them in a text
MOST_EXPONENT = 200  # of powers of powers
_MODULI = {"\\mod", "\\bmod", "\\pmod", "\\pod", "mod"}
_PAIRS = {"(": ")]", "[": ")]", "{": "}", "\\{": ["\\}"]}  # [2, 5) is an interval
_TYPE = {"$", "\\$", "\\(", "\\)", "\\[", "\\]", "\\displaystyle", "\\limits"}


def math_verify(
    key: str = "task.check='math_verify'", other: str = "task.check=numeric"
) -> tuple[Any, Any]:
    """Return a parser that parses a whole text as math-verify does, or nothing, and its `verify`.

    Raises: ConfigError for `key` if the package is not installed.
    """
    package = import_optional(
        "math_verify",
        f"{key} needs the package math-verify. Install it: pip install"
        f" -e '.[math]'. Or use {other}.",
    )

    def parse(text: str) -> Any:
        config = package.LatexExtractionConfig()
        # A unit at the end is left out below: to the package the t of 3t is one.
        config = replace(
            config, normalization_config=replace(config.normalization_config, units=False)
        )
        # Else a part of the text that can be parsed would be taken for it.
        whole = {"fallback_mode": "no_fallback", "extraction_mode": "first_match"}
        return package.parse(f"${text}$", [config], parsing_timeout=None, **whole)

    return parse, package.verify


def equal(wanted: str, given: str) -> bool:
    """Return whether two answers are equal, as texts or as mathematics."""
    if wanted == given or normalize(wanted) == normalize(given):
        return True
    said = [_read_words(text) for text in (wanted, given)]
    if any(said):
        return _are_same_words(
            *(one or _find_choice(text) for one, text in zip(said, (wanted, given), strict=True))
        )
    if _differ_in_case(wanted, given) or _is_other_equation(wanted, given):
        return False
    first, second = (comparable(text) for text in (wanted, given))
    if first is None or second is None:
        return False
    several = [text.count("=") for text in (first, second) if "," in text or ";" in text]
    if several and (first.count("=") > 0) != (second.count("=") > 0):
        return False  # x_1 = 3, x_2 = 5 is no set of 3 and 5
    return ask(first, second)


@lru_cache(maxsize=100_000)
def ask(first: str, second: str) -> bool:
    """Return whether math-verify finds two texts equal; results are cached."""
    return call("math_verify", verify_answer, first, second) == 1


@lru_cache(maxsize=100_000)
def is_comparable(text: str) -> bool:
    """Return whether math-verify can parse the whole of an answer."""
    found = comparable(text)
    return found is not None and call("math_verify", parse_answer, found) == 1


def warn_of_unread(where: str, wanted: Sequence[str]) -> None:
    """Warn of right answers that cannot be parsed completely; checks as many as it can within a
    time limit.

    Args: where: the source of the rows.
    """
    until, read = time.monotonic() + LOOK_SECONDS, 0
    unread = []
    for text in wanted:
        if time.monotonic() > until:
            break
        read += 1
        unread += [] if is_comparable(text) else [text]
    if unread:
        log.warning(
            "%s: of %d right answers that are no numbers, %d could not be read as mathematics to"
            " their end, as %r. Only an answer that is written alike earns 1 there.",
            *(where, read, len(unread), unread[0][:80]),
        )


def parse_answer(text: str) -> float:
    """Return 1 if math-verify parses all of a text; called in a separate process."""
    return float(bool(math_verify()[0](text)))


def verify_answer(wanted: str, given: str) -> float:
    """Return 1 if math-verify finds two texts equal; called in a separate process."""
    parse, verify = math_verify()
    parsed = [parse(text) for text in (wanted, given)]
    return float(all(parsed) and verify(*parsed, timeout_seconds=None))


def normalize(text: str) -> str:
    r"""Return a mathematical text without blanks, dollars and degrees at its end, and with one kind
    of \frac.
    """
    return _join(_with_plain_moduli(_plain(text))) if len(text) <= LONGEST else text


def comparable(text: str) -> str | None:
    """Return the text to pass to math-verify; None if it must not be compared."""
    tokens = _without_unit(_plain(text)) if len(text) <= LONGEST else []
    if not tokens or sum(map(_digits, tokens)) > DIGITS or not _is_readable(tokens):
        return None
    texts = _find_texts(tokens)
    if any(_is_odd(tokens, place, texts) for place in range(len(tokens))):
        return None
    # Of several equations in a row it would take the last one, if that alone can be parsed.
    row = sum(token.text == "=" for token in tokens) > 1 + _count_commas(tokens)
    if row or not _is_small(tokens):
        return None
    plain = _with_plain_numbers(tokens)
    return None if plain is None else _join(plain)


def _is_readable(tokens: Sequence[Token]) -> bool:
    """Return whether tokens may be an answer: their brackets match, and nothing is repeated
    endlessly. math-verify takes seconds to reject others.
    """
    if len(tokens) > MOST_TOKENS:
        return False
    open_ones: list[str] = []
    signs, alike = 0, [0] * LONGEST_PERIOD
    for place, token in enumerate(tokens):
        if token.text in _PAIRS:
            open_ones.append(token.text)
        elif token.text in (")", "]", "}", "\\}") and (
            not open_ones or token.text not in _PAIRS[open_ones.pop()]
        ):
            return False
        signs = signs + 1 if token.text in {"+", *DASHES, *TIMES, "/"} else 0
        for period in range(1, min(place, LONGEST_PERIOD) + 1):
            same = token.text == tokens[place - period].text
            alike[period - 1] = alike[period - 1] + 1 if same else 0
        if (
            len(open_ones) > MOST_DEPTH
            or signs > MOST_SIGNS
            or any(count > max(MOST_ALIKE, 2 * period) for period, count in enumerate(alike, 1))
        ):
            return False
    return not open_ones and sum(token.text in _ENDLESS for token in tokens) <= 1


def _read_words(text: str) -> str | None:
    r"""Return the words of an answer, without \text{}; None for mathematics."""
    if len(text) > LONGEST:
        return None
    tokens = [token for token in _plain(text) if token.text != "{" and token.text != "}"]
    typed = any(token.text in TEXT for token in tokens)
    tokens = [token for token in tokens if token.text not in TEXT]
    if typed and [token.text for token in (tokens[:1] + tokens[-1:])] == ["(", ")"]:
        tokens = tokens[1:-1]  # the letter of a choice
    marks = {*"-.,;:'’&", "\\&"}
    plain = all(token.kind == "word" or token.text in marks for token in tokens)
    spoken = any(len(token.text) > 3 or (len(token.text) > 1 and typed) for token in tokens)
    known = any(token.text in FUNCTIONS for token in tokens)
    spoken |= any(len(token.text) == 3 and not is_product(token) for token in tokens)
    choice = typed and len(tokens) == 1 and tokens[0].is_letter
    if not plain or not (spoken or choice) or (known and not typed):
        return None
    return "".join(f" {t.text}" if t.gap and place else t.text for place, t in enumerate(tokens))


def _find_choice(text: str) -> str:
    r"""Return the letter of a choice, as in \text{(C)}, from (C) or C."""
    return text.strip().strip("$").removeprefix("(").removesuffix(")")


def _differ_in_case(wanted: str, given: str) -> bool:
    """Return whether two texts have the same variables except for their case, which math-verify
    ignores.
    """
    first, second = (
        {
            letter
            for token in _plain(text[:LONGEST])
            if token.kind == "word"
            for letter in token.text
        }
        for text in (wanted, given)
    )
    folded = [{letter.casefold() for letter in one} for one in (first, second)]
    return first != second and folded[0] == folded[1]


def _is_other_equation(wanted: str, given: str) -> bool:
    """Return whether only one of two texts is an equation that does not just name its right side:
    3n = 18 compared with 18, where math-verify would compare only 18.
    """
    lefts = []
    for text in (wanted, given):
        tokens = _plain(text[:LONGEST])
        signs = [place for place, token in enumerate(tokens) if token.text == "="]
        lefts.append(tokens[: signs[-1]] if signs else None)
    several = any(token.text in (",", ";") for left in lefts for token in left or ())
    if several or (lefts[0] is None) == (lefts[1] is None):
        return False
    return not any(left is not None and is_answer(left, united=False) for left in lefts)


def _are_same_words(wanted: str, given: str) -> bool:
    """Return whether two answers in words are the same; a single word may differ in case."""
    if " " in wanted or len(wanted) == 1:
        return wanted == given
    return wanted.casefold() == given.casefold()


def _with_plain_moduli(tokens: list[Token]) -> list[Token]:
    r"""Return the tokens with 3 mod 5 in place of 3 \pmod{5}, 3 \mod 5 and 3 (mod 5)."""
    found: list[Token] = []
    place, opened = 0, False
    while place < len(tokens):
        token = tokens[place]
        if token.text in _MODULI:
            if opened := bool(found) and found[-1].text == "(":
                found.pop()
            found.append(token._replace(kind="word", text="mod"))
            end = find_end(tokens, place + 1)
            if not opened and place + 1 < end - 1 and tokens[place + 1].text in ("{", "("):
                found += tokens[place + 2 : end - 1]
                place = end
                continue
        elif opened and token.text == ")":
            opened = False
        else:
            found.append(token)
        place += 1
    return found


def _plain(text: str) -> list[Token]:
    """Return the tokens of a text that affect its meaning."""
    tokens = _without_upright([token for token in split(text) if token.text not in _TYPE])
    while tokens and tokens[-1].text in (".", ","):
        tokens.pop()
    if any(token.text.lstrip("\\") in FUNCTIONS for token in tokens):
        return tokens  # the sine of 30 is not that of 30 degrees
    for form in ((POWERS, {"{"}, DEGREES, {"}"}), (POWERS, DEGREES), (DEGREES,)):
        end = [token.text for token in tokens[-len(form) :]]
        if len(end) == len(form) and all(map(set.__contains__, form, end)):
            return tokens[: -len(form)]
    return tokens


def _without_upright(tokens: list[Token]) -> list[Token]:
    r"""Return the tokens with e in place of \mathrm{e}; after a number it may be a
    unit, and stays.
    """
    found: list[Token] = []
    place = 0
    while place < len(tokens):
        group = tokens[place : place + 4]
        braces = [token.text for token in group[1::2]] == ["{", "}"]
        letter = len(group) == 4 and braces and group[2].is_letter
        free = not found or found[-1].text in {"{", "(", "=", "+", ",", *DASHES}
        if group[0].text in ("\\mathrm", "\\mathit", "\\rm") and letter and free:
            found.append(group[2])
            place += 4
        else:
            found.append(group[0])
            place += 1
    return found


def _without_unit(tokens: list[Token]) -> list[Token]:
    r"""Return the tokens without a unit such as \text{ cm}^2 at the end."""
    end = len(tokens)
    if end > 2 and tokens[-1].kind == "digits" and tokens[-2].text in POWERS:
        end -= 2
    elif end > 4 and tokens[-1].text == "}" and tokens[-4].text in POWERS:
        end -= 4
    if end < 4 or tokens[end - 1].text != "}":
        return tokens
    start = Amounts(tokens).find_opener(end - 1)
    words = {token.text.lower() for token in tokens[start + 1 : end - 1]}
    unit = start > 1 and tokens[start - 1].text in TEXT and not words & CHANGES
    before = tokens[start - 2]
    ends = before.kind in ("digits", "word", "command") or before.text in (")", "}", "]")
    return tokens[: start - 1] if unit and ends else tokens


def _digits(token: Token) -> int:
    return len(token.text) if token.kind == "digits" else 0


def _count_commas(tokens: Sequence[Token]) -> int:
    return sum(token.text in (",", ";") for token in tokens)


def _is_odd(tokens: Sequence[Token], place: int, texts: set[int]) -> bool:
    """Return whether math-verify would misread a token, or compute endlessly."""
    token = tokens[place]
    after = tokens[place + 1].text if place + 1 < len(tokens) else ""
    if token.text in _MODULI:  # it would compare only the part before it
        return True
    if token.kind == "word":
        return len(token.text) > 2 and token.text not in FUNCTIONS and place not in texts
    if token.kind == "digits":
        return after == "_"
    odd = {*"!?'|:°", '"', "\\circ", "\\prime", "\\pm", "\\mp"}
    return token.kind in ("line", "dots", "tag", "arrow", "raised") or token.text in odd


def _find_texts(tokens: Sequence[Token]) -> set[int]:
    r"""Return the positions of the tokens within \text{...}."""
    found: set[int] = set()
    depth = 0  # of braces within one
    for place, token in enumerate(tokens):
        if depth:
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            found.add(place)
        elif token.text == "{" and place and tokens[place - 1].text in TEXT:
            depth = 1
    return found


def _is_small(tokens: Sequence[Token]) -> bool:
    """Return whether all powers are small, also powers of powers: whole numbers of two digits, or
    expressions without a power.
    """
    largest, inside = 1, [1]  # exponents of the groups that are open
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if token.text in ("{", "(", "[", "\\{"):
            inside.append(1)
        elif token.text in ("}", ")", "]", "\\}") and len(inside) > 1:
            largest = inside.pop()
            inside[-1] = max(inside[-1], largest)
        elif token.text in POWERS:
            group = _read_exponent(tokens, place + 1)
            if group is None:
                return False
            place, exponent = group
            base = largest if tokens[place - 1].text in ("}", ")") else 1
            inside[-1] = max(inside[-1], base * exponent)
            if inside[-1] > MOST_EXPONENT:
                return False
            continue
        place += 1
    return True


def _read_exponent(tokens: Sequence[Token], start: int) -> tuple[int, int] | None:
    """Return the end of an exponent, and its size; None if it is not small."""
    if start >= len(tokens):
        return None
    depth, end = 0, start
    while end < len(tokens):
        depth += {"{": 1, "}": -1}.get(tokens[end].text, 0)
        end += 1
        if depth == 0 and tokens[end - 1].text not in ("+", *DASHES):
            break
    if end < len(tokens) and tokens[end].text in POWERS:
        return None
    group = tokens[start:end]
    numbers = [int(token.text) for token in group if token.kind == "digits" and _digits(token) < 3]
    long = any(_digits(token) > 2 for token in group)
    if long or len(numbers) > 2 or any(token.text in POWERS for token in group):
        return None
    return end, max([1, *numbers])


def _with_plain_numbers(tokens: list[Token]) -> list[Token] | None:
    r"""Return the tokens with mixed numbers, powers of ten and thousands in a form that math-verify
    parses correctly: \frac{5}{2} for 2 1/2. None if a number is invalid, or follows another.
    """
    found: list[Token] = []
    place = 0
    for amount in Amounts(tokens).amounts:
        part = tokens[amount.start : amount.end]
        found += tokens[place : amount.start]
        place, value = amount.end, amount.value
        spaced = any(token.gap for token in part[1:])
        if not spaced and all(token.kind == "digits" or token.text in ",." for token in part):
            found += part  # 1,200 may also be two numbers: (1,200)
        elif value is None:
            return None
        else:
            text = str(value.numerator)
            if value.denominator > 1:
                text = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
            found.append(Token("digits", text, 0, 0, part[0].gap))
    found += tokens[place:]
    in_a_row = any(one.kind == two.kind == "digits" for one, two in pairwise(found))
    return None if in_a_row else found


def _join(tokens: Sequence[Token]) -> str:
    r"""Return tokens as a text, with blanks only between two numbers and in \pi r."""
    text, last = "", ""
    for token in tokens:
        said = "\\frac" if token.text in FRACTIONS else "-" if token.text in DASHES else token.text
        named = last == "command" and token.kind == "word"
        text += f" {said}" if named or last == token.kind == "digits" else said
        last = token.kind
    return text
