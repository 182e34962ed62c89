"""Ranks: the context of a worker, the start of workers, sharded weights."""

from common.distributed import fsdp
from common.distributed.context import Context, fingerprint, put_back
from common.distributed.workers import launch

__all__ = [
    "Context",
    "fingerprint",
    "fsdp",
    "launch",
    "put_back",
]
