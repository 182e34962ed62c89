"""Find the plugins, and the files of Hydra's groups in conf/ and in plugins.

A plugin is a folder plugins/NAME with code, tests, a README.md and, in conf/, files for Hydra's
groups, such as conf/task/x.yaml. Nothing imports a plugin: a `_target_` or another name in YAML
leads to it, or `python -m`. So a plugin is removed by removing its folder.
"""

import runpy
import sys
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PLUGINS = ROOT / "plugins"

# The modules of plugins that the project uses, if they are there. No other Python file names a
# plugin.
HINTS = "plugins.moving.table"  # the names of other trainers' settings in this project
COMPARISON = "plugins.compare.comparison:report_runs"  # writes the comparison of a sweep
# The module that python -m common.NAME, or of another package, runs.
COMMANDS = {
    "chat": "plugins.chat.command",
    "compare": "plugins.compare.comparison",
    "dashboard": "plugins.compare.dashboard",
    "export": "plugins.gguf.command",
    "judge": "plugins.judge.command",
    "publish": "plugins.publish.command",
    "replay": "plugins.replay.command",
    "status": "plugins.status.command",
}
SLURM = "plugins.slurm.batch"  # adopts ranks that srun has started, and writes batch scripts
PROBE = "plugins.probe.search"  # tries noise scales before a run, or in place of one
REPLAY = "plugins.replay.recorder"  # records a run's updates in a few kilobytes
REBUILD = "plugins.replay.rebuild"  # makes a run's model of any step from that record
RANDOPT = "plugins.randopt.method"  # a method without training: the best perturbations vote
CAPACITY = "plugins.capacity.__main__"  # estimates for a cluster


def conf_folders() -> list[Path]:
    """Return the folders with the files of Hydra's groups in the order of Hydra's search path."""
    return [CONF, *sorted(path for path in PLUGINS.glob("*/conf") if path.is_dir())]


def is_group(name: str) -> bool:
    """Return whether a config group has this name."""
    return any((folder / name).is_dir() for folder in conf_folders())


def list_groups() -> list[str]:
    """Return the names of the config groups, without Hydra's own."""
    found = {p.name for folder in conf_folders() for p in folder.iterdir() if p.is_dir()}
    return sorted(found - {"hydra"})


def find_file(name: str) -> Path:
    """Return the path of a file such as task/NAME.yaml; in conf/ if it does not exist."""
    paths = (folder / name for folder in conf_folders())
    return next((path for path in paths if path.is_file()), CONF / name)


def list_files(group: str) -> list[Path]:
    """Return the files of a config group, sorted by their names."""
    paths = [path for folder in conf_folders() for path in (folder / group).glob("*.yaml")]
    return sorted(paths, key=lambda path: path.name)


def explain_removed(module: str) -> str:
    """Return a sentence if a module belongs to a plugin that is not there, otherwise ""."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if package != "plugins" or not name or (PLUGINS / name / "__init__.py").is_file():
        return ""
    return (
        f"is of plugins/{name}, which is not there. Put that folder back into {PLUGINS}, or choose"
        " something else."
    )


def run_command(name: str, package: str = "common") -> None:
    """Run one of `COMMANDS`; end with exit code 2 if its plugin is not there.

    Args: package: the package of the command: python -m PACKAGE.NAME.
    """
    if removed := explain_removed(COMMANDS[name]):
        print(f"error: python -m {package}.{name} {removed}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module(COMMANDS[name], run_name="__main__")


class PluginSearchPath(SearchPathPlugin):
    """Puts the plugins' files behind those of conf/ on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders."""
        for folder in conf_folders()[1:]:
            search_path.append(f"plugins/{folder.parent.name}", f"file://{folder}")


def register() -> None:
    """Let Hydra find the plugins' files; safe to call again."""
    Plugins.instance().register(PluginSearchPath)
