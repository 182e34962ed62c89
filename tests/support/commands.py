"""Commands and functions in forks of tests/support/warm.py, as tests start and end them."""

import contextlib
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT


class Started:
    """A command or a function under way in a fork of tests/support/warm.py; with the methods of
    Popen that tests use.
    """

    def __init__(self, warm: "Warm", printed: Path) -> None:
        self.warm, self.printed, self.pid, self.returncode = warm, printed, int(warm.line()), None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._ended(0)

    def send_signal(self, number: int) -> None:
        """To the process alone: its ranks are processes of their own."""
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end. Returns: what it printed, on standard output and error."""
        if self._ended(timeout) is None:
            self.stop()
            pytest.fail(f"not done in {timeout} s\n" + "\n".join(self.said()))
        return self.said()

    def said(self) -> tuple[str, str]:
        """What it has printed so far."""
        files = [self.printed / name for name in ("stdout", "stderr")]
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return out, err

    def stop(self) -> None:
        """Kill what is left of it and of its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended(60)

    def _ended(self, timeout: float) -> int | None:
        if self.returncode is None and self.warm.says(timeout):
            self.returncode = int(self.warm.line())
        return self.returncode


class Warm:
    """tests/support/warm.py, started at the first request, which serves one at a time.

    environment: more variables for it.
    """

    def __init__(self, **environment: str) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.last: Started | None = None

    def start(
        self,
        folder: Path,
        environment: dict[str, str],
        printed: Path,
        merged: bool = False,
        **what: Any,
    ) -> Started:
        """what: arguments and module (None: launch.py), or call, the file of a pickled function;
        merged: standard error into standard output; stdin, stdout, stderr: other files, or a
        terminal; largest_file: in bytes.
        """
        if self.process is None:
            command = [sys.executable, str(ROOT / "tests/support/warm.py")]
            self.process = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        assert self.last is None or self.last.poll() is not None, "one at a time"
        assert self.process.stdin is not None
        files = {
            "stdout": str(printed / "stdout"),
            "stderr": str(printed / ("stdout" if merged else "stderr")),
        }
        request = {"folder": str(folder), "environment": environment, **files, **what}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.last = Started(self, printed)
        return self.last

    def call(self, function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
        """What a function of a module returns in a process of its own; what it raises is raised
        here, what it prints is printed.
        """
        with tempfile.TemporaryDirectory() as printed:
            started = self.begin(function, *arguments, printed=Path(printed), **environment)
            out, err = started.communicate()
            print(out, end="")
            print(err, end="", file=sys.stderr)
            assert started.returncode == 0, started.returncode
            outcome = pickle.loads((Path(printed) / "call").read_bytes())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def begin(
        self, function: Callable[..., Any], *arguments: Any, printed: Path, **environment: str
    ) -> Started:
        """`call` that does not wait. printed: an empty folder, for what it says and returns."""
        file = printed / "call"
        file.write_bytes(pickle.dumps((function, arguments)))
        return self.start(ROOT, dict(os.environ | environment), printed, call=str(file))

    def says(self, seconds: float) -> bool:
        """True if a line comes in that time."""
        assert self.process is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def line(self) -> bytes:
        """The next line."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> None:
        if self.last is not None:
            self.last.stop()
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses, below those that the system gives to connections (32768 on),
    which another test would have before ranks meet there.
    """
    ports = set[int]()
    while len(ports) < count:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


def as_ranks(folder: Path, cache: Path, *commands: list[str]) -> list[dict[str, Any]]:
    """What tests/support/warm.py `side_by_side` starts as torchrun would start it: rank by rank."""
    (port,), count = free_ports(1), str(len(commands))
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "x"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CLUTCH_CACHE": str(cache)}
    return [
        {
            "folder": str(folder),
            "environment": os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            "stdout": str(folder / f"stdout-{rank}"),
            "stderr": str(folder / f"stderr-{rank}"),
            "arguments": arguments,
        }
        for rank, arguments in enumerate(commands)
    ]


Launch = Callable[..., subprocess.CompletedProcess[str]]
Begin = Callable[..., Started]
