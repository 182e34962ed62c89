"""Reading rows for tasks: text lines, parallel files, TSV, CSV, JSON Lines, Parquet, the `datasets`
library. No torch.

Files are plain or .gz (by their name), strictly UTF-8; a byte-order mark is dropped and CRLF is
accepted. Only "\\n" ends a line: str.splitlines would also cut at U+2028 or a form feed inside a
sentence, and so shift one parallel file against the other. Every mistake in the data is a
`ConfigError` that names the setting, the file and the line, before the run starts.
"""

import codecs
import csv
import difflib
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from common.config import ConfigError, flat

LONGEST_LINE = 2**26  # bytes
_NUL = "Remove it; a file in UTF-16 holds many: convert it, with iconv -f UTF-16LE -t UTF-8."


@dataclass(frozen=True, slots=True)
class Row:
    """One row with named fields. where: its place, for errors: "'train.jsonl' line 3"."""

    where: str
    fields: dict[str, Any]

    def text(self, name: str, key: str, *, numbers: bool = False, blank: bool = False) -> str:
        """The field `name`, which must be a string that is not blank.

        Args: name: of the field; key: the setting that named it, for errors ("task.source_field");
        numbers: a number is taken too, as text ("0.5", and "2" for 2.0); blank: so is an empty
        text.
        Raises: ConfigError with the place, the field, and the fields that are there.
        """
        there = f"Fields there: {named(self.fields)}."
        if name not in self.fields:
            near = difflib.get_close_matches(name, self.fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key}={name!r} is not a field of {self.where}.{hint} {there}")
        value = self.fields[name]
        if numbers and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        elif numbers and isinstance(value, float) and math.isfinite(value):
            value = f"{value:.0f}" if value == int(value) else f"{Decimal(repr(value)):f}"
        if not isinstance(value, str):
            kind = type(value).__name__
            raise ConfigError(
                f"{key}={name!r} is no text in {self.where}, but {kind}: {value!r:.60}. {there}"
            )
        if not (value.strip() or blank):
            raise ConfigError(
                f"{key}={name!r} is empty in {self.where}. Remove the row, or fill it in. {there}"
            )
        if "\0" in value:
            raise ConfigError(f"{key}={name!r} holds a NUL character in {self.where}. {_NUL}")
        # half a character: no tokenizer can encode it
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(
                f"{key}={name!r} holds a lone surrogate in {self.where}. Remove the row, or"
                " repair it."
            )
        return value


def named(names: Iterable[str]) -> str:
    """Names for an error, however many and long they are."""
    listed = [f"{name[:60]}..." if len(name) > 60 else name for name in names]
    # nothing that a terminal would act on
    listed = [name if name.isprintable() else ascii(name) for name in listed]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def read_lines(path: str, key: str, lenient: bool = False) -> list[str]:
    """The lines of a text file, without their ends.

    Args: path: plain or .gz, relative to the working folder; key: the setting that gave it, for
    errors; lenient: bytes that are not UTF-8 become lone surrogates, which `Row.text` refuses, so
    that only their row is lost.
    Raises: ConfigError if the file is missing, unreadable, empty, or not UTF-8, or where a line is
    longer than LONGEST_LINE.
    """
    raw = _read_bytes(path, key, LONGEST_LINE)
    content = raw.removeprefix(codecs.BOM_UTF8)
    if not content:
        raise ConfigError(f"{key}={path!r} is empty. Give a file with one row a line.")
    try:
        text = content.decode("utf-8", "surrogateescape" if lenient else "strict")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        offset = error.start + len(raw) - len(content)
        raise ConfigError(
            f"{key}={path!r}: line {line} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset}"
            " of the text. Convert the file, for example with iconv -f LATIN1 -t UTF-8."
        ) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_parallel(paths: tuple[str, str], keys: tuple[str, str]) -> list[tuple[str, str]]:
    """Pairs of lines: line i of the first file with line i of the second.

    Args: paths: the two files; keys: the settings that gave them, for errors.
    Raises: ConfigError as `read_lines`, if the counts differ, or if a line of either is blank.
    """
    first, second = (read_lines(path, key) for path, key in zip(paths, keys, strict=True))
    if len(first) != len(second):
        raise ConfigError(
            f"{keys[0]}={paths[0]!r} has {len(first)} lines and {keys[1]}={paths[1]!r} has"
            f" {len(second)}. Line i of one must belong to line i of the other: give two files of"
            " the same length."
        )
    for number, pair in enumerate(zip(first, second, strict=True), start=1):
        for side, line in enumerate(pair):
            if not line.strip():
                raise ConfigError(
                    f"{keys[side]}={paths[side]!r}: line {number} is empty. "
                    "Remove this line from both files, or fill it in."
                )
            if "\0" in line:
                raise ConfigError(
                    f"{keys[side]}={paths[side]!r}: line {number} holds a NUL character. {_NUL}"
                )
    return list(zip(first, second, strict=True))


def read_tsv(path: str, key: str) -> list[Row]:
    """Rows of a tab-separated file whose first line names the columns. No quoting: a quote is part
    of its text.

    Blank lines are skipped. Args and errors as `read_lines`; ConfigError also where a row has more
    or fewer cells.
    """
    lines = read_lines(path, key)
    names = lines[0].split("\t")
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{key}={path!r}: line 1 names a column twice: {named(names)}. Rename one."
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != len(names):
            raise ConfigError(
                f"{key}={path!r}: line {number} has {len(cells)} cells, but line 1 names"
                f" {len(names)} columns: {named(names)}. Separate the cells by one tab each."
            )
        rows.append(Row(f"{path!r} line {number}", dict(zip(names, cells, strict=True))))
    return _not_empty(rows, f"{key}={path!r}")


def read_csv(path: str, key: str, skipped: list[str] | None = None) -> list[Row]:
    """Rows of a comma-separated file whose first line names the columns. Cells may be quoted, and
    hold line ends then.

    Args and errors as `read_jsonl`; ConfigError also where a row has more or fewer cells, or a
    quote is not closed.
    """
    lines = read_lines(path, key, lenient=skipped is not None)
    table = csv.reader((f"{line}\n" for line in lines), strict=True)
    rows, names, begin = [], [], 1
    try:
        for cells in table:
            begin, line = table.line_num + 1, begin  # a row is named by the line where it begins
            if not names:
                names = cells
                if len(set(names)) < len(names):
                    raise ConfigError(
                        f"{key}={path!r}: line 1 names a column twice: {named(names)}. Rename one."
                    )
            elif cells and len(cells) != len(names):
                text = (
                    f"{key}={path!r}: line {line} has {len(cells)} cells, but line 1 names"
                    f" {len(names)} columns: {named(names)}. Mend or remove it."
                )
                if skipped is None:
                    raise ConfigError(text)
                skipped.append(text)
            elif cells:
                rows.append(Row(f"{path!r} line {line}", dict(zip(names, cells, strict=True))))
    # a quote that is not closed takes in all that follows, so there is nothing to go on with
    except csv.Error as error:
        raise ConfigError(f"{key}={path!r}: line {begin}: {error}. Mend or remove it.") from None
    return _not_empty(rows, f"{key}={path!r}")


def read_jsonl(path: str, key: str, skipped: list[str] | None = None) -> list[Row]:
    """Rows of a JSON Lines file: one object per line. The fields of an object in it are named with
    a dot, as "a.b".

    Blank lines are skipped. Args: as `read_lines`; skipped: None, or a list that takes the texts of
    the errors in single rows, which are left out. Raises: ConfigError as `read_lines`, also for a
    line that is no JSON object.
    """
    rows = []
    for number, line in enumerate(read_lines(path, key, lenient=skipped is not None), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if isinstance(value, dict):
                rows.append(Row(f"{path!r} line {number}", flat(value)))
                continue
            problem = f"is JSON, but {type(value).__name__} and no object"
        except json.JSONDecodeError as error:
            problem = f"is not JSON ({error.msg}, column {error.colno})"
        except (
            ValueError,
            RecursionError,
        ):  # a number of thousands of digits; brackets in brackets
            problem = "holds a number too long to read, or is nested too deep"
        text = (
            f"{key}={path!r}: line {number} {problem}. Each line must be one object, such as"
            ' {"question": "..."}.'
        )
        if skipped is None:
            raise ConfigError(text)
        skipped.append(text)
    return _not_empty(rows, f"{key}={path!r}")


def read_pairs(path: str, key: str) -> list[Row]:
    """Rows of a JSON file that is one list of [question, answer] pairs, as the fields question and
    answer.

    Args and errors as `read_lines`; ConfigError also for what is no such list, naming the pair,
    counted from 1.
    """
    shape = 'Give a list of pairs, such as [["How many m are there per 2 km?", 2000.0]].'
    try:
        value = json.loads("\n".join(read_lines(path, key)))
    except (ValueError, RecursionError) as error:
        deep = "a number too long to read, or nested too deep"
        reason = (
            f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else deep
        )
        raise ConfigError(f"{key}={path!r} is not JSON ({reason}). {shape}") from None
    if not isinstance(value, list):
        raise ConfigError(
            f"{key}={path!r} is JSON, but {type(value).__name__} and no list. {shape}"
        )
    rows = []
    for number, pair in enumerate(value, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(f"{key}={path!r}: row {number} is no pair: {pair!r:.60}. {shape}")
        rows.append(
            Row(f"{path!r} row {number}", dict(zip(("question", "answer"), pair, strict=True)))
        )
    return _not_empty(rows, f"{key}={path!r}")


def read_parquet(path: str, key: str) -> list[Row]:
    """Rows of a Parquet file; "a.b" names a field of a struct.

    Args and errors as `read_lines`; ConfigError also where pyarrow is not installed, or cannot read
    the file.
    """
    content = _read_bytes(path, key)
    try:
        import pyarrow  # pyright: ignore[reportMissingImports] (an optional dependency, slow to import)
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{key}={path!r} needs the package pyarrow. Install it: pip install pyarrow"
        ) from None
    try:
        table = parquet.read_table(io.BytesIO(content))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0].removesuffix(".")
        raise ConfigError(
            f"{key}={path!r} is no Parquet file that can be read: {reason}."
        ) from None
    rows = [
        Row(f"{path!r} row {number}", flat(row))
        for number, row in enumerate(table.to_pylist(), start=1)
    ]
    return _not_empty(rows, f"{key}={path!r}")


def read_dataset(name: str, config: str | None, split: str, key: str) -> list[Row]:
    """Rows of one split of a dataset on the Hugging Face hub, of a local folder that `datasets` can
    load, or of one saved.

    A dataset's own code is never run (no trust_remote_code). Fields of a nested field are named
    with a dot, as "translation.de".

    Args: name: the id; config: its configuration, None if it has one only; split: "train"; key: for
    errors.
    Raises: ConfigError if `datasets` is not installed, or cannot load it (with its reason).
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an optional dependency, slow to import)
    except ImportError:
        raise ConfigError(
            f"{key}={name!r} needs the `datasets` library. Install it: pip install datasets"
        ) from None
    folder = Path(name).expanduser()
    try:
        # by save_to_disk
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved: Any = datasets.load_from_disk(str(folder))
            splits = saved if isinstance(saved, dict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"it has the splits {', '.join(splits)}")
            loaded = splits[split]
        else:
            loaded = datasets.load_dataset(
                str(folder) if folder.is_dir() else name, config, split=split
            )
    except (
        OSError,
        ValueError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
    ) as error:  # pyright: ignore[reportAttributeAccessIssue]
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        chosen = f"split={split}" if config is None else f"config={config}, split={split}"
        raise ConfigError(
            f"{key}={name!r} cannot be loaded ({chosen}): {reason.removesuffix('.')}. Check the id,"
            " the configuration and the split, and that the hub can be reached; or give local"
            " files."
        ) from None
    rows = [
        Row(f"{name!r} split {split} row {number}", flat(dict(row)))
        for number, row in enumerate(loaded)
    ]
    return _not_empty(rows, f"{key}={name!r} split {split}")


def _read_bytes(path: str, key: str, longest_line: int | None = None) -> bytes:
    """The content of a file, unzipped where it ends in .gz. A line that is too long is refused
    before it is read whole.
    """
    absolute = Path(path).expanduser().absolute()
    zipped = absolute.suffix == ".gz"
    lines: list[bytes] = []
    try:
        with gzip.open(absolute) if zipped else absolute.open("rb") as file:
            if longest_line is None:
                return file.read()
            while line := file.readline(longest_line + 1):
                if len(line) > longest_line:
                    raise ConfigError(
                        f"{key}={path!r}: line {len(lines) + 1} is longer than"
                        f" {longest_line / 2**20:.0f} MiB. Give one row a line; a file without line"
                        " ends is no such file."
                    )
                lines.append(line)
        return b"".join(lines)
    except FileNotFoundError:
        raise ConfigError(
            f"{key}={path!r} does not exist; tried {absolute}. "
            "Correct the path: a relative one starts at the folder where the command runs."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise ConfigError(
                f"{key}={path!r} cannot be read: {error.strerror}; tried {absolute}. Give a file."
            ) from None
        reason = str(error).removesuffix(".")
        raise ConfigError(
            f"{key}={path!r} is not a whole gzip file: {reason}; tried {absolute}. "
            "Fetch or compress it again, or rename it without .gz if it is plain text."
        ) from None


def _not_empty(rows: Sequence[Row], what: str) -> list[Row]:
    if not rows:
        raise ConfigError(f"{what} has no rows. Give data with at least one row.")
    return list(rows)
