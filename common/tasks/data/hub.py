"""Datasets of the Hugging Face hub, loaded by the `datasets` library."""

from collections.abc import Iterator
from pathlib import Path

from common.config import ConfigError
from common.system import import_optional
from common.tasks.data.columnar import narrow_columns, spelt
from common.tasks.data.row import Row


def read_dataset(name: str, config: str | None, split: str, key: str) -> Iterator[Row]:
    """Yield the rows of one split of a dataset on the Hugging Face hub, with nested fields. A
    dataset's own code is never run (no trust_remote_code).

    Args: name: the id; config: its configuration; None = its only one.
    """
    missing = (
        f"{key}={name!r} is not a file or a folder here, and as an id of the Hugging Face hub it"
        f" needs the `datasets` library; tried {Path(name).expanduser().absolute()}. Correct the"
        " path, or install the library: pip install -e '.[data]'"
    )
    datasets = import_optional("datasets", missing)
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        chosen = f"split={split}" if config is None else f"config={config}, split={split}"
        raise ConfigError(
            f"{key}={name!r} cannot be loaded ({chosen}): {reason.removesuffix('.')}. Check the id,"
            " the configuration, the split and the network; or give local files."
        ) from None
    where = f"{name!r} split {split}"
    kinds = {column: getattr(kind, "dtype", None) for column, kind in loaded.features.items()}
    for number, row in enumerate(spelt(loaded, narrow_columns(kinds)), start=1):
        yield Row(f"{where} row {number}", row)
