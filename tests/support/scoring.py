"""A package that scores in place of math-verify, and functions that should be ended."""

import json
import os
import sys
from pathlib import Path

import pytest

from common.tasks import equality, limited_process

SOURCE = """
import json
from dataclasses import dataclass
@dataclass(frozen=True)
class Normalization:
    units: bool = True
@dataclass(frozen=True)
class LatexExtractionConfig:
    normalization_config: Normalization = Normalization()
def parse(text, configs, **options):
    return text
def verify(gold, target, timeout_seconds):
    with open({path!r}, "a") as file:
        file.write(json.dumps([gold, target]) + "\\n")
    return {right}
"""


class MathVerify:
    """Install a module of that name in `folder`: what it says of `gold` and `target`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.path = folder, folder / "asked.jsonl"
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "math_verify", raising=False)
        limited_process.end_all()
        equality.ask.cache_clear()
        equality.is_comparable.cache_clear()

    def __call__(self, right: str) -> None:
        source = SOURCE.format(path=str(self.path), right=right)
        (self.folder / "math_verify.py").write_text(source)

    @property
    def asked(self) -> list[list[str]]:
        """What was compared, in order."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def answer(text: str) -> float:
    """Return 1 for what is right, and do what a text says."""
    if text == "computes":
        while True:
            pass
    if text == "fills":
        return float(len([0] * 10**10))
    if text == "exits":
        os._exit(0)
    if text == "raises":
        raise ValueError(text)
    if text == "prints":
        print("1.0")
    return {"nan": float("nan"), "two": 2.0, "half": 0.5}.get(text, 1.0)
