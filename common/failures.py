"""Note why a job of a sweep failed."""

import json
import os
from pathlib import Path

FAILED = "failed.json"  # in the folder of a job that failed: its exit code, and why


def failed(folder: Path, code: int, error: str) -> None:
    """Note why a job failed, for the process that launched it."""
    if is_main():
        text = json.dumps({"code": code, "error": error}, indent=2) + "\n"
        (folder / FAILED).write_text(text, encoding="utf-8")


def is_main() -> bool:
    """Return whether this process is rank 0."""
    return os.environ.get("RANK", "0") == "0"
