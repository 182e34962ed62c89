"""Run coroutines of the user's code in event loops of background threads."""

import asyncio
import inspect
import os
from functools import cache
from threading import Lock, Thread
from typing import Any

LOOPS, LOCK = 61, Lock()  # the number of loops, a prime, since addresses are multiples of 16


def wait(value: Any, owner: Any, seconds: float | None = None) -> Any:
    """Return a value, or the result of a coroutine.

    Args:
        owner: the object whose coroutines share one event loop.
        seconds: the time limit; None = no limit.
    Raises: TimeoutError if the coroutine takes more than `seconds`.
    """
    if not inspect.iscoroutine(value):
        return value
    with LOCK:
        loop = _run_loop(os.getpid(), id(owner) % LOOPS)
    return asyncio.run_coroutine_threadsafe(value, loop).result(seconds)


@cache
def _run_loop(process: int, number: int) -> asyncio.AbstractEventLoop:
    """Return one of the event loops of a process. All calls of an owner run in the same loop, since
    objects that it opens, such as a connection, belong to that loop.
    """
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop
