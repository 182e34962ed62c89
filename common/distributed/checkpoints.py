"""Checkpoints of weights that may be sharded over ranks.

Whole weights are written by rank 0. Sharded weights are written by torch.distributed.checkpoint as
safetensors, one file per rank. Both are read by any number of ranks, sharded or not.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from common.checkpoint import checkpoint
from common.config import ConfigError
from common.distributed.context import Context, fingerprint
from common.distributed.sharding import is_sharded
from common.system import EXIT_NUMBERS, CheckpointError, RunStopped

EXTRA = "extra"


def save_checkpoint(
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
    if not any(map(is_sharded, tensors.values())):
        check_equal(context, tensors, step)
        if context.main:
            checkpoint.save(root, step, tensors, state, extra, keep, needed=needed)
        context.meet()  # a slow disk may take longer than a collective waits
        return folder
    parts = {**tensors, **tensors_of(extra, EXTRA)}

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


def restore_checkpoint(
    saved: checkpoint.Checkpoint, tensors: dict[str, Tensor], fresh: Callable[[], dict[str, Any]]
) -> Any:
    """Fill `tensors`, sharded or not, from a checkpoint of either format. Returns its `extra`.

    Args: fresh: makes an `extra` of the same structure, to be filled; called if the checkpoint or
    the tensors are sharded.
    """
    sharded = any(map(is_sharded, tensors.values()))
    with torch.no_grad():
        if not saved.sharded:
            for name, tensor in tensors.items():
                _copy(saved.tensors[name], tensor)
            if not sharded:
                return saved.extra
            extra = fresh()
            held = tensors_of(saved.extra, EXTRA)
            for name, tensor in tensors_of(extra, EXTRA).items():
                _copy(held[name], tensor)
            return _merged(extra, saved.extra)
        extra = fresh()
        reader = dcp.HuggingFaceStorageReader(str(saved.path))
        with warnings.catch_warnings():
            # the warning about no_dist, which is intended
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                dcp.load(
                    {**tensors, **tensors_of(extra, EXTRA)},
                    storage_reader=reader,
                    no_dist=not sharded,
                )
            except dcp.CheckpointException as error:
                raise ConfigError(
                    f"{saved.path} does not go into this run: {_first(error)}. Start anew with"
                    " another hydra.run.dir."
                ) from None
        return _merged(extra, saved.extra)


def names_in_checkpoint(saved: checkpoint.Checkpoint) -> set[str]:
    """Return the names of the weights in a checkpoint of either format."""
    if not saved.sharded:
        return set(saved.tensors)
    held = dcp.HuggingFaceStorageReader(str(saved.path)).read_metadata().state_dict_metadata
    return {name for name in held if not name.startswith(f"{EXTRA}/")}


def _copy(full: Tensor, into: Tensor) -> None:
    """Copy the full tensor, which every rank has, into a tensor that may be sharded."""
    if isinstance(into, DTensor):
        full = full.to(into.device, into.dtype)
        full = distribute_tensor(full, into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(full)


def _first(error: dcp.CheckpointException) -> str:
    """Return the reason of the first failure."""
    return str(next(iter(error.failures.values()))[0]).rstrip(".")


def tensors_of(nested: Any, prefix: str) -> dict[str, Tensor]:
    """Return the tensors in nested dicts and lists, by path."""
    if isinstance(nested, list):
        nested = dict(enumerate(nested))
    if not isinstance(nested, dict):
        return {prefix: nested} if isinstance(nested, Tensor) else {}
    parts = [tensors_of(value, f"{prefix}/{key}") for key, value in nested.items()]
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
