"""The perturbed weights: float32 masters, the forward's copies, initial weights, and optimizers."""

import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import optim
from common.checkpoint import Checkpoint
from common.config import ConfigError, Run
from common.device import device_of, dtype_of
from common.distributed import (
    is_sharded,
    measure_state,
    names_in_checkpoint,
    restore_checkpoint,
    sharding_of,
)
from common.language_model import LanguageModel
from common.memory import StateMemory
from common.model import QuantizedLinear, quantized
from common.parts import Parts
from eggroll.config import LOOK_EVERY, EggrollConfig
from eggroll.noise import Noise


class Fixed:
    """The float32 master of an int8 layer, stored in 24 bits: the 8-bit integers that the forward
    uses, and in 16 bits what rounding to them left over, so that the next update continues from the
    exact value (Quantized ES, arXiv:2602.03120).

    The paper recomputes the remainder from the seeds of earlier steps; here it is stored. A weight
    can move at most half an integer step beyond the largest of its row.

    Args: offload: keep the remainder on the CPU.
    """

    STEP = 1 << 16  # fractions of an integer step

    def __init__(self, layer: QuantizedLinear, offload: bool) -> None:
        self.layer = layer
        where = "cpu" if offload and not layer.weight.is_meta else layer.weight.device
        self.rest = torch.zeros(layer.weight.shape, dtype=torch.int16, device=where)

    def read(self) -> Tensor:
        """Return the master, float32."""
        whole = self.layer.weight.float()
        return whole.add_(self.rest.to(whole.device), alpha=1 / self.STEP).mul_(self.layer.scale)

    def rounded(self, master: Tensor) -> Tensor:
        """Return the forward's weight for a master: rounded to 8-bit integers, then scaled."""
        scale = self.layer.scale.clamp(min=1e-30)
        return (master / scale).round_().clamp_(-127, 127).mul_(self.layer.scale)

    def write(self, master: Tensor) -> None:
        """Store a master as integers and remainder."""
        steps = master / self.layer.scale.clamp(min=1e-30)
        whole = steps.round().clamp_(-127, 127)
        rest = (
            steps.sub_(whole).mul_(self.STEP).round_().clamp_(-self.STEP // 2, self.STEP // 2 - 1)
        )
        self.layer.weight.copy_(whole)
        self.rest.copy_(rest)


class DiskTensors:
    """Tensors that are read now and then, in a file without a name that disappears with the
    process, however it ends.

    Tensors are float32 on the CPU when read. Raises: OSError with the folder if the disk is full.
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
            with suppress(OSError):  # closing writes again what could not be written
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
    """The perturbed weights: float32 masters, the weights of the forward, the initial weights, and
    one optimizer per parameter.

    Training needs hardly more memory than sampling: an update goes parameter by parameter, and the
    initial weights are in a file. Reading them takes as long as the rest of an update or longer, so
    an update reads them only if `compares` says so. In float32 the masters are the weights of the
    forward; otherwise they are copies, with `offload` on the CPU.

    Args:
        wide: the float32 weights of a model in half precision, as `narrow` returns them; it is
            emptied, so that the weights that are not perturbed are freed.
        offload: whether the masters are on the CPU.
        folder: the folder of the file with the initial weights; None = do not keep them, and
            compare nothing with them.
    Attributes:
        memory_gb: memory of weights and optimizer state on this rank, in GB; None before the first
            `measure`.
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
        self.cfg, self.model, self.sharding = cfg, model, sharding_of(model)
        self.memory_gb: float | None = None
        names = [address.name for address in noise.addresses]
        parameters = dict(model.named_parameters())
        small = quantized.layers(model)
        self.fixed = {
            name: Fixed(small[place], offload)
            for name in names
            if (place := name.removesuffix(".weight")) in small
        }
        # The parameters that exist; a plan's model is on the meta device and has none.
        held = [name for name in names if not parameters[name].is_meta]
        self.used = {n: parameters[n] for n in names}
        self.masters: dict[str, Tensor] = {n: self.used[n] for n in names if n not in self.fixed}
        for name in [name for name in self.masters if name in wide]:
            home = "cpu" if offload and held else self.used[name].device
            self.masters[name] = wide.pop(name).to(home)
        wide.clear()
        self.initial = DiskTensors(((n, self._now(n)) for n in held if folder), folder)
        # Sums over the parameters: |W|^2 and `movement` of the current step, and |W0|^2.
        self.size: Tensor | float = 0.0
        self.moved: Tensor | None = None
        self.started = float(sum(self._size(n) for n in held))  # read once
        if held and cfg.stop_at.drift is not None and self.size_at_start() == 0:
            raise ConfigError(
                "algo.stop_at.drift is a share of the weights' size, and all that are perturbed"
                " here begin at 0. Leave it out, or perturb others too."
            )
        for name in self.fixed:  # `_filled` makes the float32 master of an int8 layer
            self.masters[name] = torch.empty(0, device=parameters[name].device)
        kind = optim.optimizer_class(cfg.optimizer)
        optim.check_shared(cfg.optimizer, [*self.masters.values()])
        try:
            # One optimizer per parameter, so that a gradient is used and freed before the next one
            # is computed.
            options: dict[str, Any] = {"lr": 1.0, **cfg.optimizer.kwargs}  # each step sets its own
            self.optimizers = {}
            for name, master in self.masters.items():
                with self._filled(name):  # some optimizers look at the shape of the parameter
                    self.optimizers[name] = kind([master], **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"algo.optimizer.kwargs={cfg.optimizer.kwargs}: {error}") from None

    @classmethod
    def of(cls, run: Run, lm: LanguageModel, noise: Noise, folder: Path | None) -> "Weights":
        """Return the weights that a run moves, at their start. Args: folder: as of the class."""
        offload = run.opt.offload.enabled
        return cls(lm.model, noise, run.algo, lm.wide, offload=offload, folder=folder)

    def _now(self, name: str) -> Tensor:
        """Return this rank's part of a weight, float32."""
        fixed = self.fixed.get(name)
        return self.sharding.local(self.masters[name]).detach() if fixed is None else fixed.read()

    def _size(self, name: str) -> Tensor:
        """Return the sum of squares of a weight, on the device of the forward's weight."""
        now = self._now(name).to(self.sharding.local(self.used[name]).device)
        return now.square().sum().double()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Tensor]:
        """Yield a parameter's master for writing; the master of an int8 layer exists as float32
        only in the block.
        """
        with self._filled(name) as master:
            yield master
            if name in self.fixed:
                self.fixed[name].write(master)

    @contextmanager
    def _filled(self, name: str) -> Iterator[Tensor]:
        """Yield a parameter's master for reading; changes to the master of an int8 layer are
        lost.
        """
        master, fixed = self.masters[name], self.fixed.get(name)
        if fixed is not None:
            master.data = fixed.read()
        yield master
        if fixed is not None:
            master.data = master.new_empty(0)

    def root_mean_square(self) -> float:
        """Return the root mean square of the perturbed weights at the start of the run."""
        count = sum(math.prod(used.shape) for used in self.used.values())
        return math.sqrt(self.size_at_start() / count)

    def size_at_start(self) -> float:
        """Return |W0|^2 of the perturbed weights, summed over the ranks if the weights are sharded.
        An adapter is whole on every rank, even if the model is sharded.
        """
        if not any(map(is_sharded, self.used.values())):
            return self.started
        started = torch.tensor([self.started], dtype=torch.float64, device=device_of(self.model))
        return self.sharding.total(started).item()

    def compares(self, step: int) -> bool:
        """Return whether a 0-based step compares the weights with the initial ones: every step if
        weight decay or algo.stop_at.drift needs it, else one step in `LOOK_EVERY`, for the log.
        """
        asked = self.cfg.weight_decay > 0 or self.cfg.stop_at.drift is not None
        return asked or step % LOOK_EVERY == 0

    @torch.no_grad()
    def descend(self, name: str, gradient: Tensor, lr: float, compare: bool) -> None:
        """Make an optimizer step of one parameter against `gradient`, which is overwritten. If
        `compare`, also add up the movement in this step and since the start of the run.
        """
        with self._opened(name) as master:
            self._descend(name, master, gradient, lr, compare)

    def _descend(
        self, name: str, master: Tensor, gradient: Tensor, lr: float, compare: bool
    ) -> None:
        optimizer = self.optimizers[name]
        gradient = gradient.to(master.device)
        initial = self.initial[name].to(master.device) if compare else None
        before = self.sharding.local(master).clone() if compare else None
        if self.cfg.weight_decay:
            assert initial is not None, "weight decay pulls towards the initial weights"
            gradient.add_(self.sharding.local(master) - initial, alpha=self.cfg.weight_decay)
        master.grad = self.sharding.like(master, gradient)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        master.grad = None
        if self.used[name] is not master and name not in self.fixed:
            self.used[name].copy_(master)
        # Masters may be on the CPU or on the device; the sums are on the device.
        place = self.sharding.local(self.used[name]).device
        now = self.sharding.local(master)
        self.size += torch.linalg.vector_norm(now).double().square().to(place)
        if initial is not None and before is not None:
            sums = movement(now, before, initial, self._rounding(name)).to(place)
            self.moved = sums if self.moved is None else self.moved + sums

    def _rounding(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function that rounds a master to the forward's weight; None if the forward
        uses the master itself.
        """
        if name in self.fixed:
            return self.fixed[name].rounded
        # Shared weights are gathered in the dtype of the forward.
        dtype = dtype_of(self.model) if self.sharding.shared else self.used[name].dtype
        return None if dtype == torch.float32 else lambda m: m.to(dtype).float()

    def measure(self) -> tuple[bool, dict[str, float]]:
        """Return whether all perturbed weights are finite, after all of them have been stepped,
        and, if the step compared them with the initial weights, these measures:

        drift               |W - W0| / |W0|
        update_norm         |W - W before| / |W0|
        applied_share       the share of the forward's weights that changed
        applied_cosine      the cosine between the movements of the forward's weights and of the
                            masters in the step
        applied_cosine_all  the same for the movement since the start of the run
        """
        if self.memory_gb is None:
            parts = [list(self.model.parameters()), self.tensors(), self.extra()]
            self.memory_gb = measure_state(parts)
        compared, size = self.moved, torch.as_tensor(self.size)
        sums = [size[None], size.new_tensor([self.started])]
        sums = torch.cat(sums if compared is None else [*sums, compared])
        self.size, self.moved = 0.0, None
        sums = self.sharding.total(sums.to(device_of(self.model))).tolist()
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
        """Return the masters for a checkpoint; the master of an int8 layer as integers and
        remainder.
        """
        tensors = {n: master for n, master in self.masters.items() if n not in self.fixed}
        for name, fixed in self.fixed.items():
            tensors |= {name: fixed.layer.weight, f"{name}.rest": fixed.rest}
        return tensors

    def extra(self) -> dict[str, Any]:
        """Return the state of the optimizers, which a checkpoint holds in addition to the
        weights.
        """
        return {
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self.optimizers.items()
            }
        }

    def fresh(self) -> dict[str, Any]:
        """Return `extra` with the entries that exist after a first step."""
        for name, optimizer in self.optimizers.items():
            with self._opened(name):
                optim.step_nowhere(optimizer)
        return self.extra()

    def load(self, saved: Checkpoint) -> None:
        """Take over a checkpoint's weights and optimizers. Raises: ConfigError if it has other
        parameters.
        """
        tensors = self.tensors()
        if names_in_checkpoint(saved) != set(tensors):
            raise ConfigError(
                f"{saved.path} holds other parameters than this run perturbs. Start with resume=no."
            )
        extra = restore_checkpoint(saved, tensors, self.fresh)
        with torch.no_grad():
            for name, held in self.tensors().items():
                held.copy_(tensors[name])
            for name, master in self.masters.items():
                if name not in self.fixed:
                    self.used[name].copy_(master)
                self.optimizers[name].load_state_dict(extra["optimizers"][name])


def count_state(parts: Parts, noise: Noise, cfg: EggrollConfig) -> StateMemory:
    """Estimate the memory that `Weights` needs on a rank, with the model, without the file of
    initial weights.
    """
    sizes = {address.name: math.prod(address.shape) for address in noise.addresses}
    small = {f"{place}.weight" for place in quantized.layers(parts.lm.model)}
    fixed = sum(size for name, size in sizes.items() if name in small)
    plain = sum(sizes.values()) - fixed
    moments = optim.state_bytes(cfg.optimizer) * (fixed + plain) * (cfg.method != "randopt")
    if parts.lm.sharding.shared:  # the model's own weights are the masters
        return StateMemory(4.0 * parts.lm.parameters + moments, optimizer=moments)
    if parts.run.opt.offload.enabled:  # masters and optimizer state are on the CPU
        return StateMemory(float(parts.lm.own_bytes))
    masters = 4.0 * plain * parts.lm.half + 2.0 * fixed  # 2 bytes: the remainder of int8 weights
    return StateMemory(parts.lm.own_bytes + masters + moments, optimizer=moments)


def movement(
    master: Tensor, before: Tensor, initial: Tensor, rounding: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return eight sums over one parameter, float64 [8]:

    [0] |W - W0|^2 of the masters
    [1] |W - W before|^2 of the masters
    [2] the number of the forward's weights that changed in this step
    [3] the number of the forward's weights
    [4] the inner product of this step's movements of the forward's weights and of the masters
    [5] the squared norm of this step's movement of the forward's weights
    [6] as [4], of the movement since the start of the run
    [7] as [5], of the movement since the start of the run

    Args:
        master: W.
        before: W before the step; overwritten.
        initial: W0; overwritten.
        rounding: computes the forward's weights from masters; None = they are the masters.
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
