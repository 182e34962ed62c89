"""Folders of rows in the layouts of the Hugging Face hub and of save_to_disk; texts in one folder
per class; glob patterns. Only files are read, and none of their code is run.

The files of a split are listed in README.md, or recognised by name, as `datasets` does:
train-00000-of-00002.parquet, data/test.jsonl, train/part-1.csv. A configuration is a folder of its
own, or an entry of README.md.
"""

import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from common.tasks.data.row import Row
from common.tasks.data.source import DATA_SUFFIXES, Source, in_folder
from common.tasks.data.text import Text

# The names of each split, starting with the one that users give.
_SPLITS = (
    ("train", "training"),
    ("validation", "valid", "val", "dev"),
    ("test", "testing", "eval", "evaluation"),
)
_SHARD = re.compile(r"(?P<name>.*?)-?(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]{16})?\.")
# Files with metadata of a dataset.
_ABOUT = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_UNLABELLED = ("unsup",)  # folders of texts without a class, as aclImdb has one


def is_glob(path: str) -> bool:
    """Return whether a path is a glob pattern and not the name of a file."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def find_matches(source: Source) -> list[Source]:
    """Return the files that a pattern matches, sorted by name."""
    found = glob.glob(str(Path(source.path).expanduser()), recursive=True)
    files = [path for path in map(Path, found) if path.is_file()]
    if not files:
        source.fail(
            f"matches no file; tried {source.file}. Correct the pattern: a relative one starts at"
            " the folder where the command runs."
        )
    source.note(f"{len(files)} file{'s' * (len(files) > 1)}")
    return [in_folder(source, path) for path in sorted(files, key=_natural)]


def find_files(source: Source, config: str | None, split: str) -> list[Source] | None:
    """Return the files of a split of a folder; None if no file name there is recognised. Raises:
    ConfigError for a missing split or configuration.
    """
    folder = source.file
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            _fail_split(source, config, split, splits)
        return _find_saved(source, folder / split)
    if (folder / "state.json").is_file():
        return _find_saved(source, folder)
    named = _read_card(source, folder, config, split)
    if named is None:
        named = _find_named(source, _choose_folder(source, folder, config), config, split)
    return None if named is None else [in_folder(source, path) for path in named]


def _fail_split(source: Source, config: str | None, split: str, splits: Any) -> None:
    chosen = f"split={split}" if config is None else f"config={config}, split={split}"
    source.fail(
        f"cannot be loaded ({chosen}): it has the splits {', '.join(splits)}. Check the split and"
        " the configuration."
    )


def _find_saved(source: Source, folder: Path) -> list[Source]:
    """Return the files of a dataset written by save_to_disk."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_files"):
        source.fail("was saved with indices, by an old `datasets`. Save it again, or as Parquet.")
    return [in_folder(source, folder / one["filename"]) for one in state["_data_files"]]


# --- the files of the hub


def _read_card(source: Source, folder: Path, config: str | None, split: str) -> list[Path] | None:
    """Return the files of a split from the header of README.md; None if it does not list them."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        head = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        head = None
    configs = head.get("configs") if isinstance(head, dict) else None
    configs = [one for one in configs or () if isinstance(one, dict) and one.get("data_files")]
    if not configs or not all(map(_is_complete, configs)):
        return None
    chosen = _choose_config(source, configs, config)
    files: dict[str, list[Path]] = {}
    given = chosen["data_files"]
    for one in given if isinstance(given, list) else [given]:
        name, patterns = ("train", one) if isinstance(one, str) else (one["split"], one["path"])
        base = folder / chosen.get("data_dir", "")
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            paths = [Path(path) for path in glob.glob(str(base / pattern), recursive=True)]
            files.setdefault(name, []).extend(sorted(filter(Path.is_file, paths), key=_natural))
    present = {name: paths for name, paths in files.items() if paths}
    if not present:
        return None
    if split not in present:
        _fail_split(source, config, split, present)
    _check_shards(source, present[split])
    return present[split]


def _is_complete(config: dict[str, Any]) -> bool:
    """Return whether a configuration in README.md lists files, or splits with their files."""
    given = config["data_files"]
    parts = given if isinstance(given, list) else [given]
    return all(isinstance(one, str) or {"split", "path"} <= set(one) for one in parts)


def _choose_config(source: Source, configs: list[Any], config: str | None) -> Any:
    """Return the requested configuration, the default one, or the only one."""
    names = [str(one.get("config_name", "default")) for one in configs]
    if config is None:
        defaults = [one for one in configs if one.get("default")]
        if len(configs) == 1 or defaults:
            return (defaults or configs)[0]
        config = "default"
    if config not in names:
        wanted = "has" if config == "default" else f"has no configuration {config!r}, but"
        source.fail(
            f"{wanted} the configurations {', '.join(names)}. Choose one:"
            f" task.dataset_config={names[0]}."
        )
    return configs[names.index(config)]


def _choose_folder(source: Source, folder: Path, config: str | None) -> Path:
    """Return the folder of a configuration, or the folder itself if there are no configurations."""
    if config is not None and (folder / config).is_dir():
        return folder / config
    inner = [one for one in _folders(folder) if _split_of(Path(one.name)) is None]
    inner = [one for one in inner if one.name != "data" and _data_files(one)]
    here = [path for path in _data_files(folder) if not any(one in path.parents for one in inner)]
    if config is not None:
        there = ", ".join(one.name for one in inner) or "none"
        source.fail(f"has no configuration {config!r}; there: {there}. Correct it.")
    if here or not inner:
        return folder
    if len(inner) > 1:
        names = [one.name for one in inner]
        source.fail(
            f"has the folders {', '.join(names)}. Choose one: task.dataset_config={names[0]}, or"
            f" {source.key}={source.path}/{names[0]}."
        )
    return inner[0]


def _find_named(source: Source, folder: Path, config: str | None, split: str) -> list[Path] | None:
    """Return the files of a split by name; None if there are no files of rows."""
    files = _data_files(folder)
    splits: dict[str | None, list[Path]] = {}
    for path in files:
        splits.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    if not files:
        return None
    wanted = next((names[0] for names in _SPLITS if split in names), split)
    if wanted not in splits:
        if set(splits) != {None} or wanted != "train":
            _fail_split(source, config, split, [name for name in splits if name] or ["train"])
        wanted = None  # files without the name of a split are training rows
    return _choose_files(source, splits[wanted], split)


def _choose_files(source: Source, files: list[Path], split: str) -> list[Path]:
    """Return the file named like the split itself, or else all of them. Raises: ConfigError for the
    same rows in several formats, and for a missing shard.
    """
    plain = [path for path in files if _stem(path) == split]
    chosen = plain or files
    stems = [str(path.with_name(_stem(path))) for path in chosen]
    if len(set(stems)) < len(stems):
        there = ", ".join(path.name for path in chosen[:6])
        source.fail(
            f"must hold exactly one file with the {split} rows; there is {there}. Remove the"
            " others, or name the file itself."
        )
    _check_shards(source, chosen)
    if len(chosen) > 1:
        source.note(f"{len(chosen)} files are the {split} rows")
    return sorted(chosen, key=_natural)


def _check_shards(source: Source, files: list[Path]) -> None:
    """Raise ConfigError if a numbered shard is missing."""
    shards = [found for found in (_SHARD.match(path.name) for path in files) if found]
    numbers = {(found["name"], int(found["number"])) for found in shards}
    for found in shards:
        for number in range(int(found["count"])):
            if (found["name"], number) not in numbers:
                missing = f"{found['name']}-{number:05}-of-{found['count']}"
                source.fail(f"lacks the shard {missing}. Download it, or give the files alone.")


def _data_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder and its subfolders, by their suffixes."""
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or path.name in _ABOUT or not path.is_file():
            continue
        if Source(path=path.name, key="").suffix() in DATA_SUFFIXES:
            found.append(path)
    return found


def _folders(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] != ".")


def _stem(path: Path) -> str:
    """Return the name of a file without the suffixes of its format and compression."""
    suffix = Source(path=path.name, key="").suffix()
    return path.name[: path.name.lower().rfind(suffix)] if suffix else path.name


def _split_of(path: Path) -> str | None:
    """Return the split in the name of a file, or of a folder that contains it; None if there is
    none.
    """
    if (shard := _SHARD.match(path.name)) and shard["name"]:
        return next((names[0] for names in _SPLITS if shard["name"] in names), shard["name"])
    for part in (path.name, *reversed(path.parts[:-1])):
        words = re.split(r"[^a-zA-Z]+", part.lower())
        for names in _SPLITS:
            if any(word in names for word in words):
                return names[0]
    return None


def _natural(path: Path) -> list[Any]:
    """Return a sort key that puts part-10 after part-9."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


# --- texts in a folder for each class


def find_classes(source: Source, split: str) -> Path | None:
    """Return the folder of a split whose subfolders are classes of texts, such as
    aclImdb/train/pos.
    """
    folder = source.file / split
    classes = [one for one in _folders(folder)] if folder.is_dir() else []
    with_texts = [one for one in classes if next(_texts(one), None) is not None]
    return folder if len(with_texts) > 1 else None


def read_classes(source: Source, folder: Path) -> Iterator[Row]:
    """Yield a row per text: the text, and the name of its folder as label."""
    for one in _folders(folder):
        if one.name in _UNLABELLED:
            source.note(f"{one.name}/ is left out: its texts have no class")
            continue
        for path in sorted(_texts(one), key=_natural):
            with Text(in_folder(source, path)).open() as text:
                yield Row(repr(str(path)), {"text": text.read(), "label": one.name})


def _texts(folder: Path) -> Iterator[Path]:
    """Yield the text files in a folder: .txt, or without a suffix, as in 20 Newsgroups."""
    return (path for path in folder.iterdir() if path.is_file() and path.suffix in ("", ".txt"))
