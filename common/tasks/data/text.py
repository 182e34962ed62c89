"""Text of files: encodings, line ends, lines, parallel files.

A text is UTF-8 unless it begins with another byte-order mark. A text that is not UTF-8 is read as
Windows-1252, which has all letters of Latin-1, if its letters occur as in words of western Europe;
the plan and the log name the encoding and some of the words. Otherwise several encodings are
likely, and the user must choose (task.format.encoding).

Only "\\n" ends a line: str.splitlines would also split at U+2028 inside a sentence. In a file
without any "\\n", "\\r" does, as on old Macs.
"""

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TextIO

from common.tasks.data.row import Row
from common.tasks.data.source import Source, opened

LONGEST_LINE = 2**26  # bytes
CHUNK = 2**20  # bytes
WESTERN = "cp1252"
# Marks at the beginning of a file -> its encoding, as Python names it. Longer ones come first.
_BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Letters of Windows-1252 beyond ASCII, by case; all else there are signs.
_SMALL = "àáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿßšžœƒªº"
_CAPITAL = "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞŠŽŒŸ"
# Patterns that occur in no language of western Europe: a capital inside a word, many letters with
# accents in a row, or many signs, a sign between letters, an undefined byte.
_ODD = re.compile(
    rf"[a-z{_SMALL}][{_CAPITAL}]"
    rf"|[{_SMALL}{_CAPITAL}]{{3}}"
    r"|[^\x00-\x7f–—…•\xa0]{4}"
    r"|[‚ƒ„][^\x00-\x7f]"
    r"|(?<=[A-Za-z])[^\x00-\x7f\w’‘´·–—…\xad\xa0](?=[A-Za-z])"
    r"|[\ufffd¤¦¬¯¸ˆ˜‡]"
)
_WORD = re.compile(r"\w*[^\x00-\x7f]\w*")


@dataclass(frozen=True)
class Written:
    """The format of a text.

    Attributes:
        encoding: its encoding.
        newline: the end of a line.
        strict: whether all of it can be decoded.
    """

    encoding: str
    newline: str
    strict: bool = True


class Text:
    """A text file, which is read once to detect its format, and then as often as needed.

    Args: by_lines: whether a line longer than LONGEST_LINE is refused.
    Raises: ConfigError for an encoding that cannot be detected, and for bytes that are invalid in
    it.
    """

    def __init__(self, source: Source, by_lines: bool = True) -> None:
        self.source, self.written = source, survey(source, by_lines)

    @contextmanager
    def open(self, newline: str | None = None) -> Iterator[TextIO]:
        """Open the text, decoded; its lines keep their ends.

        Args: newline: the end of lines, as for io.TextIOWrapper; None = as detected.
        """
        written = self.written
        errors = "strict" if written.strict else "surrogateescape"
        newline = written.newline if newline is None else newline
        with opened(self.source) as found:
            yield io.TextIOWrapper(
                found.file, encoding=written.encoding, errors=errors, newline=newline
            )


def read_lines(source: Source) -> list[str]:
    """Return the lines of a text file, without their ends."""
    with Text(source).open() as text:
        lines = [line.removesuffix("\n").removesuffix("\r") for line in text]
    if not lines:
        source.fail("is empty. Give a file with one row a line.")
    return lines


def read_parallel(first: Source, second: Source) -> list[tuple[str, str]]:
    """Return pairs of lines: line i of the first file with line i of the second."""
    sources = (first, second)
    lines = tuple(map(read_lines, sources))
    if len(lines[0]) != len(lines[1]):
        first.fail(
            f"has {len(lines[0])} lines and {second.named} has {len(lines[1])}. Give two files of"
            " the same length, whose lines belong together."
        )
    for source, column in zip(sources, lines, strict=True):
        for number, line in enumerate(column, start=1):
            Row(f"line {number}", {source.path: line}).text(source.path, source.key)
    return list(zip(*lines, strict=True))


def survey(source: Source, by_lines: bool = True) -> Written:
    """Read a text once, and return its format. Raises: ConfigError."""
    with opened(source) as found:
        if found.table is not None:
            source.fail(
                f"is a file of {found.table}, by its first bytes, and must be text. Give a text"
                " file."
            )
        encoding = source.format.encoding or _find_marked(found.head)
        marked = source.format.encoding is None and encoding == "utf-8-sig"
        if encoding is not None and codecs.lookup(encoding).name == "utf-8":
            encoding = "utf-8-sig"  # removes a byte-order mark, if there is one
        scan = _Scan(source, codecs.lookup(encoding or "utf-8-sig").name, by_lines)
        for chunk in iter(lambda: found.file.read(CHUNK), b""):
            scan.take(chunk)
        scan.take(b"", final=True)
    if scan.bad is None:
        if encoding is not None and not encoding.startswith("utf-8"):
            source.note(f"in {encoding}")
        return Written(scan.encoding, scan.newline)
    if encoding is not None and not marked:
        _fail_at(source, scan.bad, f"is not {encoding}", "Correct task.format.encoding, or the row")
    return _survey_western(source, scan.bad)


class _Scan:
    """Scans a text in pieces: line ends, lines that are too long, and the first byte that cannot be
    decoded.

    Attributes:
        bad: the offset of that byte; None if all bytes can be decoded.
    """

    def __init__(self, source: Source, encoding: str, by_lines: bool) -> None:
        self.source, self.encoding, self.by_lines = source, encoding, by_lines
        self.decoder = codecs.getincrementaldecoder(encoding)()
        self.bad: int | None = None
        self.seen = self.lines = self.tail = 0
        self.feed = self.returns = False

    @property
    def newline(self) -> str:
        return "\r" if self.returns and not self.feed else "\n"

    def take(self, chunk: bytes, final: bool = False) -> None:
        """Scan the next piece."""
        if self.by_lines:
            self._measure(chunk)
        if self.bad is None:
            try:
                text = self.decoder.decode(chunk, final)
            except UnicodeDecodeError as error:
                rest = len(error.object) - error.start  # from the bad byte to the end of the piece
                self.bad, text = self.seen + len(chunk) - rest, chunk.decode("latin-1")
        else:
            text = chunk.decode("latin-1")
        self.feed = self.feed or "\n" in text
        self.returns = self.returns or "\r" in text
        self.seen += len(chunk)

    def _measure(self, chunk: bytes) -> None:
        """Raise ConfigError if the current line is too long."""
        ends = [at for at in (chunk.find(b"\n"), chunk.find(b"\r")) if at >= 0]
        if self.tail + (min(ends) if ends else len(chunk)) > LONGEST_LINE:
            self.source.fail_line(
                self.lines + 1,
                f"is longer than {LONGEST_LINE / 2**20:.0f} MiB. Give one row a line.",
            )
        self.lines += chunk.count(b"\n")
        last = max(chunk.rfind(b"\n"), chunk.rfind(b"\r"))
        self.tail = len(chunk) - last - 1 + (self.tail if last < 0 else 0)


def _find_marked(head: bytes) -> str | None:
    """Return the encoding that the first bytes show: by a byte-order mark, or because every other
    byte is 0, as in UTF-16 with mostly ASCII letters.
    """
    for mark, encoding in _BOMS.items():
        if head.startswith(mark):
            return encoding
    even, odd = head[0::2], head[1::2]
    for zeros, others, encoding in ((odd, even, "utf-16-le"), (even, odd, "utf-16-be")):
        if zeros and zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.05 * len(others):
            return encoding
    return None


def _survey_western(source: Source, bad: int) -> Written:
    """Return Windows-1252 for a text that is not UTF-8 if it is plausible. Raises: ConfigError,
    unless invalid rows may be skipped.
    """
    words: dict[str, None] = {}
    odd = valid = bad_bytes = signs = 0
    scan = _Scan(source, WESTERN, False)
    utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    western = codecs.getincrementaldecoder(WESTERN)("replace")
    with opened(source) as found:
        for chunk in iter(lambda: found.file.read(CHUNK), b""):
            scan.take(chunk)
            if chunk.isascii():
                continue
            decoded = utf8.decode(chunk)
            valid += len(re.findall("[^\x00-\x7f\ud800-\udfff]", decoded))
            bad_bytes += len(re.findall("[\ud800-\udfff]", decoded))
            text = western.decode(chunk)
            odd += len(_ODD.findall(text))
            signs += len(re.findall(r"[^\x00-\x7f]", text))
            if len(words) < 3:
                words |= dict.fromkeys(match[0] for match in _WORD.finditer(text))
    shown = ", ".join(repr(word[:30]) for word in list(words)[:3])
    if valid < bad_bytes and odd <= signs // 200:
        source.note(
            f"not UTF-8, read as Windows-1252, with words such as {shown}; another encoding:"
            " task.format.encoding"
        )
        return Written(WESTERN, scan.newline, strict=False)
    if source.skipped is not None:
        return Written("utf-8-sig", scan.newline, strict=False)
    if valid >= bad_bytes:
        rest = _read_from(source, bad)
        _fail_at(
            source,
            bad,
            f"is not UTF-8: byte 0x{rest[0]:02x} at offset {bad} of the text",
            f"Convert the file, for example with iconv -f {guess_encoding(rest)} -t UTF-8, or name"
            f" the encoding of all of it: task.format.encoding={guess_encoding(rest)}",
        )
    _fail_at(
        source,
        bad,
        f"is not UTF-8, and as Windows-1252 it would read {shown}",
        f"Say what it is: {_list_likely(source)}",
    )


def _fail_at(source: Source, offset: int, problem: str, advice: str) -> NoReturn:
    """Raise ConfigError for the line of the byte at `offset`."""
    line, left = 1, offset
    with opened(source) as found:
        while left and (chunk := found.file.read(min(CHUNK, left))):
            line, left = line + chunk.count(b"\n"), left - len(chunk)
    source.fail_line(line, f"{problem}. {advice}.")


def _read_from(source: Source, offset: int) -> bytes:
    """Return a piece of a file from `offset`."""
    with opened(source) as found:
        while offset and (chunk := found.file.read(min(CHUNK, offset))):
            offset -= len(chunk)
        return found.file.read(CHUNK)


def guess_encoding(content: bytes) -> str:
    """Return the likely encoding of a text that is not UTF-8, under its iconv name. Bytes 0x80 to
    0x9f are quotes and dashes in Windows' code page, but control characters in Latin-1.
    """
    decoded = content.decode("utf-8", "surrogateescape")
    odd = {ord(letter) - 0xDC00 for letter in set(decoded) if "\udc80" <= letter <= "\udcff"}
    return "WINDOWS-1252" if any(byte < 0xA0 for byte in odd) else "LATIN1"


def _list_likely(source: Source) -> str:
    """Return settings with likely encodings, each with a word as it would be decoded."""
    with opened(source) as found:
        lines = found.file.read(CHUNK).split(b"\n")
    content = b"\n".join(line for line in lines[:-1] or lines if not line.isascii())[:20_000]
    content = content[: content.rfind(b"\n")] if b"\n" in content else content
    try:
        from charset_normalizer import from_bytes

        likely = [match.encoding for match in from_bytes(content)]
    except ImportError:  # it comes with other packages
        likely = []
    shown = []
    for encoding in dict.fromkeys([*likely, *_OTHERS]):
        try:
            word = max(_WORD.findall(content.decode(encoding)), key=len, default="")
        except (UnicodeDecodeError, LookupError):
            continue
        if word:
            shown.append(f"task.format.encoding={encoding} reads {word[:20]!r}")
    return "; ".join(shown[:5]) or "task.format.encoding=NAME"


_OTHERS = ("cp1251", "gb18030", "shift_jis", "euc_kr", "big5", "cp1250", "mac_roman", "cp850")
