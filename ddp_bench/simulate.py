"""A GPU that is not there: real operations run on this CPU, and a clock counts what they would cost
on the device of hardware=NAME.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from common.config import ConfigError, Run
from ddp_bench.link import LAUNCH
from ddp_bench.step import Clock


class Simulator(TorchDispatchMode):
    """A device that works off what a host launches, in order: the host's time and the device's,
    seconds.

    Args: flops, bandwidth: of products and of memory, per second, as they are reached.
    """

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self.flops, self.bandwidth = flops, bandwidth
        self.host = self.device = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func.overloadpacket
        if kind is torch.ops.aten._local_scalar_dense:  # .item() waits
            self.host = self.device = max(self.host, self.device)
        elif not func.is_view and not kind.__name__.startswith(("empty", "detach")):
            self.host += LAUNCH
            count = (
                flop_registry[kind](*args, **kwargs, out_val=out) if kind in flop_registry else 0
            )
            moved = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            busy = max(count / self.flops, moved / self.bandwidth)
            self.device = max(self.device, self.host) + busy
        return out


class SimulatedClock(Clock):
    """Marks on the timeline of a simulated device."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(torch.device("cpu"))
        self.simulator = simulator

    def mark(self) -> float:
        """Return the present time there."""
        return max(self.simulator.host, self.simulator.device)


class Fused(TorchFunctionMode):
    """Attention as the one kernel that it is on a GPU; with dropout a CPU takes it to pieces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        off = {"dropout_p": 0.0} if func is F.scaled_dot_product_attention else {}
        return func(*args, **(kwargs or {}) | off)


def find_peak(run: Run) -> tuple[str, float]:
    """Return the dtype that the preset's device would use, and its FLOP/s."""
    facts, amp, tf32 = run.hardware.peak_tflops, run.opt.amp, run.opt.tf32.enabled
    name = "float32"
    if amp.enabled:
        auto = "bfloat16" if facts.bf16 else "float16"
        name = auto if amp.dtype == "auto" else amp.dtype
    single = facts.tf32 if tf32 else facts.fp32
    tflops = {"float32": single, "bfloat16": facts.bf16, "float16": facts.fp16}[name]
    if tflops is None or run.hardware.bandwidth_gbs is None:
        raise ConfigError(
            f"hardware={run.hardware.name} has no peak for {'tf32' if tf32 else name}. Leave"
            f" {'opt=tf32' if tf32 else 'opt.amp.dtype'} out, or name another device."
        )
    return name, tflops * 1e12
