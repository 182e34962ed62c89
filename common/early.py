"""Find mistakes in files before torch is imported, which takes seconds: a missing file, field,
column or folder is then told at once.
"""

import logging
from collections.abc import Callable
from logging.handlers import MemoryHandler
from typing import Any

from common.config import Run
from common.distributed.slurm import ranked
from common.model.source import find_source
from common.tasks import build

log = logging.getLogger("clutch")


def build_early(run: Run, maker: Callable[[dict[str, Any]], Any] = build) -> Any:
    """Look at the model's folder and build the run's task, with its rows. Returns: the task; None
    where ranks build it, each for itself.

    What is said meanwhile is kept for the log, which is not open yet. Raises: ConfigError.
    """
    if ranked():  # a mistake of one rank must reach the others, which wait for it
        return None
    if run.model.path is not None:
        find_source(run.model)
    log.addHandler(MemoryHandler(1000, flushLevel=logging.CRITICAL + 1))
    log.setLevel(logging.INFO)
    task = maker(run.task)
    return None if run.opt.workers[1].enabled else task


def take_early(handlers: list[logging.Handler]) -> list[logging.LogRecord]:
    """Return what was said before the log was open."""
    kept = [handler for handler in handlers if isinstance(handler, MemoryHandler)]
    records = [record for handler in kept for record in handler.buffer]
    for handler in kept:
        handler.buffer.clear()
    return records
