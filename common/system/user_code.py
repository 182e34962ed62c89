"""Import objects that YAML names, and instantiate the node of a configuration: a
task, an engine.
"""

import importlib
import inspect
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.config import ConfigError, build, explain_removed, is_readable
from common.system.files import first_line
from common.system.signals import RunStopped, StopSignal

# Modules that have moved, old name -> new name. YAML of users, and the settings of resumed runs,
# may still have the old names.
MOVED: dict[str, str] = {
    "common.tasks.reasoning_gym": "plugins.reasoning_gym.task",
    "common.tasks.adapters": "plugins.environments.adapters",
    "common.tasks.games": "plugins.environments.games",
    "common.tasks.tools": "plugins.environments.tools",
    "common.tasks.task_sets": "plugins.environments.task_sets",
    "common.tasks.environment": "plugins.environments.task",
    "common.tasks.countdown": "plugins.tasks.countdown",
    "common.tasks.gsm8k": "plugins.tasks.gsm8k",
    "common.sampling.remote.client": "plugins.vllm.client",
    "common.sampling.remote.link": "plugins.vllm.link",
    "common.sampling.remote.server": "plugins.vllm.server",
}


def find_moved(path: str) -> str:
    """Return the current name of an object or a module that may have moved.

    Args: path: MODULE.NAME or MODULE:NAME.
    """
    for old, new in MOVED.items():
        if path == old or path.startswith((f"{old}.", f"{old}:")):
            return new + path.removeprefix(old)
    return path


def update_targets(config: DictConfig) -> None:
    """Replace each `_target_` of an earlier version by its current name, at any depth."""
    keys: list[Any] = list(config)
    for key in keys:
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        value = config[key]
        if isinstance(value, DictConfig):
            update_targets(value)
        elif key == "_target_" and isinstance(value, str) and find_moved(value) != value:
            config[key] = find_moved(value)


def load(path: str) -> Any:
    """Return the object that "module:name" names in this project. Raises: ConfigError if it belongs
    to a plugin that is not installed.
    """
    module, _, name = path.partition(":")
    if removed := explain_removed(module):
        raise ConfigError(f"{path} {removed}")
    return getattr(importlib.import_module(module), name)


def import_named(what: str, module: str, name: str, advice: str) -> Any:
    """Return the object `name` of a module of a user or a plugin.

    Args: what: KEY=VALUE, for errors; advice: the next step, for errors.
    Raises: ConfigError if it cannot be imported.
    """
    module, _, name = find_moved(f"{module}.{name}").rpartition(".")
    if removed := explain_removed(module):
        raise ConfigError(f"{what} {removed}")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a script may call sys.exit when it is imported
        said = f"{type(error).__name__}: {error}. {advice}"
        raise ConfigError(f"{what} cannot be imported: {explain_missing(error) or said}") from error


# Names and texts of exceptions for a missing network; a server that refuses a connection is another
# problem.
_NO_NETWORK = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "gaierror", "NameResolutionError")
_WORDS = re.compile("network is unreachable|name resolution|name or service not known", re.I)


def explain_missing(error: BaseException) -> str:
    """Return which data to download, and how, if an exception says that data of a package are
    missing on this machine; "" for any other exception.
    """
    resource = re.search(r"nltk\.download\(['\"]([\w.-]+)['\"]\)", str(error))
    if isinstance(error, LookupError) and resource:
        name = resource[1]
        return (
            f"it needs NLTK's {name!r}, which is not on this machine. Fetch it where there is a"
            f" network with python -m nltk.downloader {name}, and put it into ~/nltk_data, or into"
            " a folder that the environment variable NLTK_DATA names."
        )
    if spacy := re.search(r"Can't find model '([\w.-]+)'", str(error)):
        return (
            f"it needs spaCy's model {spacy[1]!r}, which is not on this machine. Fetch it where"
            f" there is a network with python -m spacy download {spacy[1]}, and install the same"
            " package here."
        )
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _NO_NETWORK or _WORDS.search(str(seen)):
            return (
                "it fetches something that is not on this machine, and there is no network:"
                f" {type(error).__name__}: {first_line(error)}. Fetch it first where there is one"
                " (start the package there once), and copy its cache, such as that of HF_HOME, to"
                " this machine."
            )
        seen = seen.__cause__ or seen.__context__
    return ""


def import_optional(name: str, missing: str) -> Any:
    """Return a module of an optional package. Raises: ConfigError with the text `missing`, which
    names the feature that needs it and how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(missing) from None


@contextmanager
def wording(what: str, where: str, advice: str = "") -> Iterator[None]:
    """Turn exceptions of a user's code in the block, including sys.exit, into ConfigError.

    Args: what: Class.method; where: its arguments, after a comma; advice: a sentence.
    """
    try:
        yield
    except (ConfigError, RunStopped):
        raise
    except (Exception, SystemExit) as error:
        leaves = isinstance(error, SystemExit)
        if leaves and StopSignal.last is not None:
            raise  # a second signal ends the run at once
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = "called sys.exit" if leaves else f"raised {type(error).__name__}: {error}"
        if missing := explain_missing(error):
            text, advice = "cannot run", f"{missing[0].upper()}{missing[1:]}"
        text = f"{what} {text} ({last.filename}:{last.lineno}){where}. {advice}"
        raise ConfigError(text.rstrip()) from error


def instantiate(
    key: str, node: dict[str, Any], methods: Sequence[str], see: str = "", **given: Any
) -> Any:
    """Call the node's `_target_` with its other settings, converted to the annotated types.

    Args:
        key: the node's key, for errors.
        methods: the methods that the result must have.
        see: the file that explains them.
        given: further arguments, which are passed unchanged.
    Raises: ConfigError for a target that cannot be found, an unknown setting, or a result without
    one of the methods.
    """
    target = str(node["_target_"])
    settings = {name: value for name, value in node.items() if name != "_target_"}
    module, _, name = target.rpartition(".")
    advice = "Check the name, and that its folder is on PYTHONPATH."
    target_object = import_named(f"{key}._target_={target!r}", module, name, advice)
    parameters = inspect.signature(target_object).parameters.values()
    # A target that accepts any keyword checks its settings itself.
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        settings = convert(key, settings, [p for p in parameters if p.name not in given])
    with wording(f"{key}._target_={target!r}", f", with the settings {settings}"):
        instance = target_object(**given, **settings)
    missing = [name for name in methods if not callable(getattr(instance, name, None))]
    if missing:
        where = f" See {see} for those it needs." if see else ""
        raise ConfigError(f"{key}._target_={target!r} has no method {missing[0]}.{where}")
    return instance


def convert(
    key: str, settings: dict[str, Any], parameters: Iterable[inspect.Parameter]
) -> dict[str, Any]:
    """Convert settings to the types of parameters, by the rules of all other settings. Raises:
    ConfigError.
    """
    schema = []
    for parameter in parameters:
        kind = parameter.annotation
        if kind is inspect.Parameter.empty or not is_readable(kind):
            kind = Any  # a type that YAML cannot express
        if parameter.default is inspect.Parameter.empty:
            schema.append((parameter.name, kind))
        else:
            default = field(default_factory=lambda value=parameter.default: value)
            schema.append((parameter.name, kind, default))
    return vars(build(make_dataclass("Settings", schema, kw_only=True), settings, key))
