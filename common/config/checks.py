"""Checks of single settings: each raises ConfigError with the key, the value and the next step.

A field of a settings class declares its checks in its type, and `build` runs them with the full
key:

    heads: Annotated[int, Ge(1)]  # or Count
    kind: Annotated[str, one_of("linear", "cosine")]
"""

import difflib
import functools
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import OmegaConf

from common.config.plugins import find_file

HERE = "<here>"  # in the text of a ConfigError: the key of the settings that raise it


class ConfigError(ValueError):
    """A mistake of the user. The text names the key, the value, the choices and the next step."""


def quote(text: str) -> str:
    """Return a text in quotes that Hydra's overrides read back unchanged."""
    escaped = re.sub(r'(\\*)("|$)', lambda at: 2 * at[1] + ("\\" + at[2] if at[2] else ""), text)
    return f'"{escaped}"'


def name_folder(folder: str | Path, key: str = "hydra.run.dir") -> str:
    """Return KEY=FOLDER, quoted for the shell and for Hydra."""
    text = str(folder)
    plain = re.fullmatch(r"\.{0,2}[A-Za-z_/][A-Za-z0-9_./-]*", text)
    plain = plain and text.lower() not in ("null", "true", "false", "inf", "nan")
    return shlex.quote(f"{key}={text if plain else quote(text)}")


AUTO = "auto"  # in place of a number: the run chooses it


@dataclass(frozen=True)
class Check:
    """A check of our own in an annotation. pydantic calls it before it checks the type.

    Attributes:
        refuse: raises ValueError with the text that follows KEY=VALUE.
        choices: the values that it allows; empty = not a list of choices.
        means: the allowed values in words, if the type and the choices do not say it.
    """

    refuse: Callable[[Any], None]
    choices: tuple[Any, ...] = ()
    means: str = ""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._pass, handler(kind))

    def _pass(self, value: Any) -> Any:
        self.refuse(value)
        return value


def one_of(*choices: Any) -> Check:
    """Return the check that a value is one of `choices`."""
    return Check(partial(_choose, choices), choices)


def holds(*names: str) -> Check:
    """Return the check that a text contains each of `names`."""
    return Check(partial(_find, names), means=f"a text that holds {' and '.join(names)}")


def _choose(choices: Sequence[Any], value: Any) -> None:
    if value not in choices:
        names = [show(one) for one in choices]
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"is not a choice.{hint} Choices: {', '.join(names)}.")


def _find(names: Sequence[str], text: Any) -> None:
    for name in names:
        if name not in str(text):
            raise ValueError(f"does not hold {name}. Add it.")


def _is_number(value: Any) -> None:
    if isinstance(value, bool):  # Python counts it as 0 or 1
        raise ValueError("is not a number. Give one.")


def _is_positive_or_auto(value: Any) -> None:
    if value is None or value == AUTO:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is not a number. Give one above 0, or auto.")
    if not 0 < value < math.inf:
        raise ValueError("is out of range. Give a value above 0.")


Whole = Annotated[int, Check(_is_number)]
Number = Annotated[float, Check(_is_number)]
Count = Annotated[Whole, Ge(1)]
Natural = Annotated[Whole, Ge(0)]
Positive = Annotated[Number, Gt(0)]
Nonnegative = Annotated[Number, Ge(0)]
Share = Annotated[Number, Ge(0), Le(1)]
Part = Annotated[Nonnegative, Lt(1)]  # a share below 1
# auto = the run chooses it
Tuned = Annotated[int | float | str, Check(_is_positive_or_auto, means="a number above 0, or auto")]


def choice(key: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ConfigError, with the nearest choice, unless `value` is one of `choices`."""
    try:
        _choose(choices, value)
    except ValueError as error:
        raise ConfigError(f"{key}={show(value)} {error}") from None


def show(value: Any) -> str:
    """Return the text of a value on the command line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def flat(values: dict[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Return nested dicts as one dict with keys such as "outer.inner", all of them after
    `prefix`.
    """
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}{separator}", separator)
        else:
            out[f"{prefix}{name}"] = value
    return out


def unused(*cases: tuple[Any, str, str]) -> None:
    """Raise ConfigError for the first (given, setting, why) whose setting is given: it has no
    effect.
    """
    for is_set, setting, why in cases:
        if is_set:
            raise ConfigError(f"{setting} has no effect {why}. Leave it out.")


@functools.cache
def shipped(file: str) -> dict[str, Any]:
    """Return the values of a file in conf/ or in a plugin's conf/ as plain dicts, merged with the
    files of its folder that its defaults name.
    """
    settings: Any = OmegaConf.load(find_file(file))
    named = [f"{Path(file).parent}/{name}.yaml" for name in settings.pop("defaults", ())]
    bases = [shipped(base) for base in named if find_file(base).exists()]
    merged: Any = OmegaConf.to_container(OmegaConf.merge(*bases, settings))
    return merged


def no_effect(file: str, key: str, value: Any, why: str) -> None:
    """Raise ConfigError if a setting without effect differs from its value in conf/.

    Args:
        file: the file in conf/, such as algo/NAME.yaml.
        key: the key in the file, such as kl.clamp.
        why: the reason that the setting has no effect, and the next step.
    """
    folder, slash, _ = file.rpartition("/")
    group = folder + "." * len(slash)
    default = functools.reduce(dict.__getitem__, key.split("."), shipped(file))
    if value != default:
        raise ConfigError(f"{group}{key.removeprefix(group)}={show(value)} has no effect {why}")
