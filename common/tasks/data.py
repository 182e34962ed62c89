"""Reading rows for tasks: text lines, parallel files, TSV, CSV, JSON Lines, Parquet, the `datasets`
library. No torch.

Files are plain or .gz (by their name), strictly UTF-8; a byte-order mark is dropped and CRLF is
accepted. Only "\\n" ends a line: str.splitlines would also cut at U+2028 inside a sentence. Every
mistake in the data is a `ConfigError` that names the setting, the file and the line.

The readers take the path, and `key`, the setting that gave it, for errors. `skipped` is None, or a
list that takes the errors of single rows, which are then left out.
"""

import codecs
import csv
import difflib
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from common.config import ConfigError, flat
from common.instance import import_optional

LONGEST_LINE = 2**26  # bytes
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: no tokenizer can encode it
_NUL = "Remove it; a file in UTF-16 holds many: convert it, with iconv -f UTF-16LE -t UTF-8."


@dataclass(frozen=True, slots=True)
class Row:
    """One row with named fields. where: its place, for errors: "'train.jsonl' line 3"; whole: as it
    was in the file, where objects in it are not taken apart.
    """

    where: str
    fields: dict[str, Any]
    whole: dict[str, Any] | None = None

    def get(self, name: str, key: str) -> Any:
        """Return the field `name`. Raises: ConfigError for the setting `key` that named it."""
        if name not in self.fields:
            near = difflib.get_close_matches(name, self.fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{key}={name!r} is not a field of {self.where}.{hint} Fields there:"
                f" {named(self.fields)}."
            )
        return self.fields[name]

    def text(self, name: str, key: str, *, numbers: bool = False, blank: bool = False) -> str:
        """Return the field `name`, which must be a string that is not blank, unless `blank`.

        numbers: a number is taken too, as text ("0.5", and "2" for 2.0).
        """
        value = self.get(name, key)
        if numbers and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        elif numbers and isinstance(value, float) and math.isfinite(value):
            value += 0.0  # of -0.0 it makes 0.0
            value = f"{value:.0f}" if value == int(value) else f"{Decimal(repr(value)):f}"
        if _is_conversation(value):
            problem = (
                f"is a conversation in {self.where}, a list of messages, and must be text. With"
                " task=custom task.prompt_field= takes one."
            )
        elif not isinstance(value, str):
            problem = f"is not a text in {self.where}, but {type(value).__name__}: {value!r:.60}."
        elif not (value.strip() or blank):
            problem = f"is empty in {self.where}."
        elif "\0" in value:
            problem = f"holds a NUL character in {self.where}. {_NUL}"
        elif _SURROGATE.search(value):
            problem = f"holds a lone surrogate in {self.where}."
        else:
            return value
        there = f" Fields there: {named(self.fields)}." if len(self.fields) > 1 else ""
        raise ConfigError(f"{key}={name!r} {problem} Fix or remove the row.{there}")


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value)
    )


def named(names: Iterable[str]) -> str:
    """Return names for an error: not too many, not too long, nothing that a terminal acts on."""
    listed = [f"{name[:60]}..." if len(name) > 60 else name for name in names]
    listed = [name if name.isprintable() else ascii(name) for name in listed]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def read_lines(path: str, key: str, lenient: bool = False) -> list[str]:
    """Return the lines of a text file, without their ends.

    lenient: bytes that are not UTF-8 become lone surrogates, which `Row.text` refuses.
    """
    raw = _read_bytes(path, key, LONGEST_LINE)
    _check_text(raw, path, key)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            f"{key}={path!r} is in UTF-16. Convert the file, with iconv -f UTF-16 -t UTF-8."
        )
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
            f" of the text. Convert the file, for example with iconv -f {guess_encoding(content)}"
            " -t UTF-8."
        ) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def guess_encoding(content: bytes) -> str:
    """Return the likely encoding of a text that is not UTF-8, as iconv names it. Bytes 0x80 to 0x9f
    are quotes and dashes in Windows' code page, and no letters in Latin-1.
    """
    decoded = content.decode("utf-8", "surrogateescape")
    odd = {ord(letter) - 0xDC00 for letter in set(decoded) if "\udc80" <= letter <= "\udcff"}
    return "WINDOWS-1252" if any(byte < 0xA0 for byte in odd) else "LATIN1"


# The first bytes of files that are no text -> what they are, and what their names should end in.
_FORMATS = {
    b"\x1f\x8b": ("a gzip file", ".gz"),
    b"PAR1": ("a Parquet file", ".parquet"),
    b"PK\x03\x04": ("a zip file", None),
    b"BZh": ("a bzip2 file", None),
    b"\xfd7zXZ\x00": ("an xz file", None),
    b"\x28\xb5\x2f\xfd": ("a zstd file", None),
    b"ARROW1": ("an Arrow file", None),
    b"SQLite format 3\x00": ("an SQLite database", None),
    b"\x89HDF\r\n": ("an HDF5 file", None),
}


def _check_text(raw: bytes, path: str, key: str) -> None:
    """Raise ConfigError for a file whose first bytes are those of another format than text."""
    for first, (kind, suffix) in _FORMATS.items():
        # What begins with a word may be text.
        if not raw.startswith(first) or (first.isalnum() and is_text(raw)):
            continue
        named_gz = path.endswith(".gz")
        if suffix == ".gz" and named_gz:
            advice = "It was zipped twice. Unzip it once: gunzip FILE."
        elif suffix == ".gz":
            advice = f"Rename it, so that its name ends in .gz: {Path(path).name}.gz."
        elif suffix is not None:
            stem = Path(path.removesuffix(".gz")).stem
            ending = f"{suffix}.gz" if named_gz else suffix
            advice = (
                f"Rename it to {stem}{ending} where the setting takes Parquet, or write it as JSON"
                " Lines."
            )
        else:
            advice = "Unpack it, or write its rows as JSON Lines, CSV or TSV."
        raise ConfigError(f"{key}={path!r} is {kind}, by its first bytes. {advice}")


def is_text(raw: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8 without control characters."""
    try:
        beginning = codecs.getincrementaldecoder("utf-8")().decode(raw[:4096])
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in beginning)


def read_parallel(paths: tuple[str, str], keys: tuple[str, str]) -> list[tuple[str, str]]:
    """Return pairs of lines: line i of the first file with line i of the second."""
    first, second = (read_lines(path, key) for path, key in zip(paths, keys, strict=True))
    if len(first) != len(second):
        raise ConfigError(
            f"{keys[0]}={paths[0]!r} has {len(first)} lines and {keys[1]}={paths[1]!r} has"
            f" {len(second)}. Give two files of the same length, whose lines belong together."
        )
    for path, key, lines in zip(paths, keys, (first, second), strict=True):
        for number, line in enumerate(lines, start=1):
            Row(f"line {number}", {path: line}).text(path, key)
    return list(zip(first, second, strict=True))


def read_tsv(path: str, key: str) -> list[Row]:
    """Return the rows of a tab-separated file with named columns. A quote is part of its text."""
    lines = enumerate(read_lines(path, key), start=1)
    return _table(((n, line.split("\t") if line.strip() else []) for n, line in lines), path, key)


def read_csv(path: str, key: str, skipped: list[str] | None = None) -> list[Row]:
    """Return the rows of a comma-separated file with named columns; cells may be quoted."""
    lines = read_lines(path, key, lenient=skipped is not None)
    csv.field_size_limit(LONGEST_LINE)  # of a cell; the module's own limit is 128 KiB
    table = csv.reader((f"{line}\n" for line in lines), strict=True)
    begin = 1

    def numbered() -> Iterator[tuple[int, list[str]]]:
        nonlocal begin
        for cells in table:
            line, begin = begin, table.line_num + 1  # a row is named by the line where it begins
            yield line, cells

    try:
        return _table(numbered(), path, key, skipped)
    # a quote that is not closed takes in all that follows, so there is nothing to go on with
    except csv.Error as error:
        raise ConfigError(f"{key}={path!r}: line {begin}: {error}. Fix or remove it.") from None


def _table(
    lines: Iterable[tuple[int, list[str]]], path: str, key: str, skipped: list[str] | None = None
) -> list[Row]:
    """Return the rows of (line, cells), of which the first names the columns."""
    rows: list[Row] = []
    names: list[str] = []
    for line, cells in lines:
        if not names:
            names = cells
            if len(set(names)) < len(names):
                raise ConfigError(
                    f"{key}={path!r}: line 1 names a column twice: {named(names)}. Rename one."
                )
        elif len(cells) == len(names):
            rows.append(Row(f"{path!r} line {line}", dict(zip(names, cells, strict=True))))
        elif cells:
            _refuse(
                f"{key}={path!r}: line {line} has {len(cells)} cells, but line 1 names"
                f" {len(names)} columns: {named(names)}. Fix or remove it.",
                skipped,
            )
    return _not_empty(rows, f"{key}={path!r}")


def _refuse(problem: str, skipped: list[str] | None) -> None:
    if skipped is None:
        raise ConfigError(problem)
    skipped.append(problem)


class _TwiceError(ValueError):
    """A key stands twice in an object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises: _TwiceError, where json would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def read_jsonl(path: str, key: str, skipped: list[str] | None = None) -> list[Row]:
    """Return the rows of a JSON Lines file; fields of an object in it are named as "a.b"."""
    rows = []
    for number, line in enumerate(read_lines(path, key, lenient=skipped is not None), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=_unique)
            if isinstance(value, dict):
                rows.append(Row(f"{path!r} line {number}", flat(value), value))
                continue
            problem = f"is JSON, but {type(value).__name__} and no object"
        except _TwiceError as error:
            problem = (
                f"names {error.args[0]!r} twice in one object, and it is not clear which counts"
            )
        except json.JSONDecodeError as error:
            problem = f"is not JSON ({error.msg}, column {error.colno})"
        except (ValueError, RecursionError):  # a number of thousands of digits; nested brackets
            problem = "holds a number too long to read, or is nested too deep"
        _refuse(
            f"{key}={path!r}: line {number} {problem}. Each line must be one object, such as"
            ' {"question": "..."}.',
            skipped,
        )
    return _not_empty(rows, f"{key}={path!r}")


def read_pairs(path: str, key: str) -> list[Row]:
    """Return the rows of a JSON file that is one list of [question, answer] pairs."""
    shape = 'Give a list of pairs, such as [["How many m are there per 2 km?", 2000.0]].'
    try:
        value = json.loads("\n".join(read_lines(path, key)))
    except (ValueError, RecursionError) as error:
        reason = str(error).removesuffix(".")
        raise ConfigError(f"{key}={path!r} is not JSON ({reason}). {shape}") from None
    if not isinstance(value, list):
        raise ConfigError(f"{key}={path!r} is JSON, but no list. {shape}")
    rows = []
    for number, pair in enumerate(value, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(f"{key}={path!r}: row {number} is no pair: {pair!r:.60}. {shape}")
        fields = {"question": pair[0], "answer": pair[1]}
        rows.append(Row(f"{path!r} row {number}", fields))
    return _not_empty(rows, f"{key}={path!r}")


def read_parquet(path: str, key: str) -> list[Row]:
    """Return the rows of a Parquet file; "a.b" names a field of a struct."""
    content = _read_bytes(path, key)
    if not content.startswith(b"PAR1"):
        _check_text(content, path, key)
    missing = f"{key}={path!r} needs the package pyarrow. Install it: pip install pyarrow"
    pyarrow = import_optional("pyarrow", missing)
    parquet = import_optional("pyarrow.parquet", missing)
    try:
        table = parquet.read_table(io.BytesIO(content))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0].removesuffix(".")
        raise ConfigError(f"{key}={path!r} cannot be read as Parquet: {reason}.") from None
    kinds = {"float": "float32", "halffloat": "float16"}
    narrow = {one.name: kinds[str(one.type)] for one in table.schema if str(one.type) in kinds}
    return _nested(spelt(table.to_pylist(), narrow), f"{path!r}", f"{key}={path!r}")


def narrow_columns(kinds: dict[str, Any]) -> dict[str, str]:
    """Return the columns of float32 and float16, with their kind."""
    return {name: kind for name, kind in kinds.items() if kind in ("float32", "float16")}


def spelt(rows: Iterable[dict[str, Any]], narrow: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield rows, with columns of float32 and float16 as these are written: 0.1 of the former would
    be 0.10000000149011612. narrow: their kinds by name.
    """
    import numpy as np  # a command that reads no rows does without it

    for row in rows:
        held = {n: (kind, row[n]) for n, kind in narrow.items() if isinstance(row[n], float)}
        yield row | {n: float(str(np.dtype(kind).type(value))) for n, (kind, value) in held.items()}


def read_dataset(name: str, config: str | None, split: str, key: str) -> list[Row]:
    """Return the rows of one split of a dataset on the Hugging Face hub, of a local folder that
    `datasets` can load, or of one saved. Nested fields are named with a dot.

    A dataset's own code is never run (no trust_remote_code).
    Args: name: the id; config: its configuration, None if it has one only.
    """
    missing = f"{key}={name!r} needs the `datasets` library. Install it: pip install datasets"
    datasets = import_optional("datasets", missing)
    folder = Path(name).expanduser()
    try:
        # by save_to_disk
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            saved: Any = datasets.load_from_disk(str(folder))
            splits = saved if isinstance(saved, dict) else {split: saved}  # one without a name
            if split not in splits:
                raise ValueError(f"it has the splits {', '.join(splits)}")
            loaded = splits[split]
        else:
            source = str(folder) if folder.is_dir() else name
            loaded = datasets.load_dataset(source, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        chosen = f"split={split}" if config is None else f"config={config}, split={split}"
        raise ConfigError(
            f"{key}={name!r} cannot be loaded ({chosen}): {reason.removesuffix('.')}. Check the id,"
            " the configuration, the split and the network; or give local files."
        ) from None
    where = f"{name!r} split {split}"
    kinds = {column: getattr(kind, "dtype", None) for column, kind in loaded.features.items()}
    return _nested(spelt(loaded, narrow_columns(kinds)), where, f"{key}={where}")


READERS: dict[str, Callable[[str, str], list[Row]]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}


def find_reader(path: str) -> Callable[[str, str], list[Row]] | None:
    """Return the reader of a file by its name; None for what the datasets library loads."""
    return READERS.get(Path(path.removesuffix(".gz")).suffix.lower())


def read_file(path: str, key: str) -> list[Row]:
    """Return the rows of a file of one of the READERS' kinds."""
    if (reader := find_reader(path)) is not None:
        return reader(path, key)
    raise ConfigError(
        f"{key}={path!r} is of no known kind. Give a file that ends in {', '.join(READERS)}, or the"
        " same with .gz."
    )


def read_rows(path: str, key: str, config: str | None = None, split: str = "train") -> list[Row]:
    """Return the rows of a file, or of a set of the datasets library."""
    if find_reader(path) is not None or Path(path).expanduser().is_file():
        return read_file(path, key)
    return read_dataset(path, config, split, key)


def _nested(rows: Iterable[Any], where: str, what: str) -> list[Row]:
    numbered = enumerate(rows, start=1)
    rows = [Row(f"{where} row {number}", flat(row), row) for number, row in numbered]
    return _not_empty(rows, what)


def _read_bytes(path: str, key: str, longest_line: int | None = None) -> bytes:
    """Return the content of a file, unzipped; too long a line is refused early."""
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
                        f" {longest_line / 2**20:.0f} MiB. Give one row a line."
                    )
                lines.append(line)
        return b"".join(lines)
    except FileNotFoundError:
        raise ConfigError(
            f"{key}={path!r} does not exist; tried {absolute}. Correct the path: a relative one"
            " starts at the folder where the command runs."
        ) from None
    except gzip.BadGzipFile as error:
        begins = absolute.read_bytes()[:4096]
        kinds = {first: kind for first, (kind, _) in _FORMATS.items() if begins.startswith(first)}
        kind = next(iter(kinds.values()), "a text file" if is_text(begins) else None)
        if kind is None or kind == "a gzip file":
            problem, advice = f"is not a whole gzip file: {error}", "Give another file."
        else:
            problem = f"ends in .gz and is {kind}, by its first bytes"
            advice = f"Rename it to {absolute.stem}."
        raise ConfigError(f"{key}={path!r} {problem}; tried {absolute}. {advice}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None)
        problem = f"cannot be read: {reason}" if reason else f"is not a whole gzip file: {error}"
        raise ConfigError(
            f"{key}={path!r} {problem.removesuffix('.')}; tried {absolute}. Give another file."
        ) from None


def _not_empty(rows: list[Row], what: str) -> list[Row]:
    if not rows:
        raise ConfigError(f"{what} has no rows. Give data with at least one row.")
    return rows
