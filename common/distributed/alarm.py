"""An error on one rank ends all ranks within seconds, with that error.

With NCCL the other ranks would not notice: they wait in a collective, and destroying the process
group waits for them, until a timeout ends them and hides the first error (pytorch#132696). So a
rank that fails writes its error to the store through which all ranks met, and exits without
cleaning up. Every rank reads that key once a second, in a thread.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
from typing import Any, NoReturn

import torch.distributed as dist

from common.checkpoint import checkpoint
from common.config import ConfigError
from common.system import EXIT_CONFIG, EXIT_CRASH, RunStopped

log = logging.getLogger("clutch")

KEY = "clutch_failed"
LOOK = 1.0  # seconds between two reads of the store
GRACE = 8.0  # seconds for a rank to end by itself, as it does if a collective fails at once


class Alarm:
    """Reports an error to the other ranks, and watches for theirs.

    Args: store: the store of the process group.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.ended = store.clone(), rank, threading.Event()
        threading.Thread(target=self._listen, args=(store.clone(),), daemon=True).start()

    def sound(self, error: BaseException) -> BaseException:
        """Report `error` to the other ranks, and make this process exit without destroying the
        process group. Return the first error of all ranks.
        """
        self.ended.set()
        mine = {"code": EXIT_CRASH, "text": str(error)}
        if isinstance(error, ConfigError):
            mine["code"] = EXIT_CONFIG
        elif isinstance(error, (RunStopped, SystemExit)):
            mine["code"] = error.code
        else:
            mine["text"] = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        first = mine
        try:
            if _is_of_a_peer(error):  # the peer may be about to report its own error
                deadline = time.monotonic() + GRACE
                while not self.store.check([KEY]) and time.monotonic() < deadline:
                    time.sleep(LOOK / 10)
                if self.store.check([KEY]):
                    first = json.loads(self.store.get(KEY))
            else:
                first = json.loads(self.store.compare_set(KEY, "", json.dumps(mine)))
                if self.rank and mine["text"] != str(error):
                    log.error("%s", mine["text"], exc_info=error)
        except RuntimeError:  # the store is gone with the rank that served it
            pass
        atexit.register(_leave, first["code"])
        return error if first["text"] == mine["text"] else _rebuild(first)

    def stop(self) -> None:
        """Stop watching: the run has ended well."""
        self.ended.set()

    def _listen(self, store: Any) -> None:
        while not self.ended.wait(LOOK):
            try:
                if not store.check([KEY]):
                    continue
                first = json.loads(store.get(KEY))
            except RuntimeError:  # the store is gone; if its rank failed, the launcher sees that
                return
            if not self.ended.wait(GRACE):
                log.error("%s", first["text"])
                for thread in threading.enumerate():
                    if thread.name == checkpoint.WRITER:
                        thread.join()
                _leave(first["code"])


def _is_of_a_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has exited."""
    lost = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    known = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
    return known or (isinstance(error, RuntimeError) and any(text in str(error) for text in lost))


def _rebuild(first: dict[str, Any]) -> Exception:
    """Turn the error of another rank into an exception."""
    if first["code"] == EXIT_CONFIG:
        return ConfigError(first["text"])
    return RunStopped(first["text"], first["code"])


def _leave(code: int) -> NoReturn:
    """Exit at once, without destructors, which might wait for the device or for other ranks."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
