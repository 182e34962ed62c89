"""Rows from files, folders and the Hugging Face hub. Imports no torch.

    reading = Reading(columns=None, format={}, incomplete="error")
    for row in reading.rows("data.csv.zst", "task.path"):
        row.text("answer", "task.answer_field")

A path is resolved in this order:

    reading.py    the kind of a path: one file, a pattern, a folder, a dataset of the hub
    folders.py    the files of a split in a folder; texts in one folder per class
    source.py     a file, opened and decompressed by its first bytes
    text.py       its encoding and its line ends; lines, parallel files
    tables.py     CSV and TSV as programs and spreadsheets write them
    documents.py  JSON: lines, arrays, objects, columns
    columnar.py   Parquet, Arrow and Feather, Excel
    hub.py        datasets that only the `datasets` library loads
    row.py        one row, its fields by name, and the errors of a field

Rows are read one at a time. Every error in the data is a `ConfigError` that names the setting, the
file and the line or row. `Reading.notes`, the plan and the log have the detected properties of a
file, such as its encoding. docs/tasks.md lists the supported formats.
"""

from common.tasks.data.columnar import narrow_columns, spelt
from common.tasks.data.reading import (
    Incomplete,
    Reading,
    names_file,
    no_collection,
    read_lines,
    read_rows,
    with_point,
)
from common.tasks.data.row import IncompleteError, Row, holds_messages, named
from common.tasks.data.source import Format
from common.tasks.data.text import guess_encoding

__all__ = [
    "Format",
    "Incomplete",
    "IncompleteError",
    "Reading",
    "Row",
    "guess_encoding",
    "holds_messages",
    "named",
    "names_file",
    "narrow_columns",
    "no_collection",
    "read_lines",
    "read_rows",
    "spelt",
    "with_point",
]
