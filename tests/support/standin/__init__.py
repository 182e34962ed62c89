"""A stand-in for a CUDA device: tensors say cuda:0 and compute on the CPU (device.cpp beside this).

Whole runs go through every branch that is meant for CUDA. Memory is counted and can run out at any
byte; `Watch` notes what makes the host wait, and what is copied to and from it, with the line that
did it. It has to be started before torch is imported, so tests use it in a process of its own.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIBRARY = "CLUTCH_STANDIN"  # the variable that names the built library
DEVICE: Any = None  # the `Device` of this process, once it is started


def build() -> Path:
    """Compile device.cpp, once for all processes. Raises: FileNotFoundError without a compiler."""
    compiler = shutil.which("g++") if sys.platform == "linux" else None
    if compiler is None:
        raise FileNotFoundError("the stand-in device needs Linux and g++, which are not here")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    source = HERE / "device.cpp"
    version = (torch / "version.py").read_bytes()
    digest = hashlib.sha256(source.read_bytes() + version + str(torch).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"clutch-standin-{os.getuid()}-{digest}.so"
    if not built.exists():
        beside = built.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        linked = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-Wl,--no-as-needed"]
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(source), *include]
        subprocess.run([*command, *linked, "-lc10", "-ltorch_cpu", "-o", str(beside)], check=True)
        beside.replace(built)
    return built


class Device:
    """The memory of the device, in bytes."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
        for name in ("live", "peak", "total"):
            getattr(self.library, f"standin_{name}").restype = ctypes.c_size_t
        for name, kinds in (
            ("capacity", [ctypes.c_size_t]),
            ("hollow", [ctypes.c_size_t]),
            ("fail", [ctypes.c_size_t, ctypes.c_int]),
        ):
            getattr(self.library, f"standin_{name}").argtypes = kinds

    @property
    def live(self) -> int:
        """What is allocated."""
        return self.library.standin_live()

    @property
    def peak(self) -> int:
        """The most that was allocated since `reset_peak`."""
        return self.library.standin_peak()

    @property
    def total(self) -> int:
        """All that has been allocated so far."""
        return self.library.standin_total()

    def reset_peak(self) -> None:
        """Forget the peak."""
        self.library.standin_reset_peak()

    def limit(self, memory: int) -> None:
        """Set how much memory there is."""
        self.memory = memory
        self.library.standin_capacity(memory)

    def compute_below(self, size: int) -> None:
        """Compute only with tensors of up to `size` bytes; larger ones have a shape and zeros that
        nothing touches, so that models of any size run for their memory alone. 0 = with all.
        """
        self.library.standin_hollow(size)

    def fail(self, after: int, how: str = "memory") -> None:
        """Raise once, when `after` more bytes have been allocated; 0 = never. how: memory
        (OutOfMemoryError), accelerator or cublas (texts of RuntimeErrors).
        """
        self.library.standin_fail(after, ("memory", "accelerator", "cublas").index(how))


def start(memory: int = 80 << 30, capability: tuple[int, int] = (8, 0)) -> Device:
    """Load the device, before torch is imported, and let torch.cuda speak for it."""
    assert "torch" not in sys.modules, "the device must be there before torch"
    device = Device()
    device.limit(memory)
    import torch
    import torch._dynamo

    device.library.standin_start()
    _patch(torch, device, capability)
    return device


def _patch(torch: Any, device: Device, capability: tuple[int, int]) -> None:
    """Replace the parts of torch.cuda that ask a driver."""
    from tests.support.standin import tape

    cuda = torch.cuda
    properties = SimpleNamespace(
        name="NVIDIA A100-SXM4-80GB",
        total_memory=device.memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=108,
    )

    class Event:
        """Nothing runs beside the host, so an event is over when it is recorded."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.at = 0.0

        def record(self, *_: Any) -> None:
            import time

            self.at = time.perf_counter()

        def elapsed_time(self, other: "Event") -> float:
            return (other.at - self.at) * 1000

        def query(self) -> bool:
            return True

        def wait(self, *_: Any) -> None: ...

        synchronize = wait

    class Scope:
        """A stream or a device, as a context."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> "Scope":
            return self

        def __exit__(self, *_: Any) -> None: ...

        def wait_stream(self, *_: Any) -> None: ...

        synchronize = wait_stream

    def nothing(*_: Any, **__: Any) -> None: ...

    replaced = {
        "_lazy_init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability,
        "get_arch_list": lambda: ["sm_70", "sm_80", "sm_90a", "compute_90"],
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "mem_get_info": lambda *_: (device.memory - device.live, device.memory),
        "memory_allocated": lambda *_: device.live,
        "memory_reserved": lambda *_: device.live,
        "max_memory_allocated": lambda *_: device.peak,
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
        "Event": Event,
        "Stream": Scope,
        "device": Scope,
        "stream": Scope,
        "current_stream": Scope,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": tape.Graph,
        "graph": tape.Capture,
        "is_current_stream_capturing": lambda: tape.Capture.under_way,
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    copy_storage = torch.UntypedStorage.clone

    def clone(storage: Any) -> Any:  # copies of modules come here
        if storage.device.type != "cuda":
            return copy_storage(storage)
        held = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return held.clone().untyped_storage()

    torch.UntypedStorage.clone = clone
    cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.amp.grad_scaler.amp_definitely_not_available = lambda: False
    torch.version.cuda = "13.0"


def watch() -> Any:
    """Return a context that counts what makes the host wait, and copies, by line of the project.

    Attributes: waits: Counter of lines; to_device: Counter by line of bytes that are not pinned.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    asks = {
        *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2),
        *(aten.bincount, aten.is_nonzero, aten.item),
    }

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.waits: Counter[str] = Counter()
            self.to_device: Counter[str] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            packet, source = func.overloadpacket, args[0] if args else None
            if packet is aten.copy_:
                self.copied(args[1], args[0])
            elif packet is aten._to_copy:
                self.copied(source, out)
            elif getattr(source, "is_cuda", False):
                masks = args[1] if packet in (aten.index, aten.index_put, aten.index_put_) else ()
                if packet in asks or any(m is not None and m.dtype == torch.bool for m in masks):
                    self.waits[place()] += 1
            return out

        def copied(self, source: Any, into: Any) -> None:
            if source.is_cuda and not into.is_cuda:
                self.waits[place()] += 1
            elif into.is_cuda and not source.is_cuda and source.dim() and not source.is_pinned():
                self.to_device[place()] += source.nbytes

    return Watch()


def place() -> str:
    """Return the file and line of the project that is being executed: "grpo/policy.py:70"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and ".venv" not in file and "/tests/" not in file:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
