"""The memory of a rank: the rows that fit, the bytes of a training step, and the plan of a run."""

from common.memory.arithmetic import (
    BatchShape,
    StateMemory,
    activation_bytes,
    cache_bytes,
    training_peak,
)
from common.memory.fitting import TRAIN_ROWS, Memory, RolloutMemory, count_state, fit, fit_training
from common.memory.plan import decode_seconds, describe, describe_attention
from common.memory.row_limit import FITTED, Load, RowLimit

__all__ = [
    "FITTED",
    "TRAIN_ROWS",
    "BatchShape",
    "Load",
    "Memory",
    "RolloutMemory",
    "RowLimit",
    "StateMemory",
    "activation_bytes",
    "cache_bytes",
    "count_state",
    "decode_seconds",
    "describe",
    "describe_attention",
    "fit",
    "fit_training",
    "training_peak",
]
