"""The reference in docs/python.md, made of docstrings: python -m tests.support.python_page."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from common.config import ConfigError
from common.report.summary import Result
from common.task import Example, Task, TaskFeatures
from launch import compose, train
from tests.support import ROOT

PAGE = ROOT / "docs" / "python.md"
BEGIN = "<!-- made from docstrings by python -m tests.support.python_page -->\n"
END = "<!-- end of what is made -->\n"
WIDTH = 120
CALLED = ("model_and_tokenizer", "history", "evaluations", "completions")  # of a result


def make() -> str:
    """The reference: functions, the result, a task, the error."""
    parts = [
        "## Reference\n",
        _function(compose, "launch"),
        _function(train, "launch"),
        _heading("Result", "what train returns", Result),
        _items(_fields(Result)),
        *(_function(getattr(Result, name), "result", "####") for name in CALLED),
        _heading("Example", "common.tasks", Example),
        _heading("Task", "common.task", Task),
        *(_function(getattr(Task, name), "task", "####") for name in _public(Task)),
        _heading("TaskFeatures", "common.task", TaskFeatures),
        _items((name, inspect.getdoc(found) or "") for name, found in _properties(TaskFeatures)),
        _heading("ConfigError", "common.config", ConfigError),
    ]
    return "\n".join(parts)


def with_reference(page: str) -> str:
    """The page with the reference as the docstrings have it now."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + make() + "\n" + END + rest.split(END)[1]


def _heading(name: str, place: str, found: type) -> str:
    """A heading with what the docstring of a class says."""
    of = place if " " in place else f"`from {place} import {name}`"
    return f"### {name}\n\n{of[0].upper()}{of[1:]}.\n\n{_prose(inspect.getdoc(found) or '')}"


def _function(found: Callable[..., Any], place: str, level: str = "###") -> str:
    """A heading, the signature as the source has it, and what the docstring says."""
    node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    arguments.args = [one for one in arguments.args if one.arg != "self"]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    call = f"{place}.{node.name}({ast.unparse(arguments)}){returns}"
    call = "\n".join(textwrap.wrap(call, WIDTH, subsequent_indent="        "))
    return f"{level} {node.name}\n\n```\n{call}\n```\n\n{_prose(inspect.getdoc(found) or '')}"


def _prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs, and a list in place of a section of arguments."""
    found = []
    for part in re.split(r"\n\n|\n(?=(?:Args|Attributes|Raises):)", docstring):
        head, _, rest = part.partition("\n")
        if head in ("Args:", "Attributes:"):
            rest, _, after = re.sub(r"\n(?=\S)", "\0", rest).partition("\0")
            rows = re.findall(r"(?m)^    (\w+): (.*(?:\n     .*)*)", rest)
            found += [_items(rows), _fill(after)]
        else:
            found.append(_fill(part))
    return "\n".join(one for one in found if one.strip())


def _items(rows: Any) -> str:
    """A list of names with what is said about them."""
    return "".join(
        textwrap.fill(f"- `{name}`: {' '.join(said.split())}", WIDTH, subsequent_indent="  ") + "\n"
        for name, said in rows
    )


def _fill(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH) + "\n" if text.strip() else ""


def _fields(found: type) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass that have a comment above them, with it."""
    lines = textwrap.dedent(inspect.getsource(found)).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment, at = [], node.lineno - 2
            while lines[at].strip().startswith("# "):
                comment.insert(0, lines[at].strip()[2:])
                at -= 1
            yield node.target.id, f"({ast.unparse(node.annotation)}) {' '.join(comment)}".strip()


def _public(found: type) -> list[str]:
    return [name for name, value in vars(found).items() if name[0] != "_" and callable(value)]


def _properties(found: type) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(found).items() if isinstance(value, property)]


if __name__ == "__main__":
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
