"""Record the failure of a sweep's job, and keep log records until the log is open."""

import io
import json
import logging
import os
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from common.system.files import write_text

GROUP = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}  # torchrun's variables
FAILED = "failed.json"  # in the folder of a job that failed: its exit code, and why


def failed(folder: Path, code: int, error: str) -> None:
    """Write the reason that a job failed, for the process that launched it."""
    if is_main():
        text = json.dumps({"code": code, "error": error}, indent=2) + "\n"
        write_text(folder / FAILED, text)


def show_any_text() -> None:
    """Make terminals that are not UTF-8 show unknown characters as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # one that reads and writes a terminal has no place to seek to
                stream.reconfigure(errors="backslashreplace")


def keep_early(log: logging.Logger) -> None:
    """Buffer log records until the log is open."""
    log.addHandler(MemoryHandler(1000, flushLevel=logging.CRITICAL + 1))
    log.setLevel(logging.INFO)


def take_early(handlers: list[logging.Handler]) -> list[logging.LogRecord]:
    """Return the records that were buffered before the log was open."""
    early = [handler for handler in handlers if isinstance(handler, MemoryHandler)]
    records = [record for handler in early for record in handler.buffer]
    for handler in early:
        handler.buffer.clear()
    return records


def is_main() -> bool:
    """Return whether this process is rank 0, or belongs to no group of ranks."""
    return os.environ.get("RANK", "0") == "0" or not os.environ.keys() >= GROUP
