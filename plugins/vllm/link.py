"""The connection to a vLLM in a process that this process starts."""

import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from common.config import ConfigError
from common.engine import Watch
from common.system import FULL, CheckpointError, first_line, leave_out_ours, safe_read
from plugins.vllm import server

log = logging.getLogger("clutch")

OLDEST = (0, 32)  # that this was tried with
INSTALL = (
    "Make an environment for it (python3 -m venv .vllm; .vllm/bin/pip install 'vllm>="
    f"{'.'.join(map(str, OLDEST))}') and give engine.python=.vllm/bin/python; docs/engines.md"
    " says how without a GPU."
)
SHARED = Path("/dev/shm")
LEAST = 1 << 28  # bytes free there, for adapters and their files
LONGEST = 1 << 20  # bytes of the JSON of an answer


class EndedError(Exception):
    """The other side has ended."""


class Link:
    """A connection to a vLLM.

    Args:
        python: the Python of the environment with vLLM.
        path: the path of its log.
        device: the device that it uses, if several `ranks` have one each.
    """

    def __init__(self, python: str, path: Path, device: torch.device, ranks: int) -> None:
        self.ranks = ranks
        self.python, self.path, self.device = python, path, device
        self.name, self._log = f"engine.python={python}", f"; its log: {path}"
        self.connection: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.falls, self.over = 0, False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    # --- the connection

    def connect(self) -> None:
        """Start the process, and check its greeting. Raises: ConfigError."""
        if self.over:
            raise EndedError
        self._spawn()
        try:
            greeting = self.receive()[0]
        except EndedError:
            raise ConfigError(f"vLLM did not start{self._where()}.") from None
        with self.understanding():
            version = greeting["vllm"]
            found = tuple(int(part) for part in version.split(".")[:2])
            greeting["torch"] = str(greeting["torch"])
        if found < OLDEST:
            raise ConfigError(
                f"engine=vllm needs vLLM {'.'.join(map(str, OLDEST))} or newer, and {self.name} has"
                f" {version}. {INSTALL}"
            )
        log.info(
            "vLLM %s (torch %s) is loading the model%s", *(version, greeting["torch"]), self._log
        )

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        threads = str(torch.get_num_threads())
        env = leave_out_ours(os.environ) | {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if self.device.type == "cuda" and self.ranks > 1:
            env["CUDA_VISIBLE_DEVICES"] = _visible(self.device)
        fd, folder = str(theirs.fileno()), str(self.folder)
        command = [str(Path(self.python).expanduser()), server.__file__, fd, folder]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self.path.open("ab") as out:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=env,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the run, which ends it in order
                )
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"engine.python={self.python!r} cannot be started: {error.strerror}. {INSTALL}"
                ) from error
        self.connection = ours

    @property
    def running(self) -> bool:
        """Whether the other side runs."""
        return self.connection is not None

    def _where(self) -> str:
        code = None if self.process is None else self.process.wait()
        return f" ({self.name}" + (f", exit code {code})" if code else ")") + self._log

    @contextmanager
    def understanding(self) -> Iterator[None]:
        """Raise ConfigError if the block cannot read an answer."""
        try:
            yield
        except ConfigError:
            raise
        except (SafetensorError, *safe_read.ERRORS) as error:
            self.close()
            raise ConfigError(
                f"{self.name} gives answers that cannot be read ({type(error).__name__}:"
                f" {first_line(error)}){self._log}."
            ) from error

    def ask(
        self, message: dict[str, Any], watch: Watch | None = None, most: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Send a message and return its answer, with up to `most` bytes after it. Raises:
        EndedError; ConfigError with vLLM's message if vLLM refuses.
        """
        assert self.connection is not None
        try:
            server.send(self.connection, message)
        except OSError as error:
            raise EndedError from error
        while True:
            reply, data = self.receive(most)
            if "finished" not in reply:
                return reply, data
            with self.understanding():
                done = int(reply["finished"])
            if watch is not None:
                watch(done)

    def receive(self, most: int = 0) -> tuple[dict[str, Any], bytes]:
        """Wait for a message, and return it with the bytes after it, at most `most`. Raises:
        EndedError if the other side has ended.
        """
        assert self.connection is not None
        try:
            with self.understanding():
                message, data = server.receive(self.connection, LONGEST, most)
        except (EOFError, OSError) as error:
            raise EndedError from error
        self._check(message)
        return message, data

    def _check(self, told: dict[str, Any]) -> None:
        if "error" in told:
            self.close()
            said = str(told["error"])
            advice = f" {INSTALL}" if "import vllm" in said else ""
            if "KV cache" in said:
                advice = " Raise engine.cache_gb."
            raise ConfigError(f"{self.name}: {said}{self._log}.{advice}")

    def note_end(self) -> None:
        """Record that the other side has ended. Raises: ConfigError at the second time; EndedError
        if it was closed on purpose.
        """
        if self.over:
            raise EndedError
        self.falls += 1
        where = self._where()
        self.close()
        if self.falls > 1:
            raise ConfigError(
                f"vLLM has ended for the second time{where}. Where it ran out of memory, lower"
                " engine.cache_gb or algo.rollout_rows; then go on with resume=auto."
            )
        log.warning("vLLM has ended%s; starting it again, once", where)

    def close(self) -> None:
        """Close the connection, and end the process."""
        if self.connection is not None:
            with suppress(OSError):  # of a connection that is broken already
                # A thread that waits for an answer would go on waiting, on a socket that is closed.
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
            self.connection = None
        if self.process is not None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def end(self) -> None:
        """Close the connection for good: a thread that still sends requests does not open
        it again.
        """
        self.over = True
        self.close()

    # --- files

    @property
    def folder(self) -> Path:
        """A folder that lasts as long as the process, in shared memory if there is any."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="clutch-engine-", dir=_shared(), ignore_cleanup_errors=True
            )
        return Path(self._folder.name)

    @contextmanager
    def shared(self, size: int) -> Iterator[Path]:
        """Provide the block with a folder for `size` bytes, shared by the processes of this
        machine.
        """
        if shutil.disk_usage(self.folder).free > size * 1.1:
            place = self.folder
        else:
            place = Path(tempfile.gettempdir())
        with tempfile.TemporaryDirectory(prefix="part-", dir=place) as found:
            yield Path(found)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Write files for vLLM in the block. Raises: CheckpointError if there is no space."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        raise CheckpointError(
            f"{folder}, where vLLM reads weights, could not be written: {first_line(error)}."
        ) from error


def _shared() -> str | None:
    """Return the folder of shared memory; None if there is none."""
    usable = SHARED.is_dir() and os.access(SHARED, os.W_OK)
    return str(SHARED) if usable and shutil.disk_usage(SHARED).free > LEAST else None


def _visible(device: torch.device) -> str:
    """Return the name of a CUDA device for a process that must see no other."""
    index, seen = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[index] if seen else str(index)
