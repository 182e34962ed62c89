"""The commands of the documentation: each is known, and composes or parses as it stands; links lead
somewhere.

A block of commands that a test cannot try is marked in the Markdown, in a line of its own before
it: <!-- needs: network -->, or gpu or cluster. Commands of a marked block are still checked as far
as that goes without: composed, or parsed.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import launch
from common.config import describe, resolvers
from common.config.plugins import COMMANDS
from launch import ALGORITHMS, compose
from tests.support import ROOT, SMALL

PAGES = [
    *(ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "examples" / "README.md"),
    *sorted((ROOT / "skills").glob("*/SKILL.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
]
NEEDS = ("gpu", "cluster", "network")
PROGRAMS = (
    "python",
    "torchrun",
    "sbatch",
    "srun",
    "make",
    "pip",
    "tensorboard",
    "trackio",
    "wandb",
    "pytest",
    "clutch",
)
FOREIGN = ("lm_eval", "pip", "tensorboard", "trackio", "wandb")  # of other projects


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}: {self.line[:90]}"


def blocks(text: str) -> list[tuple[list[str], str | None, str]]:
    """(lines, what it needs, language) of each code block, fenced or indented."""
    found: list[tuple[list[str], str | None, str]] = []
    needs, fence, lines, language = None, False, [], ""
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            if fence:
                found.append((lines, needs, language))
                needs, lines = None, []
            fence, language = not fence, line[3:].strip()
        elif fence:
            lines.append(line)
        elif line.startswith("    "):
            lines.append(line[4:])
        elif lines:
            found.append((lines, needs, ""))
            needs, lines = None, []
        if not fence and (mark := re.fullmatch(r"<!-- needs: (\w+) -->", line)):
            needs = mark[1]
            assert needs in NEEDS, line
    return found


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
        for lines, needs, language in blocks(text):
            if language in ("python", "yaml"):
                continue
            joined: list[str] = []
            for line in lines:
                if joined and joined[-1].endswith("\\"):
                    joined[-1] = joined[-1][:-1] + line.strip()
                elif (
                    joined
                    and line.startswith(" ")
                    and not joined[-1].startswith(("prompt", "held-out"))
                ):
                    joined[-1] += " " + line.strip()  # goes on
                elif line.strip():
                    joined.append(line)
            for line in joined:
                if words(line)[:1] and (
                    words(line)[0] in PROGRAMS or words(line)[0].startswith("task=")
                ):
                    found.append(Command(name, line, needs))
        for cell in re.findall(r"`((?:python|torchrun|sbatch) [^`]*)`", text):
            if (
                page.name == "sources.md"
                and f"| `{cell}`" in text
                and f"| `{cell}` |" not in re.sub(r"(?m)^\|[^|]*", "", text)
            ):
                continue  # the left column: what the documents had
            found.append(Command(name, cell, None))
    return found


def words(line: str) -> list[str]:
    """The command's words, without its comment, what is piped into it, redirections and variables
    before it.
    """
    try:
        found = shlex.split(line, comments=True)
    except ValueError:
        return []
    for sign in ("|", "&&"):
        while sign in found:
            at = found.index(sign)
            found = found[:at] if found[at + 1 :] == ["source"] else found[at + 1 :]
    for sign in (">",):
        found = found[: found.index(sign)] if sign in found else found
    while found and re.match(r"[A-Z_]+=", found[0]):
        found = found[1:]
    return found


ALL = commands()


def parsed(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the arguments as the module's command line would, and stop there."""

    class Parsed(Exception):
        pass

    def stop_after(parse):
        def parsing(self, *args, **kwargs):
            parse(self, *args, **kwargs)
            raise Parsed

        return parsing

    packages = ("common", "eggroll")
    doors = {f"{package}.{name}": one for name, one in COMMANDS.items() for package in packages}
    found = importlib.import_module(doors.get(module, module))
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)
        monkeypatch.setattr(argparse.ArgumentParser, name, stop_after(parse))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        found.main()


@cache
def once(overrides: tuple[str, ...], folder: str | None) -> None:
    """Compose; pages have many commands in common."""
    compose(list(overrides), folder)


def composed(arguments: list[str], algo: str | None = None) -> None:
    """Compose jobs with every value that the arguments of launch.py name."""
    if {"--help", "-sc", "-cp", "-p"} & set(arguments):
        return
    if describe.asks(arguments):
        resolvers.register()
        assert describe.answer(arguments, ALGORITHMS)
        return
    arguments = [
        a for a in arguments if a not in ("--cfg", "job", "--resolve", "-m", "--multirun", "...")
    ]
    folder = None
    if "--config-dir" in arguments:
        at = arguments.index("--config-dir")
        folder = str(ROOT / "examples" / "own_task" / "conf")
        del arguments[at : at + 2]
    choices = []
    for argument in arguments:
        override = OverridesParser.create().parse_override(argument)
        if override.is_sweep_override():
            key = argument.partition("=")[0]
            values = list(override.sweep_string_iterator())
            choices.append([f"{key}={value}" for value in values[: 1 if key == "seed" else None]])
        else:
            choices.append([argument])
    for number in range(max(map(len, choices), default=1)):  # each value once, not each pair
        job = [values[number % len(values)] for values in choices]
        own = [a for a in job if not a.startswith("hydra.")]
        once((*([f"algo={algo}"] if algo else []), *own), folder)


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command_is_right(command, monkeypatch):
    found = words(command.line)
    program = found[0]
    if program.startswith("task="):
        kinds = re.search(r"task=(ag_news|imdb|custom_text|topics|trajectories)\b", command.line)
        composed([w for w in found if w != "..."], "classify" if kinds else "grpo")
    elif program in FOREIGN:
        if program == "wandb" and found[1] == "sweep":
            assert (ROOT / found[-1]).is_file()
        else:
            assert program != "pip" or command.needs == "network" or found[1] == "install"
    elif program == "make":
        assert f"\n{found[1]}:" in (ROOT / "Makefile").read_text()
    elif program == "sbatch":
        assert f"slurm.script={found[-1]} " in (ROOT / command.page).read_text(), (
            "a script that the page has made"
        )
    elif program == "pytest" or found[1:3] == ["-m", "pytest"]:
        for word in found:
            assert not word.startswith(("tests/", "plugins/")) or (ROOT / word).is_file(), word
    elif program == "torchrun" and "launch.py" not in found:
        assert all(word.startswith("--") for word in found[1:])  # named in a sentence
    elif "launch.py" in found or "../../launch.py" in found:
        assert program in ("python", "torchrun", "srun")
        at = next(i for i, word in enumerate(found) if word.endswith("launch.py"))
        composed(found[at + 1 :])
    elif found[1:3] == ["-m", "tests.support.soak"]:
        assert "--minutes" in found
        assert "--out" in found
    elif found[1].endswith(".py"):
        assert (ROOT / found[1]).is_file() or command.needs == "network"  # of another project
    elif found[1:2] == ["-m"] and found[2] != "venv":
        parsed(found[2], found[3:], monkeypatch)
    else:
        assert found[1:3] == [
            "-m",
            "venv",
        ], f"a command that this test does not know: {command.line}"


def test_there_are_commands_of_every_kind():
    assert len(ALL) > 120
    assert {"README.md", "docs/quickstart.md", "docs/sources.md"} <= {
        command.page for command in ALL
    }
    assert any(command.needs == "cluster" for command in ALL)


def right_column() -> list[tuple[str | None, list[str]]]:
    """The settings in the right column of docs/sources.md: (algorithm, overrides) of each cell."""
    sections = re.split(r"(?m)^## ", (ROOT / "docs" / "sources.md").read_text())[1:]
    algorithms = ["eggroll", "grpo", "rft", "classify", "classify"]
    found = []
    for algo, section in zip(algorithms, sections, strict=True):
        for row in section.splitlines():
            cells = row.split(" | ")
            for code in re.findall(
                r"`([^`]*)`", cells[1] if len(cells) > 1 and row.startswith("| ") else ""
            ):
                given = words(code)
                if (
                    not given
                    or not all(re.match(r"[\w.]+=", word) for word in given)
                    or "..." in code
                    or " = " in code
                ):
                    continue
                needed = ["opt=[ddp]"] if "opt.ddp" in code and "opt=[" not in code else []
                found.append((None if "algo=" in code else algo, [*needed, *given]))
    assert len(found) > 50
    return found


def test_the_keys_in_the_right_column_of_sources_are_settings():
    """Of the algorithm of their section."""
    resolvers.register()
    with hydra.initialize_config_dir(str(launch.CONF), version_base="1.3"):
        switches = "amp,compile,ddp,profile"
        every = {a: hydra.compose("config", [f"algo={a}", f"opt=[{switches}]"]) for a in ALGORITHMS}
    for algo, given in right_column():
        config = every[next((word[5:] for word in given if word.startswith("algo=")), algo)]
        for key in (word.partition("=")[0] for word in given):
            parent, _, name = key.rpartition(".")
            node = (OmegaConf.select(config, parent) if parent else config) or {}
            known = name in node or (launch.CONF / key).is_dir()
            assert known or key.startswith(("task.", "hydra.")), f"{key} of {given}"


@pytest.mark.thorough
def test_the_settings_in_the_right_column_of_sources():
    """Each `key=value` there composes, with the algorithm of its section."""
    for algo, given in right_column():
        composed(given, algo)


def test_the_python_page_runs(in_cache, tmp_path, monkeypatch, capsys):
    """All its blocks in turn, as in a notebook, with a smaller model and fewer steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "compose", lambda overrides: compose([*overrides, *SMALL]))
    space: dict = {}
    for lines, _, language in blocks((ROOT / "docs" / "python.md").read_text()):
        if language == "python":
            exec("\n".join(lines), space)
    assert (tmp_path / "outputs" / "vowels" / "result.json").is_file()
    assert "bleu 0.0 ->" in capsys.readouterr().out


@pytest.mark.parametrize("page", list((ROOT / "skills").glob("*/SKILL.md")), ids=str)
def test_a_skill_has_a_name_and_a_description(page: Path):
    _, front, text = page.read_text(encoding="utf-8").split("---\n", 2)
    found = yaml.safe_load(front)
    assert set(found) == {"name", "description"}
    assert found["name"] == page.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", found["name"])
    assert 0 < len(found["description"]) <= 1024
    assert text.strip().startswith("# ")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} of {page.name}"
        if anchor:
            titles = re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))
            assert anchor in {
                re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
            }, target


@pytest.mark.thorough
def test_the_notebook_runs(cache, tmp_path):
    """Its cells, in order, with a shorter run, where there is no Jupyter."""
    pytest.importorskip("pandas")
    notebook = json.loads((ROOT / "examples" / "a_run_from_python.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    short = '"algo.steps=2", "algo.members=8", "model.tiny.pretrain_steps=20"'
    script = "\n\n".join(cells).replace('"algo.steps=20"', short)
    script += """
assert list(history.step) == [1, 2]
assert list(evaluations.step) == [0, 2]
assert evaluations[result.metric].iloc[-1] == result.after
assert len(held_out) == 2 * 64
assert training.reward.between(0, 1).all()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"CLUTCH_CACHE": str(cache), "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
