"""Convert what Hydra composed into the dataclasses of a run, strictly; after this nothing sees
OmegaConf.
"""

import os
import re
from dataclasses import MISSING, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from common.config.checks import ConfigError
from common.config.explain import find_renamed, first_line, nested_schema, unknown_key, wrong_type
from common.config.schema import Run, T

# --- conversion


def typed(config: DictConfig, algo_schema: type) -> Run:
    """Convert a composed config into a `Run`, strictly.

    Args: config: what Hydra composed; algo_schema: dataclass of the chosen algorithm.
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
    if not isinstance(task, dict) or not task.get("_target_"):
        raise ConfigError(
            "task has no _target_. Choose one: task=translate, or see docs/tasks.md for your own."
        )
    if not isinstance(task["_target_"], str):
        raise ConfigError(
            f"task._target_={task['_target_']} names no class. Give one, such as my_module.MyTask."
        )
    run = _convert(plain, Run, "", skip=("algo", "task"))
    run["algo"] = build(algo_schema, algo, "algo")
    run["task"] = task
    return Run(**run)


_SECRET = re.compile(
    r"(^|[_-])(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE
)

# a tokenizer's
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
    """Make one dataclass from a plain dict; unknown keys and wrong types raise ConfigError with the
    full key.
    """
    return schema(**_convert(values, schema, prefix))


def _convert(
    values: dict[str, Any], schema: type, prefix: str, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    names = [f.name for f in fields(schema)]
    dot = f"{prefix}." if prefix else ""
    for key in values:
        if key not in names:
            renamed = find_renamed(schema, [str(key)], dot)
            raise ConfigError(renamed or unknown_key(f"{dot}{key}", str(key), names))
    out: dict[str, Any] = {}
    structured = OmegaConf.structured(schema)
    for key, value in values.items():
        inner = None if key in skip else nested_schema(schema, key)
        if inner is not None and isinstance(value, dict):
            out[key] = build(inner, value, f"{dot}{key}")
        else:
            out[key] = _check_type(structured, key, value, f"{dot}{key}")
    missing = [
        f.name
        for f in fields(schema)
        if f.name not in skip and f.name not in out and not _has_default(f)
    ]
    if missing:
        raise ConfigError(
            f"{dot}{missing[0]} is not set. Give it on the command line: {dot}{missing[0]}=VALUE."
        )
    return out


def _check_type(structured: DictConfig, key: str, value: Any, full_key: str) -> Any:
    """Let OmegaConf convert one value to the field's type, so that the rules are the same as on the
    command line.
    """
    try:
        OmegaConf.update(structured, key, value, merge=False)
        node = OmegaConf.select(structured, key)
        return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise ConfigError(wrong_type(f"{full_key}={value!r}", first_line(error))) from None


def _has_default(f: Any) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING
