"""The values that conf/*.yaml writes as ${clutch_...:}, which are computed when a command runs.
This module imports no torch.
"""

import os
import textwrap
from datetime import datetime
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from common.config import environment, plugins
from common.config.checks import shipped
from common.config.explain import list_options
from common.config.schema import OPEN_GROUPS


class _Shared(dict[str, Any]):
    """The contents of Hydra's store, which Hydra copies a hundred times for --help."""

    def __deepcopy__(self, _: Any) -> "_Shared":
        return self


def register() -> None:
    """Register the resolvers with OmegaConf, and the open groups and the plugins' files with Hydra;
    safe to call again.
    """
    plugins.register()
    node = {name: DictConfig({}, flags={"struct": False}) for name in OPEN_GROUPS}
    store = ConfigStore.instance()
    store.repo = _Shared(store.repo)
    store.store("open_groups", node)
    # Cached in the config, so that the jobs of a sweep put their folders below that of the process
    # that launched them.
    OmegaConf.register_new_resolver("clutch_started", started, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("clutch_aside", aside, replace=True)
    OmegaConf.register_new_resolver("clutch_env", environment.from_environment, replace=True)
    OmegaConf.register_new_resolver("clutch_switch", environment.from_switch, replace=True)
    OmegaConf.register_new_resolver("clutch_word", environment.from_word, replace=True)
    OmegaConf.register_new_resolver("clutch_workers", environment.from_workers, replace=True)
    OmegaConf.register_new_resolver("clutch_recipe", from_recipe, replace=True)
    OmegaConf.register_new_resolver("clutch_noise", choose_noise, replace=True)
    OmegaConf.register_new_resolver("clutch_groups", list_groups, replace=True)
    OmegaConf.register_new_resolver("clutch_without_budget", without_budget, replace=True)


def started() -> str:
    """Return a time stamp for the run folder; the same for all ranks of one torchrun or srun."""
    step, torchrun = os.environ.get("SLURM_STEP_ID"), "TORCHELASTIC_RUN_ID" in os.environ
    # A batch script has no step, and a shell of srun may start several runs of torchrun in its own.
    alone = torchrun and os.environ.get("SLURM_STEP_NUM_NODES") == "1"
    if "RANK" in os.environ and step is not None and not alone:
        return f"slurm_{os.environ['SLURM_JOB_ID']}_{step}"
    if torchrun:
        return f"torchrun_{find_start(os.getppid()).strftime(_FORMAT)}"
    return _STARTED


def find_start(process: int) -> datetime:
    """Return the time at which a process began."""
    import psutil  # only needed under torchrun

    return datetime.fromtimestamp(psutil.Process(process).create_time())


_FORMAT = "%Y-%m-%d_%H-%M-%S-%f"
_STARTED = datetime.now().strftime(_FORMAT)


def aside(text: str) -> str | None:
    """Return, on rank 0, a name that begins with `text` and is unique to this process; None on
    other ranks.
    """
    return f"{text}-{os.getpid()}" if int(os.environ.get("RANK", "0")) == 0 else None


def from_recipe(key: str, default: Any, *, _root_: DictConfig) -> Any:
    """Return a setting that was tuned for the run's model. `default` for a model without a recipe,
    and for lr if the optimizer is not the one in conf/algo.

    Args: key: ALGORITHM.SETTING, such as ALGORITHM.lr.
    """
    algorithm, _, name = key.partition(".")
    if name == "lr" and _root_.algo.optimizer != shipped(f"algo/{algorithm}.yaml")["optimizer"]:
        return default
    return find_recipe(_root_, algorithm).get(name, default)


def find_recipe(settings: Any, algorithm: str) -> dict[str, Any]:
    """Return the settings that were tuned for the model of a run, by name. For model=tiny the
    task's recipe comes first, because that model is pre-trained for the task.

    Args: settings: a Run, or Hydra's composed configuration.
    """
    recipes = [getattr(settings.model, "recipe", None)]
    if settings.model.path is None:
        recipes.append(settings.task.get("tiny"))
    return {k: v for recipe in recipes for k, v in ((recipe or {}).get(algorithm) or {}).items()}


def choose_noise(kind: str, *, _root_: DictConfig) -> str:
    """Return the form of the noise of "matrices" or "vectors" if none is set. The algorithm's file
    in conf/algo explains the choice.
    """
    keys = ("model.adapter.rank", "model.adapter.path")
    adapts = any(OmegaConf.select(_root_, key) is not None for key in keys)
    separate = not str(OmegaConf.select(_root_, "engine._target_")).endswith(".open_native")
    if find_recipe(_root_, _root_.algo.name) or adapts or separate:
        return "lowrank" if kind == "matrices" else "frozen"
    if kind == "matrices":
        return "frozen"
    return "full" if OmegaConf.select(_root_, "algo.noise.matrices") == "frozen" else "frozen"


def list_groups() -> str:
    """Return the groups with their options, indented for --help."""
    return "\n".join(
        textwrap.fill(
            ", ".join(options), 100, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14
        )
        for name in plugins.list_groups()
        if (options := list_options(name))
    )


def without_budget(value: Any, *others: str, _root_: DictConfig) -> Any:
    """Return `value` if neither a budget nor one of the `others` is given, otherwise None, because
    these end the run.
    """
    limits = (OmegaConf.select(_root_, k) for k in ("budget.tokens", "budget.seconds", *others))
    return None if any(limit is not None for limit in limits) else value
