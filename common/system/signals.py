"""Exit codes, and stops at the end of a step after SIGTERM, SIGUSR1 or Ctrl-C, and in a submitit
job after its SIGUSR2.
"""

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

EXIT_CRASH = 1  # Python's exit code after a traceback
EXIT_CONFIG = 2  # an error in the configuration; nothing was run
EXIT_NUMBERS = 3  # NaN or infinity in rewards, fitness or weights; the last good checkpoint is kept
# a file of the run could not be written, for example because the disk is full; earlier checkpoints
# are kept
EXIT_WRITE = 4
# Ctrl-C with nothing to save: before the first step, or after the last
EXIT_INTERRUPTED = 130
EXIT_SIGNAL = 75  # stopped by a signal after saving; resume with resume=auto (EX_TEMPFAIL)


class RunStopped(Exception):
    """The run ended before its last step, in an orderly way. `code` is the exit code of the
    process.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)  # both, so that it survives pickling between processes
        self.code = code

    def __str__(self) -> str:
        return self.args[0]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def leave_stops_to_the_run() -> None:
    """Ignore stop signals in a process that works for a run: Slurm and `timeout` send them to all
    processes, but the run needs this one until its step is finished.
    """
    for number in (*SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def taken() -> tuple[signal.Signals, ...]:
    """Return the signals that request a stop. SIGUSR2 is one if it already has a handler: submitit
    warns its jobs with it.
    """
    return (*SIGNALS, signal.SIGUSR2) if callable(signal.getsignal(signal.SIGUSR2)) else SIGNALS


class StopSignal:
    """Records a request to stop, so that a loop can finish its step; a second, later request exits
    at once.

    Use it as a context manager around the loop and read `.name`: None, or the signal's name.
    """

    # One Ctrl-C often comes twice: from the terminal, and passed on by torchrun or by the process
    # that spawned the ranks.
    SAME = 2.0  # seconds in which further signals count as the same request
    # The signal that requested the last stop in this process.
    last: int | None = None

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0
        self._left = False
        self._previous: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            if time.monotonic() - self._since <= self.SAME:
                return
            if not self._left:
                sys.exit(128 + number)
            self.restore()
            os.kill(os.getpid(), number)
            return
        self.name, self._since = signal.Signals(number).name, time.monotonic()
        StopSignal.last = number
        from common.system.terminal import notify

        notify(f"{self.name}: finishing this step, then saving. Again to exit now.")

    def __enter__(self) -> "StopSignal":
        for number in taken():
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: the caller's handlers stay
                return self
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        if (
            self.name is None
            # else the next signal restores, so that a repetition does not break into the end of the
            # run
        ):
            self.restore()

    def restore(self) -> None:
        """Install the handlers of before again."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
