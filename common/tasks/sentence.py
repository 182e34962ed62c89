"""Whether a number in a text stands alone, and its sign: the contexts of numbers.py. Each check
reads a bounded number of tokens around a number.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from common.tasks import sides
from common.tasks.amounts import AROUND, DASHES, POWERS, TEXT, TIMES, Amount, Amounts, Token, words

CURRENCIES = {"$", "\\$", "€", "£", "¥", "₹", "¢", "₽", "₩", "\\pounds", "\\euro"}
OPENERS, CLOSERS = {"(", "[", "{", "\\(", "\\["}, {")", "]", "}", "\\)", "\\]"}
QUOTES = set("\"“”«»`'’‘")
OPERATORS = {*TIMES, *POWERS, *"+/÷±∓&;|⁄∕∙•_√∛π∞", "\\div", "\\pm", "\\mp", "\\mid"}
RELATIONS = {*"<>≤≥≠∈∉∪∩∝"}
NEARLY = {*"≈~∼≃", "\\approx", "\\sim", "\\simeq"}
DEGREES = {*"°º℃℉", "\\circ", "\\degree"}
PERCENTS = {"%", "\\%", "‰"}
ORDINALS = words("st nd rd th er ère ème eme nde")  # glued to a number
UNIT_SIGNS = {"\\Omega", "\\ohm", "\\AA", "\\angstrom", "\\celsius", *"ΩΩÅ"}
CODES = words("usd eur gbp rs inr cad aud chf cny rmb jpy hkd us r no nr")  # before a number
LETTER_UNITS = set("msghlLKCFAVNJWtd")  # units that a single letter after a number can be

MULTIPLES = words(
    "hundred thousand million billion trillion dozen bn mn mil mln mio lakh crore half"
)
MULTIPLES |= {word + end for word in MULTIPLES for end in ("s", "th", "ths")} | {"halves"}
COUNTS = words("zero one two three four five six seven eight nine ten eleven twelve thirteen")
COUNTS |= words("fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty")
COUNTS |= words("fifty sixty seventy eighty ninety quarter quarters third thirds")
FUNCTIONS = words("log ln lg exp sin cos tan cot sec csc sqrt root mod pi")
# Words before a number, or after "or", that make it the bound of an interval.
BOUNDS = {"least", "most", "than", "twice", "half", "double", "triple"}
BOUNDS |= words("over under above below beyond nearly almost exceeding exceeds exceed barely")
COMPARED = {"more", "less", "fewer", "above", "below", "greater", "higher", "lower", "over", "up"}
# Words before a number that numbers a part of the text.
INDEXED = words(
    "question step problem example exercise part case figure table section page line note chapter"
    " equation method option item lemma theorem task appendix footnote volume version q fig eq"
)
# Words after a number that change its value.
CHANGES = MULTIPLES | COUNTS | FUNCTIONS | {"plus", "minus", "factorial", "squared", "cubed"}
CHANGES |= words("fold pm oclock") | {"ª"}
CHANGES |= {"base", "binary", "octal", "hexadecimal", "point", "modulo"}
REFUSALS = words("not never cannot wrong incorrect invalid extraneous rejected discarded false")
REFUSALS |= words("impossible inadmissible")
# Words between two numbers that make them a calculation, or several numbers.
JOINS = words(
    "or and to minus plus by times of versus vs over through until till choose x X rem remainder r"
)
JOINS |= set("或和与到至")
OF_WHOLE = PERCENTS | BOUNDS | {"out", "percent"}  # before "of" and a number
# Words before a dash with blanks around it that make it a minus sign.
COPULAS = words("is was are were be equals equal of by to gives get gets about becomes yields")
COPULAS |= words("approximately exactly as thus hence therefore")
MINUS_BEHIND = OPENERS | CURRENCIES | NEARLY | {*"=:*"}  # signs; there, too
# Words before a number whose clause ends before another number: "In 2023, 5 people".
PREPOSITIONS = words("in on at by after before since during until from of for with out")
MONTHS = words("January February March April May June July August September October")
MONTHS |= {"November", "December"}
MONTHS |= {name[:3] for name in MONTHS} | {"Sept"}
# Units of two numbers that are one amount: "3 hours 20 minutes".
PAIRED = words("h hr hrs hour hours min mins minute minutes s sec secs second seconds d day")
PAIRED |= words("days week weeks month months year years ft feet foot in inch inches lb lbs")
PAIRED |= {"deg", "degree", "degrees"}
PAIRED |= words("pound pounds oz ounce ounces kg g km m cm dollar dollars cent cents")


class Sign(NamedTuple):
    """The sign of a number.

    Attributes:
        factor: 1 or -1.
        first: the position of the first token of the number with its sign.
    """

    factor: int
    first: int


@dataclass
class Signed(Amounts):
    """A text with numbers that may have signs."""

    def find_sign(self, amount: Amount, whole: bool = False) -> Sign | None:
        """Return the sign of a number; None if it is ambiguous.

        Args: whole: whether the text is only the number, without a sentence.
        """
        factor, first, place = 1, amount.start, amount.start - 1
        if self.at(place).text in CURRENCIES:
            first = place
        while True:
            while self._is_wrapping(place):
                place -= 1
            token = self.at(place)
            if token.text in DASHES:
                found = self._judge_dash(place, amount, whole)
            elif token.text.lower() in ("minus", "negative"):
                found = self._judge_minus(place)
            elif token.text == "+" and not self._is_operand(place - 1):
                first, place = place, place - 1
                continue
            else:
                return Sign(factor, first)
            if found is None:
                return None
            if found > 0:  # an item of a list
                return Sign(factor, first)
            factor, first, place = -factor, place, place - 1

    def _is_wrapping(self, place: int) -> bool:
        """Return whether a token can be between a sign and its number."""
        token = self.at(place)
        return token.text in CURRENCIES or token.text in OPENERS or token.text in TEXT

    def _judge_dash(self, place: int, amount: Amount, whole: bool) -> int | None:
        """Return -1 for a minus sign, 1 for the mark of a list item; None for a subtraction, a
        range or a plain dash, or if it is ambiguous.
        """
        left, before, behind = self.at(place - 1), self.at(place).gap, self.at(place + 1).gap
        if left.kind == "edge":
            words = any(token.is_word for token in self.tokens)
            return None if behind and words and not whole else -1
        if left.kind == "line":
            if not behind:
                return -1
            above = self.at(place - 2)
            if above.text == "=" or above.text.lower() in COPULAS:
                return -1
            unit = self.at(amount.end)
            return 1 if unit.is_word or unit.text in TEXT else None
        if self._is_operand(place - 1):
            return -1 if left.text in (")", "]") and before and not behind else None
        if left.kind == "word":
            plain = before and (not behind or left.text.lower() in COPULAS)
            return -1 if plain or not left.text.isascii() else None
        if left.text in DASHES or (left.text in (".", ",") and not before):
            return None
        begins = left.kind in ("arrow", "tag") or left.text in MINUS_BEHIND
        return -1 if begins or not behind else None

    def _judge_minus(self, place: int) -> int | None:
        """Return -1 if the word "minus" or "negative" is a sign, else None."""
        left = self.at(place - 1)
        alone = left.kind in ("edge", "line", "arrow") or left.text in {*"=:({$", *NEARLY}
        negative = self.at(place).text.lower() == "negative"
        return -1 if negative or alone or left.text.lower() in COPULAS else None

    def _is_operand(self, place: int) -> bool:
        """Return whether a calculation can continue after a token: a number, a variable, a bracket,
        a unit of a number.
        """
        for _ in range(2):  # of mathematics in dollars, or a currency after a number
            place -= self.at(place).text in CURRENCIES
        token = self.at(place)
        if token.kind == "word":
            return token.is_letter or self.at(place - 1).kind == "digits"
        if token.text == "}":
            return not self._is_text(place) or self.at(place - 1).kind == "digits"
        if token.kind == "command":
            return token.text not in TEXT and token.text not in NEARLY
        return token.kind in ("digits", "raised") or token.text in {
            *(")", "]", "\\)", "\\]", "!", "π", "∞", "°", "'", "′"),
            *PERCENTS,
        }


@dataclass
class Sentence(Signed):
    """A text in which a number may stand alone.

    Attributes:
        variables: whether a single letter after a number is a variable, and never a unit.
    """

    variables: bool = False

    def is_alone(self, amount: Amount, sign: Sign, whole: bool = False) -> bool:
        """Return whether a number is not part of another number, of a calculation, a range, a list,
        a root, an interval, a date or a time.
        """
        return (
            self._is_free_before(amount, sign, whole)
            and self._is_free_behind(amount.end, whole, self.at(sign.first - 1).text in QUOTES)
            and not self._is_inside(sign.first)
        )

    def _is_free_before(self, amount: Amount, sign: Sign, whole: bool) -> bool:
        place = sign.first - 1
        while self._is_wrapping(place) or self.at(place).text in QUOTES or self._is_bold(place):
            token, left = self.at(place), self.at(place - 1)
            glued = not token.gap and left.kind != "edge"
            if token.text in ("(", "[") and glued:
                named = left.is_letter or left.text in FUNCTIONS
                if named or left.text == ")" or left.kind in ("digits", "command", "raised"):
                    return False
            if token.text in QUOTES and glued and left.kind == "digits":
                return False
            place -= 1
        token, left = self.at(place), self.at(place - 1)
        if token.text == "}" and self._is_text(place):  # of \text{ or }
            word = self.at(place - 1).text.lower()
            before = self.find_opener(place) - 2
            return not (word in JOINS and self._is_operand(before)) and word not in FUNCTIONS
        if token.kind == "dots":
            return not self._is_operand(place - 1) and left.text != ","
        if token.kind == "arrow" or token.text in NEARLY:
            return whole or self._is_answer(place, amount)
        if token.kind in ("edge", "line", "tag"):
            return True
        if token.kind == "word":
            return self._is_free_of_word(place, amount, whole)
        if token.text == ",":
            return not self._is_list(place, whole)
        if token.text == "=":
            compared = left.text in ("<", ">", "!") and not token.gap
            return not (compared or self._is_second_assignment(place)) and (
                whole or self._is_answer(place, amount)
            )
        if token.text == ":":
            ratio = left.kind == "digits" and (token.gap or not self.at(place + 1).gap)
            return not ratio and (whole or self._is_answer(place, amount))
        if token.text in (*DASHES, "—"):
            return left.kind == "line" or (token.text == "—" and not self._is_operand(place - 1))
        if token.text == "|" and not self.at(place + 1).gap and self.at(amount.end).text == "|":
            return False  # an absolute value
        if token.text in ("+", "*", "**", ";", "&", "|", "•", "∙"):
            return not self._is_operand(place - 1)
        refused = OPERATORS | RELATIONS | PERCENTS | {"}"}
        return token.text not in refused and token.kind not in ("digits", "raised", "command")

    def _is_answer(self, place: int, amount: Amount) -> bool:
        """Return whether a number is the answer of the expression that the sign, or the word, at
        `place` equates it with.
        """
        before = sides.find_clause(self.tokens, place)
        return not before or sides.is_answer(before, self._is_united(amount))

    def _is_named_behind(self, place: int) -> bool:
        """Return whether no equation follows a number, such as "18 is twice n"."""
        if self.at(place).text.lower() not in sides.EQUALS:
            return True
        end = place + 1
        while end < place + AROUND and not sides.ends_clause(self.at(end), self.at(end + 1)):
            end += 1
        return sides.is_name(self.tokens[place + 1 : end]) or not any(
            sides.changes(self.at(n), self.at(n - 1), self.at(n + 1)) or self.at(n).is_letter
            for n in range(place + 1, end)
        )

    def _is_united(self, amount: Amount) -> bool:
        """Return whether a unit follows a number."""
        unit = self.at(amount.end)
        return unit.kind == "word" or unit.text in TEXT

    def _is_bold(self, place: int) -> bool:
        """Return whether an asterisk is markup and not a product."""
        return self.at(place).text in ("*", "**") and not self._is_operand(place - 1)

    def _is_free_of_word(self, place: int, amount: Amount, whole: bool) -> bool:
        """Return whether the word before a number does not join the number to another
        expression.
        """
        token, left = self.at(place), self.at(place - 1)
        word = token.text.lower()
        if word in FUNCTIONS or word in BOUNDS:
            return False
        if word in sides.EQUALS and not whole and not self._is_answer(place, amount):
            return False
        if not self.at(place + 1).gap and token.text.isascii() and word not in CODES:
            return False  # 5C2, CO2, A4
        if word in INDEXED or (word == "to" and left.text.lower() == "close"):
            return False
        if token.text in MONTHS:
            day = self.at(amount.start).text
            return len(day) > 4 or not day.isdecimal() or amount.end > amount.start + 1
        if word in PAIRED and left.kind == "digits":
            unit = self.at(amount.end)
            return not (
                unit.text.lower() in PAIRED or unit.kind in ("edge", "line") or unit.text == "."
            )
        if word in JOINS or token.text in JOINS:
            place -= left.text == "("
            left = self.at(place - 1)
            after_comma = left.text == "," and self._is_list(place - 1, whole)
            if word == "to" and left.text.lower() == "up":
                return False
            small = amount.value is not None and 0 < amount.value < 1
            if word == "and" and small and amount.end > amount.start + 1 and left.is_word:
                pointed = self.at(amount.start + 1).text == "." or self.at(amount.start).text == "."
                if not pointed:
                    return False  # one and 1/2
            named = left.is_letter and left.text.isupper()
            plain = word == "of" and left.kind != "digits" and left.text.lower() not in OF_WHOLE
            if left.text.lower() in OF_WHOLE - PERCENTS:
                return False
            joins = self._is_operand(place - 1) or after_comma
            return plain or named or not joins
        return True

    def _is_list(self, place: int, whole: bool) -> bool:
        """Return whether a comma separates two numbers of a list, rather than following the number
        of a clause, as in "In 2023, 5 people".
        """
        left = self.at(place - 1)
        if left.kind == "dots" or not self._is_operand(place - 1):
            return left.kind == "dots"
        number = next((one for one in reversed(self.amounts) if one.end <= place), None)
        if left.kind == "digits" and number is not None and not whole:
            return self.at(number.start - 1).text.lower() not in PREPOSITIONS
        return not left.is_word

    def _is_second_assignment(self, place: int) -> bool:
        """Return whether an equals sign belongs to a second assignment, that of y in "x = 2, y =
        3".
        """
        variable = place - 1
        if self.at(variable - 1).text == "_":  # x_2
            variable -= 2
        elif self.at(variable).text == "}":
            variable = self.find_opener(variable) - 2
        if not self.at(variable).is_letter:
            return False
        before = variable - 1
        while self.at(before).text in CURRENCIES or self.at(before).text in TEXT:
            before -= 1
        number = next((one for one in reversed(self.amounts) if one.end <= before), None)
        if self.at(before).text not in (",", ";", "and", "or") or number is None:
            return False
        start = number.start - (self.at(number.start - 1).text in DASHES)
        return self.at(start - 1).text == "=" and before - number.end < 3

    def _is_free_behind(self, place: int, whole: bool, quoted: bool) -> bool:
        while self.at(place).text in {*CLOSERS, *CURRENCIES, *PERCENTS, *DEGREES, *UNIT_SIGNS}:
            place += 1
        token, after = self.at(place), self.at(place + 1)
        if token.text in QUOTES:
            return quoted or bool(token.gap) or token.text not in "'’"
        if token.kind == "word":
            return not self._changes(place) and (whole or self._is_named_behind(place))
        if token.text in TEXT:
            inner = place + 1 + (after.text == "{")
            return not self._changes(inner)
        if token.kind == "dots":
            return not whole and self.at(place - 2).text != "."
        if token.text in ("^", "**"):
            return self._is_degree(place)
        if token.text == ".":
            return bool(after.gap) or after.kind not in ("command", "digits", "raised")
        if token.text == "!":
            return not whole and (after.kind in ("edge", "line", "tag") or bool(after.gap))
        if token.text == "/":
            return after.is_word or after.text in LETTER_UNITS or after.text in TEXT
        if token.text == "=":
            return self._is_lone(place + 1)
        if token.text in ("(", "["):
            return bool(token.gap) and (after.is_word or after.text in CURRENCIES)
        if token.text == ",":
            return not self._is_variable(place + 1)
        if token.text in DASHES:
            ends = after.kind in ("edge", "line") or after.text.lower() in {
                "fold",
                *CLOSERS,
                *".,$*",
            }
            return not (ends or self._is_variable(place + 1) or after.text in OPENERS)
        if token.text in ("*", ";", "&", "|"):
            return not self._is_variable(place + 1)
        if token.kind in ("command", "raised"):
            return token.text in NEARLY
        refused = token.text in OPERATORS or token.text in RELATIONS
        return not refused and token.text not in ("?", "′", "″", "\\{") and not _is_mark(token.text)

    def _is_degree(self, place: int) -> bool:
        r"""Return whether a power is the sign of degrees: ^\circ, ^{\circ}."""
        return self.at(place + 1 + (self.at(place + 1).text == "{")).text in DEGREES

    def _is_variable(self, place: int) -> bool:
        """Return whether a token is a variable or a mathematical constant."""
        token = self.at(place)
        lone = token.is_letter and token.text not in "aAI"
        return (
            lone
            or token.text in ("∞", "π", "√")
            or (token.kind == "command" and token.text not in TEXT and token.text not in NEARLY)
        )

    def _is_lone(self, place: int) -> bool:
        """Return whether only one word follows an equals sign: 5 = x."""
        while self.at(place).text in CURRENCIES:
            place += 1
        named = [
            self.at(place),
            *([self.at(place + 1)] if self.at(place + 1).kind == "word" else []),
        ]
        if not sides.is_name(named):
            return False
        behind = place + 1
        while self.at(behind).text in {*CLOSERS, *CURRENCIES, ".", ","}:
            behind += 1
        if self.at(place).kind != "word":
            return False
        if self.at(place).is_letter and self.at(behind).text in sides.OPERATIONS:
            return False  # 18 = x squared
        return self.at(behind).kind in ("edge", "line", "word")

    def _changes(self, place: int) -> bool:
        """Return whether a word after a number changes its meaning: 4 thousand, 42x, 5k, 5
        or six.
        """
        token, after = self.at(place), self.at(place + 1)
        if token.kind != "word":
            return False
        word = token.text.lower()
        if word in CHANGES or word[0] in "万亿千百十半":
            return True
        if word in ORDINALS | {"am"} and not token.gap:
            return True
        half_day = word in "ap" and after.text == "." and self.at(place + 2).text == "m"
        if half_day or (word == "o" and after.text in ("'", "’")):
            return True  # 3 p.m., 3 o'clock
        if word == "at" and after.text.lower() in (*BOUNDS, "minimum", "maximum"):
            return True
        if word in ("and", "or", "to", "times"):
            second = self.at(place + 2).text.lower()
            more = word == "or" and after.text.lower() in COMPARED
            return (
                more
                or {after.text.lower(), second} & (MULTIPLES | COUNTS) != set()
                or (self._is_variable(place + 1))
            )
        if token.is_word:
            return not token.gap and set(word) <= set("xyz")
        if token.gap and token.text in "aI":
            return not after.is_word
        if token.text in UNIT_SIGNS:
            return False
        if self.variables:
            return True
        return token.text not in LETTER_UNITS or (token.text == "K" and not token.gap)

    def _is_inside(self, first: int) -> bool:
        """Return whether a number is in the braces of a command, such as a root, or in the brackets
        of a tuple, an interval or a set.
        """
        depths = dict.fromkeys("({[", 0)
        for place in range(first - 1, max(-1, first - AROUND), -1):
            text = self.at(place).text
            if self.at(place).kind == "line":
                return False
            if text in (")", "}", "]"):
                depths["({["[")}]".index(text)]] += 1
            elif depths.get(text):
                depths[text] -= 1
            else:
                braced = text == "\\{" or (text == "{" and not self._is_harmless(place))
                if braced or (text in ("(", "[") and self._is_tuple(place)):
                    return True
        return False

    def _is_harmless(self, place: int) -> bool:
        """Return whether an opening brace belongs to a text command, or to none."""
        owner = self.at(place - 1)
        if owner.text == "}":
            owner = self.at(self.find_opener(place - 1) - 1)
        command = owner.kind == "command" and owner.text not in TEXT | CURRENCIES
        return not command and owner.text not in ("^", "_", "**", "]")

    def _is_tuple(self, place: int) -> bool:
        """Return whether brackets contain a comma and no words, as in (3, x)."""
        comma, depth = False, 0
        for position in range(place + 1, place + AROUND):
            token = self.at(position)
            if token.kind in ("edge", "line") or (token.is_word and token.text not in FUNCTIONS):
                return comma and token.kind != "word"
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            comma |= token.text in (",", ";") and depth == 0
            if depth < 0:
                return comma
        return comma


@dataclass
class Answer(Sentence):
    """A text that may be a number as a whole."""

    def take_result(self) -> "Answer | None":
        """Return the part after the last equals sign, or the whole text; None if several
        expressions are equated, or compared.
        """
        signs, depth = [], 0
        for place, token in enumerate(self.tokens):
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            equated = token.text == "=" or token.text in NEARLY or token.kind == "arrow"
            signs += [place] if equated and depth <= 0 else []
        unequal = any(self.at(place - 1).text == "!" and not self.at(place).gap for place in signs)
        compared = any(token.text in RELATIONS for token in self.tokens)
        if unequal or (compared and not (signs and sides.is_name(self.tokens[: signs[0]]))):
            return None
        if not signs:
            return self
        before, behind = self.tokens[: signs[-1]], self.tokens[signs[-1] + 1 :]
        if not any(token.kind == "digits" for token in behind):
            lone = len(signs) == 1 and self._is_lone(signs[-1] + 1)
            return replace(self, tokens=before) if lone else None
        index = {place + 1 for place, token in enumerate(before) if token.text == "_"}
        joins = {",", ";", *JOINS} - {"x", "X", "r"}  # x = 3 * 6 = 18
        joined = any(t.text in joins or t.kind == "line" for t in before)
        more = any(
            (t.kind == "digits" and place not in index) or t.text == "="
            for place, t in enumerate(before)
        )
        if joined and more and not sides.is_name(before):
            return None
        united = any(t.kind == "word" or t.text in TEXT for t in behind)
        chain = before[
            1 + max((n for n, t in enumerate(before) if t.kind == "arrow"), default=-1) :
        ]
        fine = not chain or sides.is_answer(chain, united)
        return replace(self, tokens=behind) if fine else None

    def find_only(self) -> Amount | None:
        """Return the only number of the text; None if it has none or several. A number in an
        adjective, as in "3 12-packs", is ignored.
        """
        if len(self.amounts) < 2:
            return self.amounts[0] if self.amounts else None
        rest = [one for one in self.amounts[1:] if not self._is_adjective(one)]
        return None if rest else self.amounts[0]

    def _is_adjective(self, amount: Amount) -> bool:
        dash, word = self.at(amount.end), self.at(amount.end + 1)
        return dash.text == "-" and not dash.gap and word.is_word and not word.gap

    def is_label(self, end: int) -> bool:
        """Return whether the tokens before a number are its label."""
        plain = {*OPENERS, *CLOSERS, *CURRENCIES, *QUOTES, *NEARLY, *TEXT, *":.,#*-№~"}
        for place in range(end):
            token = self.at(place)
            if token.text == "-" and self.at(place + 1).is_letter:
                return False  # -y: 18
            if token.kind == "word":
                named = self.at(place + 1).text in (":", ".", ")", "}", "$") or token.text in "aAI"
                refused = CHANGES | BOUNDS | REFUSALS | {"between", "half", "twice", "double"}
                if token.text.lower() in refused or not (token.is_word or named):
                    return False
            elif token.text not in plain and token.kind not in ("tag", "dots"):
                if place not in self.powers and self.at(place + 1).kind != "digits":
                    return False
                if token.text not in POWERS and place not in self.powers:
                    return False
        return True

    def _find_spelled(self, place: int, value: Fraction | None) -> int:
        """Return the end of brackets that spell a number, as in 7 (seven); 0 if they do not."""
        end = sides.find_end(self.tokens, place)
        spelled = read_words(self.tokens[place + 1 : end - 1])
        return end if spelled is not None and spelled == value else 0

    def is_tail(self, start: int, value: Fraction | None = None) -> bool:
        """Return whether the tokens after a number are its unit, or brackets or words that do not
        change it.
        """
        plain = {*CLOSERS, *CURRENCIES, *PERCENTS, *DEGREES, *QUOTES, *TEXT, *".,{([-*—"}
        plain |= UNIT_SIGNS
        adjectives = {place for one in self.amounts for place in range(one.start, one.end)}
        unit = False
        skipped: set[int] = set()  # the words of the same number
        for place in range(start, len(self.tokens)):
            token, after = self.at(place), self.at(place + 1)
            if token.text == "(" and (end := self._find_spelled(place, value)):
                skipped = set(range(place, end))
            if place in skipped:
                continue
            if token.kind == "word":
                open_end = token.text.lower() in JOINS and after.kind == "edge"
                if self._changes(place) or open_end or token.text.lower() in REFUSALS:
                    return False
                unit = True
            elif token.text == "-":
                if after.kind == "edge":
                    return False
            elif token.text in POWERS:
                raised = {place + 1, place + 2, place + 3} & self.powers
                if not raised and not self._is_degree(place):
                    return False
            elif token.text in ("/", "·", "⋅", "\\cdot", "!"):
                per = token.text == "/" and (after.kind == "word" or after.text in TEXT)
                if not unit and not per:
                    return False
            elif token.kind == "digits":
                if place not in self.powers and place not in adjectives:
                    return False
            elif token.kind == "raised":
                if not unit:
                    return False
            elif token.text not in plain and token.kind not in ("tag", "line"):
                return False
        return True


_SMALL = {
    word: number
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"  # noqa: SIM905
        " fifteen sixteen seventeen eighteen nineteen".split()
    )
}
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL |= {word: 10 * number for number, word in enumerate(_TENS, 2)}
_LARGE = {"thousand": 1000, "million": 10**6, "billion": 10**9}


def read_words(tokens: Sequence[Token]) -> int | None:
    """Return the whole number that words spell, such as one hundred and twenty-one; None if they
    spell none.
    """
    total = group = 0
    spelled = [t.text.lower() for t in tokens if t.text not in ("-", "and")]
    for word in spelled:
        if word in _SMALL:
            group += _SMALL[word]
        elif word == "hundred":
            group *= 100
        elif word in _LARGE:
            total, group = total + group * _LARGE[word], 0
        else:
            return None
    return total + group if spelled else None


def _is_mark(text: str) -> bool:
    """Return whether a character changes the number before it: ½, ₂, or a line above a digit."""
    return len(text) == 1 and (text.isnumeric() or unicodedata.category(text)[0] == "M")
