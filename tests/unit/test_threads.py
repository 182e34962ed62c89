"""Threads on a machine that others use."""

import os
import subprocess
import sys

import pytest

from common.device import threads
from common.device.threads import COUNTERS, Usage

needs_linux = pytest.mark.skipif(not COUNTERS.exists(), reason="the counters are Linux's")


@pytest.mark.parametrize(
    ("busy", "own", "threads", "cores", "missing"),
    [
        (4.0, 4.0, 2, 2, 0.0),  # alone
        (4.0, 2.0, 2, 2, 1.0),  # another process has one of the two cores
        (4.0, 2.0, 1, 2, 0.0),  # it has the core that this one does not need
        (14.0, 8.0, 4, 8, 0.0),  # 3 of the 4 cores that are left
        (16.0, 6.0, 4, 8, 1.0),
        (3.9, 4.0, 2, 2, 0.0),  # counters of the kernel are of hundredths
    ],
)
def test_the_cores_that_others_have_taken(busy, own, threads, cores, missing):
    before, now = Usage(10.0, 100.0, 50.0), Usage(12.0, 100.0 + busy, 50.0 + own)
    assert now.missing(before, threads, cores) == pytest.approx(missing)


@needs_linux
def test_its_own_work_is_nobody_elses():
    before = Usage.now()
    while Usage.now().own - before.own < 0.2:
        pass
    now = Usage.now()
    assert now.own - before.own <= now.busy - before.busy + 0.05


@pytest.mark.parametrize(
    ("bound", "cpus", "ranks", "alike", "given"),
    [
        (64, None, 2, False, 32),
        (4, None, 2, False, 2),  # taskset, or a container that has some of the cores
        (64, "8", 4, False, 2),  # one task of Slurm that starts four ranks
        (8, "8", 4, True, 8),  # srun has given each its own
        (64, "8", 4, True, 8),  # and has not bound them
        (64, None, 4, True, 16),
        (1, None, 4, False, 1),
    ],
)
def test_ranks_share_the_cores_that_there_are(bound, cpus, ranks, alike, given, monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if cpus is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    monkeypatch.setattr(threads, "count_cores", lambda: bound)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    chosen = []
    monkeypatch.setattr(threads.torch, "set_num_threads", chosen.append)
    threads.share_cores(ranks, alike)
    assert chosen == [given]


@pytest.mark.parametrize(("step", "given"), [(None, 2), ("1", 1)])
def test_a_batch_script_has_the_cores_of_all_its_tasks(step, given, monkeypatch):
    """torchrun in it starts their ranks; in a task of srun it has the cores of that one."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    monkeypatch.delenv("SLURM_STEP_TASKS_PER_NODE", raising=False)
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", step)
    monkeypatch.setattr(threads, "count_cores", lambda: 8)
    chosen = []
    monkeypatch.setattr(threads.torch, "set_num_threads", chosen.append)
    threads.share_cores(4, alike=False)
    assert chosen == [given]


# Two threads on every core that there is, and as many processes that never rest.
CROWDED = """
import os, subprocess, sys, threading, time
from pathlib import Path
import torch
from common.device import threads
count = max(2, len(os.sched_getaffinity(0)))
torch.set_num_threads(count)
threads.watch_load()
spin = [sys.executable, "-S", "-c", "while True: pass"]
busy = [subprocess.Popen(spin) for _ in range(count)]
try:
    ends = time.monotonic() + float(sys.argv[1])
    names = set()
    while "idle team" not in names and time.monotonic() < ends:
        time.sleep(0.1)
        names = {thread.name for thread in threading.enumerate()}
    print(sorted(names))
finally:
    for process in busy:
        process.kill()
"""


@pytest.mark.run
@needs_linux
@pytest.mark.parametrize(
    ("chosen", "seconds", "expected"),
    [
        ({}, 60, "['MainThread', 'idle team', 'load']"),
        pytest.param({"GOMP_SPINCOUNT": "5"}, 1, "['MainThread']", marks=pytest.mark.thorough),
        pytest.param(
            {"OMP_WAIT_POLICY": "active"}, 1, "['MainThread']", marks=pytest.mark.thorough
        ),
    ],
    ids=["crowded", "spins chosen", "policy chosen"],
)
def test_crowded_processes_use_a_second_team_by_default(chosen, seconds, expected):
    done = subprocess.run(
        [sys.executable, "-c", CROWDED, str(seconds)],
        env={k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT",)} | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
