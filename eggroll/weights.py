"""The perturbed weights: float32 masters, those of the forward, the initial ones; optimizers."""

import math
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import optim
from common.checkpoint import Checkpoint
from common.config import ConfigError
from common.distributed import fsdp
from common.model.quantized import QuantizedLinear, layers
from eggroll.config import EggrollConfig
from eggroll.noise import Noise

# Steps of which one compares the weights with the initial ones where nothing but the log asks.
DRIFT_EVERY = 10


class Fixed:
    """A float32 master of a layer in int8: its whole numbers, and in 16 bits what rounding them
    left over, which the next update finds again (Quantized ES, arXiv:2602.03120).

    Together they are a number of 24 bits, of which a forward uses the upper eight. Here the rest is
    kept; the paper makes it again from the seeds of earlier steps. A weight moves up to half a step
    beyond the largest of its row, and no further. offload: keep the rest on the CPU.
    """

    STEP = 1 << 16  # parts of a whole number

    def __init__(self, layer: QuantizedLinear, offload: bool) -> None:
        self.layer = layer
        where = "cpu" if offload and not layer.weight.is_meta else layer.weight.device
        self.rest = torch.zeros(layer.weight.shape, dtype=torch.int16, device=where)

    def read(self) -> Tensor:
        """Return the master, float32."""
        whole = self.layer.weight.float()
        return whole.add_(self.rest.to(whole.device), alpha=1 / self.STEP).mul_(self.layer.scale)

    def write(self, master: Tensor) -> None:
        """Keep a master."""
        steps = master / self.layer.scale.clamp(min=1e-30)
        whole = steps.round().clamp_(-127, 127)
        rest = (
            steps.sub_(whole).mul_(self.STEP).round_().clamp_(-self.STEP // 2, self.STEP // 2 - 1)
        )
        self.layer.weight.copy_(whole)
        self.rest.copy_(rest)


class DiskTensors:
    """Tensors that are needed a moment now and then: in a file without a name, which ends with the
    process, however it ends.

    float32 on the CPU when read. Raises: OSError with the folder where there is no room.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        self.places: dict[str, tuple[int, torch.Size]] = {}
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as this object lives)
        weakref.finalize(self, self.file.close)
        try:
            for name, tensor in tensors:
                self.places[name] = self.file.tell(), tensor.shape
                self.file.write(tensor.detach().float().cpu().contiguous().numpy())  # type: ignore[arg-type]
            self.file.flush()
        except OSError as error:
            with suppress(OSError):  # what could not be written cannot be written now either
                self.file.close()
            raise OSError(
                error.errno, f"the initial weights cannot be kept there: {error.strerror}", folder
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        offset, shape = self.places[name]
        tensor = torch.empty(shape)
        self.file.seek(offset)
        read = self.file.readinto(tensor.numpy())  # type: ignore[attr-defined]
        if read != tensor.nbytes:
            raise OSError(
                f"the initial weights of {name} cannot be read back: {read} of {tensor.nbytes}"
                " bytes came."
            )
        return tensor


class Weights:
    """The perturbed weights: float32 masters, what the forward uses, the initial ones, and their
    optimizers.

    Training is to take hardly more memory than sampling does: an update goes parameter by
    parameter, and the initial weights lie in a file of `folder`. Reading them back takes as long as
    the rest of an update or longer, so that an update does it only where `compares` says so. In
    float32 the forward uses the masters; else they are beside what it uses, on the CPU with
    `offload`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        noise: Noise,
        cfg: EggrollConfig,
        compute: torch.dtype,
        *,
        offload: bool,
        folder: Path,
    ) -> None:
        self.cfg, self.model = cfg, model
        self.memory_gb: float | None = None  # of weights and optimizer state on this rank
        names = [address.name for address in noise.addresses]
        parameters = dict(model.named_parameters())
        small = layers(model)
        self.fixed = {
            name: Fixed(small[place], offload)
            for name in names
            if (place := name.removesuffix(".weight")) in small
        }
        # What this rank holds of them; the model of a plan has none.
        held = [name for name in names if not parameters[name].is_meta]
        self.initial = DiskTensors(((n, self._now(parameters[n], n)) for n in held), folder)
        # |W0|^2 and, while a step is made, |W|^2 and |W - W0|^2; None where that is not compared.
        self.size: Tensor | float = 0.0
        self.moved: Tensor | float | None = None
        parts = [self._now(parameters[n], n).square().sum().double() for n in held]
        self.started = float(sum(parts))  # read once
        plain = [name for name in names if name not in self.fixed]
        if compute == torch.float32 or fsdp.of(model):
            self.masters: dict[str, Tensor] = {n: parameters[n] for n in plain}
        else:
            self.masters = {
                # What was loaded, as the forward's are made anew below.
                n: parameters[n].detach().to("cpu" if offload and held else parameters[n].device)
                for n in plain
            }
            for parameter in model.parameters():  # buffers stay: rotary frequencies need float32
                if parameter.is_floating_point():  # and not in few bits
                    parameter.data = parameter.data.to(compute)
        self.used = {n: dict(model.named_parameters())[n] for n in names}
        for name in self.fixed:  # float32 while it is stepped
            self.masters[name] = torch.empty(0, device=parameters[name].device)
        kind = optim.optimizer_class(cfg.optimizer)
        try:
            # One for each parameter, so that a gradient is used and dropped before the next is
            # made.
            options: dict[str, Any] = {"lr": cfg.lr, **cfg.optimizer.kwargs}
            self.optimizers = {n: kind([m], **options) for n, m in self.masters.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"algo.optimizer.kwargs={cfg.optimizer.kwargs}: {error}") from None

    def _now(self, parameter: Tensor, name: str) -> Tensor:
        """Return what this rank holds of a weight."""
        fixed = self.fixed.get(name)
        return fsdp.local(parameter).detach() if fixed is None else fixed.read()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Tensor]:
        """Give a parameter's master; one of whole numbers is float32 for the block."""
        master, fixed = self.masters[name], self.fixed.get(name)
        if fixed is None:
            yield master
            return
        master.data = fixed.read()
        yield master
        fixed.write(master)
        master.data = master.new_empty(0)

    def compares(self, step: int) -> bool:
        """Return whether a 0-based step compares the weights with the initial ones: each step where
        something depends on it, else one in `DRIFT_EVERY`, for the log.
        """
        asked = self.cfg.weight_decay > 0 or self.cfg.stop_at.drift is not None
        return asked or step % DRIFT_EVERY == 0

    @torch.no_grad()
    def descend(self, name: str, gradient: Tensor, lr: float, compare: bool) -> None:
        """Make an optimizer step of one parameter against `gradient`, which is used up; `compare`
        what comes of it with the initial weights.
        """
        with self._opened(name) as master:
            self._descend(name, master, gradient, lr, compare)

    def _descend(
        self, name: str, master: Tensor, gradient: Tensor, lr: float, compare: bool
    ) -> None:
        optimizer = self.optimizers[name]
        gradient = gradient.to(master.device)
        initial = self.initial[name].to(master.device) if compare else None
        if self.cfg.weight_decay:
            assert initial is not None, "weight decay pulls towards the initial weights"
            gradient.add_(fsdp.local(master) - initial, alpha=self.cfg.weight_decay)
        master.grad = fsdp.like(master, gradient)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        master.grad = None
        if self.used[name] is not master and name not in self.fixed:
            self.used[name].copy_(master)
        self.size += torch.linalg.vector_norm(fsdp.local(master)).double().square()
        if initial is not None:
            moved = initial.sub_(fsdp.local(master)).square_().sum().double()
            self.moved = moved if self.moved is None else self.moved + moved

    def measure(self) -> tuple[bool, float | None]:
        """Return whether all perturbed weights are finite, and their drift |W - W0| / |W0|, None
        where it was not compared; once all of them have been stepped.
        """
        if self.memory_gb is None:
            parts = [list(self.model.parameters()), self.tensors(), self.extra()]
            self.memory_gb = fsdp.measured(parts)
        compared, size = self.moved is not None, torch.as_tensor(self.size)
        sums = torch.stack((size, torch.as_tensor(self.moved) if compared else size))
        sums = torch.cat((sums, sums.new_tensor([self.started]))).to(fsdp.device(self.model))
        self.size, self.moved = 0.0, None
        size, moved, started = fsdp.total(self.model, sums).tolist()
        drift = math.sqrt(moved / max(started, 1e-30)) if compared else None
        return math.isfinite(size), drift

    def tensors(self) -> dict[str, Tensor]:
        """Return the masters, for a checkpoint; those of whole numbers in two parts."""
        found = {n: master for n, master in self.masters.items() if n not in self.fixed}
        for name, fixed in self.fixed.items():
            found |= {name: fixed.layer.weight, f"{name}.rest": fixed.rest}
        return found

    def extra(self) -> dict[str, Any]:
        """Beside the weights, what a checkpoint holds."""
        return {
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self.optimizers.items()
            }
        }

    def fresh(self) -> dict[str, Any]:
        """`extra` as it is after a first step."""
        for name, optimizer in self.optimizers.items():
            with self._opened(name):
                optim.step_nowhere(optimizer)
        return self.extra()

    @torch.no_grad()
    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint's weights and optimizers."""
        tensors = self.tensors()
        if fsdp.names(saved) != set(tensors):
            raise ConfigError(
                f"{saved.path} holds other parameters than this run perturbs. Start with resume=no."
            )
        extra = fsdp.restore(saved, tensors, self.fresh)
        for name, master in self.masters.items():
            if name not in self.fixed:
                self.used[name].copy_(master)
            self.optimizers[name].load_state_dict(extra["optimizers"][name])
