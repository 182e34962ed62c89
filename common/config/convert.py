"""Convert what Hydra composed into the dataclasses of a run, strictly; after this nothing sees
OmegaConf.
"""

import os
import re
from dataclasses import MISSING, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from common.config.checks import ConfigError, declared
from common.config.explain import first_line, nested_schema, unknown_key, wrong_type
from common.config.schema import Run, T


def typed(config: DictConfig, algo_schema: type) -> Run:
    """Convert a composed config into a `Run`, strictly.

    Hydra has checked the types already. Args: algo_schema: dataclass of the chosen algorithm.
    Raises: ConfigError with the key, what was given, the nearest valid name and the full list.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or str(error)
        raise ConfigError(f"{key} is not set. Give it on the command line: {key}=VALUE.") from None
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from None
    plain.pop("hydra", None)
    no_secrets(plain)
    algo, task = plain.pop("algo"), plain.pop("task")
    if not isinstance(task, dict) or not isinstance(task.get("_target_"), str):
        raise ConfigError(
            "task has no _target_ that names a class. Choose one: task=translate, or see"
            " docs/tasks.md for your own."
        )
    return _make(Run, plain | {"algo": _make(algo_schema, algo, "algo"), "task": task}, "")


_SECRET = re.compile(
    r"(^|[_-])(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE
)
_OF_TEXT = re.compile(r"(pad|eos|bos|unk|sep|cls|mask|stop|start|end)_token$", re.IGNORECASE)


def no_secrets(settings: dict[str, Any], prefix: str = "") -> None:
    """Raise ConfigError where a setting holds a secret: by its key, or because it is what a
    variable of such a name holds.

    A run's settings are written to run.yaml and into checkpoints, and sent to W&B.
    """
    held = [value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8]
    for key, value in settings.items():
        if isinstance(value, dict):
            no_secrets(value, f"{prefix}{key}.")
        elif not isinstance(value, str) or not value:
            continue
        elif (_SECRET.search(str(key)) and not _OF_TEXT.search(str(key))) or any(
            h in value for h in held
        ):
            raise ConfigError(
                f"{prefix}{key} holds a secret, and settings are written to run.yaml, into"
                " checkpoints and to W&B. Leave it out, and let the code that needs it read an"
                " environment variable (os.environ)."
            )


def build(schema: type[T], values: dict[str, Any], prefix: str) -> T:
    """Make one dataclass from a plain dict. Raises: ConfigError with the full key, for an unknown
    key, a wrong type or a value out of bounds.
    """
    node = OmegaConf.structured(schema)
    for key, value in values.items():
        _check_known(schema, key, prefix)
        try:  # the rules are those of the command line
            OmegaConf.update(node, key, value, merge=nested_schema(schema, key) is not None)
        except OmegaConfBaseException as error:
            text = wrong_type(f"{_join(prefix, key)}={value!r}", first_line(error))
            raise ConfigError(text) from None
    plain: Any = OmegaConf.to_container(node)
    return _make(schema, {key: plain[key] for key in values}, prefix)


def _make(schema: type[T], values: dict[str, Any], prefix: str) -> T:
    """Make one dataclass from values of the right types."""
    for item in fields(schema):  # type: ignore[arg-type]
        if item.name not in values and item.default is item.default_factory is MISSING:
            key = _join(prefix, item.name)
            raise ConfigError(f"{key} is not set. Give it on the command line: {key}=VALUE.")
    converted = {}
    for name, value in values.items():
        _check_known(schema, name, prefix)
        key, inner = _join(prefix, name), nested_schema(schema, name)
        converted[name] = _make(inner, value, key) if inner and isinstance(value, dict) else value
        for check, *bounds in declared(schema)[name]:
            for full_key, one in _single(key, value):
                check(full_key, one, *bounds)
    return schema(**converted)


def _single(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the values to check: those of a list or a dict, none for null."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", one) for name, one in value.items()]
    return [
        (key, one) for one in (value if isinstance(value, list) else [value]) if one is not None
    ]


def _check_known(schema: type, key: str, prefix: str) -> None:
    names = [item.name for item in fields(schema)]
    if key not in names:
        raise ConfigError(unknown_key(_join(prefix, key), names))


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
