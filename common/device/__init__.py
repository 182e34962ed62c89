"""The device of a rank: presets, precision, threads, the profiler."""

from common.device import hardware, precision, threads
from common.device.hardware import (
    AnyDevice,
    Device,
    awaited,
    is_out_of_memory,
    peak_memory_gb,
    total_gb,
)
from common.device.precision import Precision, exact_float32, native_bf16
from common.device.profile import profile_steps, tracing_some
from common.device.threads import count_cores, watch_load

__all__ = [
    "AnyDevice",
    "Device",
    "Precision",
    "awaited",
    "count_cores",
    "exact_float32",
    "hardware",
    "is_out_of_memory",
    "native_bf16",
    "peak_memory_gb",
    "precision",
    "profile_steps",
    "threads",
    "total_gb",
    "tracing_some",
    "watch_load",
]
