"""Count the bytes that kernels read and write, by the operators that torch calls.

An operator reads its arguments and writes its results once; a view moves nothing; what picks rows
or numbers moves those alone. What a kernel reads twice, or finds in a cache, is not known here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Operators that touch as many numbers of their first argument as they are given, or give.
PICK = {aten.gather, aten.index, aten.index_select, aten.embedding}
PUT = {aten.scatter_, aten.scatter_add_, aten.index_put_, aten.index_copy_, aten.index_add_}
NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view}


class Traffic(TorchDispatchMode):
    """Attributes: moved: bytes so far; calls: operators that moved any; casts: of these, those that
    make 16 bits of float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.calls = self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {k: v for k, v in (kwargs or {}).items() if k != "out"}
        moved = self.count(func, tensors((args, read)), tensors(out))
        self.moved += moved
        self.calls += moved > 0
        if moved and func.overloadpacket in (aten._to_copy, aten.to):
            self.casts += args[0].dtype == torch.float32 and out.dtype.itemsize == 2
        return out

    def count(self, func: Any, given: list[Tensor], made: list[Tensor]) -> int:
        """Return what one call moves."""
        packet = func.overloadpacket
        written = [a.alias_info for a in func._schema.returns]
        # In inference mode a cast is seen as `to`, which returns what it was given if it can.
        views = func.is_view and not (packet is aten.to and made[0] is not given[0])
        if packet in NOTHING or (views and not any(i and i.is_write for i in written)):
            return 0
        if packet is aten._flash_attention_forward:
            return attention(given, made)
        if packet in PICK:
            return 2 * sum(map(size, made))
        if packet in PUT:
            return 2 * size(given[-1])
        return sum(map(size, given)) + sum(map(size, made))


def attention(given: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes of queries and results, and of the keys and values that count."""
    query, key, value, _, starts, *used = given
    keys = int(used[0].sum()) if used else int(starts[-1])
    each = (key[0].numel() + value[0].numel()) * key.itemsize
    return size(query) + keys * each + sum(map(size, made))


def tensors(tree: Any) -> list[Tensor]:
    """List the tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's own numbers, each once where they are repeated."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    numbers = 1
    for length, stride in pairs:
        numbers *= length if stride else min(length, 1)
    return numbers * tensor.itemsize
