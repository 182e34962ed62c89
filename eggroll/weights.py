"""The perturbed weights: float32 masters, those of the forward, the initial ones; optimizers."""

import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common import optim
from common.checkpoint import Checkpoint
from common.config import ConfigError
from common.distributed import fsdp
from common.memory import StateMemory
from common.model import QuantizedLinear, layers
from common.parts import Parts
from eggroll.config import LOOK_EVERY, EggrollConfig
from eggroll.noise import Noise


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

    def rounded(self, master: Tensor) -> Tensor:
        """Return what a forward makes of a master."""
        scale = self.layer.scale.clamp(min=1e-30)
        return (master / scale).round_().clamp_(-127, 127).mul_(self.layer.scale)

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

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], folder: Path | None) -> None:
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
    parameter, and the initial weights lie in a file of `folder`; None = nothing is compared with
    them. Reading them back takes as long as the rest of an update or longer, so that an update does
    it only where `compares` says so. In float32 the forward uses the masters; else they are beside
    what it uses, on the CPU with `offload`.

    Args: wide: the float32 weights of a model that is in half precision, as `narrow` returns
    them; emptied, so that those that are not perturbed are gone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        noise: Noise,
        cfg: EggrollConfig,
        wide: dict[str, Tensor],
        *,
        offload: bool,
        folder: Path | None,
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
        self.used = {n: parameters[n] for n in names}
        self.masters: dict[str, Tensor] = {n: self.used[n] for n in names if n not in self.fixed}
        for name in [name for name in self.masters if name in wide]:
            home = "cpu" if offload and held else self.used[name].device
            self.masters[name] = wide.pop(name).to(home)
        wide.clear()
        self.initial = DiskTensors(((n, self._now(n)) for n in held if folder), folder)
        # |W0|^2 and, while a step is made, |W|^2 and the sums of what is compared: see `movement`.
        self.size: Tensor | float = 0.0
        self.moved: Tensor | None = None
        self.started = float(sum(self._size(n) for n in held))  # read once
        if held and cfg.stop_at.drift is not None and self.size_at_start() == 0:
            raise ConfigError(
                "algo.stop_at.drift is a share of the weights' size, and all that are perturbed"
                " here begin at 0. Leave it out, or perturb others too."
            )
        for name in self.fixed:  # float32 while it is stepped
            self.masters[name] = torch.empty(0, device=parameters[name].device)
        kind = optim.optimizer_class(cfg.optimizer)
        optim.check_shared(cfg.optimizer, [*self.masters.values()])
        try:
            # One for each parameter, so that a gradient is used and dropped before the next is
            # made.
            options: dict[str, Any] = {"lr": 1.0, **cfg.optimizer.kwargs}  # each step sets its own
            self.optimizers = {}
            for name, master in self.masters.items():
                with self._filled(name):  # as some look at the sizes of what they are given
                    self.optimizers[name] = kind([master], **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"algo.optimizer.kwargs={cfg.optimizer.kwargs}: {error}") from None

    def _now(self, name: str) -> Tensor:
        """Return what this rank holds of a weight, float32."""
        fixed = self.fixed.get(name)
        return fsdp.local(self.masters[name]).detach() if fixed is None else fixed.read()

    def _size(self, name: str) -> Tensor:
        """Return the sum of squares of a weight, computed where the forward's is."""
        now = self._now(name).to(fsdp.local(self.used[name]).device)
        return now.square().sum().double()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Tensor]:
        """Give a parameter's master; one of whole numbers is float32 for the block."""
        with self._filled(name) as master:
            yield master
            if name in self.fixed:
                self.fixed[name].write(master)

    @contextmanager
    def _filled(self, name: str) -> Iterator[Tensor]:
        """Give a parameter's master; what the block makes of one of whole numbers is dropped."""
        master, fixed = self.masters[name], self.fixed.get(name)
        if fixed is not None:
            master.data = fixed.read()
        yield master
        if fixed is not None:
            master.data = master.new_empty(0)

    def root_mean_square(self) -> float:
        """Return that of the perturbed weights as they were at the start of the run."""
        count = sum(math.prod(used.shape) for used in self.used.values())
        return math.sqrt(self.size_at_start() / count)

    def size_at_start(self) -> float:
        """Return |W0|^2 of the perturbed weights, on all ranks together; an adapter is whole on
        each of them, whatever is shared out.
        """
        if not any(isinstance(used, DTensor) for used in self.used.values()):
            return self.started
        started = torch.tensor([self.started], dtype=torch.float64, device=fsdp.device(self.model))
        return fsdp.total(self.model, started).item()

    def compares(self, step: int) -> bool:
        """Return whether a 0-based step compares the weights with the initial ones: each step where
        something depends on it, else one in `LOOK_EVERY`, for the log.
        """
        asked = self.cfg.weight_decay > 0 or self.cfg.stop_at.drift is not None
        return asked or step % LOOK_EVERY == 0

    @torch.no_grad()
    def descend(self, name: str, gradient: Tensor, lr: float, compare: bool) -> None:
        """Make an optimizer step of one parameter against `gradient`, which is used up. If
        `compare`, also record the movement since the step before and since the initial weights.
        """
        with self._opened(name) as master:
            self._descend(name, master, gradient, lr, compare)

    def _descend(
        self, name: str, master: Tensor, gradient: Tensor, lr: float, compare: bool
    ) -> None:
        optimizer = self.optimizers[name]
        gradient = gradient.to(master.device)
        initial = self.initial[name].to(master.device) if compare else None
        before = fsdp.local(master).clone() if compare else None
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
        # Masters of one model may be on the host and on the device: what they add up to is there.
        place = fsdp.local(self.used[name]).device
        self.size += torch.linalg.vector_norm(fsdp.local(master)).double().square().to(place)
        if initial is not None and before is not None:
            sums = movement(fsdp.local(master), before, initial, self._rounding(name)).to(place)
            self.moved = sums if self.moved is None else self.moved + sums

    def _rounding(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return what makes the forward's weight of a master; None where they are one."""
        if name in self.fixed:
            return self.fixed[name].rounded
        shards = fsdp.of(self.model)  # of which a forward gathers weights in a dtype of its own
        dtype = shards.dtype if shards else self.used[name].dtype
        return None if dtype == torch.float32 else lambda m: m.to(dtype).float()

    def measure(self) -> tuple[bool, dict[str, float]]:
        """Return whether all perturbed weights are finite and, once all of them have been stepped,
        what came of it where that was compared:

        drift               |W - W0| / |W0|
        update_norm         |W - W before| / |W0|
        applied_share       the share of the forward's weights that are not what they were
        applied_cosine      the cosine of their movement with that of the float32 masters
        applied_cosine_all  the same of all movement since the start of the run
        """
        if self.memory_gb is None:
            parts = [list(self.model.parameters()), self.tensors(), self.extra()]
            self.memory_gb = fsdp.measured(parts)
        compared, size = self.moved, torch.as_tensor(self.size)
        sums = [size[None], size.new_tensor([self.started])]
        sums = torch.cat(sums if compared is None else [*sums, compared])
        self.size, self.moved = 0.0, None
        sums = fsdp.total(self.model, sums.to(fsdp.device(self.model))).tolist()
        finite, started = math.isfinite(sums[0]), max(sums[1], 1e-30)
        if compared is None:
            return finite, {}
        moved, stepped, changed, count, *cosines = sums[2:]
        movement = {
            "drift": math.sqrt(moved / started),
            "update_norm": math.sqrt(stepped / started),
            "applied_share": changed / count,
        }
        for name, (product, square), meant in (
            ("applied_cosine", cosines[:2], stepped),
            ("applied_cosine_all", cosines[2:], moved),
        ):
            if meant > 0:  # a step that moves nothing has no direction
                movement[name] = product / math.sqrt(max(square * meant, 1e-60))
        return finite, movement

    def tensors(self) -> dict[str, Tensor]:
        """Return the masters, for a checkpoint; those of whole numbers in two parts."""
        tensors = {n: master for n, master in self.masters.items() if n not in self.fixed}
        for name, fixed in self.fixed.items():
            tensors |= {name: fixed.layer.weight, f"{name}.rest": fixed.rest}
        return tensors

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

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint's weights and optimizers."""
        tensors = self.tensors()
        if fsdp.names(saved) != set(tensors):
            raise ConfigError(
                f"{saved.path} holds other parameters than this run perturbs. Start with resume=no."
            )
        extra = fsdp.restore(saved, tensors, self.fresh)
        with torch.no_grad():
            for name, held in self.tensors().items():
                held.copy_(tensors[name])
            for name, master in self.masters.items():
                if name not in self.fixed:
                    self.used[name].copy_(master)
                self.optimizers[name].load_state_dict(extra["optimizers"][name])


def count_state(parts: Parts, noise: Noise, cfg: EggrollConfig) -> StateMemory:
    """Count what `Weights` will hold on a rank, beside the model and the initial weights' file."""
    sizes = {address.name: math.prod(address.shape) for address in noise.addresses}
    small = {f"{place}.weight" for place in layers(parts.lm.model)}
    fixed = sum(size for name, size in sizes.items() if name in small)
    plain = sum(sizes.values()) - fixed
    moments = optim.state_bytes(cfg.optimizer) * (fixed + plain) * (cfg.method != "randopt")
    if fsdp.of(parts.lm.model):  # the model's own weights are the masters
        return StateMemory(4.0 * parts.lm.parameters + moments, optimizer=moments)
    if parts.run.opt.offload.enabled:  # masters are on the CPU, and so is what comes of them
        return StateMemory(float(parts.lm.own_bytes))
    masters = 4.0 * plain * parts.lm.half + 2.0 * fixed  # and what rounding left
    return StateMemory(parts.lm.own_bytes + masters + moments, optimizer=moments)


def movement(
    master: Tensor, before: Tensor, initial: Tensor, rounding: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return sums over one parameter, float64: |W - W0|^2, |W - before|^2, how many of the
    forward's weights changed, how many there are, and of its movement in this step, then of that
    since the start, the product with the masters' movement and its square. `before` and `initial`
    are used up.

    Args: rounding: makes the forward's weights of masters; None = they are the masters themselves.
    """
    if rounding is None:
        changed = (master != before).sum()
        step, whole = before.sub_(master).square_().sum(), initial.sub_(master).square_().sum()
        parts = [whole, step, changed, changed.new_tensor(master.numel()), step, step, whole, whole]
        return torch.stack([part.double() for part in parts])
    rounded = rounding(master)
    applied, since = rounded - rounding(before), rounded - rounding(initial)
    step, whole = before.neg_().add_(master), initial.neg_().add_(master)
    parts = [
        whole.square().sum(),
        step.square().sum(),
        (applied != 0).sum(),
        torch.tensor(master.numel(), device=master.device),
        (applied * step).sum(),
        applied.square().sum(),
        (since * whole).sum(),
        since.square().sum(),
    ]
    return torch.stack([part.double() for part in parts])
