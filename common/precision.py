"""The dtype of a forward pass: what `opt=amp` asks for, and what this device really has."""

from dataclasses import dataclass

import torch

from common.config import ConfigError, OptConfig


@dataclass(frozen=True)
class Precision:
    """compute: dtype of forward passes; masters stay float32. scaler: fp16 gradients need a
    GradScaler.
    """

    compute: torch.dtype
    scaler: bool

    @property
    def name(self) -> str:
        """float32, bfloat16 or float16."""
        return str(self.compute).removeprefix("torch.")


def native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware.

    Not `torch.cuda.is_bf16_supported()`, which is True by emulation on V100 and T4
    (pytorch#148322).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve(opt: OptConfig, device: torch.device) -> Precision:
    """The precision of a run. Switches TF32 on or off for the process as `opt` says.

    Raises: ConfigError where a dtype is insisted on that the device does not have.
    """
    torch.set_float32_matmul_precision("high" if opt.tf32.enabled else "highest")
    if opt.tf32.enabled and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise ConfigError(
            "opt=tf32 has no effect here: TF32 needs a CUDA device of compute capability 8.0. Leave"
            " it out."
        )
    if not opt.amp.enabled:
        return Precision(torch.float32, scaler=False)
    bf16, wanted = native_bf16(device), opt.amp.dtype
    if wanted == "bfloat16" and not bf16:
        raise ConfigError(
            "opt.amp.dtype=bfloat16: this device only emulates it. Use opt.amp.dtype=auto or"
            " float16."
        )
    if wanted == "float16" and device.type == "cpu":
        raise ConfigError("opt.amp.dtype=float16 is not for a CPU. Use opt.amp.dtype=auto.")
    if wanted == "float16" or (device.type == "cuda" and not bf16):
        return Precision(torch.float16, scaler=True)
    return Precision(torch.bfloat16 if bf16 else torch.float32, scaler=False)
