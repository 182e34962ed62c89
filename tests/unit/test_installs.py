"""Install commands in code, conf and docs: what they name exists, and none fetches a stranger's
package.

The name `clutch` on the package index belongs to another project; ours is used from its checkout.
"""

import re
import tomllib
from collections.abc import Iterator

from tests.support import ROOT

SUFFIXES = {".py", ".yaml", ".md", ".ipynb", ".toml", ""}
FOLDERS = ("common", "eggroll", "grpo", "rft", "ddp_bench", "benchmarks", "conf", "docs")
PLACES = (*FOLDERS, "plugins", "examples", "tests", ".ci", "launch.py", "README.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Installed in addition to what pyproject.toml names: tools, and peers that docs and tests name.
OTHERS = {"uv", "pip", "pip-audit", "vllm", "flash-attn", "verifiers", "openenv"}


def named(requirement: str) -> str:
    """The distribution of a requirement, such as math-verify of math-verify[antlr4_9_3]>=0.8."""
    return re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0].lower()


KNOWN = OTHERS | {
    named(requirement)
    for requirements in (PROJECT["dependencies"], *EXTRAS.values())
    for requirement in requirements
    if named(requirement) != PROJECT["name"]
}


def commands() -> Iterator[tuple[str, str]]:
    """Each file, and what stands behind `pip install` in it."""
    for place in PLACES:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file() or file.suffix not in SUFFIXES or "results" in file.parts:
                continue
            text = re.sub(r'"\s*\n\s*f?r?"', "", file.read_text(encoding="utf-8"))
            text = re.sub(r"\s*\n\s*(?:# )?", "\n", text)
            for found in re.finditer(r"pip\s+install\s+((?:\\?[^\n`\"|#;&()]|\n(?='))*)", text):
                if file != ROOT / "tests/unit/test_installs.py":
                    yield str(file.relative_to(ROOT)), found[1].replace("\\", "")


def test_install_commands_name_what_exists():
    seen = list(commands())
    assert len(seen) > 40
    wrong = []
    for file, command in seen:
        extras = [
            name for group in re.findall(r"\.\[([\w,]+)\]", command) for name in group.split(",")
        ]
        first = command.strip("'\"").split()[0].rstrip(".,")
        if (
            not set(extras) <= set(EXTRAS)
            or re.search(r"(?<![\w./-])clutch\b", command)
            or not (first.startswith(("-", "{")) or named(first) in KNOWN)
        ):
            wrong.append((file, command))
    assert not wrong


def test_the_distribution_has_a_name_of_its_own():
    assert PROJECT["name"] == "clutch-rl"
