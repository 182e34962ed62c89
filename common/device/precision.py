"""The dtype of forward passes: chosen from `opt=amp` and the native dtypes of the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers

from common.config import ConfigError, OptConfig, Run, environment
from common.device import hardware
from common.device.hardware import AnyDevice

EXACT_ANGLES = (5, 19)  # the first transformers that computes rotary angles without a product
LARGE = 100_000_000  # parameters from which a CPU with native bfloat16 is faster in it
# Models trained in bfloat16 may have activations beyond the range of float16.
OVERFLOW = (
    " In float16 (the largest number is 65,504) models that were trained in bfloat16 may overflow,"
    " such as Qwen2.5: leave out opt=amp, or use a device with native bfloat16."
)


@dataclass(frozen=True)
class Precision:
    """The numeric precision of a run.

    Attributes:
        compute: the dtype of forward passes; masters stay float32.
        repeatable: whether backward passes use deterministic algorithms.
    """

    compute: torch.dtype
    repeatable: bool = False

    @property
    def scaler(self) -> bool:
        """Whether gradients need a GradScaler."""
        return self.compute == torch.float16

    @property
    def name(self) -> str:
        """The name of the dtype: float32, bfloat16 or float16."""
        return str(self.compute).removeprefix("torch.")


def native_bf16(device: AnyDevice) -> bool:
    """Return whether the device multiplies bfloat16 in hardware.

    `torch.cuda.is_bf16_supported()` is True by emulation on V100 and T4 (pytorch#148322).
    """
    if device.type == "cuda":
        return hardware.capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve(opt: OptConfig, device: AnyDevice) -> Precision:
    """Return the precision of a run, and enable or disable TF32 for the process as `opt` says.

    Raises: ConfigError for a dtype that the device does not have, and if TF32 would round more than
    products of weights.
    """
    torch.set_float32_matmul_precision("high" if opt.tf32.enabled else "highest")
    if opt.tf32.enabled and (device.type != "cuda" or hardware.capability(device) < (8, 0)):
        raise ConfigError(
            "opt=tf32 has no effect here: TF32 needs a CUDA device of compute capability 8.0. Leave"
            f" it out{environment.unset('USE_TF32')}."
        )
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if opt.tf32.enabled and version < EXACT_ANGLES:
        raise ConfigError(
            f"opt=tf32 does not go with transformers {transformers.__version__}, which makes the"
            " angles of rotary positions by a matrix product: TF32 would round them. Install"
            " transformers 5.19 or later, or leave opt=tf32 out."
        )
    compute = _autocast(opt.amp.dtype, device) if opt.amp.enabled else torch.float32
    return Precision(compute, opt.deterministic.enabled)


def _autocast(wanted: str, device: AnyDevice) -> torch.dtype:
    """Return the dtype of opt=amp. Raises: ConfigError if the device does not support `wanted`."""
    bf16 = native_bf16(device)
    if wanted == "bfloat16" and not bf16:
        raise ConfigError(
            "opt.amp.dtype=bfloat16: this device only emulates it. Use opt.amp.dtype=auto or"
            f" float16{environment.unset('AMP_DTYPE')}."
        )
    if wanted == "float16" and device.type == "cpu":
        raise ConfigError(
            "opt.amp.dtype=float16 is not for a CPU. Use"
            f" opt.amp.dtype=auto{environment.unset('AMP_DTYPE')}."
        )
    if wanted == "float16" or (device.type == "cuda" and not bf16):
        return torch.float16
    return torch.bfloat16 if bf16 else torch.float32


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products without TF32 in the block."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def advise(precision: Precision, run: Run, device: AnyDevice, parameters: int) -> str:
    """Describe for the plan whether products are in TF32, and the gain of opt=amp on a device that
    computes in float32.

    The rates are those of the preset, which may describe another device.
    Args: parameters: the number of the model's parameters.
    """
    opt, peak = run.opt, run.hardware.peak_tflops
    said = "; float32 products in TF32" if opt.tf32.enabled else ""
    if precision.compute != torch.float32:
        return said
    if device.type == "cpu" and opt.amp.enabled:
        return "; opt=amp changes nothing, since this CPU has no native bfloat16"
    if device.type == "cpu":
        faster = "; 'opt=[amp]' computes in bfloat16, which is faster for a model of this size"
        return faster if parameters >= LARGE and native_bf16(device) else ""
    half = "bfloat16" if native_bf16(device) else "float16"
    rate = peak.bf16 if half == "bfloat16" else peak.fp16
    plain = peak.tf32 if opt.tf32.enabled else peak.fp32
    times = f"up to {rate / plain:.0f} times as fast by the preset" if rate and plain else "faster"
    return f"{said}; 'opt=[amp]' computes in {half}, {times}"
