"""Turn errors of Hydra and OmegaConf into sentences that name the key, the value, the choices and
the next step.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config.checks import CONF, ConfigError, choice
from common.config.schema import Run

# AssertionError: omegaconf 2.3, for a key below a setting that is null.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, AssertionError)

# What OmegaConf says of a value of a wrong type, and what to do about it.
_ADVICE = {
    "converted to Integer": "Give a whole number",
    "converted to Float": "Give a number",
    "not a valid bool": "Give true or false",
    "not Optional": "Give a value, or leave it out",
    "to string": "Give one text",
    "incompatible with (int)": "Give whole numbers as names",
}


# What other frameworks call a setting, where the names are too unlike to be found by their letters.
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


def wrong_type(given: str, reason: str, names: Sequence[str] = ()) -> str:
    """Return the text for a value of a wrong type.

    Args: given: as KEY=VALUE; reason: OmegaConf's; names: of the settings in KEY, if it is a group.
    """
    key, _, value = given.partition("=")
    if "ListConfig" in reason:
        return f"{given} is not a list. Use '{key}=[{value if value[:1] not in '{[' else '...'}]'."
    if "to Dict[" in reason:
        return f"{given} is not a dict. Use '{key}={{NAME: VALUE}}'."
    if "is not a subclass of" in reason:
        there = f", such as {key}.{names[0]}=VALUE. Settings there: {', '.join(names)}"
        return (
            f"{given}: {key} is a group of settings. Set them one by one{there if names else ''}."
        )
    advice = next((f" {text}." for part, text in _ADVICE.items() if part in reason), "")
    return f"{given}: {reason.removesuffix('.')}.{advice}"


def nested_schema(schema: Any, name: str) -> type | None:
    """Return the dataclass of a field, or None for another type or an unknown field."""
    if not is_dataclass(schema):
        return None
    kind = {item.name: item.type for item in fields(schema)}.get(name)
    return next((k for k in getattr(kind, "__args__", (kind,)) if is_dataclass(k)), None)  # type: ignore[return-value]


def unknown_key(full_key: str, names: list[str]) -> str:
    """Return the text for a key that does not exist, with the nearest one that does."""
    key = full_key.rpartition(".")[2]
    alias = _ALIASES.get(key, "")
    spoken = [alias] if alias.partition(".")[0] in names else []
    near = next(iter([*spoken, *difflib.get_close_matches(key, names, n=1)]), None)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"{full_key} is not a setting.{hint} Settings here: {', '.join(names)}."


def first_line(error: Exception) -> str:
    """Return the first sentence of an error of OmegaConf on one line."""
    text = re.sub(r"\s+", " ", str(error).split("\n    ")[0]).strip()
    return text.removeprefix("ConfigError raised while resolving interpolation: ")


# --- what Hydra raises


def explain(
    error: Exception,
    arguments: Sequence[str],
    algorithms: Mapping[str, type],
    config_dir: str | None = None,
) -> str:
    """Return one line for a user from one of HYDRA_ERRORS. Others are raised again.

    Args: arguments: the overrides; algorithms: their settings by name; config_dir: the user's own.
    """
    text = str(error)
    if isinstance(error, AssertionError):
        below = next((a for a in arguments if a.startswith("model.tiny.")), None)
        if below is None or "Unexpected type for root" not in text:
            raise error
        model = find_choice(arguments, "model", config_dir)
        return f"{below} has no effect with model={model}. Leave it out, or use model=tiny."

    if isinstance(error, OverrideParseException):
        key = error.override.partition("=")[0]
        return (
            f"{error.override} cannot be read as KEY=VALUE. A value with letters or signs that"
            f" Hydra does not know goes in quotes within quotes: '{key}=\"...\"'."
        )

    if match := re.search(r"Could not override '(@?[\w.@/]+)'", text):
        path = match.group(1)
        inside = re.search(
            r"full_key: ([\w.]+)", str(error.__cause__)
        )  # of a group given in braces
        if inside and inside[1].startswith(f"{path}."):
            path = inside[1]
        names = list_settings(path.split(".")[:-1], arguments, algorithms, config_dir)
        if others := find_owners(path, config_dir):
            return _setting_of_others(path, others, find_choice(arguments, "engine", config_dir))
        if names:
            return unknown_key(path, names)
        if "No match in the defaults list" in text:
            groups = sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name[0] != "_")
            return unknown_key(path, groups)
    if match := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, name = match.groups()
        try:
            choice(group, name, list_options(group, config_dir))
        except ConfigError as unknown:
            return str(unknown)
    cause = error.__cause__
    reason = first_line(cause if isinstance(cause, OmegaConfBaseException) else error)
    if match := re.search(r"Error merging override \+*(.+)", text):
        key = match.group(1).partition("=")[0]
        names = list_settings(key.split("."), arguments, algorithms, config_dir)
        return wrong_type(match.group(1), reason, names)
    return reason


def check_groups(arguments: Sequence[str]) -> None:
    """Raise ConfigError for null and in the `opt` list, where Hydra itself names no choices."""
    for argument in arguments:
        group = argument.partition("=")[0].lstrip("+")
        if not (CONF / group).is_dir() or "=" not in argument:
            continue
        # The choice of a task is part of the output folder's name.
        if ".." in Path(argument.partition("=")[2]).parts:
            raise ConfigError(
                f"{argument} leads out of the choices. Give the name of a file there."
            )
        choices = list_options(group)
        override = OverridesParser.create().parse_override(argument)
        value = override.value()
        if override.is_sweep_override() or (group == "experiment" and isinstance(value, list)):
            continue  # a list of experiments: one upon the other
        instead = {
            "experiment": "is the default. Leave it out.",
            "opt": "is not a list. Use opt=[] for none, or for example 'opt=[amp,compile]'.",
        }
        if value is None:
            known = f"is not a choice. Choices: {', '.join(choices)}."
            raise ConfigError(f"{group}=null {instead.get(group, known)}")
        if group == "opt":
            names = [str(name) for name in (value if isinstance(value, list) else [value])]
            for name in names:
                choice("opt", name, choices)
                if names.count(name) > 1:
                    raise ConfigError(f"{argument} names {name} twice. Name each switch once.")
        elif not isinstance(value, str):  # a number, which Hydra would take for something else
            choice(group, str(value), choices)


def open_dicts(arguments: Sequence[str], algorithms: Mapping[str, type]) -> list[str]:
    """Return the arguments, with ++ before those that set keys of an open dict, such as
    algo.optimizer.kwargs: Hydra takes a key that no file has for a mistake.
    """
    dicts = {f"algo.{name}" for schema in algorithms.values() for name in list_dicts(schema)}
    more = ("slurm.options", "task.rewards", "task.config", "engine.settings")
    opened = re.compile("|".join(rf"{name}[.=]" for name in (*dicts, *more)))
    return [f"++{argument}" if opened.match(argument) else argument for argument in arguments]


def list_dicts(schema: Any) -> list[str]:
    """Return the dotted names of the fields of a dataclass that are dicts."""
    names = []
    for item in fields(schema):
        if getattr(item.type, "__origin__", None) is dict:
            names.append(item.name)
        elif is_dataclass(item.type):
            names += [f"{item.name}.{name}" for name in list_dicts(item.type)]
    return names


def list_options(group: str, config_dir: str | None = None) -> tuple[str, ...]:
    """Return the names of the files of a config group, the user's own too."""
    folders = [CONF / group, *([Path(config_dir) / group] if config_dir else [])]
    return tuple(sorted({path.stem for folder in folders for path in folder.glob("*.yaml")}))


def find_choice(arguments: Sequence[str], group: str, config_dir: str | None = None) -> str:
    """Return what the arguments, or else the files, choose for a group; "" where that fails."""
    groups = [a for a in arguments if "=" in a and (CONF / a.split("=")[0].lstrip("+")).is_dir()]
    plain = [a for a in groups if "experiment" not in a.partition("=")[0]]
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    for overrides in (groups, plain):  # the mistake may stand in the experiment
        with suppress(*HYDRA_ERRORS), initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=[*search, *overrides], return_hydra_config=True)
            return str(composed.hydra.runtime.choices[group])
    return ""


def read_keys(group: str, name: str, config_dir: str | None) -> list[str]:
    """Return the settings in the file of a choice, none where there is no such file."""
    file = f"{group}/{name}.yaml"
    files = [f / file for f in (Path(config_dir or CONF), CONF) if (f / file).is_file()]
    keys = OmegaConf.load(files[0]) if files else {}
    return [str(key) for key in keys if key not in ("_target_", "defaults")]


def find_owners(path: str, config_dir: str | None) -> list[str]:
    """Return the engines that have a setting, whose dotted path is given."""
    group, key, *_ = [*path.split("."), ""]
    if group != "engine":  # tasks share most of their names
        return []
    return [n for n in list_options(group, config_dir) if key in read_keys(group, n, config_dir)]


def _setting_of_others(path: str, others: Sequence[str], chosen: str) -> str:
    """Return the text for a setting of engines (`others`) that does not fit the one chosen."""
    if chosen in others:
        return f"{path}: {path.rpartition('.')[0]} is no group of settings. Give it a value."
    return (
        f"{path} has no effect with engine={chosen}. It is a setting of engine={'|'.join(others)}."
        " Leave it out, or choose that."
    )


def list_settings(
    path: list[str],
    arguments: Sequence[str],
    algorithms: Mapping[str, type],
    config_dir: str | None,
) -> list[str]:
    """Return the names that may stand under a dotted path: the schema's, or those of the file of a
    task or an engine.
    """
    if path in (["task"], ["engine"]):
        return read_keys(path[0], find_choice(arguments, path[0], config_dir), config_dir)
    schema: Any = Run
    if path[:1] == ["algo"]:
        schema, path = algorithms.get(find_choice(arguments, "algo", config_dir)), path[1:]
    for name in path:
        schema = nested_schema(schema, name)
    return [item.name for item in fields(schema)] if schema else []
