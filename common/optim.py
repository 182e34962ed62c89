"""The parts that training loops with a backward pass share: the optimizer, the sum of gradients
over ranks, activation checkpointing, and learning rates by model size (algo.lr=auto).
"""

import importlib.util
import inspect
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config import AUTO, ConfigError, OptimizerConfig, Run, find_recipe
from common.device import Precision, is_out_of_memory
from common.distributed import full_tensor, is_sharded, measure_state
from common.model import has_layers
from common.system import first_line

if TYPE_CHECKING:
    from common.parts import Parts

log = logging.getLogger("clutch")

# Gradients of all ranks are added in pieces of this many bytes.
BUCKET = 64 << 20
# Adam of bitsandbytes, with two moments of 8 bits each (arXiv:2110.02861).
EIGHT_BITS = ("Adam8bit", "AdamW8bit")
ADAMS = ("Adam", "AdamW", *EIGHT_BITS)  # optimizers whose step per weight is about lr


def warm_up(step: int, warmup_steps: float, total: int | None = None) -> float:
    """Return the factor of a linear warm-up at 0-based `step`.

    Args: warmup_steps: the number of warm-up steps; below 1 their share of the `total` steps.
    """
    count = warmup_steps
    if warmup_steps < 1 and total is not None:
        count = math.ceil(warmup_steps * total)
    return min(1.0, (step + 1) / max(1, count))


def lr_factor(cfg: Any, step: int, total: int) -> float:
    """Return the factor of the peak learning rate at 0-based `step` of `total`: warm-up, then the
    schedule.

    Args: cfg: settings with warmup_steps and lr_schedule.
    """
    progress = step / max(1, total - 1)
    return warm_up(step, cfg.warmup_steps, total) * cfg.lr_schedule.factor(progress)


def find_lr(cfg: Any, step: int, progress: float) -> float:
    """Return the factor of the peak learning rate at 0-based `step` of a run that its steps or a
    budget end: warm-up, then the schedule.

    Args:
        cfg: settings with steps, warmup_steps and lr_schedule.
        progress: the progress of the run, 0 to 1.
    """
    warm = warm_up(step, cfg.warmup_steps, cfg.steps)
    if cfg.steps is None and cfg.warmup_steps < 1:  # a share of a budget
        warm = min(1.0, max(progress, 0.01) / max(cfg.warmup_steps, 0.01))
    return warm * cfg.lr_schedule.factor(progress)


def optimizer_class(config: OptimizerConfig) -> Any:
    """Return the optimizer class that algo.optimizer.name names. Raises: ConfigError for a name
    that is unknown or cannot be used here.
    """
    if config.name in EIGHT_BITS:
        return _with_eight_bits(config.name)
    kind = getattr(torch.optim, config.name, None)
    if config.name in ("LBFGS", "SparseAdam"):
        why = "wants the loss as a function" if config.name == "LBFGS" else "wants sparse gradients"
        raise ConfigError(
            f"algo.optimizer.name={config.name} {why}. Use for example SGD, Adam or AdamW."
        )
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"algo.optimizer.name={config.name!r} is not in torch.optim. Use for example SGD, Adam"
            " or AdamW, or one whose state takes 8 bits: Adam8bit or AdamW8bit."
        )
    return kind


def _with_eight_bits(name: str) -> Any:
    """Return an optimizer class of bitsandbytes. Raises: ConfigError if bitsandbytes is not
    installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"algo.optimizer.name={name} needs a package: pip install -e '.[adam8bit]'. Or use"
            f" {name.removesuffix('8bit')}."
        )
    import bitsandbytes.optim

    return getattr(bitsandbytes.optim, name)


def state_bytes(config: OptimizerConfig) -> float:
    """Return the most bytes per parameter of an optimizer's state: two moments; one for SGD."""
    if config.name == "SGD":
        return 4.0 * bool(config.kwargs.get("momentum"))
    return 2 * (1 + 4 / 256) if config.name in EIGHT_BITS else 8.0  # 256 numbers share a scale


def check_shared(config: OptimizerConfig, parameters: Sequence[Tensor]) -> None:
    """Raise ConfigError if the optimizer cannot update sharded parameters."""
    if config.name in EIGHT_BITS and any(map(is_sharded, parameters)):
        raise ConfigError(
            f"algo.optimizer.name={config.name} does not go with opt=fsdp, which shares the state"
            f" out. Use {config.name.removesuffix('8bit')}, or opt=ddp."
        )


def optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer, with a fused step if there is one. Its learning rate is set at each step.

    Raises: ConfigError for arguments that the optimizer rejects.
    """
    kind, parameters = optimizer_class(config), list(parameters)
    check_shared(config, parameters)
    options: dict[str, Any] = {"lr": 1.0, **config.kwargs}
    # SGD's fused step does not support sharded parameters; Adagrad's has no CUDA kernel in earlier
    # versions of PyTorch.
    whole = not any(map(is_sharded, parameters))
    able = config.name in ("Adam", "AdamW") or (config.name == "SGD" and whole)
    takes = inspect.signature(kind).parameters
    if able and "fused" in takes and "foreach" not in config.kwargs:
        options.setdefault("fused", True)
    try:
        return kind(parameters, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"algo.optimizer.kwargs={config.kwargs}: {error}") from None


def check_repeatable(config: Any, precision: Precision) -> None:
    """Raise ConfigError if opt=deterministic would fail at the first backward pass: linear
    attention and state-space layers need a cumulative sum, for which CUDA has no deterministic
    algorithm.
    """
    if precision.repeatable and has_layers(config, ("linear_attention", "hybrid")):
        raise ConfigError(
            f"opt=deterministic does not go with the recurrent layers of {config.model_type}:"
            " PyTorch has no repeatable running sum for CUDA. Leave it out."
        )


# Overflows in a row that stop a run. A loss scale that starts at 65,536 is below 1 by then, unless
# it has grown before.
OVERFLOWS = 20


class Guards:
    """Checks the loss and the gradients of each step.

    Args: scaled: whether gradients are fp16 with a GradScaler, which skips steps that overflow.
    """

    ADVICE = "Lower algo.lr, or leave out opt=amp."

    def __init__(self, scaled: bool) -> None:
        self.scaled, self.overflows = scaled, 0

    def not_finite(self, seen: dict[str, float]) -> str | None:
        """Return a description of the NaN or infinity in `seen`, because of which a step was
        skipped; None if all is finite. An overflow of a GradScaler does not count.
        """
        if math.isfinite(seen["loss"]) and (math.isfinite(seen["grad_norm"]) or self.scaled):
            return None
        return f"loss {seen['loss']}, gradient norm {seen['grad_norm']}"

    def trouble(self, seen: dict[str, float]) -> str | None:
        """Return the reason that a run must stop after a step that logged `seen`, with advice; None
        if it may continue.
        """
        self.overflows = self.overflows + 1 if seen.get("overflow") else 0
        if self.overflows >= OVERFLOWS or seen.get("loss_scale", 1.0) < 1:
            return (
                f"fp16 gradients overflow for good: {self.overflows} in a row, loss scale"
                f" {seen['loss_scale']:g}. Lower algo.lr, use a device with native bfloat16, or"
                " leave out opt=amp."
            )
        return None


class Updater:
    """Optimizer, GradScaler and clipping: turns accumulated gradients into one step.

    Args: settings: settings with optimizer and grad_clip.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        settings: Any,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.parameters, self.grad_clip, self.precision = parameters, settings.grad_clip, precision
        self.optimizer = optimizer(settings.optimizer, parameters)
        adam = settings.optimizer.name in ADAMS
        if adam and not any(parameter.is_meta for parameter in parameters):
            # Before the first rollout: allocated later, the state would be fragmented over the
            # memory that the sampler's cache has freed.
            self._make_state()
            for state in self.optimizer.state.values():
                state["step"] *= 0  # a tensor of torch's, a number of bitsandbytes'
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.scaler)  # type: ignore[attr-defined]
        # Memory of weights, gradients and optimizer state on this rank.
        self.memory_gb: float | None = None

    def _make_state(self) -> None:
        """Allocate the optimizer state. Raises: ConfigError if it does not fit the memory."""
        try:
            step_nowhere(self.optimizer)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                "out of memory: weights, gradients and what the optimizer keeps do not fit, however"
                " few rows a forward has. Use a smaller model, algo.optimizer.name=AdamW8bit, or"
                f" opt=fsdp on several devices. ({first_line(error)})"
            ) from error

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, scaled if gradients are fp16."""
        torch.use_deterministic_algorithms(self.precision.repeatable)
        try:
            self.scaler.scale(loss).backward()
        finally:  # sampling needs a cumulative sum: CUDA has no deterministic algorithm for it
            torch.use_deterministic_algorithms(False)

    def clear(self) -> None:
        """Discard the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        # A rank may have no row in a step; its scaler still needs a scale.
        self.scaler.scale(torch.zeros((), device=self.parameters[0].device))

    def step(self, lr: float, loss: float) -> dict[str, float]:
        """Clip and apply the gradients, unless they or the loss are not finite. Returns the numbers
        to log.

        Gradients and loss are already summed over all ranks, so that all ranks do the same.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.unscale_(self.optimizer)
        total = nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        norm = full_tensor(total).item()
        scale = self.scaler.get_scale()
        # A fused SGD allocates its momentum in the first step, wrongly if that step overflows.
        if math.isfinite(loss) and math.isfinite(norm):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.memory_gb is None:
            parts = [[p, p.grad] for p in self.parameters]
            self.memory_gb = measure_state(
                {"weights": parts, "optimizer": self.optimizer.state_dict()}
            )
        self.optimizer.zero_grad(set_to_none=True)  # frees their memory for the next rollout
        seen = {"loss": loss, "grad_norm": norm, "lr": lr, "state_memory_gb": self.memory_gb}
        if self.precision.scaler:
            seen |= {"loss_scale": scale, "overflow": float(self.scaler.get_scale() < scale)}
        return seen

    def state(self) -> dict[str, Any]:
        """Return the optimizer and scaler state for a checkpoint."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def fresh(self) -> dict[str, Any]:
        """Return `state` after a first step that allocates the optimizer's tensors and leaves the
        weights unchanged.
        """
        step_nowhere(self.optimizer)
        return self.state()

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `state`, also from a run with another number of ranks."""
        saved, own = state["optimizer"], self.optimizer.param_groups[0]
        if "fused" in own:
            groups = [group | {"fused": own["fused"]} for group in saved["param_groups"]]
            saved = saved | {"param_groups": groups}
        self.optimizer.load_state_dict(saved)
        if state["scaler"]:  # empty if the run has used no scaler so far
            self.scaler.load_state_dict(state["scaler"])


def step_nowhere(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step that changes no weight, so that the optimizer allocates its state; a
    checkpoint is loaded into it.
    """
    # Adam, unlike AdamW, adds the decay to the gradient, and so to its moments.
    names = ("lr", "weight_decay")
    asked = [{n: group[n] for n in names if n in group} for group in optimizer.param_groups]
    for group, settings in zip(optimizer.param_groups, asked, strict=True):
        group.update(dict.fromkeys(settings, 0.0))
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, settings in zip(optimizer.param_groups, asked, strict=True):
        group.update(settings)


def checkpoint_activations(model: PreTrainedModel) -> None:
    # Renamed in transformers 5.2x; the old name warns there.
    """Recompute each block's activations in the backward pass."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of all ranks, in buckets. Ranks may have run different numbers of
    backward passes, or none.

    Gradients of sharded weights have already been summed in the backward passes.
    """
    parameters = list(parameters)
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_sharded(parameters[0]):
        return
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        size += parameter.grad.nbytes
        if size > BUCKET:
            _sum(bucket)
            bucket, size = [], 0
    _sum(bucket)


def _sum(bucket: list[Tensor]) -> None:
    if not bucket:
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat)
    for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(part.view_as(gradient))


def no_dropout(model: nn.Module) -> None:
    """Disable dropout in training mode too: otherwise the policy that is trained would differ from
    the one that sampled.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # attention_dropout, hidden_dropout, activation_dropout, ...
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


# --- learning rates

FAR = 30.0  # a learning rate this many times above the recipe's is worth a warning
Points = tuple[tuple[float, float], ...]  # (parameters of the model, learning rate), by size


@dataclass(frozen=True)
class Rates:
    """Learning rates at some model sizes.

    Attributes:
        weights: the rates for training all weights.
        adapter: the rates for training an adapter.
    """

    weights: Points
    adapter: Points

    def at(self, parameters: int, adapted: bool) -> float:
        """Return the rate for a model with that number of parameters: interpolated linearly in
        logarithms between the sizes, and constant beyond the outermost sizes.
        """
        sizes, rates = np.log(self.adapter if adapted else self.weights).T
        return float(f"{np.exp(np.interp(np.log(max(parameters, 1)), sizes, rates)):.2g}")


def choose_lr(parts: "Parts", rates: Rates) -> float:
    """Return the learning rate of a run: algo.lr, or the one of `rates` if algo.lr=auto.

    Raises: ConfigError for auto with an optimizer that the rates do not apply to.
    """
    cfg = parts.run.algo
    if cfg.lr != AUTO:
        return float(cfg.lr)
    if cfg.optimizer.name not in ADAMS:
        raise ConfigError(
            f"algo.lr=auto does not know the steps of algo.optimizer.name={cfg.optimizer.name}. Use"
            f" one of {', '.join(ADAMS)}, or give algo.lr."
        )
    return rates.at(parts.lm.parameters, parts.lm.adapter is not None)


def describe_lr(parts: "Parts", rates: Rates) -> str:
    """Describe for the plan the learning rate and its source. Warns of a rate far above that of
    `rates`.
    """
    run, lr = parts.run, choose_lr(parts, rates)
    usual = rates.at(parts.lm.parameters, parts.lm.adapter is not None)
    if run.algo.optimizer.name in ADAMS and lr >= FAR * usual and parts.context.main:
        log.warning(
            "algo.lr=%g is %.0f times what is usual for a model of this size, and may destroy what"
            " the model can do. Leave it out (algo.lr=auto is %g here), or watch a text with"
            " evaluate.text=FILE.",
            *(lr, lr / usual, usual),
        )
    return f"lr {lr:g} ({describe_source(run)})"


def describe_source(run: Run) -> str:
    """Describe the source of algo.lr and of the other settings of its recipe."""
    name, algo = run.algo.name, run.algo
    if algo.lr == AUTO:
        return "auto"
    recipe = find_recipe(run, name)
    tuned = all(getattr(algo, key, value) == value for key, value in recipe.items())
    return f"the recipe of model={run.model.name}" if recipe and tuned else "as set"
