"""An error on one rank of several ends all of them within seconds, with that error.

With NCCL nobody notices otherwise: the others wait in a collective, and taking the process group
down waits for them, until a time limit ends them and hides what went wrong (pytorch#132696). So a
rank that fails says so in the store where all ranks met, and leaves without ceremony. Every rank
looks there each second, beside its work.
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
LOOK = 1.0  # seconds between two looks at the store
GRACE = 8.0  # seconds that a rank has to end by itself, as it does where a collective fails at once


class Alarm:
    """Tells the other ranks of an error, and listens for theirs. Args: store: of the group."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.ended = store.clone(), rank, threading.Event()
        threading.Thread(target=self._listen, args=(store.clone(),), daemon=True).start()

    def sound(self, error: BaseException) -> BaseException:
        """Tell the other ranks of `error`, and let this process leave without taking the group
        down. Return the error that came first, of whichever rank.
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
            if _is_of_a_peer(error):  # which may be about to say what happened to it
                deadline = time.monotonic() + GRACE
                while not self.store.check([KEY]) and time.monotonic() < deadline:
                    time.sleep(LOOK / 10)
                if self.store.check([KEY]):
                    first = json.loads(self.store.get(KEY))
            else:
                first = json.loads(self.store.compare_set(KEY, "", json.dumps(mine)))
                if self.rank and mine["text"] != str(error):
                    log.error("%s", mine["text"], exc_info=error)
        except RuntimeError:  # the store has gone with the rank that held it
            pass
        atexit.register(_leave, first["code"])
        return error if first["text"] == mine["text"] else _rebuild(first)

    def stop(self) -> None:
        """Listen no more: the run has ended well."""
        self.ended.set()

    def _listen(self, store: Any) -> None:
        while not self.ended.wait(LOOK):
            try:
                if not store.check([KEY]):
                    continue
                first = json.loads(store.get(KEY))
            except RuntimeError:  # the store has gone; where its rank failed, a launcher sees it
                return
            if not self.ended.wait(GRACE):
                log.error("%s", first["text"])
                for thread in threading.enumerate():
                    if thread.name == checkpoint.WRITER:
                        thread.join()
                _leave(first["code"])


def _is_of_a_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank has gone."""
    lost = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    known = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
    return known or (isinstance(error, RuntimeError) and any(text in str(error) for text in lost))


def _rebuild(first: dict[str, Any]) -> Exception:
    """Return the error of another rank as one of this rank."""
    if first["code"] == EXIT_CONFIG:
        return ConfigError(first["text"])
    return RunStopped(first["text"], first["code"])


def _leave(code: int) -> NoReturn:
    """End the process at once: no destructor waits for the device or for other ranks."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
