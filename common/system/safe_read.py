"""Read files of a run (JSON, JSON Lines, YAML) that may be damaged: size and depth are limited, and
the content is checked against a schema ("kind").

A kind is a type or a tuple of types, {"key": kind} for required keys, {"key?": kind} for optional
ones, {str: kind} for any other keys, or [kind] for a list.
"""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from common.config import ConfigError

log = logging.getLogger("clutch")

LARGEST = 256 << 20  # bytes of a file, or of a line of JSON Lines
DEEPEST = 50  # nested lists and objects; readers recurse into them
NUMBER = (int, float)
# The exceptions of parsers, and of code that reads values of another kind than expected.
ERRORS = (ValueError, RecursionError, ArithmeticError, LookupError, TypeError, AttributeError)
ERRORS += (yaml.YAMLError,)


class DamagedError(ConfigError):
    """A file does not have the content that a run writes: the text names the file and
    the reason.
    """


@contextmanager
def reading(path: Path, advice: str = "") -> Iterator[None]:
    """Turn errors caused by damaged files into DamagedError.

    Args: path: the file, or the run folder.
    """
    try:
        yield
    except ConfigError:
        raise
    except (OSError, *ERRORS) as error:
        other = path.is_dir() and not isinstance(error, OSError)
        what = " (a file of it does not hold what a run writes there)" if other else ""
        text = f"{path} is damaged: {_reason(error)}{what}. {advice}"
        raise DamagedError(text.rstrip()) from error


def read(path: Path, kind: Any = object, advice: str = "") -> Any:
    """Return the content of a .json or .yaml file, or None if there is no file. Raises:
    DamagedError, with `advice`.
    """
    with reading(path, advice):
        try:
            text = _read_bytes(path).decode("utf-8")
        except FileNotFoundError:
            return None
        if not text.strip():
            raise ValueError("it is empty")
        value = _yaml(text) if path.suffix == ".yaml" else parse_json(text)
        check(value, kind)
        return value


def read_or_warn(path: Path, kind: Any) -> Any:
    """Return the same as `read`; None, with a warning, if the file is damaged."""
    try:
        return read(path, kind)
    except DamagedError as error:
        _warn(f"{error} It is left out.")
        return None


def read_text(path: Path) -> str:
    """Return the content of a text file; "" if there is no file, or, with a warning, if it cannot
    be read.
    """
    try:
        with reading(path):
            return _read_bytes(path).decode("utf-8", "replace") if path.exists() else ""
    except DamagedError as error:
        _warn(f"{error} It is left out.")
        return ""


def read_lines(path: Path, kind: Any, count: int | None = None) -> list[dict[str, Any]]:
    """Return the first `count` lines of a JSON Lines file, or all; an empty list if there is no
    file.

    Invalid lines are skipped with a warning, except for an incomplete last line, which a kill
    leaves.
    """
    rows: list[dict[str, Any]] = []
    skipped, reason = 0, ""
    try:
        with reading(path), _open(path) as file:
            while (count is None or len(rows) < count) and (line := file.readline(LARGEST)):
                try:
                    value = parse_json(line.decode("utf-8", "replace"))
                    check(value, kind)
                    rows.append(value)
                except ERRORS as error:
                    torn = not line.endswith(b"\n") and len(line) < LARGEST
                    skipped, reason = skipped + (not torn), reason or _reason(error)
    except DamagedError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _warn(f"{error} It is left out.")
    if skipped:
        _warn(f"{path}: {skipped} lines are damaged and left out, the first: {reason}.")
    return rows


def check(value: Any, kind: Any, place: str = "") -> None:
    """Raise ValueError if a value does not have this kind."""
    named = f"{place.lstrip('.') or 'its content'} is {value!r:.50}"
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise ValueError(f"{named}, not a list")
        for number, item in enumerate(value):
            check(item, kind[0], f"{place}.{number}")
    elif isinstance(kind, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{named}, not an object")
        needed = (key for key in kind if key is not str and not key.endswith("?"))
        if missing := [key for key in needed if key not in value]:
            raise ValueError(f"{place.lstrip('.')}{place and '.'}{missing[0]} is missing")
        for key, item in value.items():
            known = kind.get(key, kind.get(f"{key}?", kind.get(str, object)))
            check(item, known, f"{place}.{key}")
    elif not isinstance(value, kind) or (kind is NUMBER and not math.isfinite(value)):
        raise ValueError(f"{named}, of another type")


@cache  # once per text, since served pages are made repeatedly
def _warn(text: str) -> None:
    log.warning("%s", text)


def _open(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file() and not path.is_dir():  # reading might never end
        raise ValueError("it is a pipe or a device, and not a file")
    return path.open("rb")


def _read_bytes(path: Path) -> bytes:
    with _open(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
    return content


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: ValueError or RecursionError."""
    value = json.loads(text)
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value)
    return value


def _check_depth(value: Any, room: int = DEEPEST) -> None:
    if room == 0:
        raise RecursionError
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_depth(item, room - 1)


def _yaml(text: str) -> Any:
    """Check the events of a YAML text before loading it, since the loader recurses in C."""
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecursionError
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it refers to itself (*NAME), which no run writes")
    return yaml.load(text, Loader=loader)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return f"it is nested deeper than {DEEPEST}"
    text = error.strerror if isinstance(error, OSError) else str(error)
    first = (text or "").strip().partition("\n")[0].rstrip(".:")
    return f"KeyError: {first}" if isinstance(error, KeyError) else first or type(error).__name__
