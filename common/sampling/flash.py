"""Decode steps with flash attention: every row has its own length, and one recording serves a
number of rows, whatever their content.

It is used if steps are recorded and PyTorch has a kernel for the model's heads (`Sampler.flash`). A
row's keys are left-aligned in its slot, the prompt's first, and each step writes at the row's end;
the kernel reads only valid keys. All buffers that a step reads and writes are on a `Board`. A call
with fewer rows uses the beginning of the board, so that recordings serve later calls of `generate`.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from common.config import SamplingConfig
from common.model import Sequences, attend
from common.sampling.cuda_graphs import CudaGraphs
from common.sampling.kv_cache import Step, check_stored
from common.sampling.prefill import PromptCache
from common.sampling.recurrent_cache import States
from common.sampling.slots import Rows


class FlashCache(States):
    """Keys and values of up to `slots` rows, [slots, columns, key heads, size] per layer,
    left-aligned. Its methods are those of `kv_cache.ColumnCache`.
    """

    shares: ClassVar = False

    def __init__(self, slots: int, columns: int, graphs: CudaGraphs) -> None:
        super().__init__()
        self.slots, self.columns, self.graphs = slots, columns, graphs
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.queries = torch.arange(slots + 1, dtype=torch.int32, device=graphs.device)
        self.starts = self.queries * columns
        self.lengths = torch.zeros_like(self.starts[1:])  # tokens of each row so far
        # In a step: the place of its keys, int64 [rows], and the number of valid keys then.
        self.places = self.counted = self.lengths
        self.begin(slots, None)

    def begin(self, rows: int, bound: Hashable) -> None:
        """Begin a call with `rows` rows.

        Args: bound: the further conditions under which a recording is valid.
        """
        self.rows, self.bound = rows, bound
        self.used = torch.zeros(rows, dtype=torch.bool, device=self.starts.device)

    def place(
        self, rows: Tensor, prompt: PromptCache | None, source: Tensor, lengths: Tensor, more: bool
    ) -> None:
        """Copy prefilled prompts, which are padded on the left, into `rows`."""
        assert prompt is not None
        width = prompt.keys[0].shape[2]
        column = torch.arange(width, device=rows.device) + (width - lengths)[:, None]
        column = column.clamp(max=width - 1)  # columns after the prompt are never read
        for stored, layers in ((self.keys, prompt.keys), (self.values, prompt.values)):
            for layer, new in enumerate(layers):
                if layer == len(stored):
                    shape = (self.slots, self.columns, new.shape[1], new.shape[3])
                    stored.append(new.new_zeros(shape))
                stored[layer][rows, :width] = new[source[:, None], :, column]
        self.lengths[rows], self.used[rows] = lengths.int(), True

    def read(self, rows: Tensor, token: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield per layer the keys and values, [n, m, heads, size], of tokens [n, m] of `rows` [n,
        1].
        """
        column = token.clamp(max=self.columns - 1)
        for keys, values in zip(self.keys, self.values, strict=True):
            yield keys[rows, column], values[rows, column]

    def free(self, rows: Tensor) -> None:
        """Mark `rows` as ended."""
        self.used[rows] = False

    def advance(self, most: int, step: Step) -> int:
        """Make `most` steps, each by replaying the graph for the number of rows, which is recorded
        after its first step. Returns the number of steps.
        """
        self.lengths[: self.rows].masked_fill_(~self.used, 0)
        key = (self.bound, self.rows)
        replay = self.graphs.replays.get(key)
        for _ in range(most):
            if replay is not None:
                replay()
            else:
                self._step(step)
                replay = self.graphs.replays[key] = self.graphs.record(partial(self._step, step))
        return most

    def _step(self, step: Step) -> None:
        """Launch a step, with the same kernels on the same memory whatever the lengths of
        the rows.
        """
        length = self.lengths[: self.rows].clamp(max=self.columns - 1)
        self.places = (self.starts[: self.rows] + length).long()
        self.counted = length + 1
        self.lengths[: self.rows] += 1
        positions = length.long()
        step(positions[None, None, None], positions)  # the mask is never read

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values [rows, key heads, 1, size] of one step of `layer`."""
        keys = keys.to(values.dtype)  # a rotary embedding in float32 has widened them
        for stored, new in ((self.keys, keys), (self.values, values)):
            stored[layer].flatten(0, 1).index_copy_(0, self.places, new[:, :, 0])
        self.returned = keys, values
        return self.returned

    def attend(
        self, layer: int, query: Tensor, scaling: float | None, key: Tensor, value: Tensor, *_: Any
    ) -> Tensor:
        """Return the attention of one new token per row, [rows, 1, heads, size]."""
        check_stored((key, value), self.returned)
        end = self.rows + 1
        longest = (1, self.columns)
        sequences = Sequences(self.queries[:end], self.starts[:end], longest, causal=False)
        keys, values = (x[layer][: self.rows].flatten(0, 1) for x in (self.keys, self.values))
        query = query[:, :, 0].to(values.dtype)
        return attend(query, keys, values, sequences, scaling, self.counted)[0][:, None]

    @staticmethod
    def worth_keeping(slots: int, used: int) -> int:
        """Return the number of `slots` to keep: `slots` halved as often as `used` rows allow, so
        that calls use the same few numbers of rows.
        """
        while used <= (half := -(-slots // 2)) < slots:
            slots = half
        return slots

    def keep(self, rows: Tensor) -> None:
        """Move `rows` to the beginning, in their order, and drop all other rows."""
        for stored in (*self.keys, *self.values, self.lengths):
            stored[: len(rows)] = stored[rows]
        self.rows, self.used = len(rows), self.used[rows]


@dataclass
class Board:
    """Buffers of rows that outlive a call, with the steps recorded over them."""

    rows: Rows
    cache: FlashCache

    def fits(self, rows: int, columns: int, length: int) -> bool:
        """Return whether `rows` rows of `columns` tokens, `length` of them new, fit."""
        new = self.rows.sampling.max_new_tokens
        return rows <= self.cache.slots and columns <= self.cache.columns and length <= new

    def begin(
        self, model: torch.nn.Module, rows: int, sampling: SamplingConfig, logprobs: bool
    ) -> Rows:
        """Begin another call with `rows` rows, and return these.

        Recordings are valid for one set of sampling settings, addresses of the weights, and
        replaced forwards of modules: a population replaces them, with buffers of its own.
        """
        tensors = (*model.parameters(), *model.buffers())
        weights = tuple(tensor.data_ptr() for tensor in tensors)
        forwards = tuple(module.__dict__.get("forward") for module in model.modules())
        drawing = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        self.cache.begin(rows, (drawing, logprobs, weights, forwards))
        return self.rows.view(rows, sampling, logprobs)
