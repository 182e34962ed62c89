"""Ranks: the context of a worker, workers of every kind, sharded weights, Slurm."""

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
