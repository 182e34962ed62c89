"""Tables in text: CSV and TSV, as written by programs and spreadsheets.

The dialect of a table is detected: the delimiter, whether quotation marks and backslashes have a
meaning, whether numbers have a decimal comma. A dialect is chosen if it is the only one in which
all rows have as many cells as the first; if two dialects fit and differ, the error names the
setting that decides (task.format).
"""

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from common.config import ConfigError
from common.tasks.data.row import Row, named
from common.tasks.data.source import Source
from common.tasks.data.text import LONGEST_LINE, Text

SAMPLE = 1000  # lines that the delimiter is detected from
DELIMITERS = (",", ";", "\t", "|")
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# The first line that Excel writes to declare the delimiter.
_SEPARATOR = re.compile(r"sep=([^\r\n])[\r\n]*", re.IGNORECASE)
# Numbers with a decimal mark: with one possible reading, and with two.
_WITH_POINT = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d*)\.\d+")
_WITH_COMMA = re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d*),\d+")
_EITHER = re.compile(r"[-+]?[1-9]\d{0,2}[.,]\d{3}")

Lines = Iterable[str]
# The first line of a row, and its cells.
Cells = Iterator[tuple[int, list[str]]]


class _BrokenError(ValueError):
    """A table cannot be read in a dialect, from a certain line on."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True)
class Dialect:
    """The format of cells.

    Attributes:
        delimiter: the character between cells.
        quotes: whether quotation marks around a cell are not part of it.
        escapes: whether a backslash escapes the next character.
    """

    delimiter: str
    quotes: bool = True
    escapes: bool = False

    def split(self, lines: Lines, first: int = 1) -> Cells:
        """Yield the cells of rows. Raises: _BrokenError.

        Args: first: the number of the first line.
        """
        if not self.quotes and not self.escapes:
            for number, line in enumerate(lines, start=first):
                bare = line.removesuffix("\n").removesuffix("\r")
                blank = not bare.strip() and self.delimiter not in bare
                yield number, [] if blank else bare.split(self.delimiter)
            return
        csv.field_size_limit(LONGEST_LINE)  # of a cell; the module's own limit is 128 KiB
        table = csv.reader(
            map(_keep_line_breaks, lines) if self.escapes else lines,
            delimiter=self.delimiter,
            escapechar="\\" if self.escapes else None,
            quoting=csv.QUOTE_MINIMAL if self.quotes else csv.QUOTE_NONE,
            strict=True,
        )
        begin = first
        try:
            for cells in table:
                line, begin = begin, first + table.line_num
                yield line, cells
        # an unclosed quote includes the rest of the file, so no further row can be read
        except csv.Error as error:
            raise _BrokenError(begin, str(error)) from None


def _keep_line_breaks(line: str) -> str:
    r"""Return a line with \n, \r and \t replaced by the characters that they stand for: csv would
    drop the backslash.
    """
    if "\\" not in line:
        return line
    return re.sub(r"\\([nrt\\])", lambda found: _ESCAPED[found[1]], line)


_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\\\"}


@dataclass(frozen=True)
class Table:
    """The text of a table.

    Attributes:
        text: the text.
        skip: the number of lines before the first row.
    """

    text: Text
    skip: int

    @classmethod
    def of(cls, source: Source) -> "Table":
        """Return the table of a file. Its first line may declare the delimiter in Excel's format:
        sep=;
        """
        text = Text(source)
        with text.open() as lines:
            return cls(text, int(bool(_SEPARATOR.fullmatch(next(lines, "")))))

    @property
    def source(self) -> Source:
        """The source of the file."""
        return self.text.source

    def split(self, dialect: Dialect, most: int | None = None) -> Cells:
        """Yield the cells of rows, from at most `most` lines. Raises: _BrokenError."""
        newline = "" if dialect.quotes else None  # in a cell there may be line ends of any kind
        stop = None if most is None else most + self.skip
        with self.text.open(newline) as lines:
            yield from dialect.split(itertools.islice(lines, self.skip, stop), 1 + self.skip)

    def has(self, test: Callable[[str], bool]) -> bool:
        """Return whether a line passes a test."""
        with self.text.open() as lines:
            return any(map(test, lines))

    def is_even(self, dialect: Dialect) -> bool:
        """Return whether all rows have the same number of cells in a dialect."""
        width = len(self.source.columns)
        try:
            for _, cells in self.split(dialect):
                width = width or len(cells)
                if cells and (len(cells) < width or not all(map(_is_blank, cells[width:]))):
                    return False
        except _BrokenError:
            return False
        return True


def read_table(source: Source) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file."""
    table = Table.of(source)
    dialect = find_dialect(table)
    if dialect.delimiter != _expected(source):
        source.note(f"cells separated by {_name(dialect.delimiter)}")
    try:
        yield from name_cells(table.split(dialect), source)
    except _BrokenError as error:
        raise ConfigError(
            f"{source.named}: line {error.line}: {error}. Fix or remove it."
        ) from None


def name_cells(table: Iterable[tuple[int, list[Any]]], source: Source) -> Iterator[Row]:
    """Yield rows from (line, cells). The first row names the columns, unless the user does."""
    filled = ((line, cells) for line, cells in table if cells)
    start = list(itertools.islice(filled, 50))
    if not start:
        return
    header, hint = _find_header(source, start)
    names = list(source.columns) if header is None else header
    given = "task.columns names" if source.columns else f"line {start[0][0]} names"
    place, count = repr(source.path), len(names)
    unnamed = [not name.strip() for name in names]
    names = [name if name.strip() else f"column {n}" for n, name in enumerate(names, start=1)]
    for line, cells in itertools.chain(start[header is not None :], filled):
        while len(cells) > count and _is_blank(cells[-1]):
            cells.pop()  # empty columns at the end, which spreadsheets write
        while len(cells) < count and all(unnamed[len(cells) :]):
            cells.append("")
        if len(cells) == count:
            yield Row(f"{place} line {line}", dict(zip(names, cells, strict=True)), hint)
        else:
            source.refuse(
                f"line {line} has {len(cells)} cells, but {given} {count} columns:"
                f" {named(names)}. Fix or remove it."
            )


# --- the first line


def _find_header(
    source: Source, start: list[tuple[int, list[Any]]]
) -> tuple[list[str] | None, str]:
    """Return the names of the columns (None if the first line is a row), and the hint for the error
    of a missing field.
    """
    line, rest = start[0][0], [_to_text(cells) for _, cells in start[1:]]
    first = _to_text(start[0][1])
    while len(first) > 1 and not first[-1].strip() and all(len(row) < len(first) for row in rest):
        first.pop()
    if source.columns:
        return _rename(source, line, first, rest), ""
    example = ",".join(f"NAME{n}" for n in range(1, min(len(first), 3) + 1))
    name_them = f"task.columns=[{example}{',...' if len(first) > 3 else ''}]"
    if source.format.header is False:
        source.fail(f"has no names with task.format.header=false. Name its columns: {name_them}.")
    hint = ""
    if source.format.header is None and _is_data(first, rest):
        hint = f" If line {line} is a row and does not name the columns, name them: {name_them}."
    filled = [name for name in first if name.strip()]
    if len(set(filled)) < len(filled):
        source.fail_line(line, f"names a column twice: {named(first)}. Rename one.{hint}")
    return first, hint


def _rename(source: Source, line: int, first: list[str], rest: list[list[str]]) -> list[str] | None:
    """Return the names of task.columns in place of those of the first line; None if the first line
    is a row.
    """
    header = source.format.header
    same = [name.strip().casefold() for name in first] == [
        name.casefold() for name in source.columns
    ]
    if header or (header is None and same):
        return list(source.columns)
    if header is None and _is_header(first, rest):
        source.fail_line(
            line,
            f"looks like names of columns, and task.columns is given: {named(first)}. Say which"
            " counts: task.format.header=true (line 1 is not a row, and task.columns names the"
            " columns anew), or false (line 1 is a row).",
        )
    return None


def _to_text(cells: list[Any]) -> list[str]:
    return ["" if cell is None else str(cell) for cell in cells]


def _is_blank(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _is_number(cell: str) -> bool:
    return bool(re.fullmatch(r"[-+]?[\d.,]*\d[\d.,]*%?", cell.strip()))


def _is_data(first: list[str], rest: list[list[str]]) -> bool:
    """Return whether the first line may be a row: one of its cells is a number or a sentence, or
    also occurs in its column below.
    """
    for place, cell in enumerate(first):
        below = {row[place] for row in rest if len(row) > place}
        if _is_number(cell) or len(cell) > 60 or len(cell.split()) > 6 or cell in below - {""}:
            return True
    return False


def _is_header(first: list[str], rest: list[list[str]]) -> bool:
    """Return whether the first line may name the columns: in a column of numbers, or of a few
    recurring values, its cell differs from all others.
    """
    if not all(re.fullmatch(r"[^\W\d][\w .()/-]{0,30}", cell.strip()) for cell in first):
        return False
    for place, cell in enumerate(first):
        below = [row[place] for row in rest if len(row) > place and row[place].strip()]
        recurring = len(below) >= 10 and len(set(below)) <= len(below) // 5
        if below and cell not in below and (recurring or all(map(_is_number, below))):
            return True
    return False


# --- how cells are written


def _expected(source: Source) -> str:
    return "," if source.suffix() == ".csv" else "\t"


def _name(delimiter: str) -> str:
    return _NAMES.get(delimiter, repr(delimiter))


def find_dialect(table: Table) -> Dialect:
    """Return the dialect of a table. Raises: ConfigError if two dialects fit and differ."""
    form = table.source.format
    delimiter = form.delimiter
    if delimiter is None and table.skip:
        with table.text.open() as lines:
            found = _SEPARATOR.fullmatch(next(lines))
        delimiter = found and found[1]
    if delimiter is None:
        delimiter = _find_delimiter(table)
    quotes = delimiter != "\t" if form.quotes is None else form.quotes
    dialect = Dialect(delimiter, quotes, bool(form.escapes))
    if form.quotes is None and delimiter == "\t":
        dialect = _find_quotes(table, dialect)
    return dialect if form.escapes is not None else _find_escapes(table, dialect)


def _find_delimiter(table: Table) -> str:
    """Return the delimiter: the one that occurs in the first row and gives all rows the same number
    of cells.
    """
    expected = _expected(table.source)
    widths = {one: _measure(table, Dialect(one)) for one in DELIMITERS}
    if len(set(widths["\t"])) != 1:  # quotation marks may be letters there
        widths["\t"] = _measure(table, Dialect("\t", quotes=False))
    several = [one for one in DELIMITERS if (widths[one] or [1])[0] > 1]
    if len(several) < 2:
        return several[0] if several else expected
    if expected == "\t" and "\t" in several:
        return "\t"
    even = [one for one in several if len(set(widths[one])) == 1]
    if len(even) > 1:
        signs = ["tab" if one == "\t" else f'"{one}"' for one in even]
        choices = " or ".join(f"'task.format.delimiter={sign}'" for sign in signs)
        table.source.fail(
            f"reads as a table with cells separated by {_name(even[0])} and by {_name(even[1])}."
            f" Say which: {choices}."
        )
    if even:
        return even[0]
    return expected if expected in several else several[0]


def _measure(table: Table, dialect: Dialect) -> list[int]:
    """Return the number of cells in each of the first rows, without trailing empty cells that the
    first row does not have.
    """
    widths: list[int] = []
    last = 0
    try:
        for line, cells in table.split(dialect, SAMPLE):
            last = line
            while len(cells) > 1 and widths and len(cells) > widths[0] and _is_blank(cells[-1]):
                cells.pop()
            if cells:
                widths.append(len(cells))
    except _BrokenError:
        pass
    return widths[:-1] if last >= SAMPLE and len(widths) > 1 else widths


def _find_quotes(table: Table, plain: Dialect) -> Dialect:
    """Return the dialect of a tab-separated table, by whether quotation marks are part of its
    cells.
    """
    if not table.has(lambda line: line.startswith('"') or '\t"' in line):
        return plain
    quoted = replace(plain, quotes=True)
    if not table.is_even(quoted):
        return plain
    needed, needless, bare = 1, 0, 0
    if table.is_even(plain):
        needed = 0
        for _, cells in table.split(plain):
            for cell in cells:
                if len(cell) > 1 and cell[0] == cell[-1] == '"':
                    needed += '"' in cell[1:-1]
                    needless += '"' not in cell[1:-1]
                else:
                    bare += bool(cell.strip())
    if not needless or not bare:  # as programs write quotes: only if needed, or everywhere
        table.source.note("quotation marks around cells are not part of them")
        return quoted
    if not needed:
        table.source.note("quotation marks are part of the cells")
        return plain
    table.source.fail(
        "has cells in quotation marks, which may be part of them or not. Say which:"
        " task.format.quotes=true (not part of them) or false."
    )


def _find_escapes(table: Table, plain: Dialect) -> Dialect:
    """Return the dialect of a table, by whether backslashes escape the next character."""
    if not table.has(lambda line: "\\" in line):
        return plain
    if not table.has(lambda line: "\\" in line.replace("\\\\", "")):
        table.source.note(
            "backslashes come in pairs, and both are part of the text; task.format.escapes=true"
            " makes one of two"
        )
    signs = ('\\"', f"\\{plain.delimiter}", "\\\n", "\\\r")
    if not plain.quotes or not table.has(lambda line: any(sign in line for sign in signs)):
        return plain
    escaped = replace(plain, escapes=True)
    if not table.is_even(escaped):
        return plain
    if table.is_even(plain):
        table.source.fail(
            "has backslashes before quotation marks, separators or line ends, which may be part of"
            " the text or not. Say which: task.format.escapes=false (they are) or true."
        )
    table.source.note("a backslash takes the meaning of the next character")
    return escaped


# --- decimal commas


def find_decimal(source: Source) -> str | None:
    """Return the decimal mark of a table's numbers, "point" or "comma"; None if no number shows it,
    or both occur.
    """
    table = Table.of(source)
    dialect = find_dialect(table)
    if dialect.delimiter == ",":
        return "point"
    points = commas = 0
    try:
        for _, cells in table.split(dialect, SAMPLE):
            for cell in map(str.strip, cells):
                if not _EITHER.fullmatch(cell):
                    points += bool(_WITH_POINT.fullmatch(cell))
                    commas += bool(_WITH_COMMA.fullmatch(cell))
    except _BrokenError:
        pass
    return None if bool(points) == bool(commas) else "point" if points else "comma"
