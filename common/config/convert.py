"""Convert Hydra's composed configuration into the dataclasses of a run. No other code sees
OmegaConf.
"""

import os
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from common.config.checks import ConfigError
from common.config.schema import Run
from common.config.validate import build


def typed(config: DictConfig, algo_schema: type) -> Run:
    """Convert a composed configuration into a `Run`. Unknown keys and wrong types are errors.

    Args: algo_schema: the dataclass of the chosen algorithm.
    Raises: ConfigError with the key, the given value, the nearest valid name and the full list.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or str(error)
        raise ConfigError(f"{key} is not set. Give it on the command line: {key}=VALUE.") from None
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if isinstance(error, InterpolationKeyError) else ""
        raise ConfigError(f"{where}{first_line(error)}") from None
    plain.pop("hydra", None)
    return from_plain(plain, algo_schema)


def from_plain(plain: dict[str, Any], algo_schema: type) -> Run:
    """Convert settings whose interpolations are resolved, as run.yaml has them, into a `Run`.

    Raises: as `typed`.
    """
    no_secrets(plain)
    if not isinstance(plain["task"], dict) or not isinstance(plain["task"].get("_target_"), str):
        raise ConfigError(
            "task has no _target_ that names a class. Choose one: task=translate, or see"
            " docs/tasks.md for your own."
        )
    return build(Run, plain | {"algo": build(algo_schema, plain["algo"], "algo")}, "")


def first_line(error: Exception) -> str:
    """Return the first sentence of an error from OmegaConf on one line."""
    text = re.sub(r"\s+", " ", str(error).split("\n    ")[0]).strip()
    return text.removeprefix("ConfigError raised while resolving interpolation: ")


_SECRET = re.compile(
    r"(^|[_-])(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE
)
_OF_TEXT = re.compile(r"(pad|eos|bos|unk|sep|cls|mask|stop|start|end)_token$", re.IGNORECASE)
_COUNT = re.compile(r"\d{1,6}")  # a number of tokens, for a mistyped key such as max_new_token


def no_secrets(settings: dict[str, Any], prefix: str = "") -> None:
    """Raise ConfigError if a setting holds a secret, at any depth: its key is the name of a secret,
    or its value contains the value of an environment variable with such a name.

    A run's settings are written to run.yaml and into checkpoints, and sent to W&B.
    """
    held = _held_secrets()

    def look(place: str, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                look(f"{place}.{key}", str(key), item)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                look(f"{place}[{number}]", name, item)
        elif isinstance(value, str) and value:
            named = _SECRET.search(name) and not _OF_TEXT.search(name)
            counts = name.lower().endswith("token") and _COUNT.fullmatch(value)
            if (named and not counts) or any(text in value for text in held):
                raise ConfigError(
                    f"{place} holds a secret, and settings are written to run.yaml, into"
                    " checkpoints and to W&B. Leave it out, and let the code that needs it read an"
                    " environment variable (os.environ)."
                )

    for key, value in settings.items():
        look(f"{prefix}{key}", str(key), value)


def _held_secrets() -> list[str]:
    """Return the secrets in environment variables."""
    return [value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 8]


# Keys of the Hugging Face hub, OpenAI and its kin, GitHub, AWS, W&B, and JSON Web Tokens.
_KEYS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bwandb_v\d_[A-Za-z0-9_]{20,}|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
)


def hide_secrets(text: str) -> str:
    """Return a text without secrets: values of environment variables that are named like one, what
    has the form of a service's key, and the password of an address.
    """
    for value in sorted(_held_secrets(), key=len, reverse=True):
        text = text.replace(value, "[secret]")
    text = re.sub(r"(\w://)[^/\s@]+@", r"\1", text)
    return _KEYS.sub("[secret]", text)
