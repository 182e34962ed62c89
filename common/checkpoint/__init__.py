"""The format of a checkpoint, its writer and its reader."""

from common.checkpoint import checkpoint
from common.checkpoint.checkpoint import Checkpoint, Writer

__all__ = [
    "Checkpoint",
    "Writer",
    "checkpoint",
]
