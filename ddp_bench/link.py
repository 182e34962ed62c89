"""The cost of sending gradients.

An all-reduce of S bytes among n ranks takes 2 (n-1) alpha + 2 (n-1)/n S/beta seconds. alpha and
beta are measured with messages of eight sizes, or are facts of conf/hardware.
"""

import statistics
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from common.config import ConfigError, HardwareConfig
from common.distributed import Context
from ddp_bench.step import Clock

SIZES = tuple(1024 * 4**i for i in range(8))  # bytes of the messages: 1 KiB to 16 MiB
SENT = 15  # all-reduces of each size
# bytes a second of an all-reduce over PCIe 3 x16 (NCCL's topo.h), the slowest link inside a node
PCIE = 12e9


@dataclass(frozen=True)
class Link:
    """The cost of an all-reduce.

    Attributes:
        alpha: seconds of each of 2 (ranks - 1) steps.
        beta: bytes per second.
        source: the origin of these numbers, for people.
        points: the measured (bytes, seconds) that they were fitted to.
    """

    alpha: float
    beta: float
    source: str
    points: list[tuple[int, float]]

    def seconds(self, size: float, ranks: int) -> float:
        """Return the seconds of one all-reduce of `size` bytes."""
        return 2 * (ranks - 1) * self.alpha + 2 * (ranks - 1) / ranks * size / self.beta


def fit_link(points: list[tuple[int, float]], ranks: int, source: str) -> Link:
    """Fit a link to measured (bytes, seconds), by least squares of the relative error."""
    sizes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    columns = np.stack([np.full_like(sizes, 2 * (ranks - 1)), 2 * (ranks - 1) / ranks * sizes], 1)
    solved = np.linalg.lstsq(columns / seconds[:, None], np.ones_like(seconds), rcond=None)
    alpha, inverse = solved[0]
    return Link(max(float(alpha), 1e-9), 1 / max(float(inverse), 1e-15), source, points)


def find_link(config: HardwareConfig) -> Link:
    """Return the link of a preset. Raises: ConfigError if the preset does not describe it."""
    if config.allreduce_gbs is None or config.hop_us is None:
        raise ConfigError(
            f"hardware={config.name} does not say how fast its link is, and there are no two"
            " devices here to measure it. Name the device, for example hardware=a100_40g."
        )
    source = f"conf/hardware/{config.name}.yaml"
    return Link(config.hop_us * 1e-6, config.allreduce_gbs * 1e9, source, [])


def time_messages(context: Context) -> list[float]:
    """Return the seconds of an all-reduce of each of SIZES; empty with one rank."""
    medians, device = [], context.device.device
    for size in SIZES if context.world_size > 1 else ():
        tensor = torch.zeros(size // 4, device=device)
        spans = []
        for _ in range(SENT):
            context.barrier()
            clock = Clock(device)
            with clock("sent"):
                dist.all_reduce(tensor)
            spans.append(clock.read()["sent"])
        medians.append(statistics.median(spans))
    return medians


def find_exposed(
    ready: list[tuple[float, float]],
    backward: float,
    cap: float,
    link: Link,
    ranks: int,
    overlap: bool,
) -> float:
    """Return the seconds that ranks wait for gradients after a backward pass of `backward` seconds.

    Args:
        ready: (bytes as sent, time of arrival as a share of the pass) of each gradient, by arrival.
        cap: bytes of a bucket.
        overlap: whether sending overlaps with computing.
    """
    buckets: list[tuple[float, float]] = []
    size = 0.0
    for i, (part, share) in enumerate(ready):
        size += part
        # As DistributedDataParallel rebuilds them: by arrival, full or last.
        if size >= cap or i == len(ready) - 1:
            buckets.append((size, share))
            size = 0.0
    if not overlap:
        return sum(link.seconds(size, ranks) for size, _ in buckets)
    done = 0.0
    for size, share in buckets:
        done = max(done, share * backward) + link.seconds(size, ranks)
    return max(0.0, done - backward)
