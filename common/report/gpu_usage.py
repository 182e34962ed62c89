"""Utilisation, memory and energy of the GPUs of a run, as counted by the driver.

An optional reader: it needs the package nvidia-ml-py (pip install -e '.[gpu]') and NVIDIA's driver.
A thread per rank reads the rank's own device through NVML once per second; when an event is logged,
the readings of all ranks during it are combined. Without the package, or without a GPU, nothing is
read and nothing is logged.

NVML counts the whole device, including other programs on it. Measures that a device does not
support are left out (a part of a MIG device has neither utilisation nor energy).
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from common.distributed import Context

log = logging.getLogger("clutch")

SECONDS = 1.0  # between two readings
PERCENTILES = (10, 50, 90)
MEASURES = ("utilisation", "memory")  # in percent


@dataclass
class Seen:
    """Readings of one rank during an event.

    Attributes:
        utilisation: percentages.
        memory: percentages.
        joules: energy; None = not supported.
    """

    utilisation: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    joules: float | None = None


class Reader:
    """Reads one device in a thread until `close`.

    Args: nvml: the module pynvml; handle: its device.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self.idle: set[str] = set()  # functions of NVML that the device does not support
        self.lock, self.ended = threading.Lock(), threading.Event()
        # (time, percentages by measure) since the last event; (time, joules since the start).
        self.samples: list[tuple[float, dict[str, int]]] = []
        self.energy: list[tuple[float, float]] = []
        self.first_millijoules: int | None = None
        self.watts: float | None = None
        self.taken_until = time.monotonic()
        self.look()
        self.thread = threading.Thread(target=self._watch, name="gpu usage", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(SECONDS):
            self.look()

    def ask(self, name: str, read: Any) -> Any:
        """Return the result of a function of NVML for the device; None if the device does not
        support it.
        """
        if name in self.idle:
            return None
        try:
            return read(getattr(self.nvml, name)(self.handle))
        except (self.nvml.NVMLError, AttributeError):  # a version of the package without it
            self.idle.add(name)
            return None

    def look(self) -> None:
        """Take one reading."""
        used = {
            "utilisation": self.ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu),
            "memory": self.ask(
                "nvmlDeviceGetMemoryInfo", lambda memory: round(100 * memory.used / memory.total)
            ),
        }
        known = {name: int(value) for name, value in used.items() if value is not None}
        spent = self._ask_energy()
        with self.lock:
            now = time.monotonic()
            self.samples.append((now, known))
            self._add_energy(now, *spent)

    def _ask_energy(self) -> tuple[int | None, float | None]:
        """Return the device's counter in millijoules, or else its power in watts."""
        total = self.ask("nvmlDeviceGetTotalEnergyConsumption", int)
        if total is not None:
            return total, None
        return None, self.ask("nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1e3)

    def _add_energy(self, now: float, millijoules: int | None, watts: float | None) -> None:
        """Add the joules up to now: those of the counter, or else power times seconds."""
        if millijoules is not None:
            if self.first_millijoules is None:
                self.first_millijoules = millijoules
            self.energy.append((now, (millijoules - self.first_millijoules) / 1e3))
        elif watts is not None:
            before = self.watts if self.watts is not None else watts
            at, joules = self.energy[-1] if self.energy else (now, 0.0)
            self.energy.append((now, joules + (now - at) * (before + watts) / 2))
            self.watts = watts
        else:
            self.energy.clear()

    def take(self, seconds: float) -> Seen:
        """Return the readings of the last `seconds`, without those that an earlier call has
        returned.
        """
        spent = self._ask_energy()
        with self.lock:
            now = time.monotonic()
            self._add_energy(now, *spent)
            begin = max(now - seconds, self.taken_until)
            seen = Seen(joules=self._joules_since(begin))
            for at, known in self.samples:
                if begin <= at <= now:
                    for name, value in known.items():
                        getattr(seen, name).append(value)
            self.samples.clear()
            self.energy = self.energy[-1:]
            self.taken_until = now
        return seen

    def _joules_since(self, begin: float) -> float | None:
        if not self.energy:
            return None
        times, joules = zip(*self.energy, strict=True)
        return joules[-1] - float(np.interp(begin, times, joules))

    def close(self) -> None:
        """Stop the thread, and shut down NVML."""
        self.ended.set()
        self.thread.join(2 * SECONDS)  # a driver that hangs does not keep the run
        with self.lock, suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()


def open_reader(device: torch.device) -> Reader | None:
    """Return the reader of a device; None without a GPU, the package, the driver, or a device known
    to NVML.
    """
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return Reader(nvml, find_handle(nvml, device.index or 0))
    except (nvml.NVMLError, LookupError) as error:
        log.info("the utilisation of the GPU is not read: %s", error)
        return None


def find_handle(nvml: Any, index: int) -> Any:
    """Return NVML's device for CUDA's device `index`, which is relative to CUDA_VISIBLE_DEVICES: a
    list of indices, of prefixes of UUIDs, or of parts of a MIG device.

    Raises: LookupError, or NVMLError, if NVML does not know it.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in text.split(",")] if text else []
    name = names[index] if index < len(names) else ""
    if name.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    # CUDA may number devices by speed, and NVML does by the bus: their UUIDs are the same.
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(uuid).removeprefix('GPU-')}")
    if name.isdecimal() or not name:
        return nvml.nvmlDeviceGetHandleByIndex(int(name or index))
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    for handle in handles:
        found = nvml.nvmlDeviceGetUUID(handle)
        if (found.decode() if isinstance(found, bytes) else found).startswith(name):
            return handle
    raise LookupError(f"NVML has no device {name}")


class Usage:
    """The usage of the devices of all ranks. Its methods are called on all ranks."""

    def __init__(self, context: Context, reader: Reader | None) -> None:
        self.context, self.reader = context, reader

    def measure(self, seconds: float, tokens: int) -> dict[str, Any]:
        """Return the usage to log for an event that took the last `seconds` and generated `tokens`
        on all ranks.
        """
        mine = self.reader.take(seconds) if self.reader else None
        ranks = self.context.gather_objects(mine)
        seen = [one for one in ranks if one is not None]
        event: dict[str, Any] = {}
        samples = {name: [v for one in seen for v in getattr(one, name)] for name in MEASURES}
        for name, values in samples.items():
            event |= {f"{name}_{key}": value for key, value in percentiles(values).items()}
        joules = [one.joules for one in seen if one.joules is not None]
        if len(joules) == len(ranks):  # of some ranks alone it would be too little
            event |= describe_energy(sum(joules), tokens) | {"tokens": tokens}
        kept = {name: values for name, values in samples.items() if values}
        return event | ({"samples": kept} if kept else {})


@contextmanager
def watching(context: Context) -> Iterator[Usage | None]:
    """Read the devices of all ranks in the block; None if none of them can be read. Called on all
    ranks.
    """
    reader = open_reader(context.device.device)
    try:
        on_gpus = context.device.type == "cuda"
        yield Usage(context, reader) if on_gpus and context.any(reader is not None) else None
    finally:
        if reader is not None:
            reader.close()


def percentiles(values: Sequence[int]) -> dict[str, float]:
    """Return the percentiles of values by name, such as p50; empty without values."""
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{key}": value for key, value in zip(PERCENTILES, found, strict=True)}


def describe_energy(joules: float, tokens: int) -> dict[str, float]:
    """Return joules, and joules per 1,000 generated tokens if there are any."""
    per_token = {"joules_per_1000_tokens": 1000 * joules / tokens} if tokens else {}
    return {"joules": joules} | per_token


def summarise(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the usage over all events of a log, also of a resumed run: percentiles in percent, the
    number of samples, joules. None if no event has usage.
    """
    found = [event["gpu"] for event in events if event.get("gpu")]
    if not found:
        return None
    summary: dict[str, Any] = {}
    for name in MEASURES:
        values = [v for one in found for v in one.get("samples", {}).get(name, ())]
        if values:
            summary[name] = {**percentiles(values), "samples": len(values)}
    counted = [one for one in found if "joules" in one]
    if counted:
        joules = sum(one["joules"] for one in counted)
        summary |= describe_energy(joules, sum(one["tokens"] for one in counted))
    return summary or None


def describe(usage: dict[str, Any] | None) -> dict[str, str]:
    """Return the report's rows for the result of `summarise`."""
    rows = {}
    for name in MEASURES:
        if of := (usage or {}).get(name):
            spread = f"p10 {of['p10']:.0f} %, median {of['p50']:.0f} %, p90 {of['p90']:.0f} %"
            rows[f"GPU {name}"] = f"{spread} ({of['samples']:,} readings)"
    if usage and "joules" in usage:
        rows["energy"] = f"{usage['joules']:,.0f} J"
        if "joules_per_1000_tokens" in usage:
            rows["energy"] += f", {usage['joules_per_1000_tokens']:,.3g} J per 1,000 tokens"
    return rows
