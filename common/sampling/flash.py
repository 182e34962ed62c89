"""Decode steps on flash attention: every row has its own length, and one recording serves a number
of rows, whatever they hold.

Where it is used: steps are recorded, not compiled, the attention is one that the sampler stands in
for, and PyTorch has flash attention for the model's heads (`Sampler.flash`); elsewhere rows share a
column (kv_cache.py). A row's keys lie on the left of its slot, its prompt's first, and it writes
where it ends; the kernel reads the keys that count and no other. All that a step reads and writes
belongs to a row and lies on a `Board`, which fewer rows use the beginning of. So a board and its
recordings serve one call of `generate` after the other.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from common.model.varlen import Sequences, attend
from common.sampling.cuda_graphs import CudaGraphs


class RowCache:
    """Keys and values of rows, [rows, columns, key heads, size] a layer, each from column 0 on.

    Stands in for a transformers cache: a model's attention calls `update`, then `attend`.
    lengths: int32 [rows], tokens of each row so far.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns = rows, columns
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.starts = self.queries * columns
        # Of a step: where its keys go, int64 [rows], and how many keys count with them.
        self.places = self.used = self.lengths

    def begin(self) -> Tensor:
        """Begin a step. Returns the positions of its tokens, int64 [rows]."""
        length = self.lengths[: self.rows].clamp(max=self.columns - 1)
        self.places = (self.starts[: self.rows] + length).long()
        self.used = length + 1
        self.lengths[: self.rows] += 1
        return length.long()

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one step of `layer`, [rows, key heads, 1, size]."""
        keys = keys.to(values.dtype)  # a rotation with float32 angles has widened them
        for stored, new in ((self.keys, keys), (self.values, values)):
            stored[layer].flatten(0, 1).index_copy_(0, self.places, new[:, :, 0])
        return keys, values

    def attend(self, layer: int, query: Tensor, scale: float | None) -> Tensor:
        """Return the attention of one new token a row, [rows, 1, heads, size]. query [rows, heads,
        1, size].
        """
        end = self.rows + 1
        each = (1, self.columns)
        sequences = Sequences(self.queries[:end], self.starts[:end], each, causal=False)
        keys, values = (x[layer][: self.rows].flatten(0, 1) for x in (self.keys, self.values))
        query = query[:, :, 0].to(values.dtype)
        return attend(query, keys, values, sequences, scale, self.used)[0][:, None]

    def place(self, rows: Tensor, prompt: Any, source: Tensor, lengths: Tensor) -> None:
        """Copy prefilled prompts of `lengths` tokens into `rows`: rows `source` of a `PromptCache`,
        where they are padded on the left.
        """
        slots = len(self.queries) - 1
        for layer, both in enumerate(zip(prompt.keys, prompt.values, strict=True)):
            if layer == len(self.keys):
                for new, stored in zip(both, (self.keys, self.values), strict=True):
                    shape = (slots, self.columns, new.shape[1], new.shape[3])
                    stored.append(new.new_zeros(shape))
            width = both[0].shape[2]
            column = torch.arange(width, device=rows.device) + (width - lengths)[:, None]
            column = column.clamp(max=width - 1)  # behind the prompt, where nothing counts
            for new, stored in zip(both, (self.keys, self.values), strict=True):
                stored[layer][rows, :width] = new[source[:, None], :, column]
        self.lengths[rows] = lengths.int()

    def keep(self, rows: Tensor) -> None:
        """Move `rows` to the beginning, in their order, and compute with these alone."""
        for stored in (*self.keys, *self.values, self.lengths):
            stored[: len(rows)] = stored[rows]
        self.rows = len(rows)


# What a step reads and writes of each row, besides its keys.
ROW = ("request", "place", "start", "offset", "count", "last", "witness", "lengths", "finished")
TOKEN = ("tokens", "logprobs", "uniforms")


class Board:
    """The buffers of up to `slots` rows of `columns` tokens, `length` of them new, and what was
    recorded over them.

    The names are those of `native._Grid`, which takes views of them for the rows that it has. A
    row's `place` is the row itself, and so is the `request` of a row that has one; it starts at
    column 0.
    """

    def __init__(self, slots: int, columns: int, length: int, graphs: CudaGraphs) -> None:
        device = graphs.device
        self.slots, self.columns, self.length, self.graphs = slots, columns, length, graphs
        self.cache = RowCache(slots, columns, device)
        whole = {"dtype": torch.long, "device": device}
        self.request = torch.full((slots,), -1, **whole)
        self.place = torch.arange(slots, device=device)
        self.start, self.offset = torch.zeros(2, slots, **whole)
        self.count, self.last = torch.zeros(slots, **whole), torch.zeros(slots, **whole)
        self.lengths = torch.zeros(slots, **whole)
        self.finished = torch.zeros(slots, dtype=torch.bool, device=device)
        self.witness = torch.zeros(slots, device=device)
        self.tokens = torch.zeros(slots, length, **whole)
        self.logprobs, self.uniforms = torch.zeros(2, slots, length, device=device)

    def fits(self, rows: int, columns: int, length: int) -> bool:
        """Return whether so many rows of so many tokens, `length` of them new, have room."""
        return rows <= self.slots and columns <= self.columns and length <= self.length

    def views(self, rows: int, length: int) -> dict[str, Tensor]:
        """Return the buffers of the first rows, by name."""
        found = {name: getattr(self, name)[:rows] for name in ROW}
        return found | {name: getattr(self, name)[:rows, :length] for name in TOKEN}

    def begin(self, rows: int) -> None:
        """Forget what the last call left, and compute with so many rows."""
        self.cache.rows = rows
        self.request.fill_(-1)
        self.cache.lengths.zero_()

    def keep(self, rows: Tensor) -> None:
        """Move `rows` to the beginning, in their order, and compute with these alone."""
        for name in (*ROW, *TOKEN):
            if name != "place":
                buffer = getattr(self, name)
                buffer[: len(rows)] = buffer[rows]
        self.request[len(rows) :] = -1
        torch.where(self.request < 0, self.request, self.place, out=self.request)
        self.cache.keep(rows)


def recorded_over(model: torch.nn.Module) -> Hashable:
    """Return what a recording of the model's forward is bound to beside a board: where its weights
    lie, and the forwards that a population has put in the place of the modules' own, which have
    buffers of their own.
    """
    tensors = (*model.parameters(), *model.buffers())
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return tuple(tensor.data_ptr() for tensor in tensors), tuple(forwards)


def halve(slots: int, used: int) -> int:
    """Return the slots that are left when `used` are: halved as often as it goes, so that calls
    come upon the same numbers of rows.
    """
    while used <= (half := -(-slots // 2)) < slots:
        slots = half
    return slots
