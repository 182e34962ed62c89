"""Ranks: the context of a worker, the start of workers, the sharding of weights, checkpoints."""

from common.distributed.broadcast import send_weights, without_weights
from common.distributed.checkpoints import (
    check_equal,
    names_in_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from common.distributed.context import Context, fingerprint, put_back
from common.distributed.fsdp import cut_mesh, measure_state, shard
from common.distributed.sharding import Sharding, full_tensor, is_sharded, sharding_of
from common.distributed.workers import launch

__all__ = [
    "Context",
    "Sharding",
    "check_equal",
    "cut_mesh",
    "fingerprint",
    "full_tensor",
    "is_sharded",
    "launch",
    "measure_state",
    "names_in_checkpoint",
    "put_back",
    "restore_checkpoint",
    "save_checkpoint",
    "send_weights",
    "shard",
    "sharding_of",
    "without_weights",
]
