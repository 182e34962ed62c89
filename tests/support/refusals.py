"""Mistakes of users, and the errors that refuse them: an error names the key, the value and the
next step. Its wording is free.
"""

import re
from collections.abc import Callable, Sequence
from subprocess import CompletedProcess
from typing import Any

import pytest

from common.config import ConfigError
from common.system import EXIT_CONFIG
from launch import compose

# The arguments of `refuses`, for tables of mistakes.
COLUMNS = ("overrides", "key", "value", "try_next")
Texts = str | int | float | Sequence[str] | None


def refuses(
    overrides: str | Sequence[str] | Callable[[], Any],
    *,
    key: Texts,
    value: Texts = None,
    try_next: Texts = None,
    start: Callable[[list[str]], Any] = compose,
) -> str:
    """Assert that settings are refused with an error that names all of these. Returns the
    error.

    Args:
        overrides: the settings, as a command line or a list; or what is called without arguments.
        key: what the error must name as the mistake: one text, or several.
        value: the value that it must name; None = the mistake has none.
        try_next: what it must name as the way out, such as a setting or a choice.
        start: is given the overrides. It raises ConfigError, or returns a finished process.
    """
    error = _find_error(overrides, start)
    for text in (*_list(key), *_list(value), *_list(try_next)):
        assert re.search(rf"(?<!\w){re.escape(text)}(?!\w)", error), f"{text!r} is not in: {error}"
    return error


def _find_error(
    overrides: str | Sequence[str] | Callable[[], Any], start: Callable[[list[str]], Any]
) -> str:
    given: list[str] = []
    if isinstance(overrides, str):
        given = overrides.split()
    elif not callable(overrides):
        given = list(overrides)
    try:
        done = overrides() if callable(overrides) else start(given)
    except ConfigError as error:
        return str(error)
    if not isinstance(done, CompletedProcess):
        pytest.fail(f"not refused: {given or overrides}")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("error: ")


def _list(texts: Texts) -> list[str]:
    if texts is None:
        return []
    return [str(texts)] if isinstance(texts, str | int | float) else list(texts)
