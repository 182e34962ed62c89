"""opt=profile: a torch.profiler trace of a few steps."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from common.config import Run

if TYPE_CHECKING:
    from common.distributed import Context

log = logging.getLogger("clutch")
MOST = 64  # decode steps of a rollout that are traced: a thousand would be millions of events
_profiler: Any = None  # the profiler of this process, while it traces


@contextmanager
def profile_steps(run: Run, context: "Context") -> Iterator[Callable[[], None]]:
    """Trace some steps into RUN/profile on rank 0. Yields a function to call after each step."""
    global _profiler
    if not (run.opt.profile.enabled and context.main):
        yield lambda: None
        return
    folder, steps = context.out_dir / "profile", run.opt.profile.steps

    def write(trace: Any) -> None:
        folder.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(folder / "trace.json"))
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=key, row_limit=40)
        (folder / "table.txt").write_text(table, encoding="utf-8")
        log.info(
            "profile of %d steps: %s/table.txt, and trace.json for chrome://tracing", steps, folder
        )

    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=write, record_shapes=True
    ) as _profiler:
        try:
            yield _profiler.step
        finally:
            _profiler = None


@contextmanager
def tracing_some() -> Iterator[Callable[[int], None]]:
    """Exclude decode steps beyond `MOST` from the trace within the block. Yields a function to call
    with the number of steps made.
    """
    traced = 0

    def count(steps: int) -> None:
        nonlocal traced
        if traced < MOST <= traced + steps:
            _trace(False)
        traced += steps

    try:
        yield count
    finally:
        if traced >= MOST:
            _trace(True)


def _trace(on: bool) -> None:
    if _profiler is not None:
        kinds = torch.profiler.ProfilerActivity
        _profiler.toggle_collection_dynamic(on, [kinds.CPU, kinds.CUDA])
