"""Names of run folders: each is a folder with a whole run that every command can read, or it is
refused in words.
"""

import json
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from common.config import name_folder
from tests.support import SMALL

# What a user writes within quotes, and the folder that it names.
NAMES = {
    "a b": "a b",
    "  a ": "  a ",
    "a=b": "a=b",
    "a,b": "a,b",
    "[a]": "[a]",
    "{a: 1}": "{a: 1}",
    "a'b": "a'b",
    "a;b|c&d": "a;b|c&d",
    "a#b?c*": "a#b?c*",
    "(a)": "(a)",
    "null": "null",
    "1e5": "1e5",
    "-x": "-x",
    "--help": "--help",
    "~a": "~a",
    "@a": "@a",
    "$HOME": "$HOME",
    "%s%n": "%s%n",
    "a//b": "a/b",
    "./a/../b": "b",
    ".a": ".a",
    "über/日本": "über/日本",
    "<script>alert(1)</script>": "<script>alert(1)</script>",
    "![a](b) | `c`": "![a](b) | `c`",
    "&amp;": "&amp;",
    "x" * 255: "x" * 255,
}
QUICK = ("a b", "<script>alert(1)</script>")
REFUSED = {
    "x" * 256: "cannot be made: File name too long. Choose another folder.",
    "a\nWARNING b": "='a\\nWARNING b' holds a control character. Leave it out.",
    "a\x1b]0;b\x07": "='a\\x1b]0;b\\x07' holds a control character. Leave it out.",
    "a\u202eb": "='a\\u202eb' holds a control character. Leave it out.",
    "/dev/null/a": "cannot be made: Not a directory. Choose another folder.",
    "${a": "hydra.run.dir",
    "${nothing:1}": "nothing",
}


def thorough(names: dict[str, str], quick: tuple[str, ...]) -> list:
    """One of each kind is in make test."""
    marks = [pytest.mark.thorough]
    return [pytest.param(*pair, marks=marks * (pair[0] not in quick)) for pair in names.items()]


@pytest.mark.parametrize(
    "name", [*NAMES, "a\\", 'a"b', 'a\\"b', "jörg/my runs", "inf", "5"], ids=ascii
)
def test_what_is_advised_names_the_folder(name):
    [word] = shlex.split(name_folder(name))
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override()
    assert override.key_or_group == "hydra.run.dir"
    assert str(override.value()) == name


@pytest.mark.faults
@pytest.mark.parametrize(("name", "folder"), thorough(NAMES, QUICK), ids=ascii)
def test_a_run_in_a_folder_of_any_name(launch, tmp_path, name, folder):
    done = launch(*SMALL, "algo.steps=1", f'hydra.run.dir="{name}"')
    out = tmp_path / folder
    assert json.loads((out / "result.json").read_text())["steps"] == 1
    compared = launch(str(out), str(out), module="common.compare")
    assert str(out) in done.stdout
    assert "eggroll" in compared.stdout
    page = (out / "report.html").read_text()
    assert "<script>alert" not in page
    written = {path.name for path in tmp_path.iterdir()}
    assert written <= {Path(folder).parts[0], "a"}, "nothing is written elsewhere"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "words"), thorough(REFUSED, ("x" * 256,)), ids=lambda text: ascii(text)[:20]
)
def test_a_name_that_no_folder_can_have(launch, tmp_path, name, words):
    done = launch(*SMALL, "algo.steps=1", f'hydra.run.dir="{name}"', code=2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
