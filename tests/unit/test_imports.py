"""launch -> {eggroll, grpo, rft, sft, ddp_bench} -> common; config modules import no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from tests.support import ROOT

ALGORITHMS = {schema.__module__.partition(".")[0] for schema in launch.ALGORITHMS.values()}
PACKAGES = ALGORITHMS | {"common", "launch", "benchmarks"}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(ALGORITHMS | {"common"}))
def test_the_import_rule(package):
    allowed = {"common"} | ({package} if package in ALGORITHMS else set())
    for path in (ROOT / package).rglob("*.py"):
        assert imported(path) & PACKAGES <= allowed, path


def test_composing_imports_no_torch():
    code = "import sys, launch; launch.compose(['algo=eggroll']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
