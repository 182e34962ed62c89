"""Compose a run with Hydra, convert it to typed dataclasses, and start its workers.

    python launch.py algo=eggroll hardware=a100_40g
    python launch.py -m algo=eggroll seed=1,2,3
    torchrun --nproc_per_node=2 launch.py algo=eggroll

From Python: `run = compose(["algo=eggroll", "seed=1"])`, then `result = train(run, "outputs/mine")`.
Imports no torch: that happens in the worker, so `--help` and `--cfg job` answer at once.
"""

import os
import re
import sys
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config import ConfigError, Run, choice, typed, unknown_key
from common.signals import EXIT_CONFIG, RunStopped
from eggroll.config import EggrollConfig

# The algorithms: a closed set, so a plain dict. Each has NAME/train.py with train(run, context, task) -> Result.
ALGORITHMS: dict[str, type] = {"eggroll": EggrollConfig}

CONF = Path(__file__).resolve().parent / "conf"


def started() -> str:
    """Time stamp for the run folder; the same for all ranks that one torchrun started on this node."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun_" + datetime.fromtimestamp(os.stat(f"/proc/{os.getppid()}").st_ctime).strftime(
            "%Y-%m-%d_%H-%M-%S-%f"
        )
    return _STARTED


_STARTED = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def rank0_only(text: str) -> str | None:
    """`text` on rank 0, None elsewhere, so that one rank alone writes .hydra/."""
    return text if int(os.environ.get("RANK", "0")) == 0 else None


def register() -> None:
    """Tell Hydra the schemas and resolvers; safe to call again."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=Run)
    for name, schema in ALGORITHMS.items():
        store.store(group="schema/algo", name=name, node=schema)
    OmegaConf.register_new_resolver("clutch_started", started, replace=True)
    OmegaConf.register_new_resolver("clutch_rank0", rank0_only, replace=True)


def to_run(config: DictConfig) -> Run:
    """The typed run; raises ConfigError."""
    name = config.algo.get("name") if OmegaConf.is_config(config.algo) else config.algo
    choice("algo", name, tuple(ALGORITHMS))
    return typed(config, ALGORITHMS[name])


def compose(overrides: list[str], config_dir: str | None = None) -> Run:
    """Compose a run from Python.

    Args: overrides: as on the command line; config_dir: one more folder of YAML files, as --config-dir.
    Raises: ConfigError with the same text that the command line prints.
    """
    register()
    search = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    try:
        check_opt(overrides)
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return to_run(hydra.compose("config", overrides=[*search, *overrides]))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from None


def train(run: Run, out_dir: str | Path, task: Any = None) -> Any:
    """Train in this process (or in the ranks of opt=ddp) and return the algorithm's `Result`.

    Args: run: from `compose`; out_dir: the run folder, made if needed; task: an object of one's own that has the
    methods of common.tasks.Task; None = the one that run.task names.
    """
    from common.distributed import launch

    return launch(f"{run.algo.name}.train:train", run, Path(out_dir), task)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def _main(config: DictConfig) -> None:
    run = to_run(config)
    train(run, HydraConfig.get().runtime.output_dir)


def main() -> None:
    """The command line. Exit codes: 0 done, 2 a mistake in the configuration, others in common/signals.py."""
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, to be worded for users
    try:
        check_opt(sys.argv[1:])
        _main()
    except ConfigError as error:
        sys.exit(_complain(str(error)))
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_complain(explain(error)))
    except AssertionError as error:  # omegaconf 2.3, for a key below a setting that is null
        if "Unexpected type for root" not in str(error):
            raise
        sys.exit(
            _complain(
                f"one of {' '.join(sys.argv[1:])} is below a setting that is null here (model.tiny.* needs model=tiny)."
            )
        )
    except RunStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.code)


def _complain(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return EXIT_CONFIG


# --- wording Hydra's errors --------------------------------------------------------------------------------------


def check_opt(arguments: list[str]) -> None:
    """Check the `opt` list, for which Hydra itself names no choices. Raises ConfigError."""
    choices = tuple(sorted(path.stem for path in (CONF / "opt").glob("*.yaml")))
    for argument in arguments:
        if not re.match(r"\+?opt=", argument):
            continue
        value = OverridesParser.create().parse_override(argument).value()
        if value is None:
            raise ConfigError("opt=null is not a list. Use opt=[] for none, or for example 'opt=[amp,compile]'.")
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str):
                choice("opt", name, choices)


def explain(error: Exception) -> str:
    """One line for a user from one of Hydra's or OmegaConf's errors."""
    text = str(error)
    cause = error.__cause__
    if match := re.search(r"Could not override '(@?[\w.@/]+)'", text):
        path = match.group(1)
        names = _settings(path.split(".")[:-1])
        if names:
            return unknown_key(path, path.split(".")[-1], names)
        if "No match in the defaults list" in text:
            groups = sorted(p.name for p in CONF.iterdir() if p.is_dir() and not p.name.startswith("_"))
            return unknown_key(path, path, groups)
    if match := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, name = match.groups()
        options = tuple(sorted(p.stem for p in (CONF / group).glob("*.yaml"))) if (CONF / group).is_dir() else ()
        try:
            choice(group, name, options)
        except ConfigError as worded:
            return str(worded)
    reason = str(cause if isinstance(cause, OmegaConfBaseException) else text).split("\n    ")[0]
    if match := re.search(r"Error merging override (\S+)", text):
        return f"{match.group(1)}: {reason.strip()}."
    return re.sub(r"\s+", " ", reason).strip()


def _settings(path: list[str]) -> list[str]:
    """Names that may stand under a dotted path of the schema; empty where the schema does not say."""
    schema: Any = Run
    for position, name in enumerate(path):
        if position == 0 and name == "algo":
            chosen = [a.split("=", 1)[1] for a in sys.argv if a.startswith("algo=")]
            schema = ALGORITHMS.get(chosen[-1] if chosen else "eggroll")
        else:
            kinds = {f.name: f.type for f in fields(schema)} if schema else {}
            kind = kinds.get(name)
            schema = next((k for k in getattr(kind, "__args__", (kind,)) if is_dataclass(k)), None)
    return [f.name for f in fields(schema)] if schema else []


if __name__ == "__main__":
    main()
