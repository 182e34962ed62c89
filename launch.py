"""Compose a run with Hydra, convert it to typed dataclasses, and start its workers.

    python launch.py algo=eggroll hardware=a100_40g
    python launch.py -m algo=eggroll seed=1,2,3
    torchrun --nproc_per_node=2 launch.py algo=eggroll

From Python: `run = compose(["algo=eggroll", "seed=1"])`, then `result = train(run,
"outputs/mine")`. Imports no torch: that happens in the worker, so `--help` and `--cfg job` answer
at once.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config import (
    ConfigError,
    Run,
    choice,
    find_renamed,
    no_secrets,
    resolvers,
    typed,
    unknown_key,
    wrong_type,
)
from common.config.resolvers import DEFAULT_TASKS
from common.distributed import slurm
from common.report.failures import failed
from common.signals import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_SIGNAL,
    RunStopped,
    StopSignal,
)
from ddp_bench.config import ClassifyConfig
from eggroll.config import EggrollConfig
from grpo.config import GrpoConfig
from rft.config import RftConfig

# The algorithms: a closed set, so a plain dict. The package of each settings class has train.py
# with train(run, context, task) -> Result.
ALGORITHMS: dict[str, type] = {
    "eggroll": EggrollConfig,
    "grpo": GrpoConfig,
    "rft": RftConfig,
    "classify": ClassifyConfig,
}

# Settings of language models that train from rewards, which mean nothing to classify.
NOT_FOR_CLASSIFY = {
    "model": "the sizes are algo.model.*",
    "scoring": "there are no rewards",
    "evaluate": "it evaluates after each epoch",
    "budget": "it generates nothing, and algo.epochs ends it",
}

# Settings of training, which mean nothing where algo.scaling measures steps or algo.predict
# predicts them.
NOT_FOR_SCALING = ("algo.epochs", "algo.patience", "resume", "checkpoint", "tracker")

CONF = Path(__file__).resolve().parent / "conf"
CLASS_TASKS = (  # where the class tasks of this project are; the other tasks have rewards
    "ddp_bench.tasks."
)


def register() -> None:
    """Tell Hydra the schemas and resolvers; safe to call again."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=Run)
    for name, schema in ALGORITHMS.items():
        store.store(group="schema/algo", name=name, node=schema)
    resolvers.register()


def to_run(config: DictConfig, overrides: list[str]) -> Run:
    """The typed run; raises ConfigError. overrides: what the command line gave, to refuse what has
    no effect.
    """
    name = config.algo.get("name") if OmegaConf.is_config(config.algo) else config.algo
    choice("algo", name, tuple(ALGORITHMS))
    for override in overrides if name == "classify" else []:
        key = override.partition("=")[0].lstrip("+")
        if reason := NOT_FOR_CLASSIFY.get(key.partition(".")[0]):
            raise ConfigError(f"{key} has no effect with algo=classify: {reason}. Leave it out.")
    run = typed(config, ALGORITHMS[name])
    given = next(
        (text for text in (o.lstrip("+") for o in overrides) if text.startswith("slurm.")), None
    )
    if given and run.slurm.script is None:
        raise ConfigError(
            f"{given} has no effect without slurm.script, the batch script to write. Add"
            " slurm.script=FILE."
        )
    check_kind(run)
    check_scaling(run, overrides)
    return run


def check_scaling(run: Run, overrides: list[str]) -> None:
    """Raise ConfigError for settings that the command gave and that its kind of classify run does
    not look at.
    """
    if run.algo.name != "classify":
        return
    measuring = next(
        (name for name in ("scaling", "predict") if getattr(run.algo, name) is not None), None
    )
    for key in (override.partition("=")[0].lstrip("+") for override in overrides):
        if measuring is None and key.startswith("algo.scaling_"):
            raise ConfigError(
                f"{key} has no effect without algo.scaling. Add for example 'algo.scaling=[1,2]'."
            )
        if measuring is not None and key.startswith(NOT_FOR_SCALING):
            raise ConfigError(
                f"{key} has no effect with algo.{measuring}, which measures steps and keeps no"
                " model. Leave it out."
            )
        if (
            key.startswith("algo.tokenizer")
            and run.task["_target_"] == "ddp_bench.tasks.Trajectories"
        ):
            raise ConfigError(
                f"{key} has no effect with task=trajectories, which has no texts. Leave it out."
            )


def check_kind(run: Run) -> None:
    """Raise ConfigError where a task of this project is not of the algorithm's kind, naming those
    that are.
    """
    wants_classes, target = run.algo.name == "classify", run.task["_target_"]
    if not isinstance(target, str):
        raise ConfigError(
            f"task._target_={target} names no class. Give one, such as my_module.MyTask."
        )
    if (
        target.startswith(("common.tasks.", CLASS_TASKS))
        and target.startswith(CLASS_TASKS) != wants_classes
    ):
        of_kind = {
            path.stem: OmegaConf.load(path)["_target_"].startswith(CLASS_TASKS)  # type: ignore[index]
            for path in sorted((CONF / "task").glob("*.yaml"))
        }
        fitting = [name for name, has_classes in of_kind.items() if has_classes == wants_classes]
        raise ConfigError(
            f"algo={run.algo.name} needs a {'class' if wants_classes else 'reward'} task, and"
            f" {target} is a {'reward' if wants_classes else 'class'} task. Use one of"
            f" task={', '.join(fitting)}."
        )


def compose(overrides: list[str], config_dir: str | None = None) -> Run:
    """Compose a run from Python.

    Args: overrides: as on the command line; config_dir: one more folder of YAML files, as
    --config-dir.
    Raises: ConfigError with the same text that the command line prints.
    """
    register()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        overrides = opened(overrides)
        check_groups(overrides)
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return to_run(hydra.compose("config", overrides=[*search, *overrides]), overrides)
    except HYDRA_ERRORS as error:
        raise ConfigError(explain(error, overrides, config_dir)) from None


def train(run: Run, out_dir: str | Path, task: Any = None) -> Any:
    """Train in this process (or in the ranks of opt=ddp) and return the algorithm's `Result`.

    With algo.scaling, measure instead and return what RUN/scaling.json holds; with algo.predict,
    RUN/prediction.json.

    Args: run: from `compose`; out_dir: the run folder, made if needed; task: an object of one's own
    that has the methods of common.tasks.Task (for classify, of ddp_bench.tasks.ClassTask); None =
    the one that run.task names.
    """
    from common.distributed.workers import launch

    if run.algo.name == "classify" and run.algo.scaling is not None:
        from ddp_bench.scaling import scale

        return scale(run, Path(out_dir).resolve(), task)
    if run.algo.name == "classify" and run.algo.predict is not None:
        from ddp_bench.predict import predict

        return predict(run, Path(out_dir).resolve(), task)
    package = type(run.algo).__module__.partition(".")[0]
    return launch(f"{package}.train:train", run, Path(out_dir), task)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def _main(config: DictConfig) -> None:
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    warned = signal.getsignal(
        signal.SIGUSR2
    )  # in a job of submitit, what puts it back into the queue
    try:
        run = to_run(config, list(settings.overrides.task))
        if run.slurm.script is not None:  # main has dealt with that of the command line
            raise ConfigError(
                "slurm.script goes on the command line, and not with -m. Sweeps:"
                " hydra/launcher=submitit_slurm."
            )
        train(run, folder)
    except (ConfigError, RunStopped) as error:
        code = _end(error)
        if settings.mode == RunMode.RUN and isinstance(error, ConfigError) and _unused(folder):
            shutil.rmtree(
                folder, ignore_errors=True
            )  # a mistake found before the run began leaves nothing behind
        if settings.mode == RunMode.MULTIRUN and code == EXIT_SIGNAL:
            print(
                f"The whole sweep: the same command with hydra.sweep.dir={settings.sweep.dir}"
                " resume=auto.",
                file=sys.stderr,
            )
        if code == EXIT_SIGNAL and StopSignal.last == signal.SIGUSR2 and callable(warned):
            signal.signal(signal.SIGUSR2, warned)
            signal.raise_signal(signal.SIGUSR2)  # all is saved: submitit may have the process now
        here = settings.runtime.choices["hydra/launcher"] == "basic"
        if settings.mode == RunMode.RUN or (
            code == EXIT_SIGNAL and here
        ):  # who stops a job wants the sweep to stop
            sys.exit(code)  # past Hydra, which would print a line of its own first
        failed(folder, code, str(error))
    except Exception as error:
        if settings.mode == RunMode.RUN:
            raise
        traceback.print_exc()
        failed(folder, EXIT_CRASH, f"{type(error).__name__}: {error}")


def main() -> None:
    """The command line. Exit codes: 0 done, 2 a mistake in the configuration, others in
    common/signals.py.

    A sweep goes on after a job that fails, and exits with the code of the first that did.
    """
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, to be worded for users
    arguments = sys.argv[1:] = opened(located(sys.argv[1:]))
    try:
        slurm.adopt()
        check_secrets(arguments)
        check_groups(arguments)
        if any(argument.startswith("slurm.script=") for argument in arguments):
            return submit(arguments)
        if not {"--cfg", "-c", "--help", "-h", "--info", "-i"} & set(arguments):
            check_folder(arguments)
        missing = [path for path in _folders(arguments) if not path.exists()]
        try:
            _main()
        finally:
            _remove(missing)
    except (ConfigError, RunStopped) as error:
        sys.exit(_end(error))
    except HYDRA_ERRORS as error:
        sys.exit(_end(ConfigError(explain(error, arguments, _config_dir(arguments)))))
    except Exception as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        print(
            "error: a job of the sweep ended without a word (killed, or out of time):"
            f" {str(error).splitlines()[0]}\nOthers may go on. When they have ended: python -m"
            " common.compare SWEEP_FOLDER",
            file=sys.stderr,
        )
        sys.exit(EXIT_CRASH)
    except (
        KeyboardInterrupt
    ):  # before the first step or after the last one, where there is nothing to save
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def submit(arguments: list[str]) -> None:
    """Check the command and write a batch script for it: slurm.script=FILE. Raises: ConfigError."""
    config_dir = _config_dir(arguments)
    for argument in arguments:
        if argument.startswith("-") and argument.partition("=")[0] not in ("--config-dir", "-cd"):
            raise ConfigError(
                f"{argument} does not go with slurm.script, which writes a batch script for one"
                " run. Leave it out. Sweeps: hydra/launcher=submitit_slurm -m."
            )
    settings = [a for a in arguments if "=" in a and not a.startswith(("-", "hydra."))]
    written = slurm.write(compose(settings, config_dir), arguments)
    print(f"{written} is written. Read it, then: sbatch {shlex.quote(str(written))}")


def _end(error: ConfigError | RunStopped) -> int:
    """Print why a run ended early; returns the exit code."""
    code = error.code if isinstance(error, RunStopped) else EXIT_CONFIG
    if (
        os.environ.get("RANK", "0") == "0"
    ):  # under torchrun every rank comes here with the same text
        print(error if isinstance(error, RunStopped) else f"error: {error}", file=sys.stderr)
    return code


def check_secrets(arguments: list[str]) -> None:
    """Raise ConfigError for a secret among the overrides, before Hydra writes them down."""
    for argument in arguments:
        key, equals, value = argument.lstrip("+~").partition("=")
        if equals and not key.startswith("-"):
            outer, _, name = key.rpartition(".")
            no_secrets({name: value}, f"{outer}." if outer else "")


def check_folder(arguments: list[str]) -> None:
    """Raise ConfigError where the run folder that is asked for cannot be made, or is not the one
    that is used.
    """
    sweep_asked = bool({"-m", "--multirun"} & set(arguments))
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in ("hydra.run.dir", "hydra.sweep.dir"):
            continue
        if (key == "hydra.sweep.dir") != sweep_asked:
            other = "hydra.sweep.dir" if sweep_asked else "hydra.run.dir"
            raise ConfigError(
                f"{key}={value} has no effect {'with' if sweep_asked else 'without'} -m. Use"
                f" {other}."
            )
        if value and "${" not in value and os.environ.get("RANK", "0") == "0":
            missing = [path for path in _folders([argument]) if not path.exists()]
            try:
                Path(value.strip("'\"")).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{key}={value} cannot be made: {error.strerror}. Choose another folder."
                ) from None
            finally:
                _remove(missing)


def _folders(arguments: list[str]) -> list[Path]:
    """The folders that a run is to be in, inner ones first: of hydra.run.dir or hydra.sweep.dir, as
    far as they hold no ${...}.
    """
    given = [
        a.partition("=")[2]
        for a in arguments
        if a.startswith(("hydra.run.dir=", "hydra.sweep.dir="))
    ]
    default: Any = OmegaConf.to_container(OmegaConf.load(CONF / "hydra" / "clutch.yaml"))
    folder = Path([default["run"]["dir"], *given][-1].strip("'\"").partition("${")[0])
    return [folder, *folder.parents]


def _remove(folders: list[Path]) -> None:
    """Remove those that are empty: a mistake in a setting is to leave nothing behind."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def _unused(folder: Path) -> bool:
    """Whether a run folder holds nothing but what Hydra wrote, and logs without a line."""
    with suppress(FileNotFoundError):  # another rank is done with it
        return all(
            path.name == ".hydra" or (path.is_file() and not path.stat().st_size)
            for path in folder.iterdir()
        )
    return False


def located(arguments: list[str]) -> list[str]:
    """The arguments, with a relative --config-path that is a folder here made absolute: Hydra would
    start at launch.py's.
    """
    found = list(arguments)
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-path", "-cp") and equals and Path(value).is_dir():
            found[position] = f"{flag}={Path(value).resolve()}"
        elif (
            flag in ("--config-path", "-cp")
            and not equals
            and Path(*arguments[position + 1 : position + 2]).is_dir()
        ):
            found[position + 1] = str(Path(arguments[position + 1]).resolve())
    return found


def _config_dir(arguments: list[str]) -> str | None:
    """The folder of --config-dir, in any of its spellings."""
    for position, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            return value or next(iter(arguments[position + 1 :]), None)
    return None


# --- wording Hydra's errors --------------------------------------------------------------------------------------


# AssertionError: omegaconf 2.3, for a key below a setting that is null.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, AssertionError)


def opened(arguments: list[str]) -> list[str]:
    """The arguments, with ++ before those that set keys of an open dict, such as
    algo.optimizer.kwargs.

    Hydra takes a key that no file has for a mistake; in these dicts every key is the user's.
    """
    dicts = {f"algo.{name}" for schema in ALGORITHMS.values() for name in _dicts(schema)} | {
        "slurm.options"
    }
    keys = [argument.partition("=")[0] for argument in arguments]
    below = [any(key == name or key.startswith(f"{name}.") for name in dicts) for key in keys]
    return [
        f"++{argument}" if is_open else argument
        for argument, is_open in zip(arguments, below, strict=True)
    ]


def _dicts(schema: Any) -> list[str]:
    """Dotted names of the fields of a dataclass that are dicts."""
    names = []
    for item in fields(schema):
        if getattr(item.type, "__origin__", None) is dict:
            names.append(item.name)
        elif is_dataclass(item.type):
            names += [f"{item.name}.{name}" for name in _dicts(item.type)]
    return names


def check_groups(arguments: list[str]) -> None:
    """Check null and the `opt` list, for which Hydra itself names no choices. Raises ConfigError."""
    for argument in arguments:
        group = argument.partition("=")[0].lstrip("+")
        if not (CONF / group).is_dir() or "=" not in argument:
            continue
        if (
            ".." in Path(argument.partition("=")[2]).parts
        ):  # the choice of a task is part of the output folder's name
            raise ConfigError(
                f"{argument} leads out of the folder of the choices. Give the name of a file there."
            )
        choices = _options(group)
        override = OverridesParser.create().parse_override(argument)
        if override.is_sweep_override():
            continue
        value = override.value()
        if group == "experiment" and isinstance(value, list):  # several, one upon the other
            continue
        if value is None and group == "experiment":
            raise ConfigError("experiment=null is what there is without it. Leave it out.")
        if value is None and group == "opt":
            raise ConfigError(
                "opt=null is not a list. Use opt=[] for none, or for example 'opt=[amp,compile]'."
            )
        if value is None:
            raise ConfigError(f"{group}=null is not a choice. Choices: {', '.join(choices)}.")
        if group == "opt":
            for name in value if isinstance(value, list) else [value]:
                choice("opt", str(name), choices)
        elif not isinstance(value, str):  # a number, which Hydra would take for something else
            choice(group, str(value), choices)


def explain(error: Exception, arguments: list[str], config_dir: str | None = None) -> str:
    """One line for a user from one of HYDRA_ERRORS. Others are raised again."""
    text = str(error)
    cause = error.__cause__
    if isinstance(error, AssertionError):
        below = next((a for a in arguments if a.startswith("model.tiny.")), None)
        if below is None or "Unexpected type for root" not in text:
            raise error
        return (
            f"{below} has no effect with model={_chosen(arguments, 'model')}. Leave it out, or use"
            " model=tiny."
        )
    if match := re.search(r"Could not override '(@?[\w.@/]+)'", text):
        path = match.group(1)
        if renamed := _renamed(path, arguments):
            return renamed
        names = _settings(path.split(".")[:-1], arguments, config_dir)
        if names:
            return unknown_key(path, path.split(".")[-1], names)
        if "No match in the defaults list" in text:
            groups = sorted(
                p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("_")
            )
            return unknown_key(path, path, groups)
    if match := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, name = match.groups()
        try:
            choice(group, name, _options(group, config_dir))
        except ConfigError as worded:
            return str(worded)
    match = re.search(r"not in '[\s\S]*full_key: ([\w.]+)", text)  # a key in a file of the user's
    if match and (renamed := _renamed(match[1], arguments)):
        return renamed
    reason = str(cause if isinstance(cause, OmegaConfBaseException) else text).split("\n    ")[0]
    if match := re.search(r"Error merging override \+*(.+)", text):
        names = _settings(match.group(1).partition("=")[0].split("."), arguments, config_dir)
        return wrong_type(match.group(1), reason.strip(), names)
    return re.sub(r"\s+", " ", reason).strip()


def _renamed(path: str, arguments: list[str]) -> str | None:
    """The text for a key that once was a setting, or None."""
    first, *names = path.lstrip("+").split(".")
    if first == "algo":
        return find_renamed(ALGORITHMS.get(_chosen(arguments, "algo")), names, "algo.")
    return find_renamed(Run, [first, *names])


def _options(group: str, config_dir: str | None = None) -> tuple[str, ...]:
    """The files of a config group, the user's own too."""
    folders = [CONF / group, *([Path(config_dir) / group] if config_dir else [])]
    return tuple(sorted({path.stem for folder in folders for path in folder.glob("*.yaml")}))


def _chosen(arguments: list[str], group: str) -> str:
    """What the arguments, or else their experiment, or else the defaults list, choose for a group."""
    given = [a.split("=", 1)[1] for a in arguments if a.startswith(f"{group}=")]
    if given:
        return given[-1]
    for argument in arguments:
        path = CONF / "experiment" / f"{argument.partition('=')[2]}.yaml"
        if argument.startswith("experiment=") and path.is_file():
            experiment: Any = OmegaConf.load(path)
            found = [
                item[f"override /{group}"]
                for item in experiment.defaults
                if f"override /{group}" in item
            ]
            if found:
                return found[0]
    if group == "task":
        return DEFAULT_TASKS.get(_chosen(arguments, "algo"), "translate")
    defaults: Any = OmegaConf.load(CONF / "config.yaml")
    return next(item[group] for item in defaults["defaults"] if group in item)


def _settings(path: list[str], arguments: list[str], config_dir: str | None) -> list[str]:
    """Names that may stand under a dotted path: the schema's, or for a task those of its file;
    empty where unknown.
    """
    if path == ["task"]:
        file = f"task/{_chosen(arguments, 'task')}.yaml"
        found = [
            folder / file
            for folder in (Path(config_dir or CONF), CONF)
            if (folder / file).is_file()
        ]
        return (
            [str(key) for key in OmegaConf.load(found[0]) if key not in ("_target_", "defaults")]
            if found
            else []
        )
    schema: Any = Run
    for position, name in enumerate(path):
        if position == 0 and name == "algo":
            schema = ALGORITHMS.get(_chosen(arguments, "algo"))
        else:
            kinds = {f.name: f.type for f in fields(schema)} if schema else {}
            kind = kinds.get(name)
            schema = next((k for k in getattr(kind, "__args__", (kind,)) if is_dataclass(k)), None)
    return [f.name for f in fields(schema)] if schema else []


if __name__ == "__main__":
    main()
