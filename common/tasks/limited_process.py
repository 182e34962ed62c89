"""Call functions of other packages, such as scores of a model's text, in a separate process with
limits of time and memory.

A text can make them compute for hours or fill the memory, such as a cube that is turned 999999999
times. The process is killed then, the text earns nothing, and the next call starts a new process.
The limit is processor time, so that a busy machine kills no quick call.
"""

import atexit
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from common.system import leave_stops_to_the_run

SECONDS = 1.5  # processor time of one call; starting a new process takes one more second
WAIT_SECONDS = 30.0  # wall time of a call that waits
BYTES = 4 * 2**30  # the limit of address space, except on macOS
START = "from common.tasks.limited_process import serve; serve()"


class Worker:
    """A process that calls one function.

    Args: package: the package that it imports before its time counts.
    """

    def __init__(self, function: Callable[..., float], package: str) -> None:
        self.names = (function.__module__, function.__qualname__, package)
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, *arguments: Any) -> float | None:
        """Return the result of the function, NaN if it raises; None if the process was killed."""
        message = pickle.dumps(arguments)
        with self.lock:
            if self.process is None or self.process.poll() is not None:  # killed between two calls
                self._end()
                self.process = self._start()
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            with suppress(BrokenPipeError):  # killed just now: the reply is empty
                self.process.stdin.write(message)
                self.process.stdin.flush()
            reply = self.process.stdout.readline()
            if reply.endswith(b"\n"):
                return float(reply)
            self._end()
            return None

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", START, *self.names],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the process that calls {self.names[:2]} does not start")
        return process

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


class TooLongError(BaseException):
    """A function took too long. It is no Exception, so that `except Exception` does
    not catch it.
    """


_limited: list[bool] = []  # whether a block is limited now, in the main thread


def _stop(*_: Any) -> None:
    if _limited:
        raise TooLongError


@contextmanager
def limited(seconds: float, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Stop the block if it takes more seconds of processor time, or of wall time; for functions
    that cannot run in a separate process, since they hold state.

    It works only in the main thread, for loops in Python and regular expressions, not for code in
    other languages.
    Raises: TooLongError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGPROF) is not _stop:
        signal.signal(signal.SIGPROF, _stop)  # stays: a signal that comes late finds a handler
    main = threading.main_thread().ident
    assert main is not None
    clock = threading.Timer(wait_seconds, signal.pthread_kill, (main, signal.SIGPROF))
    clock.daemon = True
    try:
        _limited.append(True)
        clock.start()
        # Again and again, for a function that catches everything.
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
        yield
    finally:
        _limited.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        clock.cancel()


workers: dict[Callable[..., float], Worker] = {}
_ended = threading.local()


def call(package: str, function: Callable[..., float], *arguments: Any) -> float:
    """Return the score of a function of this project that uses `package`; 0 if it raises, exceeds a
    limit, or returns no number from 0 to 1.
    """
    worker = workers.setdefault(function, Worker(function, package))
    score = worker.call(*arguments)
    if score is None:
        count_one()
    return score if score is not None and 0 <= score <= 1 else 0.0


def count_one() -> None:
    """Count a killed call of this thread."""
    _ended.count = count_ended() + 1


def count_ended() -> int:
    """Return the number of killed calls of this thread."""
    return getattr(_ended, "count", 0)


@atexit.register
def end_all() -> None:
    """End the processes; later calls start new ones."""
    for worker in workers.values():
        worker._end()


def serve() -> None:
    """Call the function that the command line names with each tuple of arguments from standard
    input; write one number per call. The kernel kills a process that exceeds its time.
    """
    leave_stops_to_the_run()
    module, name, package = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    importlib.import_module(package)
    if sys.platform != "darwin":  # which has given a process more than that before it begins
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output that a package prints is no reply
    replies.write(b"ready\n")
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)  # of the run itself
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        try:
            score = float(function(*arguments))
        except MemoryError:
            return
        except Exception:  # a score never raises, whatever a package makes of a text
            score = float("nan")
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(f"{score!r}\n".encode())
