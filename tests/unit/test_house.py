"""The rules of docs/architecture.md: book, rooms with doors, plugins; a tree without plugins."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import ConfigError, plugins
from common.run.resume import differences
from common.system import user_code
from common.system.user_code import find_moved, import_named, load
from launch import compose
from tests.support import ROOT

CORE = (
    "launch.py",
    "common",
    "eggroll",
    "grpo",
    "rft",
    "sft",
    "ddp_bench",
    "benchmarks",
    "examples",
)
NAMES = sorted(path.parent.name for path in plugins.PLUGINS.glob("*/__init__.py"))
# Plugins that import another one, as their README.md says.
NEEDS: dict[str, set[str]] = {}
# Where plugins are named in Python: what is asked of one if it is there, and where modules went.
NAMED = ("common/config/plugins.py", "common/system/user_code.py")


def python_files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("place", [*CORE, "conftest.py", "tests"])
def test_nothing_imports_plugins(place):
    found = [
        str(path.relative_to(ROOT))
        for path in python_files(place)
        if any(name.split(".")[0] == "plugins" for name in imports(path))
    ]
    assert found == []


@pytest.mark.parametrize("place", CORE)
def test_plugins_are_named_in_yaml_and_in_one_table(place):
    for path in python_files(place):
        text, file = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        named = [name for name in NAMES if re.search(rf"\bplugins\.{name}\b", text)]
        assert not named or file in NAMED, file


@pytest.mark.parametrize("name", NAMES)
def test_plugins_import_no_other_plugin(name):
    allowed = {name} | NEEDS.get(name, set())
    for path in python_files(f"plugins/{name}"):
        others = {one.split(".")[1] for one in imports(path) if one.startswith("plugins.")}
        assert others & set(NAMES) <= allowed, path


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_has_a_page_and_tests(name):
    folder = plugins.PLUGINS / name
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# ")
    assert list((folder / "tests").glob("test_*.py"))


def test_a_file_of_a_group_has_one_owner():
    files = [
        str(path.relative_to(folder))
        for folder in plugins.conf_folders()
        for path in folder.rglob("*.yaml")
    ]
    assert len(files) == len(set(files))


def test_defaults_of_conf_stand_without_plugins():
    chosen = {path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")}
    for path in sorted((ROOT / "conf" / "algo").glob("*.yaml")):
        tasks = re.findall(r"override /task: (\w+)", path.read_text(encoding="utf-8"))
        assert set(tasks) <= chosen, path


# --- rooms and their doors

COMMON = ROOT / "common"
ROOMS = sorted(path.parent.name for path in COMMON.glob("*/__init__.py"))
BOOK = sorted(path.stem for path in COMMON.glob("*.py") if path.stem != "__init__")
# The files of the book that rooms may import: two protocols, and two that import no other file.
OPEN_TO_ROOMS = {"engine", "task", "optim", "uncertainty"}
CODE = (
    "launch.py",
    "common",
    "eggroll",
    "grpo",
    "rft",
    "sft",
    "ddp_bench",
    "plugins",
    "benchmarks",
    "examples",
)


def code_files() -> list[Path]:
    found = [path for place in CODE for path in python_files(place)]
    return [path for path in found if "tests" not in path.relative_to(ROOT).parts]


def room_of(path: Path) -> str | None:
    """The room of common that a file is in."""
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "common" and len(parts) > 2 else None


def imported_names(path: Path, typed: bool = True) -> list[tuple[str, str]]:
    """The (module, name) pairs that a file imports. typed: those for type checkers alone, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not typed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
    return found


def door(room: str) -> set[str]:
    return set(importlib.import_module(f"common.{room}").__all__)


def test_outside_a_room_only_names_of_its_door_are_imported():
    doors = {room: door(room) for room in ROOMS}
    wrong = []
    for path in code_files():
        for module, name in imported_names(path):
            package, _, rest = module.partition(".")
            room, _, inner = rest.partition(".")
            if package != "common" or room not in doors or room == room_of(path):
                continue
            if inner or name not in doors[room]:
                wrong.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert wrong == []


@pytest.mark.skipif(not NAMES, reason="some names are for plugins, which are not here")
@pytest.mark.parametrize("room", ROOMS)
def test_a_door_names_what_others_use(room):
    used = {
        name
        for path in code_files()
        if room_of(path) != room
        for module, name in imported_names(path)
        if module == f"common.{room}"
    }
    assert door(room) - used == set()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_no_chapter_of_the_book(room):
    chapters = {f"common.{name}" for name in BOOK if name not in OPEN_TO_ROOMS}
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted((COMMON / room).rglob("*.py"))
        for module, name in imported_names(path, typed=False)
        if module in chapters or f"{module}.{name}" in chapters
    }
    assert found == set()


@pytest.mark.parametrize("place", ["common", "eggroll", "grpo", "rft", "sft"])
def test_the_book_imports_the_book_and_doors(place):
    allowed = {"common", place} & {"common", "eggroll", "grpo", "rft", "sft"}
    others = {
        "launch",
        "eggroll",
        "grpo",
        "rft",
        "sft",
        "ddp_bench",
        "benchmarks",
        "plugins",
    } - allowed
    for path in sorted((ROOT / place).glob("*.py")):
        assert {module.split(".")[0] for module, _ in imported_names(path)} & others == set(), path


def test_only_common_distributed_knows_how_weights_are_sharded():
    """Others speak of `Sharding`, and of the settings in opt.fsdp."""
    inside = re.compile(r"torch\.distributed\.(fsdp|tensor|device_mesh)\b")
    for path in code_files():
        if room_of(path) != "distributed":
            found = [module for module, _ in imported_names(path) if inside.match(module)]
            assert found == [], path


# --- a plugin of a user's


@pytest.fixture
def extra(tmp_path, monkeypatch):
    """A folder of plugins that has one, `extra`, with a task."""
    conf = tmp_path / "plugins" / "extra" / "conf" / "task"
    conf.mkdir(parents=True)
    (conf / "extra.yaml").write_text("defaults: [units, _self_]\nproblems: 9\n")
    monkeypatch.setattr(plugins, "PLUGINS", tmp_path / "plugins")


def test_files_of_a_plugin_are_choices(extra):
    assert compose(["task=extra"]).task["problems"] == 9
    also = compose(["evaluate.also=[extra]"]).evaluate.also
    assert also["extra"]["problems"] == 9
    with pytest.raises(ConfigError, match=r"Did you mean 'extra'\? Choices: .*extra"):
        compose(["task=extro"])


def test_a_removed_plugin_is_named():
    removed = "plugins/gone, which is not there"
    with pytest.raises(ConfigError, match=removed):
        load("plugins.gone.code:run")
    with pytest.raises(ConfigError, match=rf"^task\._target_=x is of {removed}"):
        import_named("task._target_=x", "plugins.gone", "Task", "")


def test_what_asks_a_plugin_says_that_it_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "PLUGINS", tmp_path)
    with pytest.raises(ConfigError, match="of plugins/slurm, which is not there"):
        load(f"{plugins.SLURM}:adopt")


def test_names_of_an_earlier_version_go_on_working(monkeypatch):
    monkeypatch.setitem(user_code.MOVED, "common.tasks.old", "common.tasks.units")
    assert find_moved("common.tasks.older.Units") == "common.tasks.older.Units"
    assert find_moved("common.tasks.old:Units") == "common.tasks.units:Units"
    run = compose(["task=units", "task._target_=common.tasks.old.Units"])
    assert run.task["_target_"] == "common.tasks.units.Units"
    assert import_named("x", "common.tasks.old", "Units", "").__name__ == "Units"
    old, new = ({"task": {"_target_": f"common.tasks.{name}.Units"}} for name in ("old", "units"))
    assert differences(old, new) == []


# --- a tree without plugins

UNUSED = (".*", "plugins", "outputs", "multirun", "build", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy of the tree without plugins/."""
    tree = tmp_path_factory.mktemp("bare") / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*UNUSED))
    # The installed project has a folder of this name, too, behind this one on the path.
    (tree / "plugins.py").write_text("raise ModuleNotFoundError('removed', name='plugins')\n")
    return tree


def call(tree, *arguments, **more):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *arguments],
        **({"cwd": tree, "env": environment, "capture_output": True, "text": True} | more),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MODEL = ["model.tiny.hidden_size=32", "model.tiny.layers=2", "model.tiny.pretrain_steps=0"]
DEFAULTS = {
    "eggroll": [*MODEL, "algo.members=4", "algo.prompts_per_step=2", "algo.steps=1"],
    "grpo": [
        *(*MODEL, "algo.prompts_per_step=2", "algo.samples_per_prompt=2", "algo.steps=1"),
        *("task.positions=32", "task.test_positions=4", "algo.sampling.max_new_tokens=4"),
    ],
    # Its base, which has been taught the task, comes with the project.
    "rft": [
        *("algo.prompts=8", "algo.validation_prompts=2", "algo.samples_per_prompt=2"),
        *("algo.iterations=1", "algo.epochs=1", "algo.select.accept=0.05", "evaluate.samples=2"),
    ],
    "classify": ["task.rows=60", "task.test_rows=20", "algo.epochs=1", "algo.model.size=16"],
}


@pytest.mark.run
@pytest.mark.parametrize("algo", DEFAULTS)
def test_a_default_task_runs_without_plugins(algo, bare, tmp_path):
    settings = [f"algo={algo}", "hardware=cpu", *DEFAULTS[algo], f"hydra.run.dir={tmp_path}"]
    if algo != "classify":
        settings.append("evaluate.examples=4")
    call(bare, "launch.py", *settings)
    assert json.loads((tmp_path / "result.json").read_text())["algo"] == algo


@pytest.mark.run
def test_help_shows_the_choices_without_plugins(bare):
    shown = call(bare, "launch.py", "--help")
    assert re.search(r"\n  engine +native", shown)
    assert re.search(r"\n  algo +classify, eggroll", shown)


@pytest.mark.run
@pytest.mark.thorough
def test_quick_tests_pass_without_plugins(bare):
    marks = "not (run or thorough or slow)"
    call(bare, "-m", "pytest", "-q", "-m", marks, "tests/unit", "tests/oracles")
