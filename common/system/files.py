"""Write files and folders atomically, seal them with hashes, and keep a cache."""

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from common.config import ConfigError
from common.system.safe_read import read

log = logging.getLogger("clutch")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the quota, the largest file allowed
FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is not valid: the text names the path and the reason."""


# --- folders that are whole or absent


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to `folder`; when the block ends, sync it to disk and
    rename it to `folder`.

    An existing `folder` is renamed to `NAME.old` and removed after the new one is in place. If the
    block fails, `folder` is unchanged and the temporary folder is removed. Raises: CheckpointError
    for I/O errors, also inside the block.
    """
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():  # safetensors writes files that only their owner may read
                path.chmod(temporary.stat().st_mode & 0o666)
            sync(path)
        sync(temporary)
        displaced = folder.with_name(f"{folder.name}.old")
        if folder.exists():
            shutil.rmtree(displaced, ignore_errors=True)
            folder.rename(displaced)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(displaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise CheckpointError(f"{folder} could not be written: {first_line(error)}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file to a temporary name and rename it: atomic, and safe against a kill."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file as `write_text` does."""
    beside = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        beside.write_bytes(content)
        sync(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write `manifest.json`: `facts` and the SHA-256 of every file in `folder`. Call it last inside
    `replacing`.
    """
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    text = json.dumps({"format": FORMAT, **facts, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def problem(folder: Path) -> str | None:
    """Return the damage of a sealed folder as text; None if every file of its manifest exists and
    is unchanged.
    """
    try:
        manifest = read(folder / MANIFEST, {"files": {str: str}, "format": int}) or {}
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"foreign, {MANIFEST} has format {manifest['format']}, this reads {FORMAT}"
        for name, digest in files.items():
            if Path(name).name != name:
                return f"foreign, {MANIFEST} names {name!r}"
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _sha256(folder / name) != digest:
                return f"{name} is damaged, its SHA-256 is not the manifest's"
    except KeyError:
        return f"{MANIFEST} is missing" if folder.is_dir() else "there is no such folder"
    except OSError as error:
        return first_line(error)
    except ValueError as error:
        return f"{MANIFEST} is damaged or foreign ({first_line(error)})"
    return None


def cache_folder() -> Path:
    """Return the cache folder: `$CLUTCH_CACHE`, else `~/.cache/clutch`."""
    return Path(os.environ.get("CLUTCH_CACHE") or "~/.cache/clutch").expanduser()


def cached(
    name: str, what: str, build: Callable[[Path], dict[str, Any]], say: Callable[[str], None]
) -> Path:
    """Return the folder `name` of the cache. It is built if it is missing or damaged, by only one
    of several parallel processes.

    Args:
        what: the cached thing, for errors.
        build: fills an empty folder and returns the facts of its manifest.
        say: called with a message before waiting for another process.
    Raises: ConfigError if the cache cannot be written.
    """
    cache = cache_folder()
    folder = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not folder.exists():  # else another process is only checking the folder
                say(f"{folder} is being built by another process; waiting for it.")
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"{what} is cached in {cache}, which cannot be written: {error.strerror or error}. "
            "Set CLUTCH_CACHE to a folder that can."
        ) from error
    try:
        if folder.exists():
            damage = problem(folder)
            if damage is None:
                return folder
            log.warning("%s in %s is built again: %s.", what, folder, damage)
        # left by a build that was killed; this process holds the lock
        for stale in cache.glob(f"{TEMPORARY}{folder.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with replacing(folder) as temporary:
            seal(temporary, build(temporary))
    finally:
        lock.release()
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
