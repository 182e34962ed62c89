r"""Distinguish a name or a calculation of a number from an equation, in which the number is no
answer, by the other side of an equals sign, or of "is".

    x = 18, x_1 = 18, P(X = 3) = 18, total cost = 18         names
    3 * 6 = 18, 5 apples + 13 = 18, \sqrt{324} = 18         calculations
    3n = 18, n^2 = 18, -y = 18, |y| = 18, twice n is 18      equations: n is another number
"""

import unicodedata
from collections.abc import Sequence

from common.tasks.amounts import AROUND, DASHES, EDGE, POWERS, TEXT, TIMES, Token, words

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WRAPPINGS = {"$", "\\$", "\\(", "\\[", "\\)", "\\]", "€", "£", "¥", "₹", "#", "№", "∠", "△", "&"}
_WRAPPINGS |= {*'"“”«»`’‘:.,~', "\\%", "%", "\\angle", "\\triangle", "\\measuredangle", "\\Delta"}
_ACCENTS = {
    "\\hat",
    "\\bar",
    "\\overline",
    "\\vec",
    "\\widehat",
    "\\tilde",
    "\\mathbb",
    "\\mathcal",
}
_GREEK = words(
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \kappa \lambda"
    r" \mu \nu \xi \rho \sigma \tau \phi \varphi \chi \psi \omega \Gamma \Theta \Lambda \Sigma"
    r" \Phi \Psi \Omega \pi π"
)
_PRIMES = {"'", "′", "’", "\\prime"}
_CONSTANTS = {"π", "\\pi", "\\%", "\\circ", "\\degree"}
# Names of functions: f(3) is the value of one, n(3) is a product.
_FUNCTIONS = set("fghpFGHPECNSTVQR")
_NO_PRODUCTS = words(  # words of two letters, in a few languages
    "am an as at be by do go he if in is it me my no of on or so to up us we ok id vs re de la el"
    " le un et du se si il en ne ce tu er zu da wo ja im um es mi su al ab"
)
# Words that change the number that is named after or before them.
OPERATIONS = words(
    "half twice thrice double triple quadruple log ln lg exp sin cos tan cot sec csc sqrt squared"
    " cubed minus plus negative factorial reciprocal modulo mod times divided multiplied"
)
_OF = words(  # the same, if "of" or "root" follows
    "square cube root third thirds quarter quarters fourth fifth percent inverse opposite multiple"
    " logarithm"
)
_EDGES = words(  # words before which another clause ends
    "so then thus hence therefore that where when if get gets getting got have has gives give"
    " find finds obtain know but because since yields implies means say let"
)
EQUALS = {"is", "equals", "equal", "are", "was", "becomes", "gives", "makes", "yields"}


def is_product(token: Token) -> bool:
    """Return whether a word is a product of variables, such as xy, rather than a word."""
    text = token.text
    if token.kind != "word" or len(text) not in (2, 3) or not text.islower() or not text.isascii():
        return False
    few = set(text) <= set("xyz") or set(text) <= set("abc")
    plain = len(text) == 2 and text not in _NO_PRODUCTS
    return few or plain or not set(text) & set("aeiouy")


def ends_clause(token: Token, after: Token) -> bool:
    """Return whether a clause ends with a token, or before it."""
    if token.kind in ("edge", "line", "tag", "arrow", "dots"):
        return True
    if token.kind == "word":
        return token.text.lower() in _EDGES
    if token.text in (".", "?", "!", ":"):
        return bool(after.gap) or after.kind in ("edge", "line")
    return token.text in (",", ";", "—", "≈", "\\approx", "•")


def is_answer(tokens: Sequence[Token], united: bool) -> bool:
    """Return whether the expression before an equals sign, in one clause and with earlier equals
    signs, makes the number after it an answer.

    Args: united: whether that number has a unit.
    """
    parts = _split(tokens)
    if is_name(parts[0]):
        return True
    return all(is_calculation(part, united) or is_name(part) for part in parts)


def find_clause(tokens: Sequence[Token], end: int) -> Sequence[Token]:
    """Return the tokens of a clause before the one at `end`."""
    depth, start = 0, end
    while start > 0 and end - start < AROUND:
        token = tokens[start - 1]
        depth += (token.text in _PAIRS.values()) - (token.text in _PAIRS)
        if depth < 0 and token.text != "{":  # a bracket that is still open
            break
        depth = max(0, depth)
        after = tokens[start] if start < len(tokens) else token
        factorial = token.text == "!" and start > 1 and not tokens[start - 2].is_word
        ends = depth == 0 and ends_clause(token, after) and not factorial
        if token.kind in ("line", "tag", "arrow") or ends:
            break
        start -= 1
    return tokens[start:end]


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """Split tokens at equals signs that are not in brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in _PAIRS) - (token.text in _PAIRS.values())
        if token.text == "=" and depth <= 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def find_end(tokens: Sequence[Token], start: int) -> int:
    """Return the position after the bracket that closes the one at `start`, or after a token that
    opens none.
    """
    closer = _PAIRS.get(tokens[start].text) if start < len(tokens) else None
    if closer is None:
        return start + 1
    depth = 0
    for place in range(start, min(len(tokens), start + AROUND)):
        depth += (tokens[place].text == tokens[start].text) - (tokens[place].text == closer)
        if depth == 0:
            return place + 1
    return len(tokens)


def is_name(tokens: Sequence[Token]) -> bool:
    """Return whether tokens are a name: words, with at most one variable, to which no operation is
    applied.

        name = {type | note | word [index] [argument] | variable [index] [argument]}
    """
    variables: list[str] = []
    place, words = 0, 0
    while place < len(tokens):
        token, after = tokens[place], _at(tokens, place + 1)
        if token.text == "m" and after.text in ("\\angle", "∠"):  # the measure of an angle
            place += 2
        elif token.is_letter and not _is_article(token, after):
            variables += [] if _is_hyphened(tokens, place) else [token.text]
            place = _skip_index(tokens, place + 1, token)
            if tokens[place - 1].text in _PRIMES and token.text.islower():
                return False  # y' = 18
        elif token.kind == "word":
            if is_product(token) or changes(token, _at(tokens, place - 1), after):
                return False
            words += token.is_word
            place = _skip_index(tokens, place + 1, token)
        elif token.text in _GREEK or token.text in _ACCENTS:
            variables.append("x")
            place = find_end(tokens, place + 1) if token.text in _ACCENTS else place + 1
            place = _skip_index(tokens, place, token)
        elif token.text in ("(", "["):
            end = find_end(tokens, place)
            inner = tokens[place + 1 : end - 1]
            item = place == 0 and len(inner) == 1  # (a) x
            if not (item or _is_note(inner, words)):
                return False
            place = end
        elif _is_type(tokens, place, words):
            place += 1
        else:
            return False
    return len(variables) <= 1 or (words > 0 and all(map(str.isupper, variables)))


def _at(tokens: Sequence[Token], place: int) -> Token:
    return tokens[place] if 0 <= place < len(tokens) else EDGE


def _is_type(tokens: Sequence[Token], place: int, words: int) -> bool:
    """Return whether a token has no meaning: a mark of type, a bullet, a hyphen."""
    token, before, after = tokens[place], _at(tokens, place - 1), _at(tokens, place + 1)
    if token.text in ("-", "/", "–", "&"):
        joined = not token.gap and not after.gap and (before.is_word or after.is_word)
        bullet = place == 0 and bool(after.gap) and after.is_word
        pause = bool(token.gap and after.gap) and words > 0 and token.text == "–"
        return bullet or pause or (joined and before.kind == after.kind == "word")
    if token.text == "|":  # of a table
        return bool(after.gap) or place == len(tokens) - 1
    if token.text in ("*", "**", "_"):
        return not before.is_letter and before.kind != "digits"
    if token.text in ("%", "\\%") and before.is_letter:
        return False
    mark = len(token.text) == 1 and unicodedata.category(token.text)[0] == "M"
    return (
        mark or token.text in _WRAPPINGS or token.text in TEXT or token.text in (")", "]", "{", "}")
    )


def _is_article(token: Token, after: Token) -> bool:
    return token.text in ("a", "A", "I") and after.is_word and bool(after.gap)


def _is_hyphened(tokens: Sequence[Token], place: int) -> bool:
    """Return whether a letter belongs to a word, as in x-coordinate and Mary's."""
    near = tokens[place + 1 : place + 3]
    dashed = len(near) == 2 and near[0].text == "-" and near[1].is_word and not near[1].gap
    owned = place > 0 and tokens[place - 1].text in ("'", "’") and tokens[place].text in "stdm"
    return (dashed and not near[0].gap) or owned


def changes(token: Token, before: Token, after: Token) -> bool:
    """Return whether a word changes the number that is named next to it."""
    word = token.text.lower()
    if word == "times" and before.text.lower() in ("of", "many", "the"):
        return False
    of = after.text.lower() in ("of", "root") or (
        word in ("square", "cube") and after.text == "root"
    )
    return word in OPERATIONS or (word in _OF and of) or after.text.lower() == "than"


def _skip_index(tokens: Sequence[Token], place: int, name: Token) -> int:
    """Return the position after an index, primes and the argument of a function, if there are any.
    An argument is a number, a condition, or a list.
    """
    if place + 1 < len(tokens) and tokens[place].text == "_":
        place = find_end(tokens, place + 1)
    while place < len(tokens) and tokens[place].text in _PRIMES and not tokens[place].gap:
        place += 1
    if place < len(tokens) and tokens[place].kind == "other" and tokens[place].text in "₀₁₂₃₄₅₆₇₈₉":
        place += 1
    opens = place < len(tokens) and tokens[place].text in ("(", "[") and not tokens[place].gap
    if opens and (name.is_word or name.text in _FUNCTIONS):
        end = find_end(tokens, place)
        inner = tokens[place + 1 : end - 1]
        if name.text.isupper() or not _is_equation(inner):
            place = end
    return place


def _is_equation(tokens: Sequence[Token]) -> bool:
    """Return whether tokens contain a variable and an operation on it."""
    letters = any(token.is_letter for token in tokens)
    return letters and len([token for token in tokens if token.text not in (",", "$")]) > 1


def _is_note(tokens: Sequence[Token], words: int) -> bool:
    """Return whether brackets contain words, or a unit after words."""
    if all(token.is_word or token.text in (*_WRAPPINGS, "-", "/") for token in tokens):
        return not any(token.is_word and token.text.lower() in OPERATIONS for token in tokens)
    return words > 0 and all(token.kind == "word" or token.text == "/" for token in tokens)


def is_calculation(tokens: Sequence[Token], united: bool) -> bool:
    """Return whether tokens calculate with numbers only: between two operators there is a number,
    which may have a unit.
    """
    digits = operand = False
    changed = ""
    for place, token in enumerate(tokens):
        before, after = _at(tokens, place - 1), _at(tokens, place + 1)
        word = token.text.lower()
        if token.kind == "digits":
            digits, operand, changed = True, True, ""
        elif token.kind == "word":
            if token.is_letter:
                if not _is_unit(token, before, united) and not _is_article(token, after):
                    if not (token.text in "xX" and _between(before, after)):
                        return False
                    operand = False
            elif word in ("times", "plus", "minus", "over") or (word == "by" and operand):
                if not operand and word != "minus":
                    return False
                operand = False
            elif word in OPERATIONS or word in _OF:
                changed = word
            elif changed and word not in ("of", "the", "root", "number", "a"):
                return False  # half of the apples
            elif after.text.lower() == "than":
                operand = False
            elif before.kind == "digits" and not token.gap and _is_factor(token):
                return False  # 3xy
        elif token.text in _CONSTANTS:
            operand = True
        elif _is_operator(token, before, after):
            if not operand and token.text not in ("-", "−", "+"):
                return False
            operand = False
        elif token.text in _GREEK or token.kind in ("edge",):
            return False
    return digits and operand and not changed


_UNITS = words("km cm mm kg mg dm ml cl hr hrs min sec ft in lb lbs oz pm mph kwh gb mb kb st nd")


def _is_factor(token: Token) -> bool:
    """Return whether a word that is attached to a number is a product of variables, and no unit."""
    return token.text.isupper() or (is_product(token) and token.text not in _UNITS)


def _between(before: Token, after: Token) -> bool:
    """Return whether an x is the sign for multiplication."""
    left = before.kind in ("digits", "word") or before.text in (")", "%")
    right = after.kind == "digits" or after.text in ("(", "$", "\\$", ".")
    return left and right


def _is_unit(token: Token, before: Token, united: bool) -> bool:
    """Return whether a letter is the unit of the number before it."""
    if token.text not in "msghlLKCFAVNJWtd":
        return False
    return united and (before.kind == "digits" or before.text == "/")


def _is_operator(token: Token, before: Token, after: Token) -> bool:
    """Return whether a token is the operator of a calculation, and no part of a unit or a word."""
    if token.text not in {*TIMES, *DASHES, *"+/÷", "\\div"} or token.text in POWERS:
        return False
    glued = after.kind == "word" and not after.gap and not token.gap and before is not EDGE
    return not (glued and token.text in ("/", "-"))
