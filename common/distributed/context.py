"""The identity of a worker, and the communication between ranks."""

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
LOOK = 0.1  # seconds between two reads of the store


def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """Return one number per tensor: a sum of its bits, weighted by row and by column. Tensors with
    other contents, or the same in another order, almost never share it.
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
    """Merge the shares of all ranks, as `Context.share` splits them, in the original order."""
    whole: list[Any] = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        whole[rank :: len(shares)] = share
    return whole


@dataclass(frozen=True)
class Context:
    """The rank, device and run folder of this worker.

    Attributes:
        rank: the number of this worker.
        world_size: the number of workers.
        device: the device of this worker.
        out_dir: the run folder.
        mesh: with opt=fsdp a DeviceMesh [replicate, shard], or in a plan only its sizes; else None.
    """

    rank: int
    world_size: int
    device: hardware.Device
    out_dir: Path
    mesh: Any = None

    @property
    def main(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def joined(self) -> bool:
        """Whether there are other ranks to communicate with; a plan has only their number."""
        return self.world_size > 1 and not self.device.planned

    @property
    def shares_weights(self) -> bool:
        """Whether models are sharded over the ranks (opt=fsdp)."""
        return self.mesh is not None

    @property
    def memory_gb(self) -> float:
        """The memory available to this rank in GB of 2**30 bytes; ranks on one CPU share its
        memory.
        """
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))  # set by torchrun and srun
        shared = min(here, self.world_size) if self.device.type == "cpu" else 1
        return hardware.available_gb(self.device) / shared

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in place. If all but one rank hold zero, it is exactly that
        rank's value.
        """
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's share of the items: every `world_size`-th. The shares of two ranks
        differ by at most one item in length. `put_back` merges them.
        """
        return items[self.rank :: self.world_size]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank."""
        if not self.joined:
            return [value] * self.world_size
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def find_other(self, value: Any) -> int | None:
        """Return the first rank whose value differs from that of rank 0; None if all are equal."""
        every = self.gather_objects(value)
        return next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)

    def check_same(self, what: str, found: Any) -> None:
        """Raise ConfigError if `found`, a hash of `what`, differs from that of rank 0."""
        self.meet()
        if (other := self.find_other(found)) is not None:
            raise ConfigError(
                f"the {what} on rank {other} are not those of rank 0, so the ranks would train"
                " apart. Give all ranks the same files, and a task whose rows do not depend on the"
                " machine, the time or chance."
            )

    def any(self, flag: bool) -> bool:
        """Return, on all ranks, whether `flag` is true on any rank."""
        if self.world_size == 1:
            return flag
        value = torch.tensor([int(flag)], device=self.device.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def meet(self) -> None:
        """Wait for all ranks through the store, however long one of them loads, writes or uploads:
        a collective would end the run after `workers.TIMEOUT`. If a rank fails, the alarm ends the
        waiting ranks.
        """
        if not self.joined:
            return
        store = dist.distributed_c10d._get_default_store()
        count = store.add("clutch_met", 1)
        whole = -(-count // self.world_size) * self.world_size  # the count of the last rank
        if count == whole:
            store.set(f"clutch_met_{whole}", "")
        while not store.check([f"clutch_met_{whole}"]):
            time.sleep(LOOK)
        dist.barrier()  # otherwise the rank that serves the store could end before others read it

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.joined:
            dist.barrier()
