"""The shape that CONTRIBUTING.md and docs/architecture.md promise: who imports whom, how docstrings
begin, and that each setting has a reader.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

from common.config.plugins import conf_folders
from tests.support import ROOT

ALGORITHMS = ("eggroll", "grpo", "rft", "sft", "ddp_bench")
PARTS = ("launch.py", "conf", "common", *ALGORITHMS, "benchmarks", "examples", "plugins")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(part: str) -> list[Path]:
    path = ROOT / part
    found = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return [file for file in found if "tests" not in file.relative_to(ROOT).parts]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- imports


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(part: str) -> dict[str, set[str]]:
    """Each module of a part -> the modules of that part that it imports, anywhere in its text;
    what stands below TYPE_CHECKING is no import.
    """
    modules = {module(path): parsed(path) for path in files(part)}
    graph = {}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in modules else node.module for name in names}
        graph[name] = found & modules.keys() - {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of the graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize(
    "part",
    ["common", *ALGORITHMS, "benchmarks", "plugins"],
)
def test_there_is_no_circle_of_imports(part):
    assert circle(imports_of(part)) == []


def test_imports_between_the_rooms_of_common_run_one_way():
    """A room is a package in common, or a module beside them."""
    rooms: dict[str, set[str]] = {}
    for name, found in imports_of("common").items():
        room = ".".join(name.split(".")[:2])
        rooms.setdefault(room, set()).update(".".join(other.split(".")[:2]) for other in found)
    assert circle({room: found - {room, "common"} for room, found in rooms.items()}) == []


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_no_algorithm_is_named_in_common():
    named = re.compile(r"\b(eggroll|grpo|rft|sft|classify|ddp_bench)\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files("common")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if named.search(line)
    ]
    assert found == []


# --- English


@pytest.mark.parametrize(
    "part",
    PARTS,
)
def test_docstrings_are_sentences(part):
    odd = re.compile(r"(Of|Which|What|Where|How)\b")
    found = []
    for path in files(part):
        for node in ast.walk(parsed(path)):
            if isinstance(node, Function | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and odd.match(text):
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found == []


# --- settings


def leaves(node: object, key: str) -> Iterator[str]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key


def settings() -> dict[str, set[str]]:
    """Each group of conf, apart from tasks -> its settings; those of an algorithm are a group."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for folder in conf_folders() for path in folder.rglob("*.yaml")):
        group = path.parent.name
        if group in ("task", "hydra", "help", "experiment"):
            continue
        name = f"algo/{path.stem}" if group == "algo" else group
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        content.pop("defaults", None)
        found.setdefault(name, set()).update(leaves(content, ""))
    return found


def attributes_read() -> set[str]:
    """The names that product code reads off an object, those that engines are opened with, and YAML
    by interpolation; the checks of a setting are no reader.
    """
    texts = [
        path.read_text(encoding="utf-8")
        for folder in conf_folders()
        for path in folder.rglob("*.yaml")
    ]
    found = {name for text in texts for name in re.findall(r"\$\{[\w.]*\.(\w+)\}", text)}
    for part in PARTS:
        for path in files(part):
            tree = parsed(path)
            for node in ast.walk(tree):
                if isinstance(node, Function) and node.name == "__post_init__":
                    node.body = []
            nodes = list(ast.walk(tree))
            found |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
            opens = [n for n in nodes if isinstance(n, Function) and n.name.startswith("open_")]
            found |= {argument.arg for n in opens for argument in n.args.args}
            if any(isinstance(n, ast.Name) and n.id == "getattr" for n in nodes):
                found |= {n.value for n in nodes if isinstance(n, ast.Constant)}
    return found


def test_every_setting_is_read():
    read = attributes_read()
    unread = {
        f"{group}: {key}"
        for group, keys in settings().items()
        for key in keys
        if key.split(".")[-1] not in read
        # a batch script is written by the plugin
        if (ROOT / "plugins" / "slurm").is_dir() or not key.startswith("slurm.")
    }
    assert unread == set()
