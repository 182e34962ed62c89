"""The record of a command, kept aside until its run has been accepted: a command that is refused
changes nothing in a folder that holds a run.

Hydra writes its files before it calls anything of this project, so they go to a folder beside
RUN/.hydra, which takes its place when the run writes its run.yaml. What is said until then goes to
RUN/run.log at the same time.
"""

import logging
import os
import shutil
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

RECORD = ".hydra"
ASIDE = "CLUTCH_RECORD"  # the environment variable that tells a rank where the record lies
RUN_FILE = "run.yaml"  # of a run that was accepted


def set_aside(folder: Path, name: str | None) -> None:
    """Note for this process and its ranks where Hydra has written its files; name: in `folder`."""
    os.environ[ASIDE] = str(folder / name) if name else ""


class HeldLog(MemoryHandler):
    """A log whose lines are written once the run is accepted, and then at once."""

    def __init__(self, written: logging.Handler) -> None:
        super().__init__(sys.maxsize, target=written)
        self.written, self.accepted = written, False

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        """Return whether to write."""
        return self.accepted

    def flush(self) -> None:
        """Write, if the run is accepted."""
        if self.accepted:
            super().flush()

    def close(self) -> None:
        """Close the file too."""
        self.written.close()
        super().close()


def open_log(path: Path) -> logging.Handler:
    """Return what writes a log; where the folder holds a run, from `accept` on."""
    written = logging.FileHandler(path, encoding="utf-8", delay=True)
    written.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if not (path.parent / RUN_FILE).exists():
        return written
    return HeldLog(written)


def write_log(log: logging.Logger) -> None:
    """Write what was said before the run was accepted, and from now on at once. A rank that has
    said nothing has an empty log.
    """
    for handler in log.handlers:
        written = handler
        if isinstance(handler, HeldLog):
            written, handler.accepted = handler.written, True
            handler.flush()
        if isinstance(written, logging.FileHandler):
            Path(written.baseFilename).touch()


def accept(folder: Path, log: logging.Logger) -> None:
    """Write what rank 0 has kept aside: the run of `folder` begins or goes on."""
    write_log(log)
    aside = Path(os.environ.get(ASIDE) or folder)
    if aside.parent == folder and aside.name != RECORD and aside.is_dir():
        shutil.rmtree(folder / RECORD, ignore_errors=True)
        with suppress(FileNotFoundError):  # a shard of the run was first
            aside.rename(folder / RECORD)


def settle(folder: Path) -> None:
    """Leave one record in a folder whose command has ended: the run's, or where there is none that
    of the command.
    """
    aside = Path(os.environ.pop(ASIDE, "") or folder / RECORD)
    if (folder / RECORD).exists() and aside != folder / RECORD:
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.is_dir():
        aside.rename(folder / RECORD)
