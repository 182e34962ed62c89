"""Lock a run folder for one process at a time.

The process that writes, rank 0, holds a lock (flock) on RUN/.lock, and the system releases it when
that process ends, however it ends. The file names its holder. Shards of one run share the folder
and each hold a lock of their own.

On one machine the lock is reliable. On a file system shared by several nodes it depends on the file
system's flock: NFS, GPFS and CephFS keep one lock for all nodes, Lustre with the mount option
flock; with localflock, or NFS with nolock, each node has its own locks. A file server keeps the
lock of a node that has died for about a minute, and a Slurm job waits that long.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.config import ConfigError, find_folder

log = logging.getLogger("clutch")

NAME = ".lock"
MOMENT = 1.0  # seconds to retry a lock, since others hold it for an instant to read it
REQUEUED = 120.0  # the same in a Slurm job; an NFS server waits 90 s for a node that is gone
PAUSE = 0.1
# The errors of a file system without locks.
WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class InUseError(ConfigError):
    """The folder is locked by another process, so nothing may be written there."""


@contextmanager
def locked(folder: Path, shard: str | None = None) -> Iterator[None]:
    """Lock a run folder for the block.

    Args: shard: a shard such as 2/8, which shares the folder with other shards.
    Raises: InUseError with the process that holds the lock; ConfigError if the folder cannot be
    written.
    """
    with ExitStack() as stack:
        stack.enter_context(held(folder / NAME, shared=shard is not None))
        if shard is not None:
            stack.enter_context(held(folder / f"{NAME}-{shard.replace('/', '-of-')}"))
        yield


@contextmanager
def reserved(arguments: Sequence[str]) -> Iterator[None]:
    """Lock the run folder that the arguments name, before Hydra writes its files there. Shards of
    one run share it. Raises: InUseError if another process has it.
    """
    named = find_folder(arguments, "hydra.run.dir")
    if named is None or "${" in named or os.environ.get("RANK", "0") != "0":
        yield
        return
    folder = Path(named)
    if (path := folder / NAME).is_file():  # a run from Python holds no other
        with path.open("rb") as file:
            take_lock(file.fileno(), path, fcntl.LOCK_SH)
    command = folder / f"{NAME}-command"
    with held(
        command, shared=any(text.lstrip("+").startswith("algo.shard=") for text in arguments)
    ):
        try:
            yield
        finally:
            command.unlink(missing_ok=True)  # so that an otherwise empty folder can be removed


@contextmanager
def held(path: Path, shared: bool = False) -> Iterator[None]:
    """Lock one file for the block, and write the holder into it. Raises: the exceptions of
    `locked`.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={path.parent} cannot be written: {error.strerror}. Choose another"
                " folder, or fix its permissions."
            ) from None
        try:
            take_lock(descriptor, path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_nlink:  # the folder was removed meanwhile
                continue
            _note(descriptor)
            try:
                yield
            finally:
                os.ftruncate(descriptor, 0)
            return
        finally:
            os.close(descriptor)


def is_held(folder: Path) -> bool | None:
    """Return whether a process holds a run folder; None if its file system keeps no locks.

    The locks are taken for an instant, for which a run that begins waits.
    """
    known: bool | None = False
    for path in folder.glob(f"{NAME}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # it has just been removed, or is not ours to read
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            known = None
        finally:
            os.close(descriptor)
    return known


def take_lock(descriptor: int, path: Path, kind: int) -> None:
    """Acquire the lock of an open file; in a Slurm job, wait for the lock of a node that has just
    died.
    """
    patience = REQUEUED if "SLURM_JOB_ID" in os.environ else MOMENT
    began, warned = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in WITHOUT:
                log.warning(
                    "the file system of %s keeps no locks (%s), so nothing stops a second run in"
                    " this folder.",
                    *(path.parent, error.strerror),
                )
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        waited = time.monotonic() - began
        if waited > patience:
            raise InUseError(
                f"{path.parent} is in use: {_holder(path)}. Two runs in one folder would overwrite"
                " each other. Wait until it has ended, or use another hydra.run.dir."
            )
        if waited > MOMENT and not warned:
            warned = True
            log.warning(
                "%s is in use: %s. Waiting %.0f s at most.",
                *(path.parent, _holder(path), patience),
            )
        time.sleep(PAUSE)


def _note(descriptor: int) -> None:
    who = {"host": socket.gethostname(), "process": os.getpid()}
    who["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
    if job := os.environ.get("SLURM_JOB_ID"):
        who["job"] = job
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(who).encode() + b"\n", 0)


def _holder(path: Path) -> str:
    """Describe the holder of the file, as far as the file names it."""
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        job = f" (Slurm job {who['job']})" if "job" in who else ""
        return f"process {who['process']} on {who['host']}{job} has run there since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process runs there"
