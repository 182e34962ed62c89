"""The parts of every benchmark: interleaved timing, peaks of the device, conditions, a table, JSON.

How time is taken: each case runs once (or as often as its warm-up says) beforehand, reported apart;
then A B C A B C ..., so that a slow minute of the machine falls on all of them; a ratio is the
median of the ratios within each repeat.
"""

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from common import hardware

WIDTH = 80
MATRIX = {"cpu": 2048, "cuda": 8192}  # size of the product that counts as the device's peak


@dataclass
class Case:
    """One thing to time.

    scale: where `run` does a part of the work, whole / part; seconds are multiplied by it.
    """

    name: str
    run: Callable[[], Any]
    scale: float = 1.0
    warm_ups: int = 1


@dataclass
class Timing:
    """The result of one case. seconds: of the whole work, one per repeat. result: what its first
    call returned.
    """

    warm_up: float
    result: Any
    seconds: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        """The median."""
        return quantile(self.seconds, 0.5)

    @property
    def p90(self) -> float:
        """Nine tenths of the repeats were at least as fast."""
        return quantile(self.seconds, 0.9)


@dataclass(frozen=True)
class Row:
    """One value of the JSON. ratio: how `row` compares with `against`; the conditions say which way
    round.
    """

    benchmark: str
    row: str
    value: float | None  # None = not measured
    unit: str
    against: str | None = None
    ratio: float | None = None


@dataclass
class Report:
    """The result of a benchmark: text for people, the rest for files."""

    text: str
    conditions: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write the JSON."""
        content = {"conditions": self.conditions, "rows": [asdict(row) for row in self.rows]}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile, interpolated between neighbours."""
    return torch.tensor(values, dtype=torch.float64).quantile(share).item()


def paired(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each repeat."""
    return [a / b for a, b in zip(above, below, strict=True)]


def progress(text: str) -> None:
    """Show what is going on, on a terminal only; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[: WIDTH - 1]}", end="", file=sys.stderr, flush=True)


def seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall-clock seconds of one call, the device's work included, and what it returned."""
    synchronize(device)
    started = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - started, result


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(cases: Sequence[Case], repeats: int, device: torch.device) -> dict[str, Timing]:
    """Time all cases in turn, `repeats` times over."""
    timings = {}
    for case in cases:
        progress(f"warm-up: {case.name}")
        first, result = seconds(case.run, device)
        timings[case.name] = Timing(first, result)
        for _ in range(case.warm_ups - 1):
            timings[case.name].warm_up += seconds(case.run, device)[0]
    for repeat in range(repeats):
        for case in cases:
            progress(f"repeat {repeat + 1} of {repeats}: {case.name}")
            timings[case.name].seconds.append(case.scale * seconds(case.run, device)[0])
    progress("")
    return timings


def taken(timings: dict[str, Timing]) -> dict[str, dict[str, Any]]:
    """Return the seconds of each case, for the JSON."""
    return {name: {"warm_up": t.warm_up, "seconds": t.seconds} for name, t in timings.items()}


@torch.inference_mode()
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a big square matrix product, the best of ten: what utilisation is a share of."""
    size = MATRIX[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    left @ right
    return 2 * size**3 / min(seconds(lambda: left @ right, device)[0] for _ in range(10))


def peak_memory_gb(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> float | None:
    """Peak memory in GB of 2**30 bytes of `prepare(*arguments)()` and of all that `prepare` builds,
    in a new process.

    On CUDA, what torch allocated. On a CPU, the largest resident size less that after the imports;
    None where the system does not tell. In this process the peak would be that of whichever case
    was largest so far.
    """
    return in_new_process(prepare.__module__, _peak_memory_gb, prepare, arguments)


def in_new_process(module: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return or raise what `function` does, called in a process of its own that has `module`
    imported.
    """
    # a clean server imports once, its children only fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _peak_memory_gb(
    prepare: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]
) -> float | None:
    memory = Peak()
    prepare(*arguments)()
    return memory.gb()


class Peak:
    """Peak memory of this process from here on: make one after the imports, in a new process."""

    def __init__(self) -> None:
        self.before = _resident("VmRSS")  # bytes

    @staticmethod
    def forget() -> None:
        """Begin the peak anew at what is held now, so that what was built before does not hide what
        comes.
        """
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS

    def gb(self) -> float | None:
        """On CUDA, what torch allocated; on a CPU, resident memory less what was there at the
        start; None if unknown.
        """
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated() / 2**30
        # not getrusage: its peak goes back to the process that this one was forked from
        peak = _resident("VmHWM")
        return None if self.before is None or peak is None else (peak - self.before) / 2**30


def _resident(which: str) -> int | None:
    """VmRSS (now) or VmHWM (peak) of this process in bytes; None outside Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{which}:")]
    return 1024 * int(found[0]) if found else None


def why_no_compiler(device: torch.device) -> str | None:
    """None where torch.compile works on `device`, else the reason in one line."""
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.ones(8, device=device))
    except (
        Exception
    ) as error:  # whatever stands in the way of a compiler is a reason to skip, not to fail
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"[:160]
    return None


def find_device(name: str | None) -> torch.device:
    """The device to measure on."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device == torch.device("cuda")
        else device
    )


def conditions(device: torch.device, **more: Any) -> dict[str, Any]:
    """Return what a number depends on. load_average: of the machine when this was called, so before
    the measurement.
    """
    return {
        "device": (
            torch.cuda.get_device_name(device) if device.type == "cuda" else hardware.cpu_name()
        ),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks " + re.sub(r" --json[ =]\S+", "", " ".join(sys.argv[1:])),
        **more,
    }


def commit() -> str | None:
    """The checkout's commit, with -dirty where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        folder = Path(__file__).resolve().parent
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, the others to the right. A line of two cells is a name and a
    remark. Names and remarks that have no room within `WIDTH` are wrapped.
    """
    full = [header, *(line for line in lines if len(line) > 2)]
    widths = [max(len(line[column]) for line in full) for column in range(len(header))]
    room = max(20, WIDTH - sum(2 + width for width in widths[1:]))
    widths[0] = min(room, max(len(line[0]) for line in (header, *lines)))

    def aligned(line: Sequence[str]) -> list[str]:
        name = textwrap.wrap(line[0], widths[0], subsequent_indent="  ")
        if len(line) == 2:
            rest = textwrap.wrap(line[1], max(20, WIDTH - widths[0] - 2))
        else:
            cells = zip(line[1:], widths[1:], strict=True)
            rest = ["  ".join(f"{cell:>{width}}" for cell, width in cells)]
        return [
            f"{left:<{widths[0]}}  {right}".rstrip()
            for left, right in itertools.zip_longest(name, rest, fillvalue="")
        ]

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*aligned(header), rule, *(text for line in lines for text in aligned(line))])


def number(value: float | None, digits: int = 3) -> str:
    """A few significant digits, no exponent; a dash for None."""
    if value is None:
        return "-"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if value >= 1e-3 else f"{value:.5f}"
