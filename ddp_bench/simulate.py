"""A GPU that is not present: its assumed performance, and a clock for real operations, which run on
this CPU, that counts their cost on the GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from common.config import ConfigError, Run
from ddp_bench.step import Clock

# An eager operation of PyTorch costs the host about ten microseconds; products reach half of the
# peak and other operations seven tenths of the memory bandwidth. These are rules of thumb, and
# predictions from them are marked as guesses.
LAUNCH, ARITHMETIC, MEMORY = 10e-6, 0.5, 0.7


@dataclass(frozen=True)
class Absent:
    """A device that is not present.

    Attributes:
        flops: floating-point operations of matrix products per second.
        bandwidth: bytes of memory per second.
        launch: seconds that its host takes to launch an operation.
    """

    flops: float
    bandwidth: float
    launch: float = LAUNCH

    @classmethod
    def of(cls, tflops: float, bandwidth_gbs: float, launch: float = LAUNCH) -> "Absent":
        """Return the device with these peaks."""
        return cls(ARITHMETIC * tflops * 1e12, MEMORY * bandwidth_gbs * 1e9, launch)

    def seconds(self, flops: float, moved: float = 0.0, launches: float = 0.0) -> float:
        """Return the seconds of work: of its products, of the bytes moved or of the launches,
        whichever is longest.
        """
        return max(flops / self.flops, moved / self.bandwidth, launches * self.launch)


class Simulator(TorchDispatchMode):
    """A device that executes the operations that a host launches, in order; counts the seconds of
    the host and of the device.
    """

    def __init__(self, absent: Absent) -> None:
        super().__init__()
        self.absent, self.host, self.device = absent, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func.overloadpacket
        if kind is torch.ops.aten._local_scalar_dense:  # .item() waits
            self.host = self.device = max(self.host, self.device)
        elif not func.is_view and not kind.__name__.startswith(("empty", "detach")):
            self.host += self.absent.launch
            count = (
                flop_registry[kind](*args, **kwargs, out_val=out) if kind in flop_registry else 0
            )
            moved = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            self.device = max(self.device, self.host) + self.absent.seconds(count, moved)
        return out


class SimulatedClock(Clock):
    """Marks on the timeline of a simulated device."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(torch.device("cpu"))
        self.simulator = simulator

    def mark(self) -> float:
        """Return the current time of the simulated device."""
        return max(self.simulator.host, self.simulator.device)


class Fused(TorchFunctionMode):
    """Computes attention as one kernel, as on a GPU; with dropout a CPU would split it into several
    operations.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        off = {"dropout_p": 0.0} if func is F.scaled_dot_product_attention else {}
        return func(*args, **(kwargs or {}) | off)


def find_peak(run: Run) -> tuple[str, Absent]:
    """Return the dtype that the preset's device would use, and its performance in that dtype."""
    hardware, amp, tf32 = run.hardware, run.opt.amp, run.opt.tf32.enabled
    facts, name = hardware.peak_tflops, "float32"
    if amp.enabled:
        auto = "bfloat16" if facts.bf16 else "float16"
        name = auto if amp.dtype == "auto" else amp.dtype
    single = facts.tf32 if tf32 else facts.fp32
    tflops = {"float32": single, "bfloat16": facts.bf16, "float16": facts.fp16}[name]
    if tflops is None or hardware.bandwidth_gbs is None:
        raise ConfigError(
            f"hardware={hardware.name} has no peak for {'tf32' if tf32 else name}. Leave"
            f" {'opt=tf32' if tf32 else 'opt.amp.dtype'} out, or name another device."
        )
    return name, Absent.of(tflops, hardware.bandwidth_gbs)
