"""Turn errors of Hydra and OmegaConf into sentences that name the key, the value, the choices and
the next step.
"""

import difflib
import re
from collections.abc import Sequence

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


def unknown_key(full_key: str, key: str, names: list[str]) -> str:
    """The text for a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{full_key} is not a setting.{hint} Settings here: {', '.join(names)}."


def first_line(error: Exception) -> str:
    """Return the first sentence of an error of OmegaConf on one line."""
    return re.sub(r"\s+", " ", str(error).split("\n    ")[0]).strip()
