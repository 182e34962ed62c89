"""Hydra's YAML files, parsed once: composing a run reads a score of them, and tests compose a
thousand runs.
"""

import os
import pickle

from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

_parsed: dict[tuple, bytes] = {}
_load_config = ConfigRepository.load_config


def hold_files() -> None:
    """From here on a file is parsed again only once it has changed."""
    ConfigRepository.load_config = load_config


def load_config(repository: ConfigRepository, config_path: str):
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None:
        return _load_config(repository, config_path)
    key = (source.scheme(), source.path, source.provider, config_path)
    if source.scheme() == "file":
        found = os.stat(os.path.join(source.path, source._normalize_file_name(config_path)))
        key += (found.st_mtime_ns, found.st_size, found.st_ino)
    if key not in _parsed:
        _parsed[key] = pickle.dumps(_load_config(repository, config_path))
    return pickle.loads(_parsed[key])  # Hydra changes what it composes
