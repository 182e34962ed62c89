"""One row with named fields, and the errors of a field."""

import difflib
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from common.config import ConfigError, flat

_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: no tokenizer can encode it
_NUL = "Remove it; a file in UTF-16 holds many: convert it, with iconv -f UTF-16LE -t UTF-8."


class IncompleteError(ConfigError):
    """A row has no value in a field: the field is missing or empty."""


_ABSENT = object()  # a field that a row does not have


@dataclass(frozen=True, slots=True)
class Row:
    """One row with named fields.

    Attributes:
        where: its place, for errors: "'train.jsonl' line 3".
        whole: its fields as in the file.
        hint: a text that is appended to the error for a missing field.
    """

    where: str
    whole: dict[str, Any]
    hint: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields, with nested ones as "outer.inner"."""
        return flat(self.whole)

    def get(self, name: str, key: str) -> Any:
        """Return a field. A dot leads into an object, or with a number from 0 into a list:
        "answers.text.0".

        Raises: IncompleteError for the setting `key` that named it.
        """
        if name in self.whole:
            return self.whole[name]
        value = _follow(self.whole, name.split("."))
        if value is _ABSENT:
            near = difflib.get_close_matches(name, self.fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise IncompleteError(
                f"{key}={name!r} is not a field of {self.where}.{hint} Fields there:"
                f" {named(self.fields)}.{self.hint}"
            )
        return value

    def passage(self, name: str, key: str) -> str:
        """Return a field as text for a template: a text, which may be blank, a number, or a list of
        these, one per line.
        """
        return "\n".join(self.texts(name, key, numbers=True, blank=True))

    def texts(
        self, name: str, key: str, *, numbers: bool = False, blank: bool = False
    ) -> list[str]:
        """Return the texts of a field that is a text or a list of texts, each by the rules of
        `text`.
        """
        value, rows = self.get(name, key), [self]
        if isinstance(value, list) and not holds_messages(value):
            rows = [Row(self.where, {**self.whole, name: item}) for item in value]
        return [row.text(name, key, numbers=numbers, blank=blank) for row in rows]

    def text(self, name: str, key: str, *, numbers: bool = False, blank: bool = False) -> str:
        """Return the field `name`, which must be a string, and not blank unless `blank`.

        Args: numbers: whether a number is accepted as well, as text ("0.5", and "2" for 2.0).
        """
        value = self.get(name, key)
        if numbers and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        elif numbers and isinstance(value, float) and math.isfinite(value):
            value += 0.0  # of -0.0 it makes 0.0
            value = f"{value:.0f}" if value == int(value) else f"{Decimal(repr(value)):f}"
        elif numbers and isinstance(value, Decimal) and value.is_finite():
            value = f"{value:f}"  # of a column of decimals
        if holds_messages(value):
            problem = (
                f"is a conversation in {self.where}, a list of messages, and must be text. With"
                " task=custom task.prompt_field= takes one."
            )
        elif not isinstance(value, str):
            problem = f"is not a text in {self.where}, but {type(value).__name__}: {value!r:.60}."
        elif not (value.strip() or blank):
            problem = f"is empty in {self.where}."
        elif value.isascii() and "\0" not in value:
            return value
        elif "\0" in value:
            problem = f"holds a NUL character in {self.where}. {_NUL}"
        elif _SURROGATE.search(value):
            problem = f"holds a lone surrogate in {self.where}."
        else:
            return value
        there = f" Fields there: {named(self.fields)}." if len(self.fields) > 1 else ""
        kind = IncompleteError if _is_missing(value) else ConfigError
        raise kind(f"{key}={name!r} {problem} Fix or remove the row.{there}")


def _is_missing(value: Any) -> bool:
    """Return whether a value counts as missing: null, NaN, a blank text."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def _follow(value: Any, parts: list[str]) -> Any:
    """Return the value at a path in nested objects and lists, or _ABSENT. A name may itself contain
    dots.
    """
    if not parts:
        return value
    if isinstance(value, list) and re.fullmatch(r"-?\d{1,9}", parts[0]):
        place = int(parts[0])
        inside = -len(value) <= place < len(value)
        return _follow(value[place], parts[1:]) if inside else _ABSENT
    if isinstance(value, dict):
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if name in value and (found := _follow(value[name], parts[end:])) is not _ABSENT:
                return found
    return _ABSENT


def holds_messages(value: Any, keys: Collection[str] = ("role", "content")) -> bool:
    """Return whether a value is a conversation: a list of objects with these keys."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and one.keys() >= {*keys} for one in value)
    )


def named(names: Iterable[str]) -> str:
    """Return names as text for an error, shortened and without control characters."""
    listed = [f"{name[:60]}..." if len(name) > 60 else name for name in names]
    listed = [name if name.isprintable() else ascii(name) for name in listed]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")
