"""Find the tasks that evaluate.also names, by composing their files. This module imports no
torch.
"""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from common.config.checks import ConfigError, choice, quote
from common.config.explain import list_options
from common.config.plugins import CONF

KEY = "evaluate.also"


def resolve_also(config: DictConfig, config_dir: str | None) -> None:
    """Replace the names in evaluate.also by the settings of these tasks.

    A name FILE/DATASET is the task of the file with its setting `dataset`.

    Args: config_dir: a further folder of YAML files, as --config-dir.
    Raises: ConfigError for a name that is no task, or is given twice.
    """
    names = config.evaluate.also
    if not isinstance(names, ListConfig):
        raise ConfigError(
            f"{KEY}={names} is not a list of tasks. Use '{KEY}=[{names}]', or [] for none."
        )
    choices, nodes = list_options("task", config_dir), {}
    folder = config_dir and str(Path(config_dir).resolve())
    for name in names:
        file, _, dataset = str(name).partition("/")
        choice(KEY, file, choices)
        if name in nodes:
            raise ConfigError(f"{KEY} names {name} twice. Name each task once.")
        nodes[name] = _compose(file, folder)
        if dataset and "dataset" not in nodes[name]:
            raise ConfigError(f"{KEY}={name}: task={file} has no setting dataset. Use {file}.")
        if dataset:
            nodes[name]["dataset"] = dataset
    with open_dict(config):
        config.evaluate.also = nodes


def search_in(folder: str) -> str:
    """Return the override that adds a folder to Hydra's search path, quoted so that any name
    works.
    """
    return f"hydra.searchpath=[{quote(f'file://{Path(folder).resolve()}')}]"


def _compose(name: str, own: str | None) -> dict[str, Any]:
    """Return the settings in a task's file, merged with the files in its defaults. They are
    composed separately from the run's own configuration, which is restored afterwards.
    """
    mine = own is not None and (Path(own) / "task" / f"{name}.yaml").is_file()
    first, second = (own, str(CONF)) if mine else (str(CONF), own)
    under_way = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(first), version_base="1.3"):
            composed = compose(f"task/{name}", overrides=[search_in(second)] if second else [])
            plain: Any = OmegaConf.to_container(composed, resolve=True)
    finally:
        GlobalHydra.instance().clear()
        if under_way is not None:
            GlobalHydra.instance().initialize(under_way)
    return plain["task"]
