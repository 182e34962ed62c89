"""Turn errors of Hydra and OmegaConf into sentences that name the key, the value, the choices and
the next step.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

# What OmegaConf says of a value of a wrong type, and what to do about it.
_ADVICE = {
    "converted to Integer": "Give a whole number",
    "converted to Float": "Give a number",
    "not a valid bool": "Give true or false",
    "not Optional": "Give a value, or leave it out",
    "to string": "Give one text",
    "incompatible with (int)": "Give whole numbers as names",
}


def wrong_type(given: str, reason: str, names: Sequence[str] = ()) -> str:
    """The text for a value of a wrong type. given: as KEY=VALUE; reason: OmegaConf's; names: of the
    settings in KEY, if it is a group.
    """
    key, _, value = given.partition("=")
    if "ListConfig" in reason:
        return f"{given} is no list. Use '{key}=[{value if value[:1] not in '{[' else '...'}]'."
    if "to Dict[" in reason:
        return f"{given} is no dict. Use '{key}={{NAME: VALUE}}'."
    if "is not a subclass of" in reason:
        shown = (
            f", such as {key}.{names[0]}=VALUE. Settings there: {', '.join(names)}" if names else ""
        )
        return f"{given}: {key} is a group of settings. Set them one by one{shown}."
    advice = next((f" {text}." for part, text in _ADVICE.items() if part in reason), "")
    return f"{given}: {reason.removesuffix('.')}.{advice}"


def find_renamed(schema: Any, names: Sequence[str], prefix: str = "") -> str | None:
    """Return the error text for a key that once was a setting, or None where it never was one.

    A dataclass declares such keys as `RENAMED: ClassVar[dict[str, str | None]]`: the old name below
    it, dotted where a whole group is gone, and what to write now; None means that it is gone.

    Args: schema: the dataclass that the path starts at; names: the path, part by part; prefix: what
    stands before it, such as "algo.".
    """
    for position in range(len(names)):
        renamed: dict[str, str | None] = getattr(schema, "RENAMED", {})
        before = prefix + "".join(f"{name}." for name in names[:position])
        for end in range(len(names), position, -1):
            old = ".".join(names[position:end])
            found = [key for key in renamed if key == old or key.startswith(f"{old}.")]
            if found:
                return " ".join(_explain_renamed(before + key, renamed[key]) for key in found)
        schema = nested_schema(schema, names[position])
    return None


def _explain_renamed(key: str, now: str | None) -> str:
    return f"{key} is now {now}." if now else f"{key} is gone: nothing read it. Leave it out."


def nested_schema(schema: Any, name: str) -> type | None:
    """Return the dataclass of a field, or None where the field has another type or does not exist."""
    if not is_dataclass(schema):
        return None
    kind = {item.name: item.type for item in fields(schema)}.get(name)
    return next((k for k in getattr(kind, "__args__", (kind,)) if is_dataclass(k)), None)  # type: ignore[return-value]


def unknown_key(full_key: str, key: str, names: list[str]) -> str:
    """Return the text for a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{full_key} is not a setting.{hint} Settings here: {', '.join(names)}."


def first_line(error: Exception) -> str:
    """Return the first sentence of an error of OmegaConf on one line."""
    return re.sub(r"\s+", " ", str(error).split("\n    ")[0]).strip()
