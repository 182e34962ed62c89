"""Columnar files (Parquet, Arrow and Feather), which pyarrow reads batch by batch, and Excel
workbooks, which openpyxl reads row by row.
"""

import io
import itertools
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time
from typing import IO, Any

from common.system import import_optional
from common.tasks.data.row import Row
from common.tasks.data.source import ARROW, ARROW_STREAM, EXCEL, PARQUET, Source, first_line, opened
from common.tasks.data.tables import name_cells

BATCH = 1000  # rows


def read_columns(source: Source) -> Iterator[Row]:
    """Yield the rows of a file that is not text."""
    with opened(source) as found:
        if found.table == EXCEL:
            yield from _read_workbook(source, found.file)
            return
        if source.columns:
            source.fail(
                f"names its columns, as every file of {found.table} does, and task.columns has no"
                " effect. Leave it out."
            )
        batches = _read_batches(source, found.table, found.file)
        for number, row in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield Row(f"{source.path!r} row {number}", row)


def _read_batches(
    source: Source, kind: str | None, file: IO[bytes]
) -> Iterator[Iterable[dict[str, Any]]]:
    """Yield the rows of each batch of a Parquet or an Arrow file."""
    missing = f"{source.named} needs the package pyarrow. Install it: pip install pyarrow"
    pyarrow = import_optional("pyarrow", missing)
    parquet = import_optional("pyarrow.parquet", missing)
    try:
        if kind == ARROW_STREAM:
            batches: Iterable[Any] = pyarrow.ipc.open_stream(file)
        else:
            whole = file if file.seekable() and hasattr(file, "fileno") else None
            content = whole if whole is not None else io.BytesIO(file.read())
            if kind == ARROW:
                reader = pyarrow.ipc.open_file(content)
                batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
            else:
                batches = parquet.ParquetFile(content).iter_batches(batch_size=BATCH)
        narrow = None
        for batch in batches:
            if narrow is None:
                narrow = narrow_columns({one.name: str(one.type) for one in batch.schema})
            batch.validate(full=True)  # pyarrow would read beyond the end of a damaged column
            for start in range(0, batch.num_rows, BATCH):
                yield spelt(batch.slice(start, BATCH).to_pylist(), narrow)
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"cannot be read as {kind or PARQUET}: {first_line(error)}"
        source.fail(f"{problem}. Give another file.")


# Kinds of a column, as pyarrow and datasets name them -> as NumPy does.
_NARROW = {"float": "float32", "halffloat": "float16", "float32": "float32", "float16": "float16"}


def narrow_columns(kinds: dict[str, Any]) -> dict[str, str]:
    """Return the columns of float32 and float16, with their kind."""
    return {name: _NARROW[kind] for name, kind in kinds.items() if kind in _NARROW}


def spelt(rows: Iterable[dict[str, Any]], narrow: dict[str, str]) -> Iterable[dict[str, Any]]:
    """Return rows with float32 and float16 values at their shortest decimal: 0.1 as float32 would
    be 0.10000000149011612.

    Args: narrow: the kinds of these columns by name.
    """
    return _spell(rows, narrow) if narrow else rows


def _spell(rows: Iterable[dict[str, Any]], narrow: dict[str, str]) -> Iterator[dict[str, Any]]:
    import numpy as np  # a command that reads no rows does without it

    for row in rows:
        held = {n: (kind, row[n]) for n, kind in narrow.items() if isinstance(row[n], float)}
        yield row | {n: float(str(np.dtype(kind).type(value))) for n, (kind, value) in held.items()}


def _read_workbook(source: Source, file: IO[bytes]) -> Iterator[Row]:
    """Yield the rows of the first sheet of a workbook that has rows."""
    missing = f"{source.named} needs the package openpyxl. Install it: pip install -e '.[excel]'"
    openpyxl = import_optional("openpyxl", missing)
    content = file if file.seekable() else io.BytesIO(file.read())
    try:
        book = openpyxl.load_workbook(content, read_only=True, data_only=True)
    except Exception as error:  # of zipfile, of an XML parser, KeyError for a missing part
        source.fail(
            f"cannot be read as an Excel workbook: {first_line(error)}. Save it again, or as CSV."
        )
    filled = [sheet for sheet in book.worksheets if any(map(_is_filled, _cells(sheet)))]
    if not filled:
        source.fail("has no rows in any sheet. Give data with at least one row.")
    if len(filled) > 1:
        names = ", ".join(sheet.title for sheet in book.worksheets)
        chosen = [sheet for sheet in filled if sheet.title == source.format.rows]
        if not chosen:
            source.fail(
                f"has several sheets with rows: {names}. Say which: task.format.rows="
                f"{filled[0].title}."
            )
        filled = chosen
    rows = enumerate(_cells(filled[0]), start=1)
    yield from name_cells(((line, cells) for line, cells in rows if _is_filled(cells)), source)


def _is_filled(cells: list[Any]) -> bool:
    return any(cell is not None for cell in cells)


def _cells(sheet: Any) -> Iterator[list[Any]]:
    """Yield the values of rows: texts and numbers unchanged, dates in ISO 8601."""
    for cells in sheet.iter_rows(values_only=True):
        yield [one.isoformat() if isinstance(one, date | datetime | time) else one for one in cells]
