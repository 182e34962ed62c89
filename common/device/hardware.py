"""The device of a rank: compare it with the hardware preset, and measure its memory."""

import ctypes
import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.config import (
    ConfigError,
    HardwareConfig,
    OptConfig,
    environment,
    list_files,
    shipped,
    unused,
)

log = logging.getLogger("clutch")

CONTROL = Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")
# The driver that a build of PyTorch needs, the newest build first.
BUILDS = ((580, "cu130"), (525, "cu126"))
INSTALL = "pip install uv && uv pip install --python {python} torch==2.13.0 --torch-backend={build}"
NO_DEVICE = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class Device:
    """The device of a rank, or of a plan.

    Attributes:
        device: the torch device.
        name: the name of the card or CPU.
        memory_gb: the memory of the card, or of the machine, which its ranks share.
        matches: whether it is the device that the preset describes.
        planned: whether it belongs to a plan (plan=true), in which models are on meta.
        preset: the known facts of a planned device that need not be present; None for a present
            device.
    """

    device: torch.device
    name: str
    memory_gb: float
    matches: bool
    planned: bool = False
    preset: HardwareConfig | None = None

    @property
    def type(self) -> str:
        """The kind of device: cpu or cuda."""
        return self.device.type

    @property
    def home(self) -> torch.device:
        """The torch device of its tensors: "meta" in a plan."""
        return torch.device("meta") if self.planned else self.device


# A device that is present, or that of a plan.
AnyDevice = torch.device | Device


def find_planned(config: HardwareConfig) -> Device:
    """Return the device of a preset for a plan, or the present device if the preset names none."""
    if config.device == "cuda" and config.memory_gb is not None:
        cuda = torch.device("cuda", 0)
        return Device(cuda, config.name, config.memory_gb, True, planned=True, preset=config)
    return replace(find(config), planned=True)


def preset_of(device: AnyDevice) -> HardwareConfig | None:
    """Return the preset of a planned device that need not be present; None for other devices."""
    return device.preset if isinstance(device, Device) else None


def unwrap(device: AnyDevice) -> torch.device:
    """Return the torch device."""
    return device.device if isinstance(device, Device) else device


def capability(device: AnyDevice) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; in a plan the lowest one that its preset
    implies.
    """
    if (preset := preset_of(device)) is not None:
        return (8, 0) if preset.peak_tflops.bf16 else (7, 0)
    return torch.cuda.get_device_capability(unwrap(device))


def local_devices(config: HardwareConfig) -> int:
    """Return the number of CUDA devices that the preset may use on this node; 0 = run
    on the CPU.
    """
    return torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0


def check_visible(config: HardwareConfig) -> None:
    """Raise ConfigError if CUDA_VISIBLE_DEVICES names devices that do not exist: CUDA drops them
    silently.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name for name in map(str.strip, text.split(",")) if name not in NO_DEVICE]
    if not named or config.device == "cpu" or torch.version.cuda is None:
        return
    count = torch.cuda.device_count()
    if count < len(named):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={text} names {len(named)} devices, but CUDA finds {count} of"
            " them: one of these ordinals does not exist on this node, or is named twice. Correct"
            " it (nvidia-smi -L lists them), or use hardware=cpu."
        )


def check_driver(config: HardwareConfig) -> None:
    """Raise ConfigError if the machine has an NVIDIA driver but PyTorch finds no device: the run
    would train on the CPU.
    """
    if config.device != "cpu" and (why := why_no_device()):
        raise ConfigError(f"{why} To train on the CPU all the same: hardware=cpu.")


def driver() -> str | None:
    """Return the version of the NVIDIA driver; None if there is none."""
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    version = re.search(r"Kernel Module.*?\s{2,}(\d[\d.]*)", text)
    return version[1] if version else None


def why_no_device() -> str | None:
    """Return the problem and its fix if the machine has an NVIDIA driver but PyTorch finds no
    device; None if there is no driver, or CUDA_VISIBLE_DEVICES hides the devices.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in NO_DEVICE
    installed = driver()
    if hidden or torch.cuda.is_available() or installed is None:
        return None
    has = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    said = (
        f"this machine has NVIDIA's driver {installed}, but PyTorch ({torch.__version__}, {has})"
        " finds no device."
    )
    major = int(installed.partition(".")[0])
    build = next((build for least, build in BUILDS if major >= least), None)
    if build is None:
        return f"{said} Builds for CUDA 12 need driver 525 or later, and for CUDA 13 driver 580."
    if torch.version.cuda is None or int(build[2:4]) < int(torch.version.cuda.partition(".")[0]):
        command = INSTALL.format(python=sys.executable, build=build)
        return f"{said} Install the build for this driver: {command}."
    return f"{said} Look whether nvidia-smi -L lists one; a container needs --gpus all."


def find(config: HardwareConfig, local_rank: int = 0) -> Device:
    """Return the device of a rank, and whether it matches the preset; `check` warns and raises."""
    if local_devices(config):
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        properties = torch.cuda.get_device_properties(device)
        gb = total_gb(device)
        same = _is_same(config.match, config.memory_gb, properties.name, gb)
        if config.match is None and config.memory_gb is not None:  # a limit, no fact of a preset
            gb, same = min(gb, config.memory_gb), True
        return Device(device, properties.name, gb, same)
    gb = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), find_limit()) / 2**30
    if config.device != "cuda" and config.memory_gb is not None:
        gb = min(gb, config.memory_gb)
    return Device(torch.device("cpu"), cpu_name(), gb, config.device != "cuda")


def _is_same(match: str | None, wanted_gb: float | None, name: str, gb: float) -> bool:
    """Return whether a preset describes a card of this name and memory: the name alone does not
    distinguish an A100 of 40 GB from one of 80 GB.
    """
    same = (match or "").lower() in name.lower()
    return same and (wanted_gb is None or abs(gb - wanted_gb) < 0.2 * wanted_gb)


def find_preset(device: Device) -> str | None:
    """Return the name of the file in conf/hardware that describes a card, or None."""
    for path in list_files("hardware"):
        facts = shipped(f"hardware/{path.name}")
        match = facts["match"] and str(facts["match"])  # YAML reads 4090 as a number
        if match and _is_same(match, facts["memory_gb"], device.name, device.memory_gb):
            return path.stem
    return None


def find_limit(process: Path = Path("/proc/self/cgroup"), root: Path = CONTROL) -> float:
    """Return the memory limit in bytes that a container or a Slurm job sets for this process;
    infinity without a limit.

    Args: process: the file that lists the process's control groups (man 7 cgroups); root: their
    folder.
    """
    lines = process.read_text(encoding="utf-8").splitlines() if process.exists() else []
    limits = [math.inf]
    for line in lines:
        number, kinds, own = line.split(":", 2)
        top = root if number == "0" else root / "memory"
        if number == "0" or "memory" in kinds.split(","):
            group = top / own.lstrip("/")
            # A container sees its group as the top, whatever its name is.
            for folder in {top, group, *(up for up in group.parents if up.is_relative_to(top))}:
                for path in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
                    limits += [float(text)] if text.isdecimal() else []
    return min(limits)


def keep_freed_memory() -> None:
    """Make the C library (glibc) keep freed host memory for later tensors.

    Otherwise it returns large blocks to the kernel, which clears every page before it is used
    again: a sixth of a training pass of SmolLM2-135M on two cores.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that older versions take
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def check(config: HardwareConfig, opt: OptConfig, found: Device) -> None:
    """Compare preset and device: log one warning, or with hardware.strict raise ConfigError.
    Applies the settings of the preset.

    Raises: ConfigError also for opt=compile if the preset excludes it, and if this torch has no
    kernels for the device.
    """
    if not found.matches:
        what = (
            f"hardware={config.name} describes another device; here is {found.name} with"
            f" {found.memory_gb:.0f} GB"
        )
        if config.strict:
            raise ConfigError(f"{what}. Use hardware=auto, or hardware.strict=false to go on.")
        log.warning(
            "%s. Sizes are refitted to it and the run goes on (hardware.strict=true would stop).",
            what,
        )
    if found.type == "cuda" and found.preset is None:
        major, minor = torch.cuda.get_device_capability(found.device)
        built = torch.cuda.get_arch_list()  # "sm_90a", "sm_100f"; "compute_90" is compiled later
        numbers = [int(arch[1]) for name in built if (arch := re.match(r"sm_(\d+)", name))]
        if numbers and min(numbers) > major * 10 + minor:
            install = INSTALL.format(python=sys.executable, build="cu126")
            raise ConfigError(
                f"this torch ({torch.__version__}) has no kernels for {found.name}"
                f" (sm_{major}{minor}; it has {', '.join(built)}). Install the build for CUDA 12.6,"
                f" which keeps older devices: {install}."
            )
    choose_attention(found.device)
    if found.device.type == "cpu":
        elsewhere = "on a CPU: there is no other memory"
        unused(
            (opt.deterministic.enabled, "opt=deterministic", "on a CPU, which repeats anyway"),
            (opt.offload.enabled, "opt=offload", elsewhere),
            (opt.fsdp.cpu_offload, "opt.fsdp.cpu_offload=true", elsewhere),
        )
    if opt.compile.enabled and not config.compile and found.matches:
        raise ConfigError(
            f"opt=compile is not for hardware={config.name}: its compiler needs compute capability"
            f" 8.0. Leave it out{environment.unset('COMPILE_MODEL')}."
        )


def choose_attention(device: AnyDevice) -> None:
    """Disable cuDNN's attention in PyTorch. On Hopper and later it has the highest priority, and
    builds a plan for every new shape, while shapes change at each step; its backward pass ignores
    opt=deterministic.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def total_gb(device: torch.device) -> float:
    """Return the memory of a GPU in GB of 2**30 bytes; 0 for a CPU, which shares its own."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.get_device_properties(device).total_memory / 2**30


def available_gb(device: Device) -> float:
    """Return the GB of memory that are free, or that this process already holds."""
    if device.type != "cuda" or device.preset is not None:
        return device.memory_gb
    free, _ = torch.cuda.mem_get_info(device.device)
    free += torch.cuda.memory_reserved(device.device)
    return min(device.memory_gb, free / 2**30)


def set_environment(p2p: bool) -> None:
    """Set environment variables that CUDA, cuBLAS and NCCL read when they start, unless the user
    has. It must run before the process group is made, since NCCL connects then.

    Args: p2p: whether devices may copy directly to each other.
    """
    if not p2p:
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Freed caches leave segments of any size, which expandable segments can reuse.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # cuBLAS reads it at the first product of a process, and a later job of a sweep may need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def attention_kernel(device: Device, dtype: torch.dtype, head_size: int) -> str:
    """Return the kernel that scaled_dot_product_attention uses with a mask on this device:
    efficient or math, on a CPU also flash.
    """
    if device.preset is not None:
        return "its kernel is chosen on the device"
    q = torch.zeros(1, 1, 16, head_size, device=device.device, dtype=dtype)
    mask = torch.zeros(1, 1, 16, 16, device=device.device, dtype=dtype)
    chosen = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(q, q, q, mask))
    return chosen.name.removesuffix("_ATTENTION").lower()


@contextmanager
def awaited(device: torch.device) -> Iterator[None]:
    """Wait after the block until the device has finished, so that its time counts towards the
    block.
    """
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak memory of a device: an earlier job of a sweep may have had a higher one. The
    peak of a CPU is that of the process and cannot be reset.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory since `forget_peak` on a device, or the peak resident memory of this
    process on a CPU; GB of 2**30 bytes.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10  # bytes that it is counted in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def cpu_name() -> str:
    """Return the model of the CPU and the number of its cores."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return f"{name[1].strip() if name else 'CPU'} ({os.cpu_count()} cores)"


# --- running out of memory

# The texts of PyTorch's CPU allocator, CUDA (also in a recording), cuBLAS and NCCL. Only CUDA's
# allocator has a class for it.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(text in str(error) for text in OUT_OF_MEMORY)
