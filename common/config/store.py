"""Hydra's store of the schemas of settings. No torch in here."""

from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore


class _Shared(dict[str, Any]):
    """The contents of Hydra's store. Hydra copies them a hundred times for --help, and each schema
    again where it takes one out, so all copies of the store may share them.
    """

    def __deepcopy__(self, _: Any) -> "_Shared":
        return self


@cache
def keep(name: str, node: type, group: str | None = None) -> None:
    """Tell Hydra a schema, once."""
    store = ConfigStore.instance()
    if not isinstance(store.repo, _Shared):
        store.repo = _Shared(store.repo)
    store.store(name=name, node=node, group=group)
