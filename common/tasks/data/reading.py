"""Read rows from the source that a setting names: a file, a pattern, a folder, or a dataset of the
hub.
"""

import gc
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from common.config import ConfigError, build, one_of
from common.tasks.data import folders, text
from common.tasks.data.columnar import read_columns
from common.tasks.data.documents import read_json
from common.tasks.data.hub import read_dataset
from common.tasks.data.row import IncompleteError, Row
from common.tasks.data.source import DATA_SUFFIXES, Format, Source, opened
from common.tasks.data.tables import find_decimal, read_table

log = logging.getLogger("clutch")

T = TypeVar("T")

Incomplete = Annotated[str, one_of("error", "skip")]
HOPELESS = 1000  # after this many incomplete rows and no complete one, reading stops
_KINDS = ", ".join(DATA_SUFFIXES)


class Reading:
    """The reader of a task's rows, with the detected properties of its files.

    Args:
        columns: the column names of tables without a header (task.columns).
        format: the format of files that is not detected (task.format).
        incomplete: how to treat a row without a required value: error or skip.
        skipped: a list that collects the errors of invalid rows, which are then left out; None =
            raise.
    Attributes:
        notes: the detected properties, for the plan; they are also logged.
    """

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        format: dict[str, Any] | None = None,
        incomplete: str = "error",
        skipped: list[str] | None = None,
    ) -> None:
        if columns is not None and len(set(columns)) < len(columns):
            raise ConfigError(f"task.columns={list(columns)} names a column twice. Rename one.")
        self.columns = tuple(columns or ())
        self.format = build(Format, dict(format or {}), "task.format")
        self.incomplete, self.skipped = incomplete, skipped
        self.notes: list[str] = []

    def source(self, path: str, key: str) -> Source:
        """Return the Source of a file."""
        return Source(
            path=path,
            key=key,
            format=self.format,
            columns=self.columns,
            notes=self.notes,
            skipped=self.skipped,
        )

    def rows(
        self, path: str, key: str, config: str | None = None, split: str = "train"
    ) -> Iterator[Row]:
        """Yield the rows of a path.

        Args:
            path: a file, a pattern, a folder, or an id of the hub.
            key: the setting that gives the path.
            config, split: the configuration and the split of a folder or of the hub.
        Raises: ConfigError for a path that cannot be read, or has no rows.
        """
        told, none = len(self.notes), True
        for row in self._find(self.source(path, key), config, split):
            none = False
            yield row
        if none:
            what = f"{key}={path!r}" + ("" if names_file(path) else f" split {split}")
            raise ConfigError(f"{what} has no rows. Give data with at least one row.")
        self._tell(told)

    def _tell(self, told: int) -> None:
        """Log the notes that are new since there were `told` of them."""
        for note in self.notes[told:]:
            log.warning("%s", note)

    def _find(self, source: Source, config: str | None, split: str) -> Iterator[Row]:
        folder = source.file
        if not folder.is_dir():
            if folders.is_glob(source.path):
                yield from _read_all(folders.find_matches(source))
            elif names_file(source.path):
                yield from read_file(source)
            elif source.columns:
                source.fail(
                    "names its columns, as every set of the hub does, and task.columns has no"
                    " effect. Leave it out."
                )
            else:
                yield from read_dataset(source.path, config, split, source.key)
            return
        files = folders.find_files(source, config, split)
        if files is not None:
            yield from _read_all(files)
        elif (classes := folders.find_classes(source, split)) is not None:
            yield from folders.read_classes(source, classes)
        else:
            there = ", ".join(sorted(one.name for one in folder.iterdir())[:6]) or "nothing"
            source.fail(
                f"holds no rows; tried {folder}, where there is {there}. Give a folder with"
                f" {split}.jsonl or another file of rows ({_KINDS}, packed or not), or with"
                f" {split}/CLASS/*.txt."
            )

    def lines(self, path: str, key: str) -> list[str]:
        """Return the lines of a text file, without their ends."""
        told = len(self.notes)
        lines = text.read_lines(self.source(path, key))
        self._tell(told)
        return lines

    def parallel(self, paths: tuple[str, str], keys: tuple[str, str]) -> list[tuple[str, str]]:
        """Return pairs of lines: line i of the first file with line i of the second."""
        first, second = (self.source(*pair) for pair in zip(paths, keys, strict=True))
        told = len(self.notes)
        pairs = text.read_parallel(first, second)
        self._tell(told)
        return pairs

    def convert(self, rows: Iterable[Row], make: Callable[[Row], T]) -> list[T]:
        """Return the result of `make` for each complete row.

        Raises: ConfigError for incomplete rows, with their count and the first three, unless they
        are skipped; and if no row is complete.
        """
        made: list[T] = []
        places: list[str] = []
        first: IncompleteError | None = None
        with no_collection():
            for row in rows:
                try:
                    made.append(make(row))
                except IncompleteError as error:
                    first = first or error
                    places.append(row.where)
                    if not made and self.incomplete == "error" and len(places) == HOPELESS:
                        raise ConfigError(str(first)) from None
        if first is None:
            return made
        count = f"{len(places):,} of {len(places) + len(made):,} rows"
        listed = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
        if not made:
            raise ConfigError(str(first))
        if self.incomplete == "error":
            raise ConfigError(
                f"{first} {count} are incomplete: {listed}. task.incomplete=skip leaves them out."
            )
        why = str(first).partition(". ")[0]
        note = f"{count} are incomplete and left out: {listed}; the first: {why}"
        log.warning("%s", note)
        self.notes.append(note)
        return made

    def decimal(self, path: str, key: str) -> str | None:
        """Return the decimal mark of numbers in the texts of a file, "point" or "comma"; None if
        ambiguous numbers must be refused.
        """
        if self.format.decimal is not None:
            return self.format.decimal
        source = self.source(path, key)
        if not names_file(path) or source.file.is_dir() or folders.is_glob(path):
            return "point"
        if _find_reader(source) is not read_table:
            return "point"
        return find_decimal(replace(source, notes=[]))


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection in the block: a million rows are no garbage, and scanning them
    repeatedly takes a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_rows(path: str, key: str, config: str | None = None, split: str = "train") -> list[Row]:
    """Return the rows of a path, with all properties of the format detected."""
    return list(Reading().rows(path, key, config, split))


def read_lines(path: str, key: str) -> list[str]:
    """Return the lines of a text file, without their ends."""
    return Reading().lines(path, key)


def names_file(path: str) -> bool:
    """Return whether a path names one or several files, not a folder or an id of the hub."""
    file = Path(path).expanduser()
    if file.is_dir():
        return False
    known = Source(path=path, key="").suffix() in (*DATA_SUFFIXES, ".txt", ".data", ".pgn")
    inside = any(parent.is_file() for parent in file.parents)  # a name in a zip file
    inside = inside or ".zip/" in path
    return known or inside or folders.is_glob(path) or file.exists()


def _read_all(sources: list[Source]) -> Iterator[Row]:
    for source in sources:
        yield from read_file(source)


def read_file(source: Source) -> Iterator[Row]:
    """Yield the rows of one file."""
    return _find_reader(source)(source)


def _find_reader(source: Source) -> Callable[[Source], Iterator[Row]]:
    """Return the reader of a file: by its first bytes, or for text by its name or its beginning."""
    with opened(source) as found:
        if found.table is not None:
            return read_columns
        head = found.head
    suffix = source.suffix()
    if suffix in (".parquet", ".arrow", ".feather", ".xlsx"):
        source.fail(f"cannot be read as {suffix[1:].title()}: it does not begin as such files.")
    if suffix in (".jsonl", ".ndjson", ".json"):
        return read_json
    if suffix in (".csv", ".tsv"):
        return read_table
    # The name is not conclusive; the beginning is.
    beginning = re.sub(rb"^[\s\0\xef\xbb\xbf\xff\xfe]+", b"", head)
    if beginning[:1] in (b"{", b"["):
        return read_json
    if b"\t" in head or source.columns or source.format.delimiter:
        return read_table
    lines = [line for line in re.split(rb"[\r\n]+", head) if line.strip()][:3]
    for mark in (b",", b";", b"|"):  # a table without a name that says so, as in a zip
        if len(lines) > 1 and lines[0].count(mark) and len({one.count(mark) for one in lines}) == 1:
            return read_table
    source.fail(
        f"is of no known kind. Give a file that ends in {_KINDS}, packed or not (.gz, .bz2, .xz,"
        ' .zst, .zip); or say what separates the cells of a table, task.format.delimiter=",".'
    )


def with_point(written: str, decimal: str | None, where: str) -> str:
    """Return a text whose numbers have decimal points in place of commas.

    Args: decimal: the decimal mark; None if the file does not show it.
    Raises: ConfigError for an ambiguous number, such as 1,234, if the mark is not known.
    """
    number = written.strip()
    if decimal == "point":
        return written
    if decimal is None:
        if re.fullmatch(r"[-+]?[1-9]\d{0,2}[.,]\d{3}", number):
            raise ConfigError(
                f"the number {number!r} in {where} is read in two ways, and no other number in the"
                " file shows which. Say it: task.format.decimal=comma or point."
            )
        return written
    if re.fullmatch(r"[-+]?(\d{1,3}(\.\d{3})+|\d*),\d+|[-+]?\d{1,3}(\.\d{3})+", number):
        return number.replace(".", "").replace(",", ".")
    return written
