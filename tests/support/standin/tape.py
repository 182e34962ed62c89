"""A tape in place of a CUDA graph: it records torch's operations, which stand for kernels.

As in a graph, numbers and shapes that Python had while recording are fixed, memory is addressed as
it was then, and what a recording allocated holds nothing that one may read later: it is poisoned.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
# What asks the device for a number, or brings one from the host: CUDA refuses to record it, or
# would repeat it blindly.
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.lift_fresh,
    aten._unique2,
}


class Recording(TorchDispatchMode):
    """Runs operations, notes them down, and puts back what they wrote: recording runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.steps: list[Step] = []
        # What operations returned, by number, and what of that lies in memory of the recording.
        # Neither holds it: a real pool gives memory back while a step is recorded.
        self.numbers = WeakTensorKeyDictionary()
        self.made = WeakTensorKeyDictionary()
        self.addresses: set[int] = set()
        # Memory that was there before, and what it held, which is no part of the device's.
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITS, f"{func} waits for the device"
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, torch.Tensor)
            ):
                address = value.untyped_storage().data_ptr()
                if address not in self.addresses and address not in self.before:
                    content = whole(value)
                    self.before[address] = (content, content.to("cpu", copy=True))
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        out = func(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))
        used = []
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf in self.numbers:
                used.append((at, self.numbers[leaf]))
                leaves[at] = None
        for tensor in tensors(out):
            address = tensor.untyped_storage().data_ptr()
            if address not in known:
                self.addresses.add(address)
            if address in self.addresses:
                self.made[tensor] = True
            if tensor not in self.numbers:
                self.numbers[tensor] = self.count
                self.count += 1
        names = [self.numbers[tensor] for tensor in tensors(out)]
        self.steps.append(Step(func, leaves, form, used, names))
        return out

    def finish(self) -> None:
        """Put back what was written, poison what is left of what was allocated, and note where
        each result is used last.
        """
        for memory, content in self.before.values():
            memory.copy_(content)
        for tensor in list(self.made):
            poison(tensor)
        last: dict[int, int] = {}  # number of a tensor -> the operation that uses it last
        for place, step in enumerate(self.steps):
            last |= dict.fromkeys([*step.names, *(name for _, name in step.used)], place)
        for name, place in last.items():
            self.steps[place].done.append(name)
        self.before = {}

    def replay(self) -> None:
        """Run the operations again on the memory of then."""
        now: dict[int, torch.Tensor] = {}
        for step in self.steps:
            leaves = step.leaves.copy()
            for at, name in step.used:
                leaves[at] = now[name]
            args, kwargs = tree_unflatten(leaves, step.form)
            again = step.func(*args, **kwargs)
            if step.func.overloadpacket in (aten.empty, aten.empty_like, aten.empty_strided):
                poison(again)
            now.update(zip(step.names, tensors(again), strict=True))
            for name in step.done:
                del now[name]


@dataclass
class Step:
    """One operation of a finished recording. used: where among the leaves of its arguments tensors
    go that the recording made, by number; names: those it makes; done: those it uses last.
    """

    func: Any
    leaves: list[Any]
    form: Any
    used: list[tuple[int, int]]
    names: list[int]
    done: list[int] = field(default_factory=list)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory that the tensor lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def poison(tensor: torch.Tensor) -> None:
    """Fill the memory with what nobody may read: all bits set, which is NaN or -1."""
    whole(tensor).fill_(255)


def tensors(tree: Any) -> list[torch.Tensor]:
    """List the tensors in nested arguments."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    recorded = replayed = 0

    def __init__(self, *_: Any) -> None:
        Graph.recorded += 1
        self.recording = Recording()

    def replay(self) -> None:
        """Run what was recorded."""
        Graph.replayed += 1
        self.recording.replay()


class Capture:
    """In place of torch.cuda.graph."""

    under_way = False

    def __init__(self, graph: Graph, **_: Any) -> None:
        self.recording = graph.recording

    def __enter__(self) -> None:
        Capture.under_way = True
        self.recording.__enter__()

    def __exit__(self, *error: Any) -> None:
        Capture.under_way = False
        self.recording.__exit__(*error)
        self.recording.finish()
