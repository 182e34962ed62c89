"""The format of a checkpoint, and what writes and reads it."""

from common.checkpoint import checkpoint
from common.checkpoint.checkpoint import Checkpoint, Writer

__all__ = [
    "Checkpoint",
    "Writer",
    "checkpoint",
]
