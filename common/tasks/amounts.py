"""The numbers in a text, by the grammar of numbers.py: tokens, and amounts made of tokens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from common.tasks.answers import DIGITS


def words(text: str) -> set[str]:
    """Return the set of words in a text, split at white space."""
    return set(text.split())


AROUND = 200  # the most tokens between the two tokens of a pair, such as braces

DASHES = set("-−–‐‑")
TIMES = {"×", "*", "·", "⋅", "∗", "\\times", "\\cdot", "\\ast"}
POWERS = {"^", "**"}
FRACTIONS = {"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"}
# Commands that do not change the meaning of the text in their braces.
TEXT = {"\\text", "\\mathrm", "\\textbf", "\\textrm", "\\textit", "\\mathbf", "\\mathit", "\\mbox"}
TEXT |= {"\\underline", "\\boldsymbol", "\\bm", "\\emph", "\\texttt", "\\textsf", "\\uline"}
TEXT |= {"\\boxed", "\\fbox", "\\rm", "\\bf", "\\operatorname", "\\textnormal", "\\mathsf"}

_TOKEN = re.compile(
    r"""(?P<gap>(?:[^\S\n]|~(?=\S)|\\[,;:!\ ]|\\q?quad(?![A-Za-z])
      |\\(?:left|right|[bB]ig[lr]?|displaystyle)(?![A-Za-z]))++)
    |(?P<line>\n)
    |(?P<tag><\|[^<>|\n]{1,40}\|>|</?[A-Za-z][^<>\n]{0,40}>|<<[^<>\n]{1,80}>>)
    |(?P<arrow>-{1,2}>|={1,2}>|[→⇒]|\\(?:to|implies|therefore|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z]))
    |(?P<dots>\.\.++|…|\\[lc]?dots(?![A-Za-z]))
    |(?P<command>\\[A-Za-z]++)
    |(?P<digits>[0-9]++)
    |(?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]++)
    |(?P<word>(?:(?![⁰¹²³⁴-⁹ⁿ₀-₉¼-¾⅐-⅟π])[^\W\d_])++)
    |(?P<other>\{,\}|\*\*|\\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_THIN = {"\\,", "\\;", "\\:", "\\ ", "\\!", "~", "\N{NO-BREAK SPACE}", "\N{THIN SPACE}"}
_THIN |= {"\N{NARROW NO-BREAK SPACE}"}
# Signs of LaTeX and of full width, and their plain equivalents.
_SAME = dict(zip("，、；：（）＝－＋％＜＞", ",,;:()=-+%<>", strict=True)) | {"{,}": ","}


class Token(NamedTuple):
    """A token of a text, with the white space before it (`gap`)."""

    kind: str
    text: str
    start: int
    end: int
    gap: str

    @property
    def is_letter(self) -> bool:
        """Whether the token is a single letter, such as a variable or a unit."""
        one = self.kind == "word" and len(self.text) == 1
        return one and (self.text.isascii() or "α" <= self.text.lower() <= "ω")

    @property
    def is_word(self) -> bool:
        """Whether the token is a word of two or more letters, or in a script of syllables."""
        return self.kind == "word" and not self.is_letter


class Amount(NamedTuple):
    """A number without its sign.

    Attributes:
        start: the position of its first token.
        end: the position after its last token.
        value: its value; None for text that looks like a number but is none, such as 1.2.3.
    """

    start: int
    end: int
    value: Fraction | None


EDGE = Token("edge", "", 0, 0, " ")


def split(text: str) -> list[Token]:
    """Split a text into tokens."""
    tokens, gap = [], ""
    for match in _TOKEN.finditer(text):
        kind, found = str(match.lastgroup), match[0]
        if kind == "gap":
            gap = found
        else:
            tokens.append(Token(kind, _SAME.get(found, found), *match.span(), gap))
            gap = ""
    return tokens


@dataclass
class Amounts:
    """Tokens, and the numbers in them, in order.

    Attributes:
        tokens: the tokens of the text.
        amounts: the numbers.
        powers: positions of digits that are the power of a unit, as in m^2 and cm3.
    """

    tokens: Sequence[Token]
    amounts: list[Amount] = field(default_factory=list, init=False)
    powers: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        position = 0
        while position < len(self.tokens):
            amount = self._amount(position)
            if amount is not None:
                self.amounts.append(amount)
            position = position + 1 if amount is None else amount.end

    def at(self, position: int) -> Token:
        """Return the token at a position; beyond the text the token EDGE."""
        return self.tokens[position] if 0 <= position < len(self.tokens) else EDGE

    # --- amounts: each method returns what begins at a position, or None

    def _amount(self, start: int) -> Amount | None:
        if self.at(start).text in FRACTIONS:
            return self._fraction(start)
        if self._is_power(start):
            self.powers.add(start)
            return None
        if not self._begins_number(start):
            return None
        end, groups, separators = self._digits(start)
        value, after = _value(groups, separators), self.at(end)
        if after.text in ("/", "⁄") and self.at(end + 1).kind == "digits":
            return self._quotient(start, end, groups, separators)
        if after.text in FRACTIONS and (part := self._fraction(end)) is not None:
            proper = part.value is not None and 0 < part.value < 1 and not separators
            mixed = value + part.value if proper and value is not None and part.value else None
            return Amount(start, part.end, mixed)
        exponent = self._exponent(end)
        if exponent is None:
            return Amount(start, end, value)
        end, power = exponent
        scaled = None if value is None or power is None else value * Fraction(10) ** power
        return Amount(start, end, scaled)

    def _begins_number(self, start: int) -> bool:
        """Return whether a number begins here: digits, or a decimal point (not a full stop) before
        digits.
        """
        token, before = self.at(start), self.at(start - 1)
        if token.text != ".":
            return token.kind == "digits"
        glued = not token.gap and before.kind in ("word", "digits", "dots")
        after = self.at(start + 1)
        return after.kind == "digits" and not after.gap and not glued

    def _is_power(self, position: int) -> bool:
        """Return whether digits are the power of a unit or of a variable."""
        token = self.at(position)
        if token.kind != "digits" or len(token.text) > 1:
            return False
        before, behind = self.at(position - 1), self.at(position + 1)
        pointed = behind.text == "." and self.at(position + 2).kind == "digits"
        if not behind.gap and (behind.kind in ("word", "digits") or pointed):
            return False
        if before.kind == "word" and not token.gap:  # cm3
            return token.text in "23" and before.text[-1].islower() and before.text[-1] != "x"
        place = position - 1
        for passed in (DASHES, {"{"}):
            place -= self.at(place).text in passed
        if self.at(place).text not in POWERS:
            return False
        base = self.at(place - 1)
        return base.kind == "word" or (base.text == "}" and self._is_text(place - 1))

    def _digits(self, start: int) -> tuple[int, list[str], list[str]]:
        """Return the end of groups of digits, the groups, and the separators between them."""
        pointed = self.at(start).text == "."
        groups, separators = [self.at(start).text], []
        end = start + 1
        if pointed:
            groups, separators, end = ["", self.at(start + 1).text], ["."], start + 2
        while True:
            token, after = self.at(end), self.at(end + 1)
            if token.kind == "digits" and token.gap:
                mixed = len(groups) == 1 and after.text in ("/", "⁄") and not after.gap
                if len(token.text) != 3 and not mixed:
                    break
                thin = token.gap if token.gap in _THIN else " " if token.gap == " " else "?"
                groups.append(token.text)
                separators.append(thin)
                end += 1
            elif (
                token.text
                and token.text in ",.'’_"
                and (not token.gap or (token.text == "," and set(token.gap) <= set("\\!")))
                and after.kind == "digits"
            ):
                if after.gap and (token.text != "," or not after.gap.startswith("\\!")):
                    break
                groups.append(after.text)
                separators.append(token.text)
                end += 2
            else:
                break
        return end, groups, separators

    def _quotient(self, start: int, end: int, groups: list[str], separators: list[str]) -> Amount:
        """Return a fraction a/b, or a mixed number a b/c."""
        parts = [_value(groups, separators)]
        mixed = separators == [" "] and _value(groups, separators) is None
        if mixed:
            parts = [_value(groups[1:], [])]
        last = end
        while self.at(last).text in ("/", "⁄") and self.at(last + 1).kind == "digits":
            last, more, between = self._digits(last + 1)
            parts.append(_value(more, between))
        value = None
        if len(parts) == 2 and parts[0] is not None and parts[1]:
            value = parts[0] / parts[1]
            if mixed:
                whole = _value(groups[:1], [])
                value = None if whole is None or value >= 1 else whole + value
            elif " " in separators:  # 1 234/5: of a thousand, or mixed
                value = None
        return Amount(start, last, value)

    def _fraction(self, start: int) -> Amount | None:
        r"""Return \frac{3}{4}, \frac34 and similar; None if an argument is more than a number."""
        digits = self.at(start + 1)
        if digits.kind == "digits" and len(digits.text) == 2:
            above, below = (Fraction(letter) for letter in digits.text)
            return Amount(start, start + 2, above / below if below else None)
        values, end = [], start + 1
        for _ in range(2):
            argument = self._argument(end)
            if argument is None:
                return None
            end, value = argument
            values.append(value)
        fine = values[0] is not None and values[1]
        return Amount(start, end, values[0] / values[1] if fine else None)

    def _argument(self, start: int) -> tuple[int, Fraction | None] | None:
        """Return the end and the value of an argument of a fraction."""
        if self.at(start).kind == "digits" and len(self.at(start).text) == 1:
            return start + 1, Fraction(self.at(start).text)
        if self.at(start).text != "{":
            return None
        negative = self.at(start + 1).text in DASHES
        first = start + 1 + negative
        if not self._begins_number(first):
            return None
        end, groups, separators = self._digits(first)
        if self.at(end).text != "}":
            return None
        value = _value(groups, separators)
        return end + 1, -value if negative and value is not None else value

    def _exponent(self, start: int) -> tuple[int, int | None] | None:
        """Return the end and the value of an exponent of ten: e3, × 10^3, × 10³. The value is None
        if it is too large.
        """
        token, ten = self.at(start), self.at(start + 1)
        if token.text in ("e", "E") and not token.gap:
            place = start + 1
        elif (token.text in TIMES or token.text in ("x", "X")) and ten.text == "10":
            raised = self.at(start + 2)
            if raised.kind == "raised" and not raised.gap:
                text = raised.text.translate(_RAISED)
                fine = re.fullmatch("[-+]?[0-9]{1,2}", text)
                return start + 3, int(text) if fine else None
            if raised.text not in POWERS:
                return None
            place = start + 3
        else:
            return None
        braced = self.at(place).text == "{" and place > start + 1
        place += braced
        sign = -1 if self.at(place).text in DASHES else 1
        place += self.at(place).text in DASHES or self.at(place).text == "+"
        digits, behind = self.at(place), self.at(place + 1)
        if digits.kind != "digits" or (digits.gap and place == start + 1):
            return None
        if braced != (behind.text == "}") and braced:
            return None
        end = place + 1 + braced
        behind = self.at(end)
        pointed = behind.text == "." and self.at(end + 1).kind == "digits"
        glued = not behind.gap and (pointed and not self.at(end + 1).gap)
        fine = len(digits.text) <= 2 and not glued
        return end, sign * int(digits.text) if fine else None

    def find_opener(self, place: int) -> int:
        """Return the position of the opening brace of a closing brace; -1 if there is none."""
        depth = 0
        for position in range(place, max(-1, place - AROUND), -1):
            depth += {"}": 1, "{": -1}.get(self.at(position).text, 0)
            if depth == 0:
                return position
        return -1

    def _is_text(self, place: int) -> bool:
        r"""Return whether a closing brace ends \text{...} or a similar command."""
        return self.at(self.find_opener(place) - 1).text in TEXT


def _value(groups: Sequence[str], separators: Sequence[str]) -> Fraction | None:
    """Return the number that groups of digits stand for; None if they are no number,
    or too long.
    """
    if sum(map(len, groups)) > DIGITS:
        return None
    whole, between, decimals = list(groups), list(separators), ""
    if between and between[-1] == ".":
        decimals = whole.pop()
        between.pop()
    if between:
        even = len(set(between)) == 1 and (between[0] == "," or between[0] in {" ", *_THIN})
        fits = 1 <= len(whole[0]) <= 3 and all(len(group) == 3 for group in whole[1:])
        if not even or not fits or whole[0].startswith("0"):
            return None
    return Fraction(f"{''.join(whole) or '0'}.{decimals or '0'}")
