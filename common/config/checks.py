"""Checks of single settings: each raises ConfigError with the key, the value and the next step.

A field of a settings class declares them beside its type, as a check and its arguments:

    heads: Annotated[int, (at_least, 1)]  # or Count

`build` and `typed` run them with the full key. null is not checked.
"""

import difflib
import functools
import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf

# The folder with the YAML files.
CONF = Path(__file__).resolve().parents[2] / "conf"


class ConfigError(ValueError):
    """A mistake of the user's: the text names the key, the value, the choices and the next step."""


def choice(key: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`; name the nearest one."""
    if value not in choices:
        choices = tuple(str(one).lower() if isinstance(one, bool) else one for one in choices)
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}={value!r} is not a choice.{hint} Choices: {', '.join(choices)}.")


def at_least(key: str, value: float, minimum: float) -> None:
    """Raise ConfigError unless `value` is finite and >= `minimum`."""
    if not (value >= minimum and math.isfinite(value)):
        raise ConfigError(f"{key}={value} is too small. Give a value of at least {minimum:g}.")


def at_most(key: str, value: float, maximum: float) -> None:
    """Raise ConfigError unless `value` is <= `maximum`."""
    if not value <= maximum:
        raise ConfigError(f"{key}={value} is too large. Give a value of at most {maximum:.12g}.")


def above(key: str, value: float, bound: float) -> None:
    """Raise ConfigError unless `value` is finite and > `bound`."""
    if not (value > bound and math.isfinite(value)):
        raise ConfigError(f"{key}={value} is out of range. Give a value above {bound:g}.")


def below(key: str, value: float, bound: float) -> None:
    """Raise ConfigError unless `value` is < `bound`."""
    if not value < bound:
        raise ConfigError(f"{key}={value} is out of range. Give a value below {bound:g}.")


def share(key: str, value: float) -> None:
    """Raise ConfigError unless `value` is a share, from 0 to 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} is out of range. Give a share from 0 to 1.")


AUTO = "auto"  # of a number: the run finds it out


def positive_or_auto(key: str, value: float | str) -> None:
    """Raise ConfigError unless `value` is a number above 0, or auto."""
    if isinstance(value, str) and value != AUTO:
        raise ConfigError(f"{key}={value} is not a number. Give one above 0, or auto.")
    if not isinstance(value, str):
        above(key, float(value), 0)


def holds(key: str, text: str, *names: str) -> None:
    """Raise ConfigError unless each of `names` stands in `text`."""
    for name in names:
        if name not in text:
            raise ConfigError(f"{key}={text!r} does not hold {name}. Add it.")


Count = Annotated[int, (at_least, 1)]
Natural = Annotated[int, (at_least, 0)]
Positive = Annotated[float, (above, 0)]
Nonnegative = Annotated[float, (at_least, 0)]
Share = Annotated[float, (share,)]
Tuned = Annotated[int | float | str, (positive_or_auto,)]  # auto = what the run finds out


@functools.cache
def declared(schema: type) -> dict[str, list[tuple[Any, ...]]]:
    """Return the checks that a dataclass declares, by field."""
    return {
        item.name: [
            check
            for kind in (item.type, *getattr(item.type, "__args__", ()))
            for check in getattr(kind, "__metadata__", ())
        ]
        for item in fields(schema)
    }


def flat(values: dict[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Return the same fields with nested ones as "outer.inner", all of them behind `prefix`."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}{separator}", separator)
        else:
            out[f"{prefix}{name}"] = value
    return out


def unused(*cases: tuple[Any, str, str]) -> None:
    """Raise ConfigError for the first (given, setting, why) that is given: it has no effect."""
    for is_set, setting, why in cases:
        if is_set:
            raise ConfigError(f"{setting} has no effect {why}. Leave it out.")


@functools.cache
def shipped(file: str) -> dict[str, Any]:
    """Return the values of a file in conf/ as plain dicts."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONF / file))
    return settings


def no_effect(file: str, key: str, value: Any, why: str) -> None:
    """Raise ConfigError where a setting without effect is not what conf/ has. why: and what to do.

    Args: file: in conf/, such as algo/NAME.yaml; key: there, such as kl.clamp.
    """
    default = functools.reduce(dict.__getitem__, key.split("."), shipped(file))
    if value != default:
        algo = "algo." if file.startswith("algo/") else ""
        raise ConfigError(f"{algo}{key.removeprefix('algo.')}={value} has no effect {why}")
