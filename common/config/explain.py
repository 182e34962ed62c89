"""Turn errors of Hydra and OmegaConf into sentences that name the key, the value, the choices and
the next step, and report mistakes that Hydra does not explain. This module checks the names of
groups, and the settings of a task and an engine, which are listed in their files; `build` checks
everything else.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from common.config import plugins
from common.config.checks import ConfigError, choice
from common.config.convert import first_line
from common.config.schema import Run
from common.config.validate import unknown_key

HYDRA_ERRORS = (HydraException, OmegaConfBaseException)

_DICTS = re.compile(r"(task\.(rewards|config|settings|format)|engine\.settings)[.=]")


def open_dicts(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with ++ before those that set keys of a dict, such as task.rewards,
    because Hydra rejects a key that is in no file.
    """
    return [f"++{argument}" if _DICTS.match(argument) else argument for argument in arguments]


def explain(error: Exception, arguments: Sequence[str], config_dir: str | None = None) -> str:
    """Return one line for a user from one of HYDRA_ERRORS.

    Args:
        arguments: the overrides.
        config_dir: the user's own folder of YAML files.
    """
    if isinstance(error, OverrideParseException):
        key = error.override.partition("=")[0]
        return (
            f"{error.override} cannot be read as KEY=VALUE. A value with letters or signs that"
            f" Hydra does not know goes in quotes within quotes: '{key}=\"...\"'."
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if not group:
            return (
                f"--config-name={name}: no {name}.yaml is in the folder of --config-path, or in"
                " conf/ where none is given."
            )
        try:
            choice(group, name, list_options(group, config_dir))
        except ConfigError as unknown:
            return str(unknown)
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _unknown(cause, arguments, config_dir)
    merged = re.fullmatch(r"Error merging override \+*((.+?)=\[.*)", first_line(error))
    if merged and "DictConfig with ListConfig" in str(cause):
        return f"{merged[1]} is not a dict. Use '{merged[2]}={{NAME: VALUE}}'."
    reason = f": {first_line(cause)}." if isinstance(cause, OmegaConfBaseException) else ""
    return f"{first_line(error)}{reason}"


def _unknown(
    error: OmegaConfBaseException, arguments: Sequence[str], config_dir: str | None
) -> str:
    """Return the error text for a setting that is in no file, with the settings that exist."""
    key, beside = str(error.full_key), error.parent_node
    # For a group that does not exist, Hydra reports the first setting in it.
    begins = (f"{key}=", f"{key}.")
    argument = next((a for a in arguments if a.lstrip("+").startswith(begins)), key).lstrip("+")
    outer = key.rpartition(".")[0]
    if not outer:
        return unknown_key(argument, [item.name for item in fields(Run)])
    if not isinstance(beside, DictConfig) or not beside:
        return f"{argument}: {outer} is not a group of settings. Give it a value."
    if outer == "engine":  # not for tasks, which share most names of settings
        paths = list_files("engine", config_dir)
        engines: Any = {path.stem: OmegaConf.load(path) for path in paths}
        others = "|".join(name for name, file in engines.items() if error.key in file)
        chosen = [n for n, file in engines.items() if file.get("_target_") == beside["_target_"]]
        if others:
            return (
                f"{argument} has no effect with engine={chosen[0]}. It is a setting of"
                f" engine={others}. Leave it out, or choose that."
            )
    choices = (
        a.lstrip("+") for a in arguments if plugins.is_group(a.lstrip("+").partition("=")[0])
    )
    chosen = "".join(f"{shlex.quote(choice)} " for choice in choices)
    names = [str(name) for name in beside if name != "_target_"]
    return unknown_key(argument, names, chosen=chosen)


def check_groups(arguments: Sequence[str], config_dir: str | None = None) -> None:
    """Raise ConfigError for a wrong choice of a group that Hydra reports without choices: null, an
    unknown name in the `opt` list, or a name that leads out of the group's folder.

    Args: config_dir: the user's own folder of YAML files.
    """
    for argument in arguments:
        if "@" in argument.partition("=")[0].lstrip("+")[:1]:
            raise ConfigError(f"{argument} has no name before @. Give KEY=VALUE.")
        group = argument.partition("=")[0].lstrip("+")
        if not plugins.is_group(group) or "=" not in argument:
            continue
        # The choice of a task is part of the output folder's name.
        if ".." in Path(argument.partition("=")[2]).parts:
            raise ConfigError(
                f"{argument} leads out of the choices. Give the name of a file there."
            )
        choices = list_options(group, config_dir)
        override = OverridesParser.create().parse_overrides([argument])[0]
        value = override.value()
        if override.is_sweep_override() or (group == "experiment" and isinstance(value, list)):
            continue  # a list of experiments, merged in this order
        instead = {
            "experiment": "is the default. Leave it out.",
            "opt": "is not a list. Use opt=[] for none, or for example 'opt=[amp,compile]'.",
        }
        if value is None:
            known = f"is not a choice. Choices: {', '.join(choices)}."
            raise ConfigError(f"{group}=null {instead.get(group, known)}")
        chosen: list[Any] = value if group == "opt" and isinstance(value, list) else [value]
        for name in chosen:
            if group == "opt" or not isinstance(name, str):
                choice(group, str(name), choices)
            if not isinstance(name, str):
                raise ConfigError(
                    f"{argument}: Hydra takes {name} for a number. Give the file a name with a"
                    " letter."
                )
            if chosen.count(name) > 1:
                raise ConfigError(f"{argument} names {name} twice. Name each switch once.")


def list_options(group: str, config_dir: str | None = None) -> tuple[str, ...]:
    """Return the names of the files of a config group, including the user's own."""
    return tuple(sorted({path.stem for path in list_files(group, config_dir)}))


def list_files(group: str, config_dir: str | None) -> list[Path]:
    """Return the files of a config group, the user's own last."""
    own = sorted((Path(config_dir) / group).glob("*.yaml")) if config_dir else []
    return [*plugins.list_files(group), *own]
