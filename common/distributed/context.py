"""Who a worker is, and what ranks say to each other."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.config import ConfigError
from common.device import hardware

T = TypeVar("T")
LOOK = 0.1  # seconds between two looks at the store


def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """Return one number per tensor: a sum of its bits, weighted by row and by column, which other
    contents, or the same in another order, share by a rare chance only.
    """
    parts = [_sum_up(tensor.detach()) for tensor in tensors]
    return torch.stack([part.to(parts[0].device) for part in parts]).tolist() if parts else []


def _sum_up(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.view(kinds[tensor.element_size()])
    bits = bits.flatten(1) if bits.ndim > 1 else bits.reshape(1, -1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for sums in (bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)):
        odd = torch.arange(1, 2 * len(sums), 2, device=bits.device)
        total += (sums * odd).sum()
    return total


def put_back(shares: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the shares of all ranks, each of `Context.share`, in the order of the whole."""
    whole: list[Any] = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        whole[rank :: len(shares)] = share
    return whole


@dataclass(frozen=True)
class Context:
    """Who this worker is."""

    rank: int
    world_size: int
    device: hardware.Device
    out_dir: Path
    mesh: Any = None  # a DeviceMesh [replicate, shard], with opt=fsdp; of a plan its sizes alone

    @property
    def main(self) -> bool:
        """True on the rank that writes and prints."""
        return self.rank == 0

    @property
    def joined(self) -> bool:
        """Whether there are other ranks to talk to; a plan has only their number."""
        return self.world_size > 1 and not self.device.planned

    @property
    def memory_gb(self) -> float:
        """The memory that this rank can have in GB of 2**30 bytes; the ranks on one CPU share its
        memory.
        """
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))  # of torchrun and srun
        shared = min(here, self.world_size) if self.device.type == "cpu" else 1
        return hardware.available_gb(self.device) / shared

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks. Where all but one hold zero, it is exactly that one's."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items that are this rank's: every `world_size`-th, so that all have as many,
        but for one. `put_back` is the way back.
        """
        return items[self.rank :: self.world_size]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank."""
        if not self.joined:
            return [value] * self.world_size
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def find_other(self, value: Any) -> int | None:
        """Return the first rank whose value is not that of rank 0; None where all are equal."""
        every = self.gather_objects(value)
        return next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)

    def check_same(self, what: str, found: Any) -> None:
        """Raise ConfigError where `found`, a hash of `what`, is not that of rank 0."""
        self.meet()
        if (other := self.find_other(found)) is not None:
            raise ConfigError(
                f"the {what} on rank {other} are not those of rank 0, so the ranks would train"
                " apart. Give all ranks the same files, and a task whose rows do not depend on the"
                " machine, the time or chance."
            )

    def any(self, flag: bool) -> bool:
        """Return on all ranks whether `flag` is true on one."""
        if self.world_size == 1:
            return flag
        value = torch.tensor([int(flag)], device=self.device.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def meet(self) -> None:
        """Wait for all ranks on the store where they found each other, however long one of them
        loads, writes or uploads: a collective would end the run after `workers.TIMEOUT`. Where a
        rank fails, the alarm ends those that wait.
        """
        if not self.joined:
            return
        store = dist.distributed_c10d._get_default_store()
        count = store.add("clutch_met", 1)
        whole = -(-count // self.world_size) * self.world_size  # what the last rank counts
        if count == whole:
            store.set(f"clutch_met_{whole}", "")
        while not store.check([f"clutch_met_{whole}"]):
            time.sleep(LOOK)
        dist.barrier()  # or the rank that serves the store could end before another has looked

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.joined:
            dist.barrier()
