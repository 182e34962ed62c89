"""Buffers the record of a command until its run is accepted, so that a rejected command leaves an
existing run folder unchanged.

Hydra writes its files before it calls this project, so they go to a folder next to RUN/.hydra, and
replace it when the run writes its run.yaml. Log lines until then are written to RUN/run.log at the
same time.
"""

import logging
import os
import shutil
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from common.system.failures import FAILED

RECORD = ".hydra"
ASIDE = "CLUTCH_RECORD"  # the environment variable with the folder of the record, for ranks
RUN_FILE = "run.yaml"  # the file that marks a run folder as accepted


def set_aside(folder: Path, name: str | None) -> None:
    """Record, for this process and its ranks, the folder of Hydra's files: `name` in `folder`."""
    os.environ[ASIDE] = str(folder / name) if name else ""


class HeldLog(MemoryHandler):
    """A log handler that buffers records until the run is accepted, and then writes at once."""

    def __init__(self, written: logging.Handler) -> None:
        super().__init__(sys.maxsize, target=written)
        self.written, self.accepted = written, False

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        """Return whether to write now."""
        return self.accepted

    def flush(self) -> None:
        """Write the buffered records if the run is accepted."""
        if self.accepted:
            super().flush()

    def close(self) -> None:
        """Close the handler and its file."""
        self.written.close()
        super().close()


def open_log(path: Path) -> logging.Handler:
    """Return the handler of a log file; if the folder already holds a run, it writes only after
    `accept`.
    """
    written = logging.FileHandler(path, encoding="utf-8", delay=True)
    written.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if not (path.parent / RUN_FILE).exists():
        return written
    return HeldLog(written)


def write_log(log: logging.Logger) -> None:
    """Write the buffered log records, and write later ones at once. A rank without records gets an
    empty log.
    """
    for handler in log.handlers:
        written = handler
        if isinstance(handler, HeldLog):
            written, handler.accepted = handler.written, True
            handler.flush()
        if isinstance(written, logging.FileHandler):
            Path(written.baseFilename).touch()


def accept(folder: Path, log: logging.Logger) -> None:
    """Write rank 0's buffered log and Hydra's files: the run of `folder` starts or resumes. How an
    earlier attempt failed is no longer true.
    """
    write_log(log)
    (folder / FAILED).unlink(missing_ok=True)
    aside = Path(os.environ.get(ASIDE) or folder)
    if aside.parent == folder and aside.name != RECORD and aside.is_dir():
        shutil.rmtree(folder / RECORD, ignore_errors=True)
        with suppress(FileNotFoundError):  # a shard of the run was first
            aside.rename(folder / RECORD)


def settle(folder: Path) -> None:
    """Leave one record in a folder whose command has ended: the run's, or if there is none the
    command's.
    """
    aside = Path(os.environ.pop(ASIDE, "") or folder / RECORD)
    if (folder / RECORD).exists() and aside != folder / RECORD:
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.is_dir():
        aside.rename(folder / RECORD)
