"""Read the comments of settings: from YAML files, and from the code next to their types."""

import ast
import functools
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Comment:
    """The comment of a setting.

    Attributes:
        key: the setting that it stands at, which may be the one above or the group.
        text: the comment, whose paragraphs and list items are lines.
    """

    key: str
    text: str


def note(comment: Comment | None, key: str) -> str:
    """Return the text of a comment, with the setting that it stands at if that is another one."""
    if comment is None:
        return ""
    return comment.text if comment.key == key else f"(at {comment.key}) {comment.text}"


def find_prefix(path: Path, usual: str) -> str:
    """Return the beginning of the keys in a file of a group: `usual`, or that of its # @package."""
    found = re.match(r"# @package (\S+)", path.read_text(encoding="utf-8"))
    if found is None:
        return usual
    return "" if found[1] == "_global_" else f"{found[1]}."


@functools.cache
def read(path: Path, prefix: str = "") -> dict[str, Comment]:
    """Return the comments of a YAML file by key.

    A key without a comment has that of the key above it, if nothing stands between the two, or
    else that of its group, or else that of the file.
    """
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return {}
    lines = text.splitlines()
    head = _join([line for line in _leading(lines) if not line.startswith("# @package")])
    found: dict[str, Comment] = {}
    _collect(root, lines, prefix, Comment(prefix.rstrip("."), head), found)
    if prefix and head:
        found.setdefault(prefix.rstrip("."), Comment(prefix.rstrip("."), head))
    return found


def _leading(lines: list[str]) -> list[str]:
    return lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), None)]


def _collect(
    node: yaml.MappingNode, lines: list[str], prefix: str, outer: Comment, found: dict[str, Comment]
) -> None:
    """Add the comments of the keys of a mapping, and of the mappings in it."""
    before: Comment | None = None  # the comment above the keys that stand together
    end = -1  # the last line of the key above
    for name, value in node.value:
        line, key = name.start_mark.line, f"{prefix}{name.value}"
        starts = not lines[line][: name.start_mark.column].strip()
        above = _join(_above(lines, line)) if starts else ""
        text = "\n".join(filter(None, [above, _behind(name, value, lines) if starts else ""]))
        if above:
            before = Comment(key, above)
        elif line != end + 1 and not node.flow_style:
            before = None
        if key != "defaults":
            found[key] = Comment(key, text) if text else before or outer
        end = _last_line(value)
        if isinstance(value, yaml.MappingNode):
            _collect(value, lines, f"{key}.", found.get(key, outer), found)
        elif name.value == "defaults" and isinstance(value, yaml.SequenceNode):
            for one in value.value:
                if isinstance(one, yaml.MappingNode):
                    _collect(one, lines, prefix, Comment(prefix, ""), found)
        if text and not above:
            before = None  # a comment behind a value is of that key alone


def _above(lines: list[str], line: int) -> list[str]:
    """Return the lines of the comment directly above a line."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return [one for one in lines[first:line] if not one.startswith("# @package")]


def _behind(name: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    """Return the comment behind a value, or behind the key of a group."""
    block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    mark = name.end_mark if block else value.end_mark
    if mark.line >= len(lines):
        return ""
    match = re.match(r":?\s+#\s?(.*)", lines[mark.line][mark.column :])
    return match[1].strip() if match else ""


def _last_line(value: yaml.Node) -> int:
    """Return the line on which a value ends."""
    mark = value.end_mark
    return mark.line - 1 if mark.column == 0 and mark.line > value.start_mark.line else mark.line


def _join(lines: list[str]) -> str:
    """Return the text of the lines of a comment; list items and indented lines stay lines."""
    text = ""
    for raw in lines:
        line = re.sub(r"^\s*#\s?", "", raw)
        own = not text or line.startswith(("  ", "- ")) or not line.strip()
        text += ("\n" if own and text else " " if text else "") + line.strip()
    return text.strip()


def of_field(owner: Any, key: str) -> str:
    """Return the comment next to a field in the code of a dataclass, or of its base classes."""
    name = key.rpartition(".")[2]
    for one in owner.__mro__ if isinstance(owner, type) else ():
        if text := _field_comments(one).get(name):
            return text
    return ""


@functools.cache
def _field_comments(owner: type) -> dict[str, str]:
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):
        return {}
    lines = source.splitlines()
    try:
        body: Any = ast.parse(inspect.cleandoc(source)).body[0]
    except SyntaxError:
        return {}
    found = {}
    for node in getattr(body, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = lines[(node.end_lineno or node.lineno) - 1]
            behind = re.search(r"\s#\s(.*)", last[node.end_col_offset :])
            above = _join(_above(lines, node.lineno - 1))
            found[node.target.id] = " ".join(filter(None, [above, behind[1] if behind else ""]))
    return found
