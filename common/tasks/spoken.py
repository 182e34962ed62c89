"""Whether a sentence states that a number is the answer: it may reject it ("18, not 20"), or use it
to describe another number ("18 apples for $3 each").
"""

from common.tasks.amounts import AROUND, Amount, Token, words
from common.tasks.sentence import (
    COUNTS,
    CURRENCIES,
    NEARLY,
    REFUSALS,
    Sentence,
    Sign,
    read_words,
)
from common.tasks.sides import find_end

REJECTS = REFUSALS | words(
    "neither nor instead reject rejects rejecting rejected discard discards"
    " discarding discarded ignore ignores ignoring ignored exclude excludes excluding excluded"
    " except disregard disregarding unlike whereas versus without wrongly incorrectly mistaken"
    " mistakenly nicht kein pas"
)
_WRONG = (REFUSALS - {"not", "never", "cannot"}) | words("excluded ignored mistake mistaken")
_SIZES = words("many much large small high low big few little great long short")
_BREAKS = words("but so then therefore thus hence because since") | {";", ":", "—"}
_QUALIFIES = words("for at in within after during before with every")
NEAR_BEHIND = 6  # tokens after a number in which "not" refers to it
_REMAINDERS = {"remainder", "leftover", "rest"}


class Spoken(Sentence):
    """A text whose last number may be the answer."""

    def is_said(self, amount: Amount, sign: Sign) -> bool:
        """Return whether a number is not rejected, and does not describe another one."""
        begin, end = self._find_sentence(sign.first, amount.end)
        clause = self._find_clause(sign.first, begin)
        return not (
            self._is_spelled_otherwise(amount)
            or self._is_rejected(clause, sign.first)
            or self._is_wrong(amount.end, end)
            or self._is_of_another(clause, sign.first)
            or self._follows_answer(begin, sign.first)
        )

    def _is_spelled_otherwise(self, amount: Amount) -> bool:
        """Return whether brackets after a number spell another number, as in 7 (eight)."""
        if self.at(amount.end).text != "(":
            return False
        inner = self.tokens[amount.end + 1 : find_end(self.tokens, amount.end) - 1]
        return read_words(inner) not in (None, amount.value)

    def _find_sentence(self, first: int, last: int) -> tuple[int, int]:
        begin, end = first, last
        while begin > max(0, first - AROUND) and not self._ends(begin - 1):
            begin -= 1
        while end < min(len(self.tokens), last + AROUND) and not self._ends(end):
            end += 1
        return begin, end

    def _ends(self, place: int) -> bool:
        token, after = self.at(place), self.at(place + 1)
        if token.kind in ("line", "tag"):
            return True
        stops = token.text in (".", "?", "。") and (bool(after.gap) or after.kind == "line")
        short = self.at(place - 1).is_letter or after.text[:1].islower()  # a.m., vs.
        return stops and not short

    def _find_clause(self, first: int, begin: int) -> int:
        """Return the beginning of a number's clause."""
        place = first
        while place > begin:
            token, left = self.at(place - 1), self.at(place - 2)
            comma = token.text == "," and not (left.kind == "digits" and not self.at(place).gap)
            if comma or token.text.lower() in _BREAKS:
                break
            place -= 1
        return place

    def _is_rejected(self, clause: int, first: int) -> bool:
        """Return whether a word before a number, in its clause, rejects it."""
        return any(self._rejects(place) for place in range(clause, first))

    def _rejects(self, place: int) -> bool:
        token, after = self.at(place), self.at(place + 1)
        word = token.text.lower()
        if word == "not" and after.text.lower() == "only":
            return False
        contracted = word.endswith("n") and after.text in ("'", "’")
        contracted = contracted and self.at(place + 2).text == "t"
        return word in REJECTS or contracted or (word == "rather" and after.text == "than")

    def _is_wrong(self, start: int, end: int) -> bool:
        """Return whether the sentence rejects a number after it."""
        same = True  # clause
        for place in range(start, end):
            token, after = self.at(place), self.at(place + 1)
            word = token.text.lower()
            same = same and token.text != "," and word not in _BREAKS and token.text != "("
            sized = word == "too" and after.text.lower() in _SIZES
            near = same and place < start + NEAR_BEHIND
            if word in _WRONG or sized or (near and self._rejects(place) and word != "without"):
                return True
        return False

    def _is_of_another(self, clause: int, first: int) -> bool:
        """Return whether a number describes another one of its clause: for $3 each, per 1 hour."""
        place = first - 1
        while self.at(place).text in CURRENCIES or self.at(place).text.lower() in (
            *("a", "an", "the", "about", "only", "just", "every", "each", "some"),
        ):
            place -= 1
        word = self.at(place).text.lower()
        if word == "per" or self.at(first - 1).text.lower() in ("every", "per"):
            return True
        others = any(clause <= one.start < place for one in self.amounts)
        counted = any(_counts(self.at(n)) for n in range(clause, max(clause, place)))
        if word in _QUALIFIES and (others or counted):
            return True
        rests = [n for n in range(clause, first) if self.at(n).text.lower() in _REMAINDERS]
        if not rests:
            return False
        joins = {self.at(n).text.lower() for n in range(max(clause, rests[0] - 2), rests[0])}
        return bool(joins & {"and", "with"} and others) or self._is_equated_before(first)

    def _is_equated_before(self, first: int) -> bool:
        """Return whether a sentence has equated an earlier number: "is 18", "= 18"."""
        begin, _ = self._find_sentence(first, first)
        for one in self.amounts:
            if begin <= one.start < first:
                sign = self.find_sign(one)
                before = self.at((one.start if sign is None else sign.first) - 1)
                if before.text == "=" or before.text.lower() in ("is", "are", "equals", ":"):
                    return True
        return False

    def _follows_answer(self, begin: int, first: int) -> bool:
        """Return whether the sentence has already stated the answer: "The answer is 18 and
        ... 2".
        """
        marks = [n for n in range(begin, first) if self.at(n).text.lower() in ("answer", "ans")]
        if not marks:
            return False
        said = (
            n
            for n in range(marks[-1] + 1, first)
            if self.at(n).text in ("=", ":") or self.at(n).text.lower() in ("is", "equals", "be")
        )
        start = next(said, first)
        others = [one for one in self.amounts if start < one.start and one.end <= first]
        before = self.at(first - 1)
        result = before.text == "=" or before.text in NEARLY
        which = before.text.lower() in ("is", "equals") and self.at(first - 2).text == "which"
        corrected = before.text.lower() == "but"  # not 20 but 18
        return bool(others) and not (result or which or corrected)


def _counts(token: Token) -> bool:
    return token.text.lower() in COUNTS - {"one", "second", "third", "quarter"}
