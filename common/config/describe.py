"""Describe settings: python launch.py --explain KEY, and without a key the groups.

What is printed is read from where it stands: the comment from conf/ or a plugin's conf/, the type,
the bounds and the choices from the annotations that `build` checks, the value from the composed
command, the readers from the code, and the page from docs/. This module imports no torch.
"""

import ast
import builtins
import functools
import importlib
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config import comments, plugins
from common.config.algorithm import AlgorithmConfig
from common.config.checks import Check, ConfigError, flat, show
from common.config.command import find_config_dir
from common.config.explain import check_groups, list_files, list_options
from common.config.extra_tasks import search_in
from common.config.plugins import CONF, ROOT
from common.config.schema import Run
from common.config.validate import name_nearest, see_also

FLAG = "--explain"
_FOLDERS = ("--config-dir", "-cd")
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a dict",
    type(None): "null",
}
_MOST_READERS = 6
# Pages of docs/ that name settings without explaining them.
_RECORDS = ("benchmarks", "decisions", "migrate", "results", "sources")


class Value(Enum):
    """The value of a setting that has none."""

    UNSET = "not set"


@dataclass(frozen=True)
class Setting:
    """A setting of the composed command.

    Attributes:
        key: its dotted key.
        kind: its annotated type; None if none is declared.
        owner: the class or function that declares it; None if none does.
        default: its default in the code; UNSET if it has none.
    """

    key: str
    kind: Any = None
    owner: Any = None
    default: Any = Value.UNSET


# --- the command


def asks(arguments: Sequence[str]) -> bool:
    """Return whether a command asks for explanations."""
    return any(argument.partition("=")[0] == FLAG for argument in arguments)


def answer(arguments: Sequence[str], algorithms: Mapping[str, type[AlgorithmConfig]]) -> str:
    """Return the text for a command with --explain.

    Args:
        arguments: the arguments of the command line.
        algorithms: the class of each algorithm's settings.
    Raises: ConfigError for a key that is no setting; HYDRA_ERRORS for overrides that do not
    compose.
    """
    keys, overrides = _split(arguments)
    folder = find_config_dir(arguments)
    check_groups(overrides, folder)
    if not keys:
        return Command(overrides, folder, algorithms).list_groups()
    return "\n\n".join(_answer_one(key, overrides, folder, algorithms) for key in keys)


def _answer_one(
    key: str,
    overrides: list[str],
    folder: str | None,
    algorithms: Mapping[str, type[AlgorithmConfig]],
) -> str:
    in_task = key.partition(".")[0] == "task"
    command = Command(overrides, folder, algorithms, in_task)
    if key == "experiment":
        return command.list_experiments()
    setting = command.find(key)
    if command.below(setting.key) and setting.key == key:
        return command.list_settings(key)
    others = [text for text in overrides if text.lstrip("+~").partition("=")[0] != key]
    if others == overrides:
        return command.describe(setting, key)
    return Command(others, folder, algorithms, in_task).describe(setting, key, command)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the keys to explain and the overrides. KEY=VALUE after --explain is both.

    Raises: ConfigError for an option that shows or starts something else.
    """
    keys, overrides, before = list[str](), list[str](), ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = argument.lstrip("+~").partition("=")[0]
        if flag == FLAG:
            keys += [value] if value else []
        elif before in _FOLDERS or flag in _FOLDERS:
            pass  # `find_config_dir` reads it
        elif argument.startswith("-"):
            raise ConfigError(
                f"{argument} does not go with {FLAG}, which starts nothing. Leave it out."
            )
        else:
            keys += [name] if not equals or before == FLAG else []
            overrides += [argument] if equals else []
        before = argument
    return [key.strip(".") for key in keys if key.strip(".")], overrides


class Command:
    """A composed command, and what is known of its settings.

    Attributes:
        config: Hydra's composed configuration.
        chosen: the chosen option per group.
        chosen_text: the choices of groups among the overrides, for a command to try.
        imports_task: whether the task's class is imported for its types, which takes time.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        folder: str | None,
        algorithms: Mapping[str, type[AlgorithmConfig]],
        imports_task: bool = False,
    ) -> None:
        search = [search_in(folder)] if folder else []
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            config = hydra.compose(
                "config", overrides=[*search, *overrides], return_hydra_config=True
            )
        choices = config.hydra.runtime.choices
        self.config: DictConfig = config
        self._by_group: dict[str, list[tuple[Path, str]]] = {}
        self.folder, self.algorithms, self.imports_task = folder, algorithms, imports_task
        self.chosen = {str(k): str(v) for k, v in choices.items() if v and "/" not in str(k)}
        groups = [o for o in overrides if plugins.is_group(o.lstrip("+~").partition("=")[0])]
        self.chosen_text = "".join(f"{text} " for text in groups)

    # --- settings

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """Every setting of the command by its key: groups of settings, and single ones."""
        found = {one.key: one for one in self._declared(Run, "")}
        plain: Any = OmegaConf.to_container(self.config, resolve=False)
        plain.pop("hydra", None)
        for key in flat(plain):
            parts = key.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in found:
                    above = found.get(".".join(parts[: end - 1]), Setting(""))
                    found[name] = Setting(name, owner=above.owner)
        return found

    def _declared(self, kind: Any, key: str) -> Iterator[Setting]:
        """Yield the settings that a class or function declares, and those of classes in it."""
        for name, annotation, default in _fields_of(kind):
            inner = f"{key}.{name}" if key else name
            if inner == "algo":
                annotation = self.algorithms.get(str(self.config.algo.get("name")), annotation)
            yield Setting(inner, annotation, kind, default)
            if inner in ("task", "engine"):
                below: Any = self._target(inner)
            else:
                below = next((one for one in _members(annotation) if is_dataclass(one)), None)
            if below is not None:
                yield from self._declared(below, inner)

    def _target(self, group: str) -> Any:
        """Return the class of the task's settings, or the definition of the engine's function,
        whose module imports torch; None if it cannot be read.
        """
        module, _, name = str(OmegaConf.select(self.config, f"{group}._target_")).rpartition(".")
        if group == "engine":
            path = ROOT / Path(*module.split(".")).with_suffix(".py")
            body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
            defined = (node for node in body if isinstance(node, ast.FunctionDef))
            return next((node for node in defined if node.name == name), None)
        if not self.imports_task:
            return None
        try:
            return getattr(importlib.import_module(module), name)
        except (Exception, SystemExit):  # a user's module may do anything when it is imported
            return None

    def below(self, key: str) -> list[str]:
        """Return the keys of the settings directly below a key."""
        inner = [name for name in self.settings if name.rpartition(".")[0] == key]
        return [name for name in inner if not name.endswith("._target_")]

    def find(self, key: str) -> Setting:
        """Return the setting with a key; for a key in a dict that takes any, that of the dict.

        Raises: ConfigError if there is none.
        """
        if (found := self.settings.get(key)) is not None:
            return found
        parts = key.split(".")
        for end in range(len(parts) - 1, 0, -1):
            above = self.settings.get(".".join(parts[:end]))
            if above is not None and self._takes_any(above):
                return above
        raise ConfigError(self._unknown(key))

    def _takes_any(self, setting: Setting) -> bool:
        kinds = [_origin(one) for one in _members(setting.kind)]
        return setting.key not in ("task", "engine", "algo") and (dict in kinds or Any in kinds)

    def _unknown(self, key: str) -> str:
        """Return the error text for a key that is no setting, which ends with a command."""
        head, group = f"{key} is not a setting", key.partition(".")[0]
        if group in ("algo", "task", "engine") and group in self.chosen:
            own = f"{group}={self.chosen[group]}"
            for option in list_options(group, self.folder):
                if self._has(group, option, key):
                    return (
                        f"{head} of {own}, but one of {group}={option}:"
                        f" {see_also(key, f'{group}={option} ')}"
                    )
            head += f" with {own}"
        last = key.rpartition(".")[2]
        same = [name for name in self.settings if name.rpartition(".")[2] == last]
        outer = key.rpartition(".")[0]
        while outer and not self.below(outer):
            outer = outer.rpartition(".")[0]
        names = [name.removeprefix(f"{outer}.") for name in self.below(outer)]
        near = same[0] if same else name_nearest(last, names)
        hint = f" Did you mean {near!r}?" if near else ""
        return (
            f"{head}.{hint} Settings here: {', '.join(names)}."
            f" {see_also(outer, self.chosen_text if outer else '')}"
        )

    def _has(self, group: str, option: str, key: str) -> bool:
        """Return whether another option of a group has a setting."""
        if group == "algo":
            algorithm = self.algorithms.get(option)
            return algorithm is not None and any(
                one.key == key for one in _nested(algorithm, "algo")
            )
        paths = [path for path in list_files(group, self.folder) if path.stem == option]
        return any(key in comments.read(path, f"{group}.") for path in paths)

    # --- texts

    def describe(self, setting: Setting, key: str, changed: "Command | None" = None) -> str:
        """Return all that is known of a setting.

        Args:
            key: the key that was asked for, which may be below a dict.
            changed: the command with the key's own override; None if it has none.
        """
        rows = {}
        if choices := find_choices(setting.kind):
            rows["choices"] = ", ".join(choices)
        elif setting.kind is not None:
            rows["type"] = describe_type(setting.kind) or "any"
        if bounds := find_bounds(setting.kind):
            rows["bounds"] = bounds
        rows["default"] = self.show_value_of(setting, key)
        source = self._written(key)
        if source is not None and "${" in str(source[1]):
            rows["default"] += f", from {source[1]}"
        if changed is not None:
            rows["here"] = changed.show_value_of(setting, key)
        if source is not None:
            rows["set in"] = _name(source[0])
        owner = _describe_owner(setting.owner)
        if isinstance(setting.owner, ast.FunctionDef):
            owner = f"{self.config.engine._target_}, a function"
        if owner:
            rows["belongs to"] = owner
        if readers := self._find_readers(setting):
            more = len(readers) - _MOST_READERS
            said = ", ".join(readers[:_MOST_READERS])
            rows["read in"] = f"{said} and {more} more" if more > 0 else said
        if page := self._find_page(key):
            rows["docs"] = page
        head = key if key == setting.key else f"{key}, a key of {setting.key}"
        known = key if key in self.settings else setting.key
        note = comments.note(self.comment(known), known)
        return "\n".join([head, *_wrap(note or "No comment.", "  "), "", *_table(rows)])

    def list_settings(self, group: str) -> str:
        """Return the settings of a group, a paragraph each."""
        lines = [group]
        if text := comments.note(self.comment(group), group):
            lines += _wrap(text, "  ")
        if plugins.is_group(group):
            lines += _wrap(self._describe_options(group), "  ")
        for key in self.below(group):
            inner = self.below(key)
            value = "" if inner else f" = {self.show_value_of(self.settings[key])}"
            lines += ["", f"{key}{'.' if inner else ''}{value}"]
            lines += _wrap(_first_sentence(comments.note(self.comment(key), key)), "    ")
        example = next((key for key in self.below(group) if not self.below(key)), group)
        return "\n".join([*lines, "", f"More of one: {see_also(example, self.chosen_text)}"])

    def list_groups(self) -> str:
        """Return the groups of settings, with the options of those that are chosen by a name."""
        rows = {}
        for key in self.below(""):
            text = _first_sentence(comments.note(self.comment(key), key))
            options = self._describe_options(key) if plugins.is_group(key) else ""
            rows[key] = f"{text} {options}".strip()
        if names := list_options("experiment", self.folder):
            rows["experiment"] = f"The settings of a whole run. Choose one: {', '.join(names)}."
        return "\n".join([*_table(rows), "", f"More of one: {see_also('algo', self.chosen_text)}"])

    def list_experiments(self) -> str:
        """Return the experiments, with what each one is."""
        rows = {}
        for path in list_files("experiment", self.folder):
            head = comments.read(path, "experiment.").get("experiment")
            rows[path.stem] = _first_sentence(head.text) if head is not None else ""
        example = f"python launch.py experiment={next(iter(rows), 'NAME')}"
        return "\n".join(["experiment", *_table(rows), "", f"Run one: {example}"])

    def _describe_options(self, group: str) -> str:
        """Return the options of a group, and the one that this command has."""
        text = f"Choose with {group}=OPTION: {', '.join(list_options(group, self.folder))}."
        option = self.chosen.get(group, "")
        path = next(self._bases(group, option), None)
        if path is None:
            return text
        head = comments.read(path, f"{group}.").get(group)
        about = f": {_first_sentence(head.text)}" if head is not None else "."
        return f"{text} This command has {option}{about}"

    def show_value_of(self, setting: Setting, key: str | None = None) -> str:
        """Return the text of a setting's value in this command.

        Args: key: the key that was asked for, if it is below a dict.
        """
        key = key or setting.key
        try:
            value = OmegaConf.select(self.config, key, default=Value.UNSET, throw_on_missing=True)
        except OmegaConfBaseException:
            return Value.UNSET.value
        if value is Value.UNSET and key == setting.key:
            value = setting.default
        if value is Value.UNSET:
            return value.value
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False)
        return show_value(value)

    # --- where it stands

    def _files(self, key: str) -> list[tuple[Path, str]]:
        """Return the YAML files that may hold a key, each with the beginning of its keys, those
        that count first: an experiment, the algorithm, the group's option, config.yaml. Settings
        whose class is the same for every option may also be in the files of other options.
        """
        group = key.partition(".")[0]
        if group not in self._by_group:
            self._by_group[group] = list(self._find_files(group))
        return self._by_group[group]

    def _find_files(self, group: str) -> Iterator[tuple[Path, str]]:
        shared = {item.name for item in fields(Run) if is_dataclass(item.type)}
        for name in dict.fromkeys(("experiment", "algo", group)):
            if name in self.chosen:
                for path in self._bases(name, self.chosen[name]):
                    yield path, comments.find_prefix(path, f"{name}.")
        yield CONF / "config.yaml", ""
        if group in shared and plugins.is_group(group):
            for path in list_files(group, self.folder):
                yield path, comments.find_prefix(path, f"{group}.")

    def _bases(self, group: str, option: str) -> Iterator[Path]:
        """Yield the file of an option, and the files of its group that its defaults name."""
        for path in list_files(group, self.folder):
            if path.stem == option:
                yield path
                content: Any = OmegaConf.load(path)
                for base in content.get("defaults") or ():
                    if isinstance(base, str) and base != "_self_":
                        yield from self._bases(group, base)
                return

    def comment(self, key: str) -> comments.Comment | None:
        """Return the comment of a key: its own in a YAML file, in the code next to its type, or
        that of its nearest neighbour or group.
        """
        setting = self.settings.get(key, Setting(key))
        if plugins.is_group(key):  # what its file says is of the option
            return _of_class(setting)
        inherited = None
        for path, prefix in self._files(key):
            found = comments.read(path, prefix).get(key)
            if found is not None and found.key == key:
                return found
            inherited = inherited or found
        if text := comments.of_field(setting.owner, key):
            more = comments.note(inherited, key)
            return comments.Comment(key, f"{text}\n{more}" if more else text)
        outer = key.rpartition(".")[0]
        return inherited or _of_class(setting) or (self.comment(outer) if outer else None)

    def _written(self, key: str) -> tuple[Path, Any] | None:
        """Return the YAML file that sets a key in this command, and the value as written there."""
        for path, prefix in self._files(key):
            if prefix and not key.startswith(prefix):
                continue
            content = OmegaConf.load(path)
            parts = key.removeprefix(prefix).split(".")
            node: Any = OmegaConf.to_container(content, resolve=False)
            for part in parts:
                node = node.get(part, Value.UNSET) if isinstance(node, dict) else Value.UNSET
            known = self.chosen.get(key.partition(".")[0]) in (None, path.stem)
            if node is not Value.UNSET and (known or path.parent.name in ("experiment", "algo")):
                return path, node
        return None

    def _find_readers(self, setting: Setting) -> list[str]:
        """Return the files that read a setting, those with the most places first: an attribute of
        its name in the package or in a file that names the class, or behind its group's name.
        """
        outer, _, name = setting.key.rpartition(".")
        owner = setting.owner if isinstance(setting.owner, type) else object
        package = owner.__module__.partition(".")[0]
        found: dict[str, int] = {}
        own = {one.__module__.partition(".")[0] for one in self.algorithms.values()}
        for path, text in _code(("common", *sorted(own), "plugins")):
            if f".{name}" not in text or path == _find_source(owner):
                continue
            inside = outer == "algo" and path.startswith(f"{package}/")
            alone = inside or (owner not in (object, Run) and owner.__name__ in text)
            if hits := _count_reads(
                path, name, None if alone else outer.rpartition(".")[2] or "run"
            ):
                found[path] = hits
        yaml_hits = (path for path, text in _yaml() if re.search(rf"[{{:]{setting.key}\b", text))
        return [*sorted(found, key=lambda path: -found[path]), *yaml_hits]

    def _find_page(self, key: str) -> str:
        """Return the page of docs/ or of a plugin that says the most about a key, and its
        section.
        """
        group = key.partition(".")[0]
        option = self.chosen.get(group, "")
        file = next(self._bases(group, option), None)
        plugin = file.parents[2] if file and file.is_relative_to(plugins.PLUGINS) else None
        parts = key.split(".")
        words = [".".join(parts[:end]) for end in range(len(parts), 1, -1)]
        for word in [*words, f"{group}={option}" if option else f"{group}=", f"{group}."]:
            pattern = re.compile(rf"(?<![\w.]){re.escape(word)}" + r"\b" * word[-1].isalnum())
            found = []
            for path, text in _pages():
                own = path.stem == option or path.parent == plugin
                if hits := len(pattern.findall(text)):
                    found.append((own, hits, f"{_name(path)}{_section(text, pattern, option)}"))
            if found:
                return max(found)[2]
        return ""


# --- types


def describe_type(kind: Any) -> str:
    """Return an annotated type in words."""
    if checks := [one.means for one in _checks(kind) if one.means]:
        return checks[0] + (", or null" if type(None) in _members(kind) else "")
    words = []
    for one in _members(kind):
        if is_dataclass(one):
            words.append("a group of settings")
        elif _origin(one) is typing.Literal:
            words.append("a choice")
        elif isinstance(one, str):
            words.append(one)
        elif (inner := typing.get_args(one)) and _origin(one) in (list, dict):
            inside = describe_type(inner[-1])
            words.append(f"{_NAMES[_origin(one)]} of {inside}" if inside else _NAMES[_origin(one)])
        elif one is not Any:
            words.append(_NAMES.get(_origin(one), getattr(one, "__name__", str(one))))
    words.sort(key=lambda word: word == "null")
    return ", or ".join(dict.fromkeys(words))


def find_bounds(kind: Any) -> str:
    """Return the bounds of an annotated type in words; "" = none."""
    bounds = []
    for one in _metadata(kind):
        if type(one) in _BOUNDS:
            name, word = _BOUNDS[type(one)]
            bounds.append(f"{word} {show(getattr(one, name))}")
    return ", ".join(bounds)


def find_choices(kind: Any) -> list[str]:
    """Return the choices of an annotated type; empty = any value of its type."""
    literals = [one for one in _members(kind) if _origin(one) is typing.Literal]
    named = [show(value) for one in literals for value in typing.get_args(one)]
    return [*(show(value) for check in _checks(kind) for value in check.choices), *named]


def show_value(value: Any) -> str:
    """Return the text of a value, also of a list or a dict."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show_value, value)) + "]"
    return '""' if value == "" else " ".join(show(value).split())


def _checks(kind: Any) -> list[Check]:
    return [one for one in _metadata(kind) if isinstance(one, Check)]


def _metadata(kind: Any) -> Iterator[Any]:
    """Yield the metadata of an annotated type and of the members of a union."""
    if _origin(kind) in (typing.Union, types.UnionType):
        for one in typing.get_args(kind):
            yield from _metadata(one)
    yield from getattr(kind, "__metadata__", ())
    if hasattr(kind, "__metadata__"):
        yield from _metadata(kind.__origin__)


def _members(kind: Any) -> list[Any]:
    """Return the types of a union without metadata; the type itself if it is no union."""
    if kind is None:
        return []
    if hasattr(kind, "__metadata__"):
        return _members(kind.__origin__)
    if _origin(kind) in (typing.Union, types.UnionType):
        return [member for one in typing.get_args(kind) for member in _members(one)]
    return [kind]


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


def _fields_of(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the annotated type and the default of what a dataclass, a class or the
    definition of a function declares.
    """
    if is_dataclass(kind):
        for item in fields(kind):
            if item.init:
                made = item.default_factory
                default = item.default if made is MISSING else made()
                yield item.name, item.type, Value.UNSET if default is MISSING else default
    elif isinstance(kind, ast.FunctionDef):
        for argument in kind.args.args[1:]:  # the first is what the engine is opened with
            yield argument.arg, _read_annotation(argument.annotation), Value.UNSET
    elif isinstance(kind, type):
        for item in inspect.signature(kind).parameters.values():
            if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL):
                empty = item.annotation is item.empty
                default = Value.UNSET if item.default is item.empty else item.default
                yield item.name, None if empty else item.annotation, default


def _read_annotation(node: ast.expr | None) -> Any:
    """Return the type of an annotation in code that is not imported; its text if it is none of
    Python's own.
    """
    if isinstance(node, ast.BinOp):
        return typing.Union[_read_annotation(node.left), _read_annotation(node.right)]  # noqa: UP007
    if isinstance(node, ast.Subscript):
        return _read_annotation(node.value)
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.Name):
        return getattr(builtins, node.id, Any)
    return Any


def _nested(kind: Any, key: str) -> Iterator[Setting]:
    """Yield the settings of a dataclass, and of the dataclasses in it."""
    for name, annotation, default in _fields_of(kind):
        setting = Setting(f"{key}.{name}", annotation, kind, default)
        yield setting
        for one in _members(annotation):
            if is_dataclass(one):
                yield from _nested(one, setting.key)
            elif _origin(one) is dict:
                yield replace(setting, key=f"{setting.key}.*")


def _of_class(setting: Setting) -> comments.Comment | None:
    """Return the first paragraph of the docstring of a setting's class, or of its owner's."""
    kinds = [one for one in _members(setting.kind) if is_dataclass(one)]
    for kind in (*kinds, setting.owner):
        if isinstance(kind, type) and kind is not Run and (text := inspect.getdoc(kind)):
            text = " ".join(text.split("\n\n")[0].split())
            return comments.Comment(setting.key, text)
    return None


def _describe_owner(owner: Any) -> str:
    """Return the name and the file of the class that declares a setting."""
    path = _find_source(owner)
    return f"{owner.__name__} in {path}" if path else ""


def _find_source(owner: Any) -> str:
    """Return the file of a class; "" if it has none."""
    if not isinstance(owner, type) or owner is object:
        return ""
    path = inspect.getsourcefile(owner)
    return _name(Path(path)) if path else ""


def _count_reads(path: str, name: str, behind: str | None) -> int:
    """Return how often a file reads an attribute.

    Args: behind: the name before the dot, such as kl in x.kl.beta; None = any.
    """
    return sum(attr == name and behind in (None, word) for word, attr in _attributes(path))


@functools.cache
def _attributes(path: str) -> list[tuple[str, str]]:
    """Return each attribute that a file reads, with the name before the dot."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            before = node.value
            word = before.attr if isinstance(before, ast.Attribute) else getattr(before, "id", "")
            found.append((word, node.attr))
    return found


# --- files


@functools.cache
def _code(packages: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the name and the text of each file of the product's code."""
    paths = [path for name in packages for path in sorted((ROOT / name).rglob("*.py"))]
    kept = [path for path in (ROOT / "launch.py", *paths) if "tests" not in path.parts]
    return [(_name(path), path.read_text(encoding="utf-8")) for path in kept if path.is_file()]


@functools.cache
def _yaml() -> list[tuple[str, str]]:
    paths = [path for folder in plugins.conf_folders() for path in sorted(folder.rglob("*.yaml"))]
    return [(_name(path), path.read_text(encoding="utf-8")) for path in paths]


@functools.cache
def _pages() -> list[tuple[Path, str]]:
    """Return the path and the text of each page of docs/ that explains, and of the plugins."""
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in _RECORDS]
    paths = [*pages, *sorted(plugins.PLUGINS.glob("*/README.md"))]
    return [(path, path.read_text(encoding="utf-8")) for path in paths]


def _section(text: str, pattern: re.Pattern[str], option: str) -> str:
    """Return the heading of the section that has a pattern most often, one that names the option
    first, to follow the name of a page.
    """
    heading, found = "", dict[str, int]()
    for line in text.splitlines():
        if re.match(r"##+ ", line):
            heading = line.lstrip("# ").strip()
        found[heading] = found.get(heading, 0) + len(pattern.findall(line))
    best = max(found, key=lambda one: (bool(option) and option in one and found[one], found[one]))
    return f', "{best}"' if best else ""


def _name(path: Path) -> str:
    """Return the path of a file from the project's folder."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# --- layout


def _first_sentence(text: str) -> str:
    """Return the first sentence of a comment."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z(`'])", text, maxsplit=1)[0]


def _width() -> int:
    return min(100, max(40, shutil.get_terminal_size((100, 24)).columns))


def _wrap(text: str, indent: str) -> list[str]:
    paragraphs = text.split("\n") if text else []
    width = _width()
    return [
        line
        for one in paragraphs
        for line in textwrap.wrap(
            one.strip(),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def _table(rows: Mapping[str, str]) -> list[str]:
    """Return rows of a name and a text, wrapped."""
    width = max(map(len, rows), default=0)
    return [
        line
        for name, text in rows.items()
        for line in textwrap.wrap(
            text or "-",
            _width(),
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
