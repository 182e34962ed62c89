"""Settings whose defaults are environment variables, as in the scripts before this project. The
command line or an experiment overrides them. conf/*.yaml reads them through the resolvers of
common/config/resolvers.py. This module imports no torch.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.config.checks import ConfigError, show

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
# The choices of variables that are words.
CHOICES = {"AMP_DTYPE": ("auto", "bfloat16", "float16")}


def number(name: str) -> int | None:
    """Return the whole number in an environment variable; None if it is not set or is empty.

    Raises: ConfigError that names the variable.
    """
    text = os.environ.get(name, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"the environment variable {name}={text!r} is not a number. Unset it.")
    return int(text) if text else None


def switch(name: str) -> bool | None:
    """Return the truth value in an environment variable; None if it is not set or is empty.

    Raises: ConfigError that names the variable.
    """
    text = os.environ.get(name, "")
    word = text.strip().lower()
    if word and word not in TRUE + FALSE:
        raise ConfigError(
            f"the environment variable {name}={text!r} is neither true nor false. Give one of them,"
            " or unset it."
        )
    return word in TRUE if word else None


def word(name: str) -> str | None:
    """Return the choice in an environment variable; None if it is not set or is empty.

    Raises: ConfigError that names the variable and its choices.
    """
    text = os.environ.get(name, "")
    if text and text.strip().lower() not in CHOICES[name]:
        raise ConfigError(
            f"the environment variable {name}={text!r} is not a choice. Choices:"
            f" {', '.join(CHOICES[name])}. Or unset it."
        )
    return text.strip().lower() or None


def from_environment(names: str, default: int | None) -> int | None:
    """Return the product of the integers in environment variables, or `default` if none is set.

    Args: names: the variables, joined by "*"; if only later ones are set, the first counts as
    `default`.
    """
    numbers = [number(name) for name in names.split("*")]
    if all(value is None for value in numbers):
        return default
    first = default if numbers[0] is None else numbers[0]
    return math.prod(value for value in (first, *numbers[1:]) if value is not None)


def from_switch(algorithm: str, name: str, yes: Any, no: Any, *, _root_: DictConfig) -> Any:
    """Return `yes` if an environment variable is true and the run has the algorithm that reads it,
    otherwise `no`.
    """
    return yes if _root_.algo.name == algorithm and switch(name) else no


def from_word(algorithm: str, name: str, needs: str, default: str, *, _root_: DictConfig) -> str:
    """Return the choice in an environment variable if the run has the algorithm that reads it.

    Args:
        needs: the key of a switch without which the setting has no effect.
        default: the value if the variable is not set or has no effect.
    """
    if _root_.algo.name != algorithm:
        return default
    found = word(name)
    return found if found and OmegaConf.select(_root_, needs) else default


def from_workers(algorithm: str, name: str, *, _root_: DictConfig) -> int:
    """Return the number of threads or processes that score rewards: from an environment variable if
    the run has the algorithm that reads it and a pool scores, otherwise from the hardware.
    """
    pool = _root_.algo.name == algorithm and _root_.scoring.kind != "serial"
    found = number(name) if pool else None
    return _root_.hardware.scoring_workers if found is None else found


def unset(name: str) -> str:
    """Return advice about an environment variable that may have chosen a setting, to follow "Leave
    it out"; "" if the variable is not set.
    """
    return f" (or unset {name}, an environment variable)" if os.environ.get(name) else ""


def describe(name: str, wanted: Any, found: Any, idle: str = "") -> Sequence[str]:
    """Return NAME=VALUE for an environment variable that is set, with the run's setting if that is
    different; nothing if the variable is not set.

    Args:
        wanted: the setting that the variable asks for.
        found: the setting of the run.
        idle: the reason that the variable has no effect; "" = it has an effect.
    """
    if not (text := os.environ.get(name)):
        return ()
    note = f"no effect: {idle}" if idle else f"overridden: {show(found)}"
    return (f"{name}={text}" + ("" if found == wanted and not idle else f" ({note})"),)
