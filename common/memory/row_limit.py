"""The number of rows in a forward: fitted to the memory at the start, halved when memory still runs
out.
"""

import gc
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch

from common.config import ConfigError, SamplingConfig
from common.device import is_out_of_memory

T = TypeVar("T")
log = logging.getLogger("clutch")

UNLIMITED = 1 << 30
# The share of the memory that a plan may use.
FITTED = 0.9
HALF = "add 'opt=[amp]' if the device computes in bfloat16 or float16"


@dataclass(frozen=True)
class Load:
    """The calls of `generate` that a plan is made for.

    Attributes:
        prompt_tokens: tokens of the longest prompt.
        sampling: the sampling settings.
        samples: completions per prompt.
        completions: completions per call; None = more than there are rows for.
        opening: tokens of the common openings of all groups, which are cached until no request
            waits.
        cached_episodes: the number of episodes that keep their keys and values between turns.
    """

    prompt_tokens: int
    sampling: SamplingConfig
    samples: int = 1
    completions: int | None = None
    opening: int = 0
    cached_episodes: int = 0


@runtime_checkable
class TradesMemory(Protocol):
    """The optional part of an Engine that trades memory for speed: a plan grants or withdraws this
    memory.

    Attributes:
        merged_bytes: bytes of the weights that an adapter is merged into while sampling; 0 = the
            adapter is computed separately.
    """

    merged_bytes: float

    def forgo_merging(self) -> None:
        """Compute the adapter separately from now on, as the memory has no room for merged weights;
        `merged_bytes` is 0 then.
        """
        ...

    def keep(self, rows: int) -> bool:
        """Keep the caches of `rows` rows from call to call, while the model is trained, if the
        engine can. Returns whether it does.
        """
        ...

    def describe(self) -> str:
        """Describe the attention of decode steps and whether they are recorded, for the plan."""
        ...


class RowLimit:
    """The rows of one kind of forward on this rank. No number of it ever rises.

    Args:
        key: the setting for the rows, such as algo.rollout_rows.
        rows: the value of the setting.
        floor: the fewest rows that make sense; 2 if a mirrored pair must stay together.
        fixed: whether the rows cannot be halved, since ranks that share weights cannot repeat a
            forward alone.
        shorter: the setting that makes sequences shorter, for error messages.
    Attributes:
        cached_episodes: the most episodes that may keep their keys and values from turn to turn.
        columns: the tokens of the longest row that the memory is planned for.
    """

    def __init__(
        self,
        key: str,
        rows: int,
        floor: int = 1,
        fixed: bool = False,
        shorter: str = "algo.sampling.max_new_tokens",
    ) -> None:
        self.key, self.rows, self.floor, self.fixed, self.shorter = key, rows, floor, fixed, shorter
        self.cached_episodes = self.columns = UNLIMITED
        self._running = False

    def fit(self, peak: Callable[[int], float], memory_gb: float) -> None:
        """Lower the rows to the number that fits `FITTED` of the memory, in multiples of the floor.

        Args: peak: returns the bytes for a number of rows; it never falls as rows grow.
        """
        room = FITTED * memory_gb * 2**30
        fitting = bisect_right(range(1, self.rows + 1), room, key=peak)
        self.rows = max(self.floor, fitting // self.floor * self.floor)

    def lower(
        self, rows: int = UNLIMITED, *, cached_episodes: int = UNLIMITED, columns: int = UNLIMITED
    ) -> None:
        """Lower the numbers that are above these."""
        self.rows = min(self.rows, rows)
        self.cached_episodes = min(self.cached_episodes, cached_episodes)
        self.columns = min(self.columns, columns)

    def run(self, action: Callable[[int], T]) -> T:
        """Return `action(rows)`; each time memory runs out, retry with half the rows.

        Random draws depend on addresses alone, so a retry gives the same result as fewer rows from
        the start. A nested call leaves the retry to the outer one.
        Raises: ConfigError with advice if the rows are at the floor.
        """
        if self._running:
            return action(self.rows)
        self._running = True
        try:
            while True:
                try:
                    return action(self.rows)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._check(error)
                self._halve()  # out of the handler, whose traceback holds tensors
        finally:
            self._running = False

    def _check(self, error: BaseException) -> None:
        """Raise ConfigError if the rows cannot be lowered."""
        if self.fixed:
            raise ConfigError(
                f"out of memory with {self.rows} rows per forward, and ranks that share weights or "
                "gradients cannot go on with fewer rows one by one. Lower "
                f"{self.key}, lower {self.shorter}, use a smaller model, or {HALF}."
            ) from error
        if self.rows <= self.floor:
            raise ConfigError(
                f"out of memory even with {self.rows} rows per forward. Lower {self.shorter}, use a"
                f" smaller model, or {HALF}."
            ) from error

    def _halve(self) -> None:
        gc.collect()  # a traceback in a cycle would keep a cache alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rows, self.cached_episodes = max(self.floor, self.rows // 2), 0
        log.warning("out of memory: repeating with %d rows per forward", self.rows)
