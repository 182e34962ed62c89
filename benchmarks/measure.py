"""The parts of every benchmark: interleaved timing, peaks of the device, conditions, a table, JSON.

Each case runs once first (or as often as its warm-up says), which is reported separately; then A B
C A B C ..., so that a slow minute of the machine affects all cases. A ratio is the median of the
ratios within each repeat.
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from common.device import hardware, native_bf16, threads
from common.report import find_commit
from common.system import first_line, write_text
from ddp_bench.report.tables import align

MATRIX = {"cpu": 2048, "cuda": 8192}  # size of the product that counts as the device's peak


@dataclass
class Case:
    """One thing to time. scale: whole / part, if `run` does a part of the work."""

    name: str
    run: Callable[[], Any]
    scale: float = 1.0
    warm_ups: int = 1


@dataclass
class Timing:
    """The seconds of the whole work, and the result, by repeat. first: the result of the first
    call.
    """

    warm_up: float
    first: Any
    seconds: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    @property
    def p50(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)

    def speeds(self, work: Callable[[Any], float]) -> list[float]:
        """Return the work per second of each repeat. work: returns the work of a result."""
        return [work(r) / s for r, s in zip(self.results, self.seconds, strict=True)]


class Report:
    """The result of a benchmark: rows and conditions for files, and the same as text.

    Attributes:
        figures: the targets and the measured values.
        notes: sentences below the table.
    """

    def __init__(self, name: str, options: argparse.Namespace, repeats: int, **facts: Any) -> None:
        self.name, self.quick = name, options.quick
        self.device = find_device(options.device)
        self.repeats = options.repeats or (1 if options.quick else repeats)
        self.conditions: dict[str, Any] = conditions(self.device) | facts
        self.conditions |= {"repeats": self.repeats, "quick": self.quick, "skipped": {}}
        self.rows: list[dict[str, Any]] = []
        self.figures: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self.path: Path | None = getattr(options, "json", None)

    def time(self, cases: Sequence[Case]) -> dict[str, Timing]:
        """Time the cases in turn; the raw seconds go to the conditions."""
        timings = interleaved(cases, self.repeats, self.device)
        taken = {name: {"warm_up": t.warm_up, "seconds": t.seconds} for name, t in timings.items()}
        self.conditions["timing"] = self.conditions.get("timing", {}) | taken
        return timings

    def add(self, row: str, value: float | None, unit: str, *against: Any) -> None:
        """Add a row, and write the rows so far, as a benchmark may be cut off.

        Args:
            value: the measured value; None = not measured.
            against: the row that the ratio refers to, and the ratio; nothing = no ratio.
        """
        base, ratio = against or (None, None)
        found = {"benchmark": self.name, "row": row, "value": value, "unit": unit}
        self.rows.append(found | {"against": base, "ratio": ratio})
        if self.path is not None:
            self.save(self.path)

    def compare(self, values: dict[str, list[float]], unit: str, base: str, less: bool) -> None:
        """Add a row per series of repeats, with its ratio to `base`. less: whether less is
        better.
        """
        for name, series in values.items():
            ratio = paired(values[base], series) if less else paired(series, values[base])
            against = () if name == base else (base, ratio)
            self.add(name, statistics.median(series), unit, *against)

    def skip(self, row: str, unit: str, reason: str) -> None:
        """Add a row that this device cannot measure."""
        self.conditions["skipped"][row] = reason
        self.add(row, None, unit)
        self.notes.append(f"{row}: skipped, {reason.rstrip('.')}.")

    @property
    def text(self) -> str:
        """The table, the figures and the notes."""
        units = [*dict.fromkeys(row["unit"] for row in self.rows), "ratio"]
        lines: dict[str, dict[str, str]] = {}
        for row in self.rows:
            cells = lines.setdefault(row["row"], {})
            cells[row["unit"]] = number(row["value"], row["unit"])
            if row["ratio"] is not None:  # the last one counts
                cells["ratio"] = f"{row['ratio']:.2f}x"
        table = [[name, *(cells.get(u, "") for u in units)] for name, cells in lines.items()]
        parts = [align([["", *units], *table], left=1)] if table else []
        if self.figures:
            parts.append(align([("", "wanted", "measured"), *self.figures], left=1))
        return "\n\n".join("\n".join(part) for part in (*parts, self.notes) if part)

    def save(self, path: Path) -> None:
        """Write the JSON."""
        figures = {what: {"wanted": w, "measured": m} for what, w, m in self.figures}
        content = {"conditions": self.conditions | {"figures": figures}, "rows": self.rows}
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of each repeat."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def progress(text: str) -> None:
    """Show the current work, on a terminal only; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)


def seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds of one call, including the device's work, and its result."""
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    wait(device)
    started = time.perf_counter()
    result = run()
    wait(device)
    return time.perf_counter() - started, result


def interleaved(cases: Sequence[Case], repeats: int, device: torch.device) -> dict[str, Timing]:
    """Time all cases in turn, `repeats` times."""
    timings = {}
    for case in cases:
        progress(f"warm-up: {case.name}")
        timing = timings[case.name] = Timing(*seconds(case.run, device))
        for _ in range(case.warm_ups - 1):
            timing.warm_up += seconds(case.run, device)[0]
    for repeat in range(repeats):
        for case in cases:
            progress(f"repeat {repeat + 1} of {repeats}: {case.name}")
            took, result = seconds(case.run, device)
            timings[case.name].seconds.append(case.scale * took)
            timings[case.name].results.append(result)
    progress("")
    return timings


@torch.inference_mode()
def peak_flops(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Return the FLOP/s of a big square matrix product, the best of ten."""
    size = size or MATRIX[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    left @ right
    return 2 * size**3 / min(seconds(lambda: left @ right, device)[0] for _ in range(10))


def find_kernels(run: Callable[[], Any], device: torch.device, most: int = 12) -> dict[str, float]:
    """Return the microseconds of the kernels that take most of a call, by name; on a CPU those of
    operators.
    """
    cuda, kinds = device.type == "cuda", torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        seconds(run, device)
    spent = {
        event.key[:80]: event.self_device_time_total if cuda else event.self_cpu_time_total
        for event in profile.key_averages()
    }
    longest = sorted(spent.items(), key=lambda pair: -pair[1])[:most]
    return {name: round(taken, 1) for name, taken in longest}


def peak_memory_gb(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> float | None:
    """Return the peak memory of `prepare(*arguments)()` and of all that it builds, in GB of 2**30
    bytes, in a new process.
    """
    return in_new_process(prepare.__module__, _peak_memory_gb, prepare, arguments)


def in_new_process(module: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function`, or raise its exception, in a new process that has imported
    `module`.
    """
    # a clean server imports once, its children only fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


class Stopwatch(transformers.TrainerCallback):
    """The clock of a peer's trainer. seconds: of each step except the first, which is warm-up."""

    def __init__(self) -> None:
        self.marks: list[float] = []  # begin and end of each step

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Take the time."""
        self.marks.append(time.perf_counter())

    on_step_end = on_step_begin

    @property
    def seconds(self) -> list[float]:
        """The seconds of each step."""
        pairs = zip(self.marks[2::2], self.marks[3::2], strict=True)
        return [end - start for start, end in pairs]


def trainer_settings(work: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of every peer's trainer: one step more than is timed, and no files."""
    return {
        "output_dir": tempfile.mkdtemp(dir=work["folder"]),
        "max_steps": work["steps"] + 1,
        "use_cpu": work["device"] == "cpu",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def print_to(path: str) -> None:
    """Append the output of this process to a file from now on."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _peak_memory_gb(prepare: Callable[..., Any], arguments: tuple[Any, ...]) -> float | None:
    memory = Peak()
    prepare(*arguments)()
    return memory.gb()


class Peak:
    """The peak memory of this process from now on. Create one after the imports, in a new
    process.
    """

    def __init__(self) -> None:
        self.before = _resident("VmRSS")  # bytes

    @staticmethod
    def forget() -> None:
        """Restart the peak at the current memory."""
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS

    def gb(self) -> float | None:
        """Return the memory that torch allocated, on CUDA; on a CPU the resident memory minus that
        at the start. None if unknown.
        """
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated() / 2**30
        # not getrusage: its peak goes back to the process that this one was forked from
        peak = _resident("VmHWM")
        return None if self.before is None or peak is None else (peak - self.before) / 2**30


def _resident(which: str) -> int | None:
    """Return VmRSS (the current memory) or VmHWM (its peak) of this process in bytes; None outside
    Linux.
    """
    try:
        found = re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def why_no_compiler(device: torch.device) -> str | None:
    """Return the reason that torch.compile does not work on `device`, in one line; None if it
    works.
    """
    try:
        torch.compile(lambda x: (x + 1).sin())(torch.ones(8, device=device))
    except Exception as error:  # whatever it is, it is a reason to skip, not to fail
        return describe(error)
    return None


def describe(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"[:160]


def find_device(name: str | None) -> torch.device:
    """Return the device to measure on, prepared as in a run."""
    hardware.set_environment(p2p=True)
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    hardware.choose_attention(device)
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        hardware.keep_freed_memory()
        threads.watch_load()
    return device


def choose_model(name: str | None, device: torch.device) -> tuple[str, torch.dtype]:
    """Return the model of --model or the device's default, and its dtype."""
    name = name or ("0.5b" if device.type == "cuda" else "small")
    half = name != "small" and native_bf16(device)
    return name, torch.bfloat16 if half else torch.float32


def conditions(device: torch.device) -> dict[str, Any]:
    """Return the conditions of a measurement. load_average: the machine's load before it."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else hardware.cpu_name(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "commit": find_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks " + re.sub(r" --json[ =]\S+", "", " ".join(sys.argv[1:])),
    }


def number(value: float | None, unit: str = "") -> str:
    """Format three digits without exponent, a percentage for a share, a dash for None."""
    if value is None:
        return "-"
    if unit.startswith("share"):
        return f"{value:.1%}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 1e-3 else f"{value:.5f}"


def name_of(dtype: torch.dtype) -> str:
    """Return float32, bfloat16 or float16."""
    return str(dtype).removeprefix("torch.")
