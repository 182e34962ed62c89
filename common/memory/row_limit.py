"""The number of rows in a forward: fitted to the memory at the start, halved when it runs out all
the same.
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

# The share of the memory that is planned with.
FITTED = 0.9
HALF = "add 'opt=[amp]' if the device computes in bfloat16 or float16"


@dataclass(frozen=True)
class Load:
    """The calls of `generate` that a plan is made for.

    Attributes: prompt_tokens: of the longest prompt; samples: of each prompt; completions: of a
    call, None = more than there are rows for; opening: tokens that prompts begin with, which are
    kept until no request waits, of all groups; kept: episodes that keep their keys and values.
    """

    prompt_tokens: int
    sampling: SamplingConfig
    samples: int = 1
    completions: int | None = None
    opening: int = 0
    kept: int = 0


@runtime_checkable
class TradesMemory(Protocol):
    """The optional part of an Engine: memory that only makes it faster, which a plan grants or
    takes back.

    Attributes:
        merged_bytes: bytes of weights that an adapter is merged into while sampling; 0 = it is
            computed beside them. A plan without room sets it to 0.
    """

    merged_bytes: float

    def keep(self, rows: int) -> bool:
        """Keep caches of so many rows from call to call, while the model is trained, if the engine
        can. Returns: whether it does.
        """
        ...

    def describe(self) -> str:
        """Return the attention of decode steps and how they run, for the plan."""
        ...


class RowLimit:
    """The rows of one kind of forward on this rank. It only shrinks.

    Args:
        key: the setting that names it, such as algo.rollout_rows.
        rows: what the setting asks for.
        floor: the fewest rows that make sense, 2 where a mirrored pair must stay together.
        fixed: ranks share weights, so one of them cannot repeat a forward alone.
        shorter: the setting that makes sequences shorter.
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
        self.kept = 1 << 30  # episodes that may keep their keys and values from turn to turn
        self.columns = 1 << 30  # tokens of the longest row that the memory is planned for
        self._running = False

    def fit(self, peak: Callable[[int], float], memory_gb: float) -> None:
        """Lower the rows to what fits `FITTED` of the memory, in multiples of the floor.

        Args: peak: returns the bytes in all with so many rows, which never fall as rows grow.
        """
        room = FITTED * memory_gb * 2**30
        fitting = bisect_right(range(1, self.rows + 1), room, key=peak)
        self.rows = max(self.floor, fitting // self.floor * self.floor)

    def run(self, action: Callable[[int], T]) -> T:
        """Return `action(rows)`, repeated with half the rows each time memory runs out.

        The draws of a step depend on addresses alone, so a repetition gives what a smaller start
        would have given. A call inside another one leaves the repetition to the outer one.
        Raises: ConfigError with advice at the floor.
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
        """Raise ConfigError where fewer rows are not possible."""
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
        self.rows, self.kept = max(self.floor, self.rows // 2), 0
        log.warning("out of memory: repeating with %d rows per forward", self.rows)
