"""Tasks and a text that are evaluated in addition to the run's task: evaluate.also and
evaluate.text. Imports no torch, so that errors in their files are reported at once.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from common.config import ConfigError
from common.task import Task, build
from common.tasks.data import read_lines


def build_others(nodes: dict[str, dict[str, Any]]) -> dict[str, Task]:
    """Make the tasks of evaluate.also, by name. Raises: ConfigError that names the key."""
    tasks = {}
    for name, node in nodes.items():
        with naming(name):
            tasks[name] = _made(json.dumps(node))
    return tasks


def forget_others() -> None:
    """Clear the cached tasks, since their files may have changed since an earlier run."""
    _made.cache_clear()


@lru_cache(maxsize=8)
def _made(node: str) -> Task:
    """Make a task once: the early check of its files makes the task that the run uses."""
    return build(json.loads(node))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix ConfigErrors of the block with evaluate.also and the name of the task."""
    try:
        yield
    except ConfigError as error:
        file = name.partition("/")[0]
        raise ConfigError(
            f"evaluate.also, task {name}: {error} It has the settings of its file: for others,"
            f" write one of your own with `defaults: [{file}]` (docs/uncertainty.md)."
        ) from error


def read_text(path: str) -> str:
    """Return the text of evaluate.text. Raises: ConfigError if it is missing, empty or
    not UTF-8.
    """
    text = "\n".join(read_lines(path, "evaluate.text"))
    if not text.strip():
        raise ConfigError(f"evaluate.text={path!r} holds no text. Give a file with some.")
    return text
