"""The device of a rank: presets, precision, threads, the profiler; facts of a model."""

from common.device import hardware, precision, threads
from common.device.hardware import (
    AnyDevice,
    Device,
    awaited,
    is_out_of_memory,
    peak_memory_gb,
    total_gb,
)
from common.device.modules import (
    autocast_of,
    blocks_of,
    count_parameters,
    device_of,
    dtype_of,
    target_of,
)
from common.device.precision import Precision, exact_float32, native_bf16
from common.device.profile import profile_steps, tracing_some
from common.device.threads import count_cores, watch_load

__all__ = [
    "AnyDevice",
    "Device",
    "Precision",
    "autocast_of",
    "awaited",
    "blocks_of",
    "count_cores",
    "count_parameters",
    "device_of",
    "dtype_of",
    "exact_float32",
    "hardware",
    "is_out_of_memory",
    "native_bf16",
    "peak_memory_gb",
    "precision",
    "profile_steps",
    "target_of",
    "threads",
    "total_gb",
    "tracing_some",
    "watch_load",
]
