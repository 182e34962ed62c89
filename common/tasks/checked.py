"""Call the methods of a user's task, and report their errors with class, method,
example and line.
"""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

from common.config import ConfigError
from common.system import EXIT_NUMBERS, RunStopped, wording
from common.task import Example, Task, task_name

_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no file and no model takes
SHOWN = 80  # characters of a value


class Checked:
    """A wrapper around a task that checks the results of its methods and reports errors; all other
    attributes are the task's own.

    Attributes:
        own: the task itself.
    """

    def __init__(self, task: Task) -> None:
        self.own: Any = task
        self.name = task_name(task)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "own":
            raise AttributeError(name)
        attribute = getattr(self.own, name)
        if name == "examples":  # whatever it is, a list from here on
            return partial(self._list, attribute)
        return partial(self._call, name, attribute) if name in _PROBLEMS else attribute

    def wrap(self, outer: Callable[[Any], Any]) -> None:
        """Put `outer(task)` in the place of the task itself."""
        self.own = outer(self.own)

    def _list(self, found: Callable[[str], Iterable[Example]], split: str) -> list[Example]:
        return self._call("examples", lambda given: list(found(given)), split)

    def _call(self, name: str, found: Callable[..., Any], *given: Any) -> Any:
        what = f"{type(self.own).__name__}.{name}"
        try:
            value = found(*given)
        except (Exception, SystemExit):
            with wording(what, _describe(given)):
                raise
        if problem := _PROBLEMS[name](value):
            raise ConfigError(
                f"{what} returned {problem}{_describe(given)}. See docs/tasks.md for what it must"
                " return."
            )
        return _finite(what, value) if name == "metrics" else value


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's global generator for the block, for code that draws from it."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def _describe(given: Sequence[Any]) -> str:
    """Describe the arguments of a method, for errors."""
    first = given[0] if given else None
    if isinstance(first, Example):
        return f", for example {first.id}"
    if isinstance(first, str):
        return f", for {first[:SHOWN]!r}"
    return f", for {len(first)} held-out examples" if isinstance(first, Sequence) else ""


# --- the problem of a value; None = no problem


def show(value: Any) -> str:
    """Return the beginning of the `repr` of any value."""
    try:
        return f"{value!r:.{SHOWN}}"
    except Exception:  # a whole number of 5,000 digits has none
        return f"a {type(value).__name__} that cannot be shown"


def is_finite(value: Any) -> bool:
    """Return whether a real number is finite, and within the range of floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"{show(value)}, which is not text"
    if value.isascii() or not _SURROGATE.search(value):
        return None
    return f"{show(value)}, which holds a lone surrogate"


def _prompt(value: Any) -> str | None:
    if not isinstance(value, list):
        return _text(value)
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"a message without role and content: {show(message)}"
        if problem := _text(message["content"]):
            return f"a message of {problem}"
    return None if value else "an empty conversation"


def _rows(value: list[Any]) -> str | None:
    for number, row in enumerate(value):
        for part in ("id", "question", "answer"):
            if not hasattr(row, part):
                return f"{show(row)} as row {number}, which is no common.tasks.Example"
        for part in ("question", "answer"):
            if problem := _text(getattr(row, part)):
                return f"row {number} (id {row.id}) with the {part} {problem}"
    return None


def _pair(value: Any) -> str | None:
    if not isinstance(value, tuple) or len(value) != 2:
        return f"{show(value)}, which is no pair of prompt and completion"
    return _prompt(value[0]) or _prompt(value[1])


def _measures(value: Any) -> str | None:
    if not isinstance(value, Mapping) or not value:
        return f'{show(value)}, which is not a dict of measures such as {{"exact": 50.0}}'
    for name, number in value.items():
        if not isinstance(name, str) or not isinstance(number, Real):
            return f"{show(number)} as {show(name)}, which is not a number"
    return None


def _scores(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f'{show(value)}, which is not a dict of lists such as {{"exact": [0.0, 100.0]}}'
    for name, numbers in value.items():
        if not isinstance(name, str) or not isinstance(numbers, Sequence):
            return f"{show(numbers)} as {show(name)}, which is not a list"
        if odd := [n for n in numbers if not isinstance(n, Real) or not is_finite(n)]:
            return f"{show(odd[0])} among the values of {name!r}, which is no finite number"
    return None


def _finite(what: str, found: Mapping[str, Any]) -> dict[str, float]:
    """Return measures as plain floats. Raises: RunStopped if one is not finite."""
    for name, value in found.items():
        if not is_finite(value):
            raise RunStopped(
                f"{what} returned {show(value)} as {name!r}: a held-out measure must be a finite"
                " number, or nobody can tell whether the run has learnt anything. Return 0 where"
                " nothing can be measured.",
                EXIT_NUMBERS,
            )
    return {name: float(value) for name, value in found.items()}


_PROBLEMS: dict[str, Callable[[Any], str | None]] = {
    "examples": _rows,
    "prompt": _prompt,
    "hint": _prompt,
    "pretraining": _pair,
    "answer": lambda value: None if value is None else _text(value),
    "path_key": _text,
    "metrics": _measures,
    "scores": _scores,
}
