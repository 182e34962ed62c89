"""JSON: one object per line, objects over several lines, an array of objects, an object that
contains one array of them, or columns.

An array is read element by element, so that a large one is never in memory as a whole. If the whole
file is one object, rows are at the path of task.format.rows, or in the only possible place.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from common.tasks.data.row import Row, named
from common.tasks.data.source import Source
from common.tasks.data.text import Text

PIECE = 2**16  # characters
LINES = (".jsonl", ".ndjson")
_SHAPE = 'Each line must be one object, such as {"question": "..."}.'
# The message of json for an unfinished string, whose position is not at the end of the text.
_CUT = "Unterminated string"


class _TwiceError(ValueError):
    """An object has the same key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises: _TwiceError for a repeated key, of which json would keep
    the last value.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def read_json(source: Source) -> Iterator[Row]:
    """Yield the rows of a JSON file of any shape."""
    text = Text(source, by_lines=source.suffix() in LINES)
    with text.open() as lines:
        values = Values(lines)
        kind = _find_shape(values, source)
    with text.open() as lines:
        if kind == "lines":
            yield from _read_lines(lines, source)
        elif kind == "array":
            yield from _read_array(Values(lines), source)
        elif kind == "values":
            found = _place(_read_values(Values(lines), source))
            yield from _take_rows(found, source)
        else:
            [(_, value)] = _read_values(Values(lines), source)
            yield from _look_into(value, source)


def _find_shape(values: "Values", source: Source) -> str:
    """Return the shape of a file: lines, array, values (over several lines) or object."""
    by_lines = source.suffix() in LINES
    try:
        first = values.peek()
        if first == "[" and not by_lines:
            return "array"
        begins = values.line
        value = values.take()
        one_line, more = values.line == begins, values.peek()
    except (ValueError, RecursionError):
        return "lines" if by_lines or first not in "[{" else "values"
    if isinstance(value, list):  # one in the first line, or an array that fills the file
        return "lines" if one_line and (more or not _is_rows(value)) else "array"
    if not isinstance(value, dict):
        return "lines"
    if not more and not (by_lines and one_line):
        return "object"
    return "lines" if one_line else "values"


class Values:
    """Consecutive JSON values in a text, read piece by piece.

    Attributes:
        line: the number of the current line.
    """

    def __init__(self, text: TextIO) -> None:
        self._text, self._held, self._at, self._ended = text, "", 0, False
        self._piece = PIECE
        self.line = 1

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            rest = self._held[self._at :]
            if bare := rest.lstrip(" \t\r\n"):
                self._go(len(rest) - len(bare))
                return bare[0]
            self._go(len(rest))
            if not self._more():
                return ""

    def skip(self) -> None:
        """Skip the character that `peek` returned."""
        self._go(1)

    def take(self) -> Any:
        """Return the next value. Raises: ValueError or RecursionError."""
        self.peek()
        self._piece = PIECE
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self._at)
                if (
                    end < len(self._held) or not self._more()
                ):  # a number may continue in the next piece
                    self._go(end - self._at)
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith(_CUT) or error.pos >= len(self._held) - 16
                if not cut or not self._more():
                    raise

    def place(self, error: json.JSONDecodeError) -> tuple[int, int]:
        """Return the line and the column of an error of `take`, from 1."""
        line = self.line + self._held.count("\n", self._at, error.pos)
        return line, error.pos - self._held.rfind("\n", 0, error.pos)

    def _go(self, count: int) -> None:
        self.line += self._held.count("\n", self._at, self._at + count)
        self._at += count

    def _more(self) -> bool:
        """Read another piece, twice as long each time for an unfinished value."""
        piece = "" if self._ended else self._text.read(self._piece)
        self._ended = not piece
        if piece:
            before = (
                self._held.rfind("\n", 0, self._at) + 1
            )  # the beginning of the line, from which columns count
            keep = self._held[before:] if self._at - before < PIECE else self._held[self._at :]
            self._at = self._at - before if self._at - before < PIECE else 0
            self._held, self._piece = keep + piece, self._piece * 2
        return bool(piece)


def _explain(error: Exception, values: Values | None = None, line: str = "") -> str:
    """Describe the error in a JSON value of `values`, or of a line."""
    if isinstance(error, _TwiceError):
        return f"names {error.args[0]!r} twice in one object, and it is not clear which counts"
    if isinstance(error, json.JSONDecodeError):
        column = min(error.pos, len(line.rstrip("\r\n"))) + 1
        column = values.place(error)[1] if values else column
        return f"is not JSON ({error.msg}, column {column})"
    # a number of thousands of digits, nested brackets
    return "holds a number too long to read, or is nested too deep"


def _read_lines(lines: TextIO, source: Source) -> Iterator[Row]:
    place = repr(source.path)
    expand = source.format.rows or source.columns
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            value = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            source.refuse(f"line {number} {_explain(error, line=line)}. {_SHAPE}")
            continue
        if expand:
            yield from _take_rows([(f"line {number}", value)], source)
        elif isinstance(value, dict):
            yield Row(f"{place} line {number}", value)
        else:
            source.refuse(
                f"line {number} is JSON, but {type(value).__name__} and no object. {_SHAPE}"
            )


def _read_values(values: Values, source: Source) -> Iterator[tuple[int, Any]]:
    """Yield consecutive values, each with its first line."""
    while values.peek():
        line = values.line
        try:
            value = values.take()
        except (ValueError, RecursionError) as error:
            _fail(values, error, source)
        yield line, value


def _read_array(values: Values, source: Source) -> Iterator[Row]:
    """Yield the rows of an array, after which the text must end."""

    def read() -> Iterator[tuple[int, Any]]:
        values.peek()
        values.skip()
        while (sign := values.peek()) != "]":
            line = values.line
            try:
                yield line, values.take()
            except (ValueError, RecursionError) as error:
                _fail(values, error, source)
            sign = values.peek()
            if sign == ",":
                values.skip()
            elif sign != "]":
                found = "ends before its ']'" if not sign else f"has {sign!r} where , or ] follows"
                source.fail_line(values.line, f"is not JSON: the array {found}. Fix the file.")
        values.skip()
        if values.peek():
            source.fail_line(values.line, "is not JSON: the array has ended. Fix the file.")

    yield from _take_rows(_place(read()), source)


def _fail(values: Values, error: Exception, source: Source) -> None:
    line = values.place(error)[0] if isinstance(error, json.JSONDecodeError) else values.line
    source.fail_line(line, f"{_explain(error, values)}. Fix the file, or write it as JSON Lines.")


def _place(values: Iterable[tuple[int, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield values with descriptions of their places."""
    for number, (line, value) in enumerate(values, start=1):
        yield f"row {number}" + (f" (line {line})" if line > 1 else ""), value


# --- from values to rows


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _is_columns(value: dict[str, Any]) -> bool:
    """Return whether an object has lists of one length, or objects with the same keys from 0 on,
    which is how pandas writes columns.
    """
    columns = list(value.values())
    if not columns:
        return False
    if all(isinstance(column, list) for column in columns):
        return len(set(map(len, columns))) == 1 and not (
            len(columns) == 1 and (_is_rows(columns[0]) or not columns[0])
        )
    if not all(isinstance(column, dict) for column in columns):
        return False
    numbered = [str(number) for number in range(len(columns[0]))]
    return all(list(column) == numbered for column in columns)


def _is_keyed(value: dict[str, Any]) -> bool:
    """Return whether an object has a row under each key, which is how pandas writes with
    orient="index".
    """
    rows = list(value.values())
    if len(rows) < 2 or not all(isinstance(row, dict) for row in rows):
        return False
    texts = (any(isinstance(cell, str) for cell in row.values()) for row in rows)
    return all(row.keys() == rows[0].keys() for row in rows) and all(texts)


def _look_into(value: Any, source: Source) -> Iterator[Row]:
    """Yield the rows of an object that fills a file."""
    if source.format.rows is not None:
        yield from _take_rows([("line 1", value)], source)
        return
    if set(value) >= {"columns", "data"} and isinstance(value["columns"], list):  # of pandas
        rows = (dict(zip(value["columns"], cells, strict=True)) for cells in value["data"])
        yield from _number(rows, source)
        return
    if _is_columns(value):
        columns = [c if isinstance(c, list) else list(c.values()) for c in value.values()]
        source.note(f"columns: {named(value)}")
        rows = (dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True))
        yield from _number(rows, source)
        return
    if _is_keyed(value):
        source.note(f"rows are the values of {named(value)}")
        yield from _number(value.values(), source)
        return
    places = [name for name, inner in value.items() if _is_rows(inner)]
    if len(places) > 1:
        choices = " or ".join(f"task.format.rows={name}" for name in places[:6])
        source.fail(f"is an object with several lists of rows. Say which: {choices}.")
    if not places:
        yield Row(f"{source.path!r} line 1", value)
        return
    nested = [name for name, inner in value[places[0]][0].items() if _is_rows(inner)]
    deeper = f"; rows inside them: task.format.rows={places[0]}.{nested[0]}" if nested else ""
    source.note(f"rows are those of {places[0]!r}{deeper}")
    yield from _number(value[places[0]], source)


def _number(rows: Iterable[dict[str, Any]], source: Source) -> Iterator[Row]:
    return (Row(f"{source.path!r} row {n}", row) for n, row in enumerate(rows, start=1))


def _take_rows(values: Iterable[tuple[str, Any]], source: Source) -> Iterator[Row]:
    """Yield rows from (place, value): objects, the objects at task.format.rows in them, and lists
    with the column names of task.columns.
    """
    parts = source.format.rows.split(".") if source.format.rows else []
    for place, value in values:
        inner = [value] if not parts else _expand(value, parts, place, source)
        for number, one in enumerate(inner, start=1):
            where = f"{source.path!r} {place}" + (f" row {number}" if parts else "")
            if source.columns and not isinstance(one, dict):
                cells = one if isinstance(one, list) else [one]
                if len(cells) == len(source.columns):
                    yield Row(where, dict(zip(source.columns, cells, strict=True)))
                    continue
                problem = f"has {len(cells)} values, but task.columns names {len(source.columns)}"
                source.refuse(f"{place} {problem}. Fix or remove it.")
            elif isinstance(one, dict):
                if source.columns and not set(source.columns) <= one.keys():
                    source.fail(
                        f"has objects, which name their fields, and task.columns has no effect."
                        f" Leave it out. Fields in {place}: {named(one)}."
                    )
                yield Row(where, one)
            else:
                listed = isinstance(one, list)
                example = "[question,answer]" if listed else "[text]"
                source.refuse(
                    f"{place} is JSON, but {type(one).__name__} and no object. Give objects, such"
                    ' as {"question": "..."}, or name the parts of lists:'
                    f" task.columns={example}."
                )


def _expand(
    value: Any, parts: list[str], place: str, source: Source, outer: dict[str, Any] | None = None
) -> Iterator[Any]:
    """Yield the objects at the end of a path of lists in a value. They also have the fields of the
    objects around them, unless they have a field of that name.
    """
    outer = outer or {}
    if not parts:
        for one in value if isinstance(value, list) else [value]:
            yield outer | one if isinstance(one, dict) else one
        return
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or parts[0] not in one:
            there = named(one) if isinstance(one, dict) else f"no object: {one!r:.60}"
            source.fail(
                f"has no {parts[0]!r} in {place}, which task.format.rows={source.format.rows}"
                f" names. There: {there}."
            )
        beside = {n: v for n, v in one.items() if n != parts[0] and not _is_rows(v)}
        around = outer | beside
        yield from _expand(one[parts[0]], parts[1:], place, source, around)
