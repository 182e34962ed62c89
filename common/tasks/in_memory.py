"""Rows of a Python program as a task: train(run, folder, rows=[{"prompt": ..., "answer": ...}]).

The task is that of conf/task/custom.yaml, with rows from memory in place of files, and with all
checks of rows. Imports no torch.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from common.config import CONF, REWARD_TASKS, ConfigError, Run, shipped
from common.task import FOR_OTHERS, Example, Messages
from common.tasks.base import Component
from common.tasks.custom import Custom
from common.tasks.data import Row, narrow_columns, spelt

log = logging.getLogger("clutch")

TARGET = "common.tasks.custom.Custom"
FIELDS = {"prompt_field": "prompt", "answer_field": "answer"}
# Settings of task=custom that name a source of rows.
SOURCES = (
    *("path", "test_path", "dataset_config", "dataset_split", "dataset_test_split"),
    *("columns", "format"),
)
SHAPE = (
    "Give a list of dicts, such as [{'prompt': '2 + 2 =', 'answer': '4'}], a datasets.Dataset or a"
    " pandas data frame."
)


def build(
    run: Run, rows: Any, test_rows: Any = None, reward: Callable[..., Any] | None = None
) -> tuple[Run, "InMemory"]:
    """Return a task with rows from memory, and the run with the settings of that task.

    Args:
        rows: a list of dicts, a datasets.Dataset or a pandas data frame.
        test_rows: the same; None = a part of `rows` is held out.
        reward: a function as in task.rewards; None = task.reward.
    Raises: ConfigError, with the row, for rows that would be refused in a file too.
    """
    if rows is None:
        given = "test_rows" if test_rows is not None else "reward"
        raise ConfigError(f"{given}= has no effect without rows=. Give the training rows too.")
    if run.algo.TASKS != REWARD_TASKS:
        raise ConfigError(
            f"rows= has no effect with algo={run.algo.name}, which does not take prompts and"
            " answers. Use an algorithm that samples completions."
        )
    settings = dict(run.task)
    if settings["_target_"] != TARGET:
        _check_default(run)
        settings = dict(shipped("task/custom.yaml"))
    for key in SOURCES:
        if settings[key] not in (None, {}):
            raise ConfigError(
                f"task.{key}={settings[key]} has no effect with rows=. Leave it out, or leave rows="
                " out."
            )
    if test_rows is not None and settings["test_share"] is not None:
        raise ConfigError("test_rows= and task.test_share both give the test rows. Leave one out.")
    if settings["template"] is None:
        settings["prompt_field"] = settings["prompt_field"] or FIELDS["prompt_field"]
    if settings["reward"] is not None:
        settings["answer_field"] = settings["answer_field"] or FIELDS["answer_field"]
    own = {k: v for k, v in settings.items() if k not in ("_target_", *FOR_OTHERS)}
    return replace(run, task=settings), InMemory(rows, test_rows, reward, own)


def _check_default(run: Run) -> None:
    """Raise ConfigError if rows= is combined with a task other than the algorithm's default one,
    which the rows replace.
    """
    name, file = run.task.get("name"), CONF / f"algo/{run.algo.name}.yaml"
    settings: Any = OmegaConf.load(file) if file.exists() else {}
    parts = settings.get("defaults", ())
    pairs = [pair for part in parts if isinstance(part, Mapping) for pair in part.items()]
    default = next((value for key, value in pairs if key.startswith("override /task")), None)
    if default is None:
        return
    usual = shipped(f"task/{default}.yaml")
    changed = [
        key
        for key, value in usual.items()
        if "${" not in str(value) and run.task.get(key) != value and key not in FOR_OTHERS
    ]
    if changed:
        setting = name or run.task["_target_"].split(".")[-2]
        raise ConfigError(
            f"rows= has no effect with task={setting}, which has rows of its own"
            f" ({', '.join(f'task.{key}' for key in changed[:3])}). Leave the task out, or use"
            " task=custom, whose settings say how rows= are read and scored."
        )
    log.info("rows= take the place of task=%s, the default of algo=%s", default, run.algo.name)


class InMemory(Custom):
    """task=custom with rows from memory.

    Args: settings: those of conf/task/custom.yaml, without sources of rows.
    """

    repeatable = False  # a user's function may not be repeatable

    def __init__(
        self,
        rows: Any,
        test_rows: Any,
        reward: Callable[..., Any] | None,
        settings: dict[str, Any],
    ) -> None:
        self._given = {"rows": rows, "test_rows": test_rows}
        self._function = reward
        # Names in place of the paths of files.
        sources = {"path": "rows", "test_path": None if test_rows is None else "test_rows"}
        super().__init__(**settings | sources)
        del self._given
        if reward is not None:
            self._reward_with(reward)

    @property
    def has_functions(self) -> bool:
        """Whether functions of the user contribute to the reward."""
        return self._function is not None or super().has_functions

    def _read(self, path: str, key: str, split: str) -> list[Example]:
        self._decimal = self.reading.format.decimal or "point"
        return self.reading.convert(read(self._given[path], path), self._example)

    def _source(self) -> str:
        return "rows="

    def _find_answers(
        self, row: Row, messages: Messages | None, said: str | None, field: str | None
    ) -> list[str]:
        usual = FIELDS["answer_field"]
        if usual not in row.fields and said is not None:
            field = None  # by default, as no other answer is there
        elif field is None and usual in row.fields:
            field = usual
        return super()._find_answers(row, messages, said, field)

    def _example(self, row: Row) -> Example:
        example = super()._example(row)
        if self._function is None:
            return example
        return replace(example, extra=example.extra | {"row": row.fields | row.whole})

    def _reward_with(self, function: Callable[..., Any]) -> None:
        """Use a function as the reward in place of task.reward, which still determines the
        measures.
        """
        if not callable(function):
            raise ConfigError(f"reward={function!r} is not a function. {_FORMS}")
        name = getattr(function, "__name__", type(function).__name__)
        own = self.bound(name, function, f"reward={name}")
        score: Component = self.component(own)
        others = {key: self.components[key] for key in self.config.rewards}
        if name in others:
            raise ConfigError(f"reward={name} and task.rewards both name {name!r}. Leave one out.")
        self.components = {name: score, **others}
        self.whole.add(name)
        self.weights = {name: self.config.reward_weight, **self.config.rewards}


_FORMS = (
    "Give a function of a completion and its answer that returns 0 to 1, or one of prompts,"
    " completions and any columns of the rows that returns a list, as in TRL."
)


def read(rows: Any, name: str) -> list[Row]:
    """Return rows from memory, numbered from 0.

    Args: name: the name of the argument, for errors.
    Raises: ConfigError.
    """
    if isinstance(rows, str | bytes):
        raise ConfigError(f"{name}={rows!r:.60} is a text. {SHAPE} A file is task.path=FILE.")
    if isinstance(rows, Mapping):  # a DatasetDict too
        keys = ", ".join(map(str, list(rows)[:6]))
        raise ConfigError(
            f"{name} is a {type(rows).__name__} with the keys {keys}. {SHAPE} Of a DatasetDict give"
            f" one split: {name}=data['train']."
        )
    taken: list[Row] = []
    for number, row in enumerate(_records(rows, name)):
        where = f"{name}[{number}]"
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{where} is not a dict, but {type(row).__name__}: {row!r:.60}. {SHAPE}"
            )
        for key in row:
            if not isinstance(key, str):
                raise ConfigError(f"{where} has the key {key!r:.60}, which is not a text. {SHAPE}")
        whole = {key: _plain(value) for key, value in row.items()}
        taken.append(Row(where, whole))
    if not taken:
        raise ConfigError(f"{name} has no rows. Give data with at least one row.")
    return taken


def _records(rows: Any, name: str) -> Iterable[Any]:
    """Return the rows of a data frame, of a Dataset or of any iterable, one at a time."""
    package = type(rows).__module__.partition(".")[0]
    if package == "pandas" and hasattr(rows, "columns"):
        columns = rows.columns
        if columns.has_duplicates:
            twice = ", ".join(dict.fromkeys(map(str, columns[columns.duplicated()])))
            raise ConfigError(f"{name} has several columns named {twice}. Rename them.")
        names, values = list(columns), [rows[column].to_numpy() for column in columns]
        return (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))
    if package == "datasets" and hasattr(rows, "with_format"):
        kinds = {name: getattr(kind, "dtype", None) for name, kind in (rows.features or {}).items()}
        return spelt(rows.with_format(None), narrow_columns(kinds))
    try:
        return iter(rows)
    except TypeError:
        raise ConfigError(f"{name} is of type {type(rows).__name__}. {SHAPE}") from None


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python value, a float32 at its shortest decimal; other values
    unchanged.
    """
    if not isinstance(value, np.generic):
        return value
    return float(str(value)) if isinstance(value, np.floating) else value.item()
