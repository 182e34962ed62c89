"""Who a worker is, and what ranks say to each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import hardware


@dataclass(frozen=True)
class Context:
    """Who this worker is."""

    rank: int
    world_size: int
    device: hardware.Device
    out_dir: Path
    mesh: DeviceMesh | None = None  # [replicate, shard], with opt=fsdp

    @property
    def main(self) -> bool:
        """True on the rank that writes and prints."""
        return self.rank == 0

    @property
    def memory_gb(self) -> float:
        """The memory of this rank in GB of 2**30 bytes; the ranks of a CPU share its memory."""
        shared = self.world_size if self.device.device.type == "cpu" else 1
        return self.device.memory_gb / shared

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; where all but one rank hold zero, that rank's value exactly."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every rank, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """True on all ranks if it is true on one."""
        if self.world_size == 1:
            return flag
        value = torch.tensor([int(flag)], device=self.device.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()
