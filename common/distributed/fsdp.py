"""opt=fsdp: weights, gradients and optimizer state sharded over ranks, by torch's FSDP2
(`fully_shard`).

Each block, and all that is outside the blocks, is a unit that is gathered before its forward and
resharded after it; its gradients are summed over ranks as they are computed. Code that uses a model
that may be sharded follows four rules:

- a computation that uses weights outside `model(...)` goes through `inside`;
- forwards without a backward pass go into `gathered`, in which ranks may make different numbers;
- all ranks make the same number of backward passes (`logprobs.match_backward_passes` pads it);
- `save`, `restore` and `whole` are called on all ranks.

On a plain model each of these functions does what a run without sharding does. Checkpoints are
written by torch.distributed.checkpoint as safetensors, one file per rank, and read by any number of
ranks, sharded or not.
"""

import copy
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from common.checkpoint import checkpoint
from common.config import ConfigError, FsdpConfig, Run
from common.device import AnyDevice, Precision, peak_memory_gb
from common.distributed.context import Context, fingerprint
from common.system import EXIT_NUMBERS, CheckpointError, RunStopped

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
log = logging.getLogger("clutch")


@dataclass
class Shards:
    """The sharding of a model.

    Attributes:
        mesh: the DeviceMesh [replicate, shard]; None in a plan.
        ranks: the number of ranks along its second dimension.
        device: the device of computations.
        dtype: the dtype of gathered weights.
    """

    mesh: Any
    ranks: int
    device: torch.device
    dtype: torch.dtype


def cut_mesh(config: FsdpConfig, world: int) -> tuple[int, int]:
    """Return the sizes of [replicate, shard]. Raises: ConfigError if they do not divide `world`."""
    each = config.ranks_per_group or world
    if world % each:
        raise ConfigError(
            f"opt.fsdp.ranks_per_group={each} does not divide the {world} ranks. Use one of "
            f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
        )
    return world // each, each


def shard(models: list[Any], run: Run, context: Context, numbers: Precision) -> None:
    """With opt=fsdp, shard `models` (plain, float32, on any device) over ranks, in place; None
    entries are skipped.

    The weights are those of rank 0; those of other ranks may be on meta. In a plan models are only
    marked as sharded. Masters stay float32; blocks are gathered in the dtype of `numbers` and their
    gradients summed in float32.
    Raises: ConfigError for settings that conflict.
    """
    if context.mesh is None:
        return
    if numbers.scaler and run.opt.fsdp.cpu_offload:
        raise ConfigError(
            "opt.fsdp.cpu_offload=true does not go with fp16, whose gradients are unscaled on the"
            " device. Leave out opt=amp, or use a device with native bfloat16."
        )
    offload = CPUOffloadPolicy() if run.opt.fsdp.cpu_offload else OffloadPolicy()
    half = numbers.compute if numbers.compute != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for model in models:
        if model is None:
            continue
        if isinstance(context.mesh, tuple):  # in a plan, models are on meta
            model.shards = Shards(None, context.mesh[1], torch.device("meta"), numbers.compute)
            continue
        for part in [*blocks(model), model]:
            send_weights(part, context)
            fully_shard(part, mesh=context.mesh, mp_policy=policy, offload_policy=offload)
            # Sums, since algorithms divide by counts of all ranks themselves. A reduction with
            # factor 1 instead would need NCCL.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        each, device = context.mesh.size(1), context.device.device
        model.shards = Shards(context.mesh, each, device, numbers.compute)
        model.inside = types.MethodType(_call, model)
        register_fsdp_forward_method(model, "inside")


def without_weights(model: M) -> M:
    """Return a copy of `model` with parameters and buffers on meta, small enough to be sent to
    other ranks.
    """
    empty = {id(t): torch.empty_like(t, device="meta") for t in model.buffers()}
    for p in model.parameters():
        empty[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, empty)


def send_weights(part: nn.Module, context: Context, home: torch.device | None = None) -> None:
    """Broadcast the parameters and buffers of `part` from rank 0 to all ranks, on their device, or
    finally at `home`; sharded ones are skipped. All buffers are sent, also those outside of the
    state dict, such as rotary frequencies.
    """
    for tensor in (*part.parameters(), *part.buffers()):
        if isinstance(tensor, DTensor):
            continue
        if not context.main:  # in place, so that tied weights stay tied
            empty = torch.empty_like(tensor, device=context.device.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            empty = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            torch.utils.swap_tensors(tensor, empty)
        tensor.data = tensor.data.to(context.device.device)
        dist.broadcast(tensor.data, 0)
        tensor.data = tensor.data.to(home or context.device.device)


def _call(model: Any, function: Callable[..., T], *args: Any) -> T:
    return function(model, *args)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the members of its outermost module lists."""
    modules: list[nn.Module] = []
    for child in model.children():
        modules += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return modules


def of(model: Any) -> Shards | None:
    """Return the sharding of `model`; None for a plain one."""
    return getattr(model, "shards", None)


def device(model: Any) -> torch.device:
    """Return the device of `model`'s computations; its parameters may be elsewhere."""
    shards = of(model)
    return shards.device if shards else next(model.parameters()).device


def target(model: Any) -> AnyDevice:
    """Return the device of `model`'s computations; for a model on meta, the device of its plan."""
    return getattr(model, "planned_for", None) or device(model)


def dtype(model: Any) -> torch.dtype:
    """Return the dtype of the weights in a forward."""
    shards = of(model)
    return shards.dtype if shards else next(model.parameters()).dtype


def inference(model: Any) -> Any:
    """Return the context of forwards without a backward pass. For a sharded model it is no_grad,
    since weights gathered in inference mode could never be trained.
    """
    return torch.no_grad() if of(model) else torch.inference_mode()


def autocast(model: Any) -> Any:
    """Return the autocast context of dummy forwards: an adapter is float32, and gathered weights
    may be in 16 bits.
    """
    kind = dtype(model)
    return torch.autocast(device(model).type, kind, enabled=kind != torch.float32)


def inside(model: Any, function: Callable[..., T], *args: Any) -> T:
    """Return `function(model, *args)`, computed as one forward of `model`, with the weights outside
    its blocks gathered.
    """
    return model.inside(function, *args) if of(model) else function(model, *args)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Gather all weights of a sharded model on every rank for the block, for forwards without a
    backward pass, whose number may differ between ranks. Writes to the weights are lost.
    """
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)] if model else []
    if not parts:
        yield  # there is no model, or it is not sharded
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


# --- the shards of one rank


def rows(tensor: Tensor) -> range:
    """Return the rows (of the first dimension) of the full tensor that this rank holds; all of them
    unless it is sharded.
    """
    whole = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return range(whole)
    mesh = tensor.device_mesh
    each = -(-whole // mesh.size(1))
    start = min(whole, mesh.get_local_rank("shard") * each)
    held = range(start, min(whole, start + each))
    assert len(held) == local(tensor).shape[0], (
        "FSDP shares out rows in chunks, the last of them smaller"
    )
    return held


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return `part`, the rows that this rank holds, as a tensor with the sharding and device of
    `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return part
    shape, stride = tensor.shape, tensor.stride()
    part = part.to(local(tensor).device)
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def total(model: Any, value: Tensor) -> Tensor:
    """Return the sum of `value`, in place, over the ranks that together hold one copy of the
    weights.
    """
    shards = of(model)
    if shards:
        dist.all_reduce(value, group=shards.mesh.get_group("shard"))
    return value


# --- memory


def measured(parts: Any) -> float:
    """Return the GB (2**30 bytes) that this rank holds of tensors in nested dicts and lists; logs
    it if they are sharded.
    """
    tensors = {id(tensor): tensor for tensor in _tensors(parts, "").values()}.values()
    here = sum(local(tensor).nbytes for tensor in tensors)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        whole = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
        log.info(
            "measured: %s. Peak so far %.2f GB",
            _beside(here, whole),
            peak_memory_gb(next(iter(tensors)).device),
        )
    return here / 2**30


def planned(model: Any, whole: float) -> str:
    """Describe for the plan the bytes of `whole` that a rank holds, compared with opt=ddp; "" for a
    plain model.
    """
    return f"; {_beside(whole / share(model), whole)}" if of(model) else ""


def _beside(here: float, whole: float) -> str:
    unit, name = (2**30, "GB") if whole >= 2**30 else (2**20, "MB")
    return f"training state {here / unit:.2f} {name} a rank, with opt=ddp {whole / unit:.2f} {name}"


def gathered_bytes(model: Any, rollout: bool) -> float:
    """Return the bytes of weights that are gathered at a time: in a rollout all of them; in
    training those outside the blocks and two blocks, with their gradients; 0 for a plain model.
    """
    shards = of(model)
    if shards is None:
        return 0
    if rollout:
        return shards.dtype.itemsize * parameters(model)
    inside = {id(p) for block in blocks(model) for p in block.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]
    each = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    weights = sum(p.numel() for p in outside) + 2 * max(each, default=0)
    trained = sum(p.numel() for p in outside if p.requires_grad)
    return shards.dtype.itemsize * weights + 4.0 * trained + block_gradients(model)


def block_gradients(model: Any) -> float:
    """Return the bytes of the unsharded gradients of two blocks of a sharded model during their
    backward pass; 0 for a plain model.
    """
    if of(model) is None:
        return 0
    each = [
        sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks(model)
    ]
    return 4.0 * 2 * max(each, default=0)


def parameters(model: Any) -> int:
    """Return the number of weights of the full model."""
    return sum(parameter.numel() for parameter in model.parameters())


def share(model: Any) -> int:
    """Return the number of ranks that together hold one copy of the weights; 1 for a
    plain model.
    """
    shards = of(model)
    return shards.ranks if shards else 1


# --- checkpoints and export


def save(
    context: Context,
    root: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    extra: dict[str, Any],
    keep: int,
    needed: Sequence[int] = (),
) -> Path:
    """Save a checkpoint of weights that may be sharded, and return its folder; called on all ranks.

    Sharded weights, and the tensors of `extra`, are written to one safetensors file per rank. Other
    arguments are those of `checkpoint.save`.
    """
    folder = checkpoint.folder_of(root, step)
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        check_equal(context, tensors, step)
        if context.main:
            checkpoint.save(root, step, tensors, state, extra, keep, needed=needed)
        context.meet()  # a slow disk may take longer than a collective waits
        return folder
    parts = {**tensors, **_tensors(extra, EXTRA)}

    def write(place: Path | None) -> None:
        agreed = context.gather_objects(place)[0]
        writer = dcp.HuggingFaceStorageWriter(str(agreed), save_distributed=True)
        try:
            dcp.save(parts, storage_writer=writer)
        except dcp.CheckpointException as error:  # raised on all ranks, with the failure of each
            raise CheckpointError(f"{folder} could not be written: {_first(error)}.") from None

    if context.main:
        others = tree_map_only(Tensor, lambda _: None, extra)
        checkpoint.save(root, step, {}, state, others, keep, write, needed)
    else:
        write(None)
    context.meet()
    return folder


def check_equal(context: Context, tensors: dict[str, Tensor], step: int) -> None:
    """Raise RunStopped if the weights of the ranks differ, as they do when devices of different
    kinds round differently.
    """
    if context.world_size == 1:
        return
    other = context.find_other(fingerprint(tensors.values()))
    if other is not None:
        raise RunStopped(
            f"step {step}: the weights of rank {other} are no longer those of rank 0, so the ranks"
            " train apart. Use devices of one kind, or opt=fsdp."
            f" {checkpoint.describe_latest(context.out_dir / 'checkpoints')}",
            EXIT_NUMBERS,
        )


EXTRA = "extra"


def restore(
    saved: checkpoint.Checkpoint, tensors: dict[str, Tensor], fresh: Callable[[], dict[str, Any]]
) -> Any:
    """Fill `tensors`, sharded or not, from a checkpoint of either format. Returns its `extra`.

    Args: fresh: makes an `extra` of the same structure, to be filled; called if the checkpoint or
    the tensors are sharded.
    """
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    with torch.no_grad():
        if not saved.sharded:
            for name, tensor in tensors.items():
                _copy(saved.tensors[name], tensor)
            if not sharded:
                return saved.extra
            extra = fresh()
            held = _tensors(saved.extra, EXTRA)
            for name, tensor in _tensors(extra, EXTRA).items():
                _copy(held[name], tensor)
            return _merged(extra, saved.extra)
        extra = fresh()
        reader = dcp.HuggingFaceStorageReader(str(saved.path))
        with warnings.catch_warnings():
            # the warning about no_dist, which is intended
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                dcp.load(
                    {**tensors, **_tensors(extra, EXTRA)},
                    storage_reader=reader,
                    no_dist=not sharded,
                )
            except dcp.CheckpointException as error:
                raise ConfigError(
                    f"{saved.path} does not go into this run: {_first(error)}. Start anew with"
                    " another hydra.run.dir."
                ) from None
        return _merged(extra, saved.extra)


def names(saved: checkpoint.Checkpoint) -> set[str]:
    """Return the names of the weights in a checkpoint of either format."""
    if not saved.sharded:
        return set(saved.tensors)
    held = dcp.HuggingFaceStorageReader(str(saved.path)).read_metadata().state_dict_metadata
    return {name for name in held if not name.startswith(f"{EXTRA}/")}


def whole(model: Any) -> dict[str, Tensor] | None:
    """Return the full weights of a sharded model by name, on the CPU of rank 0 (empty on other
    ranks), tied weights once; None for a plain model. Called on all ranks.
    """
    shards = of(model)
    if shards is None:
        return None
    main, tensors = dist.get_rank() == 0, {}
    for name, parameter in model.named_parameters():
        full = parameter.detach().to(shards.device)
        full = full.full_tensor() if isinstance(full, DTensor) else full
        if main:
            tensors[name] = full.cpu()
    for name, buffer in model.named_buffers():
        if main and name in model.state_dict():
            tensors[name] = buffer.cpu()
    return tensors


def _copy(full: Tensor, into: Tensor) -> None:
    """Copy the full tensor, which every rank has, into a tensor that may be sharded."""
    if isinstance(into, DTensor):
        full = full.to(into.device, into.dtype)
        full = distribute_tensor(full, into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(full)


def _first(error: dcp.CheckpointException) -> str:
    """Return the reason of the first failure."""
    return str(next(iter(error.failures.values()))[0]).rstrip(".")


def _tensors(nested: Any, prefix: str) -> dict[str, Tensor]:
    """Return the tensors in nested dicts and lists, by path."""
    if isinstance(nested, list):
        nested = dict(enumerate(nested))
    if not isinstance(nested, dict):
        return {prefix: nested} if isinstance(nested, Tensor) else {}
    parts = [_tensors(value, f"{prefix}/{key}") for key, value in nested.items()]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _merged(filled: Any, saved: Any) -> Any:
    """Combine the tensors of `filled` with all other values of `saved`."""
    if isinstance(filled, Tensor):
        return filled
    if isinstance(filled, dict) and isinstance(saved, dict):
        return {key: _merged(filled.get(key), value) for key, value in saved.items()}
    if isinstance(filled, list) and isinstance(saved, list):
        return [_merged(mine, theirs) for mine, theirs in zip(filled, saved, strict=True)]
    return saved
