"""Print the command for a configuration of TRL or verl: python -m plugins.moving FILE.yaml."""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from plugins.moving.sizes import ACTOR, BETAS, SIZES, combine
from plugins.moving.table import TRL, VERL, Entry, as_markdown

ALWAYS = ("algo=grpo",)
# What the sizes together say.
COUNTED = (*SIZES, *BETAS, f"{ACTOR}.ppo_mini_batch_size")


def flat(values: dict[str, Any], front: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{front}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return found


def read_numbers(value: Any) -> Any:
    """Return settings in which quoted numbers, and numbers such as 1e3, which YAML reads as text,
    are numbers. A small one such as 1e-6 keeps its spelling.
    """
    if isinstance(value, dict):
        return {key: read_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [read_numbers(inner) for inner in value]
    if not isinstance(value, str) or not re.fullmatch(r"[-+]?\d+(\.\d*)?(e\+?\d+)?", value, re.I):
        return value
    number = float(value)
    return int(number) if number.is_integer() and "." not in value else number


def translate(settings: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the overrides for a configuration, and the settings that are omitted, with the
    reasons.
    """
    known: dict[str, Entry] = TRL | VERL
    settings = read_numbers(settings)
    if settings.get("warmup_ratio") and not settings.get("warmup_steps"):
        settings.pop("warmup_steps", None)  # which counts for more only if it is above 0
    whole = {key: settings[key] for key in settings if key in known}
    parts = {key: value for key, value in flat(settings).items() if key.split(".")[0] not in whole}
    overrides: list[str] = [*ALWAYS]
    left: dict[str, str] = {}
    for key, value in (whole | parts).items():
        entry = known.get(key)
        if entry is None:
            left[key] = "is not known here"
        elif made := entry.overrides(value):
            overrides += made
        elif value not in (None, False, [], {}):
            left[key] = f"see {entry}" if entry.here else str(entry)
    if "algo.loss=gspo" in overrides:  # a level of TRL's, whatever the loss is called there
        others = [one for one in overrides if one.startswith("algo.loss=") and "gspo" not in one]
        overrides = [one for one in overrides if one not in others]
        left |= {one: "gspo is a loss of its own here" for one in others}
    overrides, together = combine(whole | parts, overrides)
    left = {key: why for key, why in left.items() if key not in COUNTED or key in together}
    left |= together
    switches = dict.fromkeys(one.removeprefix("opt+") for one in overrides if "opt+" in one)
    kept = [one for one in overrides if not one.startswith("opt+")]
    if switches:
        kept.append(f"opt=[{','.join(switches)}]")
    # Groups come before the settings in them.
    return sorted(kept, key=lambda one: "." in one.partition("=")[0]), left


def main() -> None:
    """Read the file, and print the command and the settings that it omits."""
    parser = argparse.ArgumentParser(prog="python -m plugins.moving", description=__doc__)
    shown = parser.add_mutually_exclusive_group(required=True)
    shown.add_argument(
        "file", type=Path, nargs="?", help="a YAML file of TRL's GRPO script, or of verl"
    )
    shown.add_argument("--table", action="store_true", help="print what is known, as Markdown")
    options = parser.parse_args()
    if options.table:
        print(as_markdown(), end="")
        return
    path = options.file
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"error: {path}: {error}. Give a YAML file of TRL's GRPO script, or of verl.")
    if not isinstance(settings, dict):
        sys.exit(f"error: {path} holds no settings. Give a YAML file of names and values.")
    overrides, left = translate(settings)
    print(f"python launch.py {shlex.join(overrides)}")
    for key, why in left.items():
        print(f"# {key}: {why}")


if __name__ == "__main__":
    main()
