"""Threads that wait for each other, on a machine with other busy processes.

Torch splits an operation among the threads of OpenMP, which spin while they wait for the last one.
On an idle machine nothing is faster: the kernel takes longer to wake a thread than most waits last.
If another process has taken a core, the spinning takes the time that the last thread needs, and a
training run takes many times as long (docs/decisions.md).

The OpenMP library of torch (libgomp) spins for only a few microseconds if it has more threads than
cores. So a crowded process starts a second, idle team of threads, and stops it once the process is
alone. Results do not change: the same number of threads as before split the work.
"""

import logging
import math
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.device.hardware import Device

log = logging.getLogger("clutch")

COUNTERS = Path("/proc/stat")
INTERVAL = 0.25  # seconds between two readings of the load
MISSING = 0.3  # a process that misses more cores than this is crowded
CALM = 8  # looks in a row without a missing core after which a process counts as alone
DIVIDED = 1 << 17  # elements that suffice for torch to split an operation among threads
USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # with either, a user has chosen how threads wait


@dataclass(frozen=True)
class Usage:
    """Counters of the cores of this process.

    Attributes:
        clock: the time of the reading, seconds.
        busy: seconds that the cores were busy, for any process.
        own: seconds that this process used itself.
    """

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> "Usage":
        """Read the kernel's counters."""
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = (line.split() for line in COUNTERS.read_text().splitlines())
        # user, nice, system, idle, waiting for disks, interrupts of two kinds
        ticks = [list(map(int, line[1:8])) for line in lines if line and line[0] in cores]
        busy = sum(sum(line) - line[3] - line[4] for line in ticks)
        return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time())

    def missing(self, before: "Usage", threads: int, cores: int) -> float:
        """Return the mean number of cores, of those that `threads` need, that other processes took
        since `before`.
        """
        others = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, others / (self.clock - before.clock) - (cores - threads))


class Watcher:
    """Watches the load in a thread, for the life of the process."""

    def __init__(self) -> None:
        self.threads, self.cores = torch.get_num_threads(), count_cores()
        self.began = Usage.now()
        self.release: threading.Event | None = None  # stops the second team, while there is one
        if self.threads > 1 and not any(name in os.environ for name in USERS):
            threading.Thread(target=self._watch, name="load", daemon=True).start()

    def missing(self) -> float:
        """Return the mean number of this process's cores that other processes took since
        the start.
        """
        return Usage.now().missing(self.began, self.threads, self.cores)

    def _watch(self) -> None:
        before, calm = self.began, 0
        while True:
            time.sleep(INTERVAL)
            now = Usage.now()
            crowded = now.missing(before, self.threads, self.cores) > MISSING
            before, calm = now, 0 if crowded else calm + 1
            if crowded and self.release is None:
                self._add_team()
            elif calm == CALM and self.release is not None:
                self.release.set()
                self.release = None

    def _add_team(self) -> None:
        """Start idle threads, so that libgomp counts more threads than cores."""
        self.release = release = threading.Event()

        def hold() -> None:
            torch.zeros(DIVIDED).add_(1)  # starts a team of threads for this thread
            release.wait()

        for _ in range(math.ceil((self.cores - self.threads + 1) / (self.threads - 1))):
            threading.Thread(target=hold, name="idle team", daemon=True).start()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_cores(ranks: int, alike: bool) -> None:
    """Set this rank's number of threads to its share of the cores: more threads slow down all
    ranks. OMP_NUM_THREADS takes precedence.

    Args:
        ranks: the number of ranks on this machine.
        alike: whether srun has started each of them, and may have bound it to cores of its own.
    """
    cores = count_cores()
    # A batch script has no step, and is given the cores of all tasks of its node, as in "4(x2),1".
    everyone = "" if "SLURM_STEP_TASKS_PER_NODE" in os.environ else "SLURM_TASKS_PER_NODE"
    tasks = re.match(r"\d+", os.environ.get(everyone, "1"))
    each = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))
    cores = min(cores, each * int(tasks[0] if tasks else 1))
    if alike and cores < (os.cpu_count() or 1):
        ranks = 1
    torch.set_num_threads(max(1, cores // ranks))


_watcher: Watcher | None = None


def watch_load() -> None:
    """Start to watch the load of this machine, once per process. Linux only."""
    global _watcher
    if COUNTERS.exists() and _watcher is None:
        _watcher = Watcher()


def describe(device: Device) -> dict[str, str]:
    """Describe for the plan the number of computing threads, and warn if other processes use the
    machine.

    Returns: the lines; empty for a GPU, and for a plan of another machine.
    """
    if device.device.type != "cpu" or device.planned:
        return {}
    threads, cores = torch.get_num_threads(), count_cores()
    if _watcher is not None and (missing := _watcher.missing()) > MISSING:
        fewer = max(1, round(threads - missing))
        advice = (
            f", or let it use fewer threads: OMP_NUM_THREADS={fewer}" if fewer < threads else ""
        )
        log.warning(
            "other processes take %.1f cores of the %d that this run computes on, so it is slower"
            " than on an idle machine. End them%s.",
            *(missing, threads, advice),
        )
    return {"threads": f"{threads} per rank, on {cores} cores"}
