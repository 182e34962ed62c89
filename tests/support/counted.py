"""The bytes of the tensors of this process that live at a time, wherever they lie."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Counted(TorchDispatchMode):
    """Counts what operations take and make in the block. peak: the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = WeakIdKeyDictionary()  # storages
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # what it does is seen below
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        storages = [x.untyped_storage() for x in found]
        storages = [x for x in storages if x.device.type != "meta"]  # of what DTensor tries out
        if any(storage not in self.held for storage in storages):
            for storage in storages:
                self.held[storage] = True
            self.peak = max(self.peak, self.live)
        return out

    @property
    def live(self) -> int:
        """What there is now."""
        return sum(storage.nbytes() for storage in self.held)

    def forget(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live
