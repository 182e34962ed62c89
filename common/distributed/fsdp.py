"""opt=fsdp: weights, gradients and optimizer state sharded over ranks, by torch's FSDP2
(`fully_shard`).

Each block, and all that is outside the blocks, is a unit that is gathered before its forward and
resharded after it; its gradients are summed over ranks as they are computed. `Sharding`
(common/distributed/sharding.py) has the rules for code that uses such a model.
"""

import logging
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from common.config import ConfigError, FsdpConfig, Run
from common.device import (
    Precision,
    blocks_of,
    count_parameters,
    device_of,
    dtype_of,
    peak_memory_gb,
)
from common.distributed.broadcast import send_weights
from common.distributed.checkpoints import tensors_of
from common.distributed.context import Context
from common.distributed.sharding import Sharding, full_tensor, is_sharded

T = TypeVar("T")
log = logging.getLogger("clutch")


def cut_mesh(config: FsdpConfig, world: int) -> tuple[int, int]:
    """Return the sizes of [replicate, shard]. Raises: ConfigError if they do not divide `world`."""
    each = config.ranks_per_group or world
    if world % each:
        raise ConfigError(
            f"opt.fsdp.ranks_per_group={each} does not divide the {world} ranks. Use one of "
            f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
        )
    return world // each, each


def shard(model: Any, run: Run, context: Context, precision: Precision) -> None:
    """With opt=fsdp, shard `model` (plain, float32, on any device) over ranks, in place.

    The weights are those of rank 0; those of other ranks may be on meta. In a plan the model is
    only marked as sharded. Masters stay float32; blocks are gathered in the compute dtype and
    their gradients summed in float32.
    Raises: ConfigError for settings that conflict.
    """
    if context.mesh is None:
        return
    if precision.scaler and run.opt.fsdp.cpu_offload:
        raise ConfigError(
            "opt.fsdp.cpu_offload=true does not go with fp16, whose gradients are unscaled on the"
            " device. Leave out opt=amp, or use a device with native bfloat16."
        )
    model.forward_dtype = precision.compute
    if isinstance(context.mesh, tuple):  # in a plan, models are on meta
        model.forward_device = torch.device("meta")
        model.sharding = Sharded(model, None, context.mesh[1])
        return
    offload = CPUOffloadPolicy() if run.opt.fsdp.cpu_offload else OffloadPolicy()
    half = precision.compute if precision.compute != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for part in [*blocks_of(model), model]:
        send_weights(part, context)
        fully_shard(part, mesh=context.mesh, mp_policy=policy, offload_policy=offload)
        # Sums, since algorithms divide by counts of all ranks themselves. A reduction with
        # factor 1 instead would need NCCL.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    model.forward_device = context.device.device
    model.sharding = Sharded(model, context.mesh, context.mesh.size(1))
    model.inside = types.MethodType(_call, model)
    register_fsdp_forward_method(model, "inside")


def _call(model: Any, function: Callable[..., T], *args: Any) -> T:
    return function(model, *args)


class Sharded(Sharding):
    """The sharding of a model whose ranks each hold a part of the weights. Tensors that are whole
    all the same, such as an adapter's, are left as they are.

    Args:
        mesh: the DeviceMesh [replicate, shard]; None in a plan.
        ranks: the number of ranks along its second dimension.
    """

    shared = True

    def __init__(self, model: Any, mesh: Any, ranks: int) -> None:
        super().__init__(model)
        self.mesh, self.ranks = mesh, ranks

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all weights on every rank for the block."""
        model = self.model
        parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
        if not parts:
            yield  # in a plan
            return
        model.inside(lambda _: None)  # FSDP initializes its state at the first forward
        model.set_reshard_after_forward(False)
        for part in parts:
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()
            model.set_reshard_after_forward(True)
            # the backward pass begins with the head
            model.set_reshard_after_forward(False, recurse=False)

    def inside(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(model, *args)`, computed as one forward pass."""
        return self.model.inside(function, *args)

    def inference(self) -> AbstractContextManager[None]:
        """Return no_grad, since weights gathered in inference mode could never be trained."""
        return torch.no_grad()

    def whole(self) -> dict[str, Tensor] | None:
        """Return the full weights by name, on the CPU of rank 0 (empty on other ranks), tied
        weights once.
        """
        main, tensors, device = dist.get_rank() == 0, {}, device_of(self.model)
        for name, parameter in self.model.named_parameters():
            full = full_tensor(parameter.detach().to(device))
            if main:
                tensors[name] = full.cpu()
        for name, buffer in self.model.named_buffers():
            if main and name in self.model.state_dict():
                tensors[name] = buffer.cpu()
        return tensors

    # --- the part of one rank

    def rows(self, tensor: Tensor) -> range:
        """Return the rows of the full tensor that this rank holds."""
        whole = tensor.shape[0]
        if not isinstance(tensor, DTensor):
            return range(whole)
        mesh = tensor.device_mesh
        each = -(-whole // mesh.size(1))
        start = min(whole, mesh.get_local_rank("shard") * each)
        held = range(start, min(whole, start + each))
        assert len(held) == self.local(tensor).shape[0], (
            "FSDP shares out rows in chunks, the last of them smaller"
        )
        return held

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that this rank holds."""
        return _local(tensor)

    def like(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Return `part`, the rows that this rank holds, as a tensor with the sharding and device of
        `tensor`.
        """
        if not isinstance(tensor, DTensor):
            return part
        shape, stride = tensor.shape, tensor.stride()
        part = part.to(self.local(tensor).device)
        return DTensor.from_local(
            part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
        )

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of `value`, in place, over the ranks of one copy of the weights."""
        dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    # --- memory

    def gathered_bytes(self, rollout: bool) -> float:
        """Return the bytes of weights that are gathered at a time: in a rollout all of them; in
        training those outside the blocks and two blocks, with their gradients.
        """
        model, size = self.model, dtype_of(self.model).itemsize
        if rollout:
            return size * count_parameters(model)
        inside = {id(p) for block in blocks_of(model) for p in block.parameters()}
        outside = [p for p in model.parameters() if id(p) not in inside]
        each = [count_parameters(block) for block in blocks_of(model)]
        weights = sum(p.numel() for p in outside) + 2 * max(each, default=0)
        trained = sum(p.numel() for p in outside if p.requires_grad)
        return size * weights + 4.0 * trained + self.gradient_bytes()

    def gradient_bytes(self) -> float:
        """Return the bytes of the full gradients of two blocks."""
        each = [
            sum(p.numel() for p in block.parameters() if p.requires_grad)
            for block in blocks_of(self.model)
        ]
        return 4.0 * 2 * max(each, default=0)

    def describe(self, state: float) -> str:
        """Describe for the plan the bytes of training state that a rank holds."""
        return f"; {_compare(state / self.ranks, state)}"


def measure_state(parts: Any) -> float:
    """Return the GB (2**30 bytes) that this rank holds of tensors in nested dicts and lists; logs
    it if they are sharded.
    """
    tensors = {id(tensor): tensor for tensor in tensors_of(parts, "").values()}.values()
    here = sum(_local(tensor).nbytes for tensor in tensors)
    if any(map(is_sharded, tensors)):
        whole = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
        log.info(
            "measured: %s. Peak so far %.2f GB",
            _compare(here, whole),
            peak_memory_gb(next(iter(tensors)).device),
        )
    return here / 2**30


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _compare(here: float, whole: float) -> str:
    unit, name = (2**30, "GB") if whole >= 2**30 else (2**20, "MB")
    return f"training state {here / unit:.2f} {name} a rank, with opt=ddp {whole / unit:.2f} {name}"
