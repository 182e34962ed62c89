"""python launch.py --explain: each setting has a comment, a type and a default."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from common.config import AUTO, ConfigError, Count, Share, Tuned, describe, one_of, resolvers
from common.config.comments import of_field, read
from common.config.plugins import find_file, list_files
from launch import ALGORITHMS, compose
from tests.support import ROOT


def explained(*arguments: str) -> str:
    resolvers.register()
    return describe.answer(["--explain", *arguments], ALGORITHMS)


def rows(text: str) -> dict[str, str]:
    """The table below the comment: its names and texts."""
    table = text.rpartition("\n\n")[2]
    found: dict[str, str] = {}
    for line in table.splitlines():
        name, _, said = line.strip().partition("  ")
        if line.startswith("   "):
            found[list(found)[-1]] += f" {line.strip()}"
        else:
            found[name] = said.strip()
    return found


# --- every setting


def commands() -> list[list[str]]:
    """One command per algorithm, per option of the groups whose settings differ, and per task."""
    options = [
        [f"{group}={path.stem}"] for group in ("task", "engine") for path in list_files(group)
    ]
    more = [["model=hf"], ["hardware=h100"], ["opt=[amp,fsdp,compile]"], ["experiment=grpo_dapo"]]
    return [*([f"algo={name}"] for name in ALGORITHMS), *options, *more]


@pytest.mark.parametrize("overrides", commands(), ids=" ".join)
def test_every_setting_has_an_explanation(overrides):
    resolvers.register()
    command = describe.Command(overrides, None, ALGORITHMS, imports_task=True)
    for key in command.settings:
        if not command.below(key) and not key.endswith("_target_"):
            comment = command.comment(key)
            assert comment is not None, key
            assert re.search(r"\w{2}", comment.text), key


@pytest.mark.parametrize("overrides", commands()[: len(ALGORITHMS)], ids=" ".join)
def test_defaults_are_those_of_the_composed_run(overrides):
    resolvers.register()
    command = describe.Command(overrides, None, ALGORITHMS)
    run = compose(overrides)
    for key, setting in command.settings.items():
        if not key.startswith(("algo.", "evaluate.", "scoring.")) or command.below(key):
            continue
        value: Any = run
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        if isinstance(value, int | float | str) or value is None:
            assert command.show_value_of(setting) == describe.show_value(value), key


# --- one setting


def test_a_setting_with_everything():
    text = explained("algo.sigma")
    found = rows(text)
    assert text.startswith("algo.sigma\n  Standard deviation of the noise")
    assert found["type"] == "a number above 0, or auto"
    assert found["default"].startswith("0.01, from ${clutch_recipe:")
    assert found["set in"] == "conf/algo/eggroll.yaml"
    assert found["belongs to"] == "EggrollConfig in eggroll/config.py"
    assert "eggroll/population.py" in found["read in"]
    assert found["docs"].startswith("docs/eggroll.md")


def test_a_recipe_and_the_environment_count(monkeypatch):
    assert rows(explained("algo.sigma", "model=hf", "model.path=x"))["default"].startswith("auto,")
    assert rows(explained("scoring.kind", "algo=grpo"))["default"].startswith("serial,")
    monkeypatch.setenv("PARALLEL_REWARDS", "true")
    assert rows(explained("scoring.kind", "algo=grpo"))["default"].startswith("threads,")


def test_an_experiment_and_an_algorithm_change_defaults():
    found = rows(explained("algo.resample_rounds", "experiment=grpo_dapo"))
    assert (found["default"], found["set in"]) == ("3", "conf/experiment/grpo_dapo.yaml")
    found = rows(explained("checkpoint.every", "algo=classify"))
    assert (found["default"], found["set in"]) == ("500", "conf/algo/classify.yaml")


def test_an_override_of_the_key_stands_beside_its_default():
    for arguments in (["algo.members", "algo.members=8"], ["algo.members=8"]):
        found = rows(explained(*arguments))
        assert (found["default"], found["here"]) == ("64", "8")
    assert "here" not in rows(explained("algo.members"))


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("algo.rank", "bounds", "at least 1"),
        ("algo.sample_quantile", "bounds", "at least 0, at most 1"),
        ("algo.sample_quantile", "type", "a number, or null"),
        ("algo.noise.vectors", "choices", "lowrank, full, frozen"),
        ("algo.mirrored", "type", "true or false"),
        ("algo.sampling.stop", "type", "a list of a text"),
        ("engine.cuda_graphs", "type", "true or false"),
        ("task.reward", "choices", "exact, levenshtein, bleu, chrf"),
        ("model.adapter.alpha", "default", "32"),
        ("opt.amp.dtype", "choices", "auto, bfloat16, float16"),
    ],
)
def test_types_bounds_and_choices_are_those_that_are_checked(key, name, said):
    assert sorted(rows(explained(key))[name].split(", ")) == sorted(said.split(", "))


def test_keys_of_open_dicts_are_explained_by_the_dict():
    assert "optimizer" in explained("algo.optimizer.kwargs.weight_decay")
    assert "patterns" in explained("algo.noise.patterns.lower")
    assert "temperature" in explained("evaluate.sampling.top_p")


def test_several_keys_at_once():
    text = explained("algo.rank", "algo.members", "algo=eggroll")
    assert "Rank r of the noise" in text
    assert "Population" in text


@pytest.mark.skipif(not find_file("task/reasoning_gym.yaml").is_file(), reason="of a plugin")
def test_settings_of_plugins():
    found = rows(explained("task.few_shot", "task=reasoning_gym"))
    assert found["set in"].startswith("plugins/reasoning_gym/conf/")
    assert found["docs"].startswith("plugins/reasoning_gym/README.md")
    with pytest.raises(ConfigError, match=r"python launch.py task=\w+ --explain task.few_shot$"):
        explained("task.few_shot")


def test_settings_of_the_users_own_files(tmp_path):
    (tmp_path / "task").mkdir()
    own = "# Rows of my own.\ndefaults: [units, _self_]\n\n# Mine: how many.\nproblems: 77\n"
    (tmp_path / "task" / "mine.yaml").write_text(own)
    text = explained("task.problems", "task=mine", "--config-dir", str(tmp_path))
    assert "Mine: how many." in text
    assert rows(text)["default"] == "77"


# --- groups


def test_without_a_key_the_groups_are_listed():
    text = explained()
    for name in ("algo", "task", "evaluate", "seed", "experiment"):
        assert re.search(rf"^  {name} +\S", text, re.M), name
    assert "grpo" in text


@pytest.mark.parametrize("group", ["algo", "algo.kl", "model", "opt", "evaluate", "task", "engine"])
def test_a_group_lists_its_settings(group):
    text = explained(group, "algo=grpo")
    command = describe.Command(["algo=grpo"], None, ALGORITHMS, imports_task=group == "task")
    assert command.below(group)
    for key in command.below(group):
        assert re.search(rf"^{re.escape(key)}( = \S|\.$)", text, re.M), key


def test_experiments_are_listed():
    assert re.search(r"^  grpo_dapo +DAPO", explained("experiment"), re.M)


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "near", "command"),
    [
        (["algo.sgima"], "'sigma'", "python launch.py --explain algo"),
        (["algo.kl.bta", "algo=grpo"], "'beta'", "python launch.py algo=grpo --explain algo.kl"),
        (["sigma"], "'algo.sigma'", "python launch.py --explain"),
        (["algo.kl.beta"], "algo=grpo", "python launch.py algo=grpo --explain algo.kl.beta"),
        (["nothing.at.all"], "seed", "python launch.py --explain"),
        (["seed.x"], "seed", "python launch.py --explain"),
    ],
)
def test_a_wrong_key_ends_with_the_command_to_run(arguments, near, command):
    with pytest.raises(ConfigError) as raised:
        explained(*arguments)
    assert near in str(raised.value)
    assert str(raised.value).endswith(command)


@pytest.mark.parametrize("flag", ["--cfg", "-m", "--help", "-cn"])
def test_other_options_do_not_go_with_it(flag):
    with pytest.raises(ConfigError, match=flag):
        explained("algo.sigma", flag)


@pytest.mark.parametrize(
    ("overrides", "command"),
    [
        (["algo.sgima=1"], "python launch.py algo=eggroll --explain algo"),
        (["algo=grpo", "algo.kl.bta=1"], "python launch.py algo=grpo --explain algo.kl"),
        (["evaluate.exmples=1"], "python launch.py --explain evaluate"),
        (["sed=1"], "python launch.py --explain"),
        (["task=units", "task.foo=1"], "python launch.py task=units --explain task"),
        (["opt.amp.foo=1"], "python launch.py --explain opt.amp"),
    ],
)
def test_the_error_of_a_run_ends_with_a_command_that_works(overrides, command):
    with pytest.raises(ConfigError) as raised:
        compose(overrides)
    assert str(raised.value).endswith(command)
    arguments = command.removeprefix("python launch.py ").split()
    resolvers.register()
    assert describe.answer(arguments, ALGORITHMS)


@pytest.mark.run
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--explain", "algo.members"], 0, "Population"),
        (["algo=grpo", "--explain=algo.kl.beta"], 0, "KL penalty"),
        (["--explain", "algo.sgima"], 2, "python launch.py --explain algo\n"),
    ],
    ids=["a key", "with an equals sign", "a wrong key"],
)
def test_the_command_line(tmp_path, arguments, code, said):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


# --- comments


YAML = """# @package algo
# The file.
name: x
# Above a pair,
# on two lines:
#   a: an item
one: 1
two: 2 # behind

three: 3
# Of the group.
group: # and more
  inner: {deep: 1}
  text: "a # b" # after a text
  last: [1, # no
    2]
"""


def test_comments_of_a_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(YAML)
    found = {key: (one.key, one.text) for key, one in read(path, "algo.").items()}
    assert found["algo.one"] == ("algo.one", "Above a pair, on two lines:\na: an item")
    assert found["algo.two"] == ("algo.two", "behind")
    assert found["algo.three"] == ("algo", "The file.")
    assert found["algo.group"] == ("algo.group", "Of the group.\nand more")
    assert found["algo.group.inner.deep"][0] == "algo.group"
    assert found["algo.group.text"] == ("algo.group.text", "after a text")
    assert found["algo.group.last"][0] == "algo.group"


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "- a\n- list\n", "x: |\n  text # no\ny: 1\n"]
)
def test_odd_files_have_comments_of_their_own_kind(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert all(one.text in text for one in read(path).values())


@dataclass
class Declared:
    """A class of settings."""

    first: int = 1  # behind it
    # Above it,
    # twice.
    second: list[str] = field(default_factory=list)  # and at its end
    third: str = "# no comment"


def test_comments_next_to_fields():
    assert of_field(Declared, "x.first") == "behind it"
    assert of_field(Declared, "x.second") == "Above it, twice. and at its end"
    assert of_field(Declared, "x.third") == ""


# --- types


@pytest.mark.parametrize(
    ("kind", "words", "bounds", "choices"),
    [
        (Count, "a whole number", "at least 1", []),
        (Count | None, "a whole number, or null", "at least 1", []),
        (Share, "a number", "at least 0, at most 1", []),
        (Annotated[float, Gt(0), Lt(1)], "a number", "above 0, below 1", []),
        (
            Annotated[int, Ge(-1), Le(8)] | None,
            "a whole number, or null",
            "at least -1, at most 8",
            [],
        ),
        (Tuned, f"a number above 0, or {AUTO}", "", []),
        (Annotated[str, one_of("a", "b")] | None, "a text, or null", "", ["a", "b"]),
        (Literal["x", 2], "a choice", "", ["x", "2"]),
        (dict[str, Annotated[float, Ge(0)]], "a dict of a number", "", []),
        (bool | None, "true or false, or null", "", []),
        (Declared | None, "a group of settings, or null", "", []),
    ],
)
def test_types_in_words(kind, words, bounds, choices):
    assert describe.describe_type(kind) == words
    assert describe.find_bounds(kind) == bounds
    assert describe.find_choices(kind) == choices
