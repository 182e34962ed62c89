"""A file of rows that a setting names, opened and decompressed.

The first bytes of a file determine its compression (gzip, bzip2, xz, zstd, zip) and its kind (text,
Parquet, Arrow, Excel), whatever its name is. Files are read in pieces.
"""

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, NoReturn

from common.config import ConfigError, one_of
from common.system import import_optional
from common.tasks.data.row import named

HEAD = 4096  # bytes that formats are detected from
LAYERS = 4  # the most nested compressions

PARQUET, ARROW, ARROW_STREAM, EXCEL = "Parquet", "Arrow", "Arrow stream", "Excel"

# The first bytes of columnar files.
_TABLES = {b"PAR1": PARQUET, b"ARROW1": ARROW, b"\xff\xff\xff\xff": ARROW_STREAM}
# The first bytes of unsupported files -> their kind, and the next step.
_FOREIGN = {
    b"SQLite format 3\x00": ("an SQLite database", "Export its rows as CSV or JSON Lines."),
    b"\x89HDF\r\n": ("an HDF5 file", "Write its rows as JSON Lines or Parquet."),
    b"\xd0\xcf\x11\xe0": ("an old Excel file (.xls)", "Save it as .xlsx or CSV."),
    b"\x93NUMPY": ("an array of NumPy", "Write its rows as JSON Lines or Parquet."),
    b"FEA1": ("a Feather file of version 1", "Write it again with a Feather of today, or Parquet."),
    b"\x04\x22\x4d\x18": ("an lz4 file", "Unpack it: lz4 -d FILE."),
    b"7z\xbc\xaf\x27\x1c": ("a 7z file", "Unpack it: 7z x FILE."),
    b"Rar!\x1a": ("a rar file", "Unpack it: unrar x FILE."),
    b"%PDF-": ("a PDF", "Give the rows as text."),
    b"\x80\x04": ("a pickle", "Reading one runs code that is in it: write its rows as JSON Lines."),
    b"\x80\x05": ("a pickle", "Reading one runs code that is in it: write its rows as JSON Lines."),
    b"version https://git-lfs": ("a pointer of Git LFS and not the data", "Run: git lfs pull."),
    b"<!DOCTYPE html": ("a web page", "Download the file itself, not the page that shows it."),
    b"<html": ("a web page", "Download the file itself, not the page that shows it."),
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """The format of a file, if it cannot be detected, or is detected wrongly (task.format)."""

    encoding: str | None = None  # as Python names it; None = found out
    delimiter: str | None = None  # of the cells of a table; tab for "\t"
    quotes: bool | None = None  # whether quotation marks around a cell are not part of it
    escapes: bool | None = None  # whether a backslash takes the meaning of the next character
    header: bool | None = None  # whether the first line names the columns
    decimal: Annotated[str | None, one_of(None, "point", "comma")] = None  # of numbers in answers
    rows: str | None = None  # the path of rows in JSON: "data", or "data.paragraphs.qas"

    def __post_init__(self) -> None:
        if self.encoding is not None:
            try:
                is_text = codecs.lookup(self.encoding)._is_text_encoding
            except (LookupError, ValueError):
                is_text = False
            if not is_text:
                raise ConfigError(
                    f"task.format.encoding={self.encoding} is not an encoding that Python knows."
                    " Give one, such as utf-8, utf-16, cp1252, latin-1, cp1251 or gb18030."
                )
        if self.delimiter in ("tab", "\\t"):
            object.__setattr__(self, "delimiter", "\t")
        if self.delimiter is not None and len(self.delimiter) != 1:
            raise ConfigError(
                f"task.format.delimiter={self.delimiter!r} is not one character. Give one, such as"
                " 'task.format.delimiter=\";\"', or leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of rows.

    Attributes:
        path: the path that the user gave, or a file in a folder that they gave.
        key: the setting that names it.
        format: the format that the user gave.
        columns: the column names of a file without a header.
        notes: detected properties of files, for the plan and the log; shared.
        skipped: a list that collects the errors of single rows, which are then left out; None =
            raise.
    """

    path: str
    key: str
    format: Format = Format()
    columns: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    skipped: list[str] | None = None

    @property
    def file(self) -> Path:
        """The absolute path."""
        return Path(self.path).expanduser().absolute()

    @property
    def named(self) -> str:
        """KEY='PATH', the beginning of errors."""
        return f"{self.key}={self.path!r}"

    def fail(self, problem: str) -> NoReturn:
        """Raise ConfigError for the whole file: `problem` follows its name."""
        raise ConfigError(f"{self.named} {problem}")

    def fail_line(self, line: int, problem: str) -> NoReturn:
        """Raise ConfigError for the first line that cannot be read."""
        raise ConfigError(f"{self.named}: line {line} {problem}")

    def refuse(self, problem: str) -> None:
        """Raise ConfigError for one row, or skip it and record the error."""
        text = f"{self.named}: {problem}"
        if self.skipped is None:
            raise ConfigError(text)
        self.skipped.append(text)

    def note(self, text: str) -> None:
        """Record a detected property of the file, once."""
        found = f"{self.path}: {text}"
        if found not in self.notes:
            self.notes.append(found)

    def suffix(self) -> str:
        """Return the suffix of the name, without that of its compression: .csv for a.CSV.gz."""
        name = PurePosixPath(self.path)
        while name.suffix.lower() in PACKED_SUFFIXES and name.stem:
            name = PurePosixPath(name.stem)
        return name.suffix.lower()


@dataclass
class Opened:
    """An open file.

    Attributes:
        file: its bytes, decompressed.
        head: the first bytes.
        table: its kind if it is not text.
        place: its path if it is not compressed; else None.
    """

    file: IO[bytes]
    head: bytes
    table: str | None
    place: Path | None


@contextmanager
def opened(source: Source) -> Iterator[Opened]:
    """Open a file, decompress it, and detect its kind. Raises: ConfigError if it is missing,
    damaged or of a kind that is not supported.
    """
    with ExitStack() as stack, _worded(source) as packed:
        path, member = _find_member(source.file)
        file: Any = stack.enter_context(path.open("rb"))
        place: Path | None = path
        for _ in range(LAYERS):
            head = file.peek(HEAD)[:HEAD]
            kind = next((one for one in _PACKED if _PACKED[one].begins(head)), None)
            if kind == "zip" and packed:  # which is read from its end, and so not in pieces
                file = io.BufferedReader(io.BytesIO(file.read()))  # type: ignore[arg-type]
            if kind is None or (kind == "zip" and _is_workbook(file)):
                break
            packed.append(kind)
            file = stack.enter_context(_PACKED[kind].unpack(file, source, member))
            place = None
        else:
            source.fail(f"is packed more than {LAYERS} times. Unpack it.")
        if member is not None and "zip" not in packed:
            raise FileNotFoundError
        _check_name(source, head, packed)
        yield Opened(file, head, EXCEL if kind == "zip" else _find_table(source, head), place)


def is_text(raw: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8 without control characters."""
    try:
        beginning = codecs.getincrementaldecoder("utf-8")().decode(raw[:HEAD])
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in beginning)


def first_line(error: Exception) -> str:
    """Return the beginning of another package's error, which may hold bytes of a damaged file."""
    text = str(error).strip().split("\n")[0].removesuffix(".")
    return text if text.isprintable() else ascii(text)[1:-1]


def _find_table(source: Source, head: bytes) -> str | None:
    """Return the kind of a file that is not text; None for text. Raises: ConfigError for a kind
    that is not supported.
    """
    for first, (kind, advice) in _FOREIGN.items():
        if head.startswith(first):
            source.fail(f"is {kind}, by its first bytes. {advice}")
    if head[257:262] == b"ustar":
        source.fail("is a tar archive, by its first bytes. Unpack it: tar -xf FILE.")
    for first, kind in _TABLES.items():
        if head.startswith(first) and not (first.isalnum() and is_text(head)):
            return kind
    return None


def _check_name(source: Source, head: bytes, packed: list[str]) -> None:
    """Raise ConfigError for a file with the suffix of a compressed file whose content is neither
    compressed nor of a known kind.
    """
    kind = PACKED_SUFFIXES.get(source.file.suffix.lower())
    readable = is_text(head) or head.startswith((*_TABLES, *_FOREIGN, *_BOMS)) or not head
    if kind and not packed and not readable and b"\0" in head:
        source.fail(
            f"is not a whole {kind} file: its first bytes are {head[:2]!r}; tried {source.file}."
            " Give another file."
        )


_BOMS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@contextmanager
def _worded(source: Source) -> Iterator[list[str]]:
    """Turn errors about the bytes of a file into ConfigError. Yields a list for the detected
    compressions.
    """
    packed: list[str] = []
    try:
        yield packed
    except FileNotFoundError:
        source.fail(
            f"does not exist; tried {source.file}. Correct the path: a relative one starts at the"
            " folder where the command runs."
        )
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None)
        kind = packed[-1] if packed else "readable"
        said = first_line(error)
        problem = f"cannot be read: {reason}" if reason else f"is not a whole {kind} file: {said}"
        source.fail(f"{problem.removesuffix('.')}; tried {source.file}. Give another file.")


# --- packed files


@dataclass(frozen=True)
class _Packing:
    """A compression: the test of its first bytes, and its decompressor."""

    begins: Callable[[bytes], bool]
    unpack: Callable[[Any, Source, str | None], Any]


def _unpack_gzip(file: Any, source: Source, member: str | None) -> Any:
    return gzip.open(file)


def _unpack_bzip2(file: Any, source: Source, member: str | None) -> Any:
    return bz2.open(file)


def _unpack_xz(file: Any, source: Source, member: str | None) -> Any:
    return lzma.open(file)


def _unpack_zstd(file: Any, source: Source, member: str | None) -> Any:
    missing = (
        f"{source.named} is packed with zstd, which needs the package pyarrow. Install it: pip"
        " install -e '.[parquet]'"
    )
    pyarrow = import_optional("pyarrow", missing)
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 2**20)


def _unpack_zip(file: Any, source: Source, member: str | None) -> Any:
    try:
        return _open_member(file, source, member)
    except (IndexError, NotImplementedError, RuntimeError) as error:  # of a damaged directory
        raise zipfile.BadZipFile(str(error)) from None


def _open_member(file: Any, source: Source, member: str | None) -> Any:
    archive = zipfile.ZipFile(file)
    names = [
        one.filename
        for one in archive.infolist()
        if not one.is_dir()
        and not one.filename.startswith("__MACOSX/")
        and not PurePosixPath(one.filename).name.startswith(".")
    ]
    if member is None and len(names) > 1:  # there may be a readme in addition to the rows
        of_data = [name for name in names if PurePosixPath(name).suffix.lower() in DATA_SUFFIXES]
        names = of_data if len(of_data) == 1 else names
    if member is not None:
        names = [name for name in names if name == member]
    if len(names) != 1:
        path = source.path.removesuffix(f"/{member}")
        source.fail(
            f"is a zip file that holds {named(sorted(archive.namelist())) or 'nothing'}. Name the"
            f" file in it: {source.key}={path}/NAME."
        )
    if archive.getinfo(names[0]).flag_bits & 1:
        source.fail("is a zip file with a password. Unpack it.")
    if member is None and PurePosixPath(names[0]).name:
        source.note(f"read from {names[0]!r} in it")
    return io.BufferedReader(archive.open(names[0]))  # type: ignore[arg-type]


def _is_workbook(file: Any) -> bool:
    """Return whether a zip file is an Excel workbook. The position in the file does not change."""
    at = file.tell()
    try:
        names = zipfile.ZipFile(file).namelist()
    except (NotImplementedError, IndexError) as error:  # of a damaged directory
        raise zipfile.BadZipFile(str(error)) from None
    finally:
        file.seek(at)
    return "[Content_Types].xml" in names and any(name.startswith("xl/") for name in names)


def _find_member(path: Path) -> tuple[Path, str | None]:
    """Return a file, and the name of the member if the path leads into a zip file:
    a.zip/train.csv.
    """
    if not path.exists():
        for parent in path.parents:
            if parent.is_file():
                return parent, path.relative_to(parent).as_posix()
    return path, None


_BZIP2 = (b"1AY&SY", b"\x17rE8P\x90")  # of a block, and of an empty file
_PACKED = {
    "gzip": _Packing(lambda head: head.startswith(b"\x1f\x8b"), _unpack_gzip),
    "bzip2": _Packing(lambda head: head[:3] == b"BZh" and head[4:10] in _BZIP2, _unpack_bzip2),
    "xz": _Packing(lambda head: head.startswith(b"\xfd7zXZ\x00"), _unpack_xz),
    "zstd": _Packing(lambda head: head.startswith(b"\x28\xb5\x2f\xfd"), _unpack_zstd),
    "zip": _Packing(lambda head: head.startswith(b"PK\x03\x04"), _unpack_zip),
}
PACKED_SUFFIXES = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".zip": "zip",
}
DATA_SUFFIXES = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".feather",
    ".xlsx",
)


def in_folder(source: Source, path: Path) -> Source:
    """Return the source of one of the files that a setting names."""
    return replace(source, path=str(path))
