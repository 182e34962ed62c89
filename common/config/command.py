"""Check the command line before Hydra reads it and against the run that Hydra composes, and keep
the run folder clean after a mistake. This module imports no torch.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from common.config import plugins
from common.config.algorithm import REWARD_TASKS, AlgorithmConfig
from common.config.checks import ConfigError, shipped
from common.config.convert import no_secrets
from common.config.plugins import CONF
from common.config.schema import OPEN_GROUPS, Run
from common.config.validate import UnreadableError, build

MULTIRUN = {"-m", "--multirun"}
_PATHS = ("--config-path", "-cp")
ELSEWHERE = {*_PATHS, "--config-name", "-cn"}  # flags that choose a configuration outside conf/

# --- arguments


def check_secrets(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a secret among the overrides, before Hydra writes them down."""
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        if equals and not key.startswith("-"):
            outer, _, name = key.rpartition(".")
            prefix = f"{outer}." if outer else ""
            no_secrets({name: value}, prefix)
            with suppress(HydraException):  # Hydra itself reports it later
                override = OverridesParser.create().parse_override(argument)
                if not override.is_sweep_override():
                    no_secrets({name: override.value()}, prefix)


def check_script(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an argument that does not fit a batch script for one run."""
    for argument in arguments:
        if argument.startswith("-") and argument.partition("=")[0] not in ("--config-dir", "-cd"):
            raise ConfigError(
                f"{argument} does not go with slurm.script, which writes a batch script for one"
                " run. Leave it out. Sweeps: hydra/launcher=submitit_slurm -m."
            )


def resolve_config_path(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with a --config-path that is relative to this folder made absolute."""
    resolved: list[str] = []
    for before, argument in itertools.pairwise(["", *arguments]):
        flag, equals, value = argument.partition("=")
        if before in _PATHS and Path(argument).is_dir():
            argument = str(Path(argument).resolve())
        elif flag in _PATHS and equals and Path(value).is_dir():
            argument = f"{flag}={Path(value).resolve()}"
        resolved.append(argument)
    return resolved


def find_config_dir(arguments: Sequence[str]) -> str | None:
    """Return the folder of --config-dir, in any of its spellings."""
    return _find_value(arguments, "--config-dir", "-cd")


def _find_value(arguments: Sequence[str], *spellings: str) -> str | None:
    for position, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in spellings:
            return value or next(iter(arguments[position + 1 :]), None)
    return None


def complete_repeated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, completed if -cp and -cn name the saved configuration of a run: Hydra
    saved it without its own settings, and without the permission to add keys to the open groups.

    Raises: ConfigError for an argument that chooses from a group, which is not possible then.
    """
    flags = _find_flags(arguments)
    if not flags & ELSEWHERE:
        return list(arguments)
    folder = Path(_find_value(arguments, *_PATHS) or CONF)
    name = _find_value(arguments, "--config-name", "-cn") or "config"
    path = folder / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file() or "defaults" in OmegaConf.load(path):
        return list(arguments)
    completed: list[str] = []
    for argument in arguments:
        key, equals, _ = argument.lstrip("+").partition("=")
        if equals and key and not key.startswith("hydra") and plugins.is_group(key):
            raise ConfigError(
                f"{argument} chooses from a group, and {path} holds what was chosen. Give single"
                f" values, such as {key}.KEY=VALUE, or compose the run anew without -cp and -cn."
            )
        opened = "." in key and key.partition(".")[0] in OPEN_GROUPS
        completed.append(f"++{argument.lstrip('+')}" if opened else argument)
    sweeps = "++hydra.callbacks.sweep._target_=common.sweep.Sweep"
    return [*completed, sweeps] if flags & MULTIRUN else completed


def given_dir(hydra: Any) -> str | None:
    """Return the folder of --config-dir from Hydra's own configuration (HydraConfig), which has it
    in a job of a sweep too.
    """
    sources = hydra.runtime.config_sources
    return next((one.path for one in sources if one.provider == "command-line"), None)


def find_folder(arguments: Sequence[str], *keys: str) -> str | None:
    """Return the value of the last override of one of `keys`; None if there is none."""
    return next((value.strip("'\"") for value in _values(arguments, *keys)), None)


def asks_for_plan(arguments: Sequence[str]) -> bool:
    """Return whether plan is given as true, in any spelling of true."""
    with suppress(ConfigError):  # it is raised again later
        return any(build(bool, value, "plan") for value in _values(arguments, "plan")[:1])
    return False


def _values(arguments: Sequence[str], *keys: str) -> list[str]:
    """Return the values of the overrides of `keys`, the last one, which counts, first."""
    plain = (argument.lstrip("+").partition("=") for argument in arguments)
    return [value for key, _, value in plain if key in keys][::-1]


def _find_flags(arguments: Sequence[str]) -> set[str]:
    """Return the names of the arguments; for --config-path=X this is --config-path."""
    return {argument.partition("=")[0] for argument in arguments}


def check_values(arguments: Sequence[str], compose: Callable[..., Any]) -> None:
    """Raise ConfigError for a value that no run can have, before a sweep starts its first job and
    before Hydra prints a composed configuration. Values that only conflict with each other end only
    the jobs that have them.
    """
    flags = _find_flags(arguments)
    shown = [flag for flag in ("-c", "--cfg", "-i", "--info") if flag in flags]
    if shown and flags & MULTIRUN:
        raise ConfigError(
            f"-m starts runs, and {shown[0]} shows what one has. Leave out one of the two."
        )
    if flags & ELSEWHERE or not flags & {*MULTIRUN, "-c", "--cfg"}:
        return
    settings = [a for a in arguments if "=" in a and not a.startswith(("-", "hydra"))]
    swept = OverridesParser.create().parse_overrides(settings)
    # Only Hydra can expand a glob; the jobs themselves report wrong values.
    if any(isinstance(one.value(), Glob) for one in swept):
        return
    values = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_discrete_sweep()
        else [str(one.input_line)]
        for one in swept
    ]
    for number in range(max(map(len, values), default=0)):
        job = [each[min(number, len(each) - 1)] for each in values]
        try:
            compose(job, find_config_dir(arguments))
        except UnreadableError:
            raise
        except ConfigError:
            continue


# --- settings without effect


def check_effect(
    config: DictConfig, algorithm: type[AlgorithmConfig], overrides: Sequence[str]
) -> None:
    """Raise ConfigError for an override that has no effect with the algorithm or the model."""
    for override, reason in _find_given(algorithm.NO_EFFECT, overrides):
        algo = config.algo.name
        raise ConfigError(f"{override} has no effect with algo={algo}: {reason}. Leave it out.")
    tiny = {"model.tiny": ""} if config.model.get("path") is not None else {}
    for override, _ in _find_given(tiny, overrides):
        raise ConfigError(
            f"{override} has no effect with model={config.model.name}. Leave it out, or use"
            " model=tiny."
        )


def check_run(
    run: Run, algorithms: Mapping[str, type[AlgorithmConfig]], overrides: Sequence[str]
) -> None:
    """Raise ConfigError for a task of the wrong kind for the algorithm, and for overrides without
    effect.
    """
    plain = [override.lstrip("+") for override in overrides]
    slurm = next((text for text in plain if text.startswith("slurm.")), None)
    if slurm and run.slurm.script is None:
        raise ConfigError(
            f"{slurm} has no effect without slurm.script, the batch script to write. Add"
            " slurm.script=FILE."
        )
    target = run.task["_target_"]
    wanted, _ = run.algo.TASKS
    kinds = {one.TASKS for one in algorithms.values()}

    def kind_of(target: str) -> str | None:
        return next((kind for kind, modules in kinds if target.startswith(modules)), None)

    def check_kind(target: str, wanted: str, who: str, key: str) -> None:
        if kind_of(target) not in (None, wanted):
            paths = plugins.list_files("task")
            fitting = [
                p.stem for p in paths if kind_of(shipped(f"task/{p.name}")["_target_"]) == wanted
            ]
            raise ConfigError(
                f"{who} needs a {wanted} task, and {target} is a {kind_of(target)} task."
                f" Use one of {key}={', '.join(fitting)}."
            )

    check_kind(target, wanted, f"algo={run.algo.name}", "task")
    for name, node in run.evaluate.also.items():
        check_kind(node["_target_"], REWARD_TASKS[0], f"evaluate.also={name}", "evaluate.also")
    for text, reason in _find_given(run.algo.find_idle(target), overrides):
        raise ConfigError(f"{text} has no effect with {reason}. Leave it out.")


def _find_given(reasons: Mapping[str, str], overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each override of a key that is in `reasons`, or that is below one of them, with the
    reason.
    """
    for override in (text.lstrip("+") for text in overrides):
        key = override.partition("=")[0]
        for name, reason in reasons.items():
            if key == name or key.startswith(f"{name}."):
                yield override, reason


# --- folders


def check_folder(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a run folder that cannot be made or has no effect, and for a plan of a
    sweep, which would leave a folder per job.
    """
    flags = _find_flags(arguments)
    multirun = bool(flags & MULTIRUN)
    if multirun and asks_for_plan(arguments):
        raise ConfigError("plan=true plans one run. Leave out -m, and plan the jobs one by one.")
    used = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    if find_folder(arguments, used) is None and not flags & ELSEWHERE:
        folder = _default_folder(multirun)
        _try_to_make(folder / "0", f"a run folder in {folder.resolve()}", f"Give {used}.")
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        _check_below(key, value.strip("'\""))
        if key not in ("hydra.run.dir", "hydra.sweep.dir"):
            continue
        if key != used:
            when = "with" if multirun else "without"
            raise ConfigError(f"{key}={value} has no effect {when} -m. Use {used}.")
        if fixed := value.strip("'\"").partition("${")[0]:
            _try_to_make(Path(fixed), f"{key}={value}", "Choose another folder.")


def _check_below(key: str, value: str) -> None:
    """Raise ConfigError for a folder that is empty text, is not below the run's or the sweep's
    folder, or would be shared by jobs.
    """
    if key in ("hydra.run.dir", "hydra.sweep.dir"):
        if not value:
            raise ConfigError(f"{key}= is empty. Name a folder, such as {key}=outputs/mine.")
        if not value.isprintable():
            raise ConfigError(f"{key}={value!r} holds a control character. Leave it out.")
    if key == "hydra.run.dir" and "${" not in value:
        here, folder = Path.cwd(), Path(value).resolve()
        if folder in (here, *here.parents) and not (folder / "run.yaml").exists():
            raise ConfigError(
                f"{key}={value} is the folder that the command runs in, or above it. Name one for"
                f" the run, such as {key}=outputs/mine."
            )
    if key == "hydra.output_subdir" and value != "null":
        raise ConfigError(
            f"{key}={value} has no effect: a run's record is in .hydra. Leave it out."
        )
    if key == "hydra.sweep.subdir":
        if Path(value).is_absolute() or ".." in Path(value).parts:
            raise ConfigError(f"{key}={value} is not below hydra.sweep.dir. Give a folder in it.")
        if "${" not in value:
            raise ConfigError(
                f"{key}={value} gives all jobs one folder. Put what tells them apart into it, such"
                f" as '{key}=${{hydra:job.num}}'."
            )


def _try_to_make(folder: Path, name: str, advice: str) -> None:
    """Raise ConfigError if a folder cannot be made; remove it again if it did not exist."""
    if os.environ.get("RANK", "0") != "0":
        return
    with _removing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{name} cannot be made: {error.strerror}. {advice}") from None


def _default_folder(multirun: bool) -> Path:
    """Return the default folder of runs, or of sweeps, up to the first ${...}."""
    default: Any = OmegaConf.to_container(OmegaConf.load(CONF / "hydra" / "clutch.yaml"))
    return Path(default["sweep" if multirun else "run"]["dir"].partition("${")[0])


@contextmanager
def removing_empty_folders(arguments: Sequence[str]) -> Iterator[None]:
    """After the block, remove the empty folders that it made for a run, up to the first ${...}."""
    named = find_folder(arguments, "hydra.run.dir", "hydra.sweep.dir")
    default = _default_folder(bool(_find_flags(arguments) & MULTIRUN))
    with _removing(default if named is None else Path(named.partition("${")[0])):
        yield


@contextmanager
def _removing(folder: Path) -> Iterator[None]:
    """After the block, remove `folder` and its parents, as far as the block made them and left them
    empty.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
