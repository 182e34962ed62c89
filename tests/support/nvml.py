"""A stand-in for the package nvidia-ml-py (module pynvml), with the devices that a test gives it.

sys.modules["pynvml"] = nvml.module([nvml.Gpu("GPU-aa", utilisation=[40, 60])])
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace


@dataclass
class Gpu:
    """One device. utilisation: percentages, in turn; millijoules, milliwatts: per reading; None =
    NVML does not support it, as on a part of a MIG device.
    """

    uuid: str
    utilisation: Sequence[int] | None = (50,)
    used: int | None = 20
    total: int = 80
    millijoules: int | None = 1000
    milliwatts: int | None = None
    spent: int = 0
    turns: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.turns = itertools.cycle(self.utilisation or ())


def module(gpus: Sequence[Gpu], fails: str = "") -> ModuleType:
    """Return the module. fails: why NVML cannot be started."""
    found = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def supported(value):
        if value is None:
            raise NVMLError("Not Supported")
        return value

    def start() -> None:
        if fails:
            raise NVMLError(fails)
        found.started += 1

    def stop() -> None:
        found.started -= 1

    def by_index(index: int) -> Gpu:
        if index >= len(gpus):
            raise NVMLError("Invalid Argument")
        return gpus[index]

    def by_uuid(uuid: str) -> Gpu:
        for gpu in gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError("Not Found")

    def rates(gpu: Gpu) -> SimpleNamespace:
        supported(gpu.utilisation)
        return SimpleNamespace(gpu=next(gpu.turns), memory=0)

    def energy(gpu: Gpu) -> int:
        gpu.spent += supported(gpu.millijoules)
        return 5_000_000 + gpu.spent

    found.started = 0
    found.NVMLError, found.nvmlInit, found.nvmlShutdown = NVMLError, start, stop
    found.nvmlDeviceGetCount = lambda: len(gpus)
    found.nvmlDeviceGetHandleByIndex, found.nvmlDeviceGetHandleByUUID = by_index, by_uuid
    found.nvmlDeviceGetUUID = lambda gpu: gpu.uuid.encode()
    found.nvmlDeviceGetUtilizationRates = rates
    found.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(
        used=supported(gpu.used), total=gpu.total
    )
    found.nvmlDeviceGetTotalEnergyConsumption = energy
    found.nvmlDeviceGetPowerUsage = lambda gpu: supported(gpu.milliwatts)
    return found
