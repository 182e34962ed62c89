"""Find the source of a model: a folder or the hub. No torch, so that mistakes are reported at
once.
"""

import re
from pathlib import Path

from common.config.checks import ConfigError
from common.config.schema import ModelConfig

ADAPTER = "adapter_config.json"  # a folder with this file is a peft adapter
POINTER = b"version https://git-lfs"  # the first bytes of a Git LFS file that was not fetched
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_source(config: ModelConfig) -> str:
    """Return `model.path` for transformers: the absolute path of a local folder, or a hub id.

    Raises: ConfigError if the folder does not exist or holds no complete model.
    """
    assert config.path is not None
    setting = f"model.path={config.path!r}"
    local = Path(config.path).expanduser()
    wanted = config.gguf_file or "config.json"
    if local.is_file():
        raise ConfigError(
            f"{setting} is a file. Give the folder that holds it, with a config.json"
            + (
                f"; for a GGUF file: model=gguf model.path={local.parent}"
                f" model.gguf_file={local.name}."
                if local.suffix == ".gguf"
                else "."
            )
        )
    if local.is_dir():
        if not (local / wanted).is_file() and (local / ADAPTER).is_file():
            raise ConfigError(
                f"{setting} is an adapter and no model. Give the model that it belongs to, and the"
                " adapter on top: model=hf model.path=FOLDER_OR_HUB_ID"
                f" model.adapter.path={config.path}."
            )
        if not (local / wanted).is_file():
            inside = ", ".join(sorted(entry.name for entry in local.iterdir())[:8]) or "nothing"
            key = "model.gguf_file" if config.gguf_file else setting
            raise ConfigError(
                f"{setting} is not a model folder: it has no {wanted} (it has: {inside}). "
                + (
                    f"Correct {key}."
                    if config.gguf_file
                    else "Give a folder written by save_pretrained."
                )
            )
        _check_pointers(local, setting)
        if config.revision is not None:
            raise ConfigError(
                f"model.revision={config.revision!r} has no effect: {setting} is a local folder."
                " Remove it."
            )
        return str(local.absolute())  # an adapter may be loaded from another working folder
    if not _HUB_ID.fullmatch(config.path):
        raise ConfigError(
            f"{setting}: there is no such folder. Correct the path (relative ones start at"
            f" {Path.cwd()}), or give a hub id such as HuggingFaceTB/SmolLM2-135M."
        )
    return config.path


def _check_pointers(folder: Path, setting: str) -> None:
    """Raise ConfigError if a file is the pointer that Git LFS leaves in place of a large file."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(POINTER):
            raise ConfigError(
                f"{setting}: {path.name} is a pointer of Git LFS and not the file. Run git lfs pull"
                " in that folder, or give the hub id."
            )
