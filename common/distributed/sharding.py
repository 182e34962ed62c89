"""The sharding of a model's weights over ranks; without opt=fsdp every rank has whole weights.

Code that uses a model whose weights may be sharded follows four rules:

- a computation that uses weights outside `model(...)` goes through `inside`;
- forward passes without a backward pass go into `gathered`, in which ranks may make different
  numbers of them;
- if ranks share weights, all of them make the same number of backward passes
  (`logprobs.match_backward_passes` pads it);
- `whole`, and the functions of common/distributed/checkpoints.py, are called on all ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Sharding:
    """The sharding of a model whose weights are whole on every rank: it does nothing.

    `Sharded` (common/distributed/fsdp.py) is the sharding of a model whose ranks each hold a part.
    """

    # Whether ranks share weights, so that one rank cannot repeat a forward pass alone.
    shared = False
    # The number of ranks that together hold one copy of the weights.
    ranks = 1

    def __init__(self, model: Any) -> None:
        self.model = model

    def gathered(self) -> AbstractContextManager[None]:
        """Gather all weights on every rank for the block, for forward passes without a backward
        pass, whose number may differ between ranks. Writes to gathered weights are lost.
        """
        return nullcontext()

    def inside(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(model, *args)`, computed as one forward pass of the model, with the
        weights outside its blocks gathered.
        """
        return function(self.model, *args)

    def inference(self) -> AbstractContextManager[None]:
        """Return the context of forward passes without a backward pass."""
        return torch.inference_mode()

    def whole(self) -> dict[str, Tensor] | None:
        """Return the full weights by name, on the CPU of rank 0, gathered from the ranks; None if
        the model itself has them. Called on all ranks.
        """
        return None

    # --- the part of one rank

    def rows(self, tensor: Tensor) -> range:
        """Return the rows (of the first dimension) of the full tensor that this rank holds."""
        return range(tensor.shape[0])

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that this rank holds."""
        return tensor

    def like(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Return `part`, the rows that this rank holds, sharded as `tensor` is."""
        return part

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of `value`, in place, over the ranks that together hold one copy of the
        weights.
        """
        return value

    # --- memory

    def gathered_bytes(self, rollout: bool) -> float:
        """Return the bytes of weights that are gathered at a time, in a rollout or in training, in
        addition to the part of this rank.
        """
        return 0.0

    def gradient_bytes(self) -> float:
        """Return the bytes of full gradients that exist at a time during a backward pass."""
        return 0.0

    def describe(self, state: float) -> str:
        """Describe for the plan the bytes of the training state `state` that a rank holds, compared
        with whole weights; "" if they are whole.
        """
        return ""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only a part of a tensor."""
    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from the ranks if it is sharded. Called on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharding_of(model: Any) -> Sharding:
    """Return the sharding of a model; also of None, for which there is nothing to gather."""
    return getattr(model, "sharding", None) or Sharding(model)
