"""Find mistakes in files before torch is imported, which takes seconds: a missing file, field,
column or folder is then told at once.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from common.config import Run
from common.failures import keep_early
from common.model.source import find_source
from common.tasks import build
from common.tasks.others import build_others, forget_others, read_text

log = logging.getLogger("clutch")


def build_early(run: Run, maker: Callable[[dict[str, Any]], Any] = build) -> Any:
    """Look at the model's folder, the other tasks and the text that are measured, and build the
    run's task, with its rows. Returns: the task; None where ranks build it, each for itself.

    What is said meanwhile is kept for the log, which is not open yet. Raises: ConfigError.
    """
    if "RANK" in os.environ:  # a mistake of one rank must reach the others, which wait for it
        return None
    if run.model.path is not None:
        find_source(run.model)
    keep_early(log)
    task = maker(run.task)
    forget_others()  # of an earlier run of this process, whose files may have changed
    build_others(run.evaluate.also)
    if run.evaluate.text is not None:
        read_text(run.evaluate.text)
    return None if run.opt.workers[1].enabled else task
