"""Make the dataclasses of settings from plain values, and report wrong values with the key, the
value, the choices and the next step. pydantic checks them by the annotations of the fields; it is
imported when it is first needed.
"""

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import GenericAlias
from typing import Any, TypeVar, get_args

from common.config import plugins
from common.config.checks import HERE, ConfigError, show

T = TypeVar("T")

# The text for an error of pydantic, by its type or by the first word of its type.
_WORDS = {
    "greater_than_equal": "is too small. Give a value of at least {ge:g}.",
    "greater_than": "is out of range. Give a value above {gt:g}.",
    "less_than_equal": "is too large. Give a value of at most {le:.12g}.",
    "less_than": "is out of range. Give a value below {lt:.12g}.",
    "finite": "is not a finite number. Give one.",
    "int": "is not a whole number. Give one.",
    "float": "is not a number. Give one.",
    "bool": "is neither true nor false. Give one of them.",
    "string": "is not a text. Give one.",
    "list": "is not a list. Use '{key}=[{inside}]'.",
    "dict": "is not a dict. Use '{key}={{NAME: VALUE}}'.",
    "literal": "is not a choice. Choices: {expected}.",
    "value": "{error}",
}

# Other frameworks' names of settings that are too different to be found by their letters.
_ALIASES = {
    "learning_rate": "lr",
    "batch": "batch_size",
    "num_generations": "samples_per_prompt",
    "group_size": "samples_per_prompt",
    "population": "members",
    "population_size": "members",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "noise_scale": "sigma",
    "std": "sigma",
    "beta": "kl.beta",
    "max_tokens": "sampling.max_new_tokens",
    "max_new_tokens": "sampling.max_new_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "gradient_accumulation_steps": "train_rows",
    "micro_batch_size": "train_rows",
}


class UnreadableError(ConfigError):
    """A setting that does not exist, or a value that its type does not allow: wrong in any run."""


def build(kind: type[T], values: Any, key: str) -> T:
    """Make a dataclass, or another annotated type, from a plain value.

    Args: key: the dotted name of the value; "" for all settings.
    Raises: ConfigError with the full key.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python({key: values})[key]
    except ValidationError as error:
        problems: Any = sorted(error.errors(include_url=False), key=_rank)
        cause = problems[0].get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            place = ".".join(filter(None, map(str, problems[0]["loc"])))
            raise type(cause)(str(cause).replace(HERE, place)) from None
        raise UnreadableError(_word(problems[0], kind, {key: values})) from None


def check(kind: Any, value: Any, key: str) -> None:
    """Raise ConfigError unless the value fits an annotated type."""
    build(kind, value, key)


def is_readable(kind: Any) -> bool:
    """Return whether pydantic can check values from YAML against an annotation."""
    from pydantic.errors import PydanticUserError

    try:
        return bool(_adapter(kind))
    except (PydanticUserError, NameError):
        return False


def unknown_key(given: str, names: Sequence[str], key: str = "", chosen: str = "") -> str:
    """Return the error text for a key that does not exist, with the nearest one that does, and the
    command that explains those that exist.

    Args:
        given: KEY=VALUE.
        names: the settings that exist there.
        key: the part of KEY that does not exist; "" = its last part.
        chosen: the choices of groups that the settings depend on, such as "algo=NAME ".
    """
    full = given.partition("=")[0]
    key = key or full.rpartition(".")[2]
    near = name_nearest(key, names)
    hint = f" Did you mean {near!r}?" if near else ""
    moved = (
        "" if near and near == _ALIASES.get(key) else _say_elsewhere(full) or _say_elsewhere(key)
    )
    if moved:
        hint = f" {moved}"
    parts = full.split(".")
    group = ".".join(parts[: parts.index(key)] if key in parts else parts[:-1])
    listed = f"Settings here: {', '.join(names)}."
    return f"{given} is not a setting.{hint} {listed} {see_also(group, chosen)}"


def name_nearest(key: str, names: Sequence[str]) -> str | None:
    """Return the one of `names` that a mistaken or another framework's name means; None if none is
    near.
    """
    alias = _ALIASES.get(key, "")
    spoken = [alias] if alias.partition(".")[0] in names else []
    return next(iter([*spoken, *difflib.get_close_matches(key, names, n=1)]), None)


def see_also(key: str, chosen: str = "") -> str:
    """Return the command that explains a setting or a group of settings.

    Args: chosen: the choices of groups that it depends on, such as "algo=NAME ".
    """
    return f"python launch.py {chosen}--explain {key}".rstrip()


def _say_elsewhere(key: str) -> str:
    """Return a sentence about a setting of another trainer; "" if it is none, or without
    plugins/moving.
    """
    try:
        table = importlib.import_module(plugins.HINTS)
    except ImportError:
        return ""
    return table.describe(key)


@lru_cache(maxsize=128)
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    rules = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
    keyed: Any = GenericAlias(dict, (str, kind))
    return TypeAdapter(keyed, config=rules)


def _rank(error: Any) -> int:
    """Return how late to report an error: mistaken names first, rules between settings last."""
    return {"unexpected_keyword_argument": 0, "value_error": 2}.get(error["type"], 1)


def _word(error: Any, kind: Any, values: Any) -> str:
    """Return the text for one error of pydantic (an entry of ValidationError.errors)."""
    names, node = [], values
    for part in error["loc"]:  # with a union type, pydantic adds the name of the type at the end
        if isinstance(node, dict):
            names.append(str(part))
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part]
    key, value, what = ".".join(filter(None, names)), error["input"], error["type"]
    setting = f"{key}={show(value)}"
    if what == "missing":
        return f"{key} is not set. Give it on the command line: {key}=VALUE."
    if what == "unexpected_keyword_argument":
        while isinstance(value, dict) and len(value) == 1:  # as it was typed
            [(part, value)] = value.items()
            key += f".{part}"
        name = values["algo"].get("name") if isinstance(values.get("algo"), dict) else None
        chosen = f"algo={name} " if name else ""
        return unknown_key(f"{key}={show(value)}", _names(kind, names[1:-1]), names[-1], chosen)
    if value is None:
        return f"{setting}: the setting needs a value. Give one, or leave it out."
    optional = type(None) in get_args(_annotation(kind, names[1:]))
    if what.startswith("dataclass"):
        there = _names(kind, names[1:])
        return (
            f"{setting}: {key} is a group of settings{', or null' if optional else ''}. Set them"
            f" one by one, such as {key}.{there[0]}=VALUE. Settings there: {', '.join(there)}."
        )
    if optional and what.startswith("bool"):
        return f"{setting} is neither true, false nor null. Give one of them."
    words = _WORDS.get(what) or _WORDS.get(what.partition("_")[0]) or f": {error['msg']}."
    inside = "..." if isinstance(value, dict) else show(value)
    said = words.format(key=key, inside=inside, **error.get("ctx", {}))
    return f"{setting} {said.removesuffix('.')}, or null." if optional else f"{setting} {said}"


def _annotation(kind: Any, path: Sequence[str]) -> Any:
    """Return the annotation of the setting at `path` in a dataclass; None below a dict."""
    for name in path:
        inner = next((one for one in (kind, *get_args(kind)) if is_dataclass(one)), None)
        if inner is None:
            return None
        kind = {item.name: item.type for item in fields(inner)}[name]
    return kind


def _names(kind: Any, path: Sequence[str]) -> list[str]:
    """Return the names of the settings in a dataclass, or in the nested dataclass at `path`."""
    for name in path:
        annotation = {item.name: item.type for item in fields(kind)}[name]
        kind = next(k for k in (annotation, *get_args(annotation)) if is_dataclass(k))
    return [item.name for item in fields(kind)]
