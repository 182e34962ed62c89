"""Keys and values of rows that are sampled in one batch, and the attention that reads them.

All rows write the same column: keys are right-aligned, so that a step's write is one slice and a
new row starts at the current column. Rows that write at their own lengths are in flash.py.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from common.config import ConfigError
from common.model import Kinds, Mask, additive, keeps_states, take_states
from common.sampling.cuda_graphs import CudaGraphs
from common.sampling.prefill import PromptCache
from common.sampling.recurrent_cache import States

ATTENTION = "clutch_slots"
SPAN = (
    64  # a recorded step computes a multiple of this many columns, so that steps share recordings
)

# Model families whose attention computes new keys or values from those that the cache returned.
REPEATING = ("jetmoe", "diffllama")

# One step of all rows: takes additive masks [rows, 1, 1, columns] and positions int64 [rows].
Step = Callable[[Mask, Tensor], None]


def attends_to_cache(config: Any) -> bool:
    """Return whether the attention of each layer gets exactly the keys and values that its cache
    returned, so that it may read them in place.

    Not so for latents (MLA), which are expanded first, for layers that share keys and store none,
    and for recurrent layers, which have a state instead.
    """
    keys = ("kv_lora_rank", "num_kv_shared_layers")
    others = any(getattr(config, key, None) for key in keys) or keeps_states(config)
    return config.model_type not in REPEATING and not others


def check_stored(attended: Sequence[Tensor], returned: Sequence[Tensor]) -> None:
    """Raise ConfigError if attention gets other keys or values than the cache returned: `attend`
    would read the wrong ones.
    """
    pairs = zip(attended, returned, strict=True)
    if not all(a.data_ptr() == r.data_ptr() and a.shape == r.shape for a, r in pairs):
        raise ConfigError(
            "the model's attention changes the keys or values that its cache holds, which these"
            " decode steps read there. Use opt=compile, whose steps take them from the model."
        )


class ColumnCache(States):
    """Keys and values of all slots, [rows, heads, columns, head size] per layer, each row's prompt
    before its own tokens.

    Stands in for a transformers cache: a model's attention calls `update`, then `attend`.
    Args:
        rows: the number of slots.
        columns: the number of columns.
        first: the column of the first new tokens.
        dtype: the dtype of masks.
        kinds: the kinds of the model's layers.
    """

    shares: ClassVar = False
    prefix: "Prefix | None" = None
    # A smaller cache is worth the copy at this share of the slots.
    shrink_share: ClassVar = 3 / 4

    def __init__(
        self,
        rows: int,
        columns: int,
        first: int,
        dtype: torch.dtype,
        device: torch.device,
        kinds: Kinds | None = None,
    ) -> None:
        self.kinds = kinds or Kinds()
        super().__init__(self.kinds.recurrent)
        self.columns, self.dtype = torch.arange(columns, device=device), dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.begin = self.column = first  # the first column of new tokens, the next to be written
        self.first = 0  # columns before this one are valid in no row
        self.masked = True  # False: all rows attend to all columns from `first` on
        self.start = torch.full((rows,), first, device=device)  # the first valid column of each row
        self.used = torch.zeros(rows, dtype=torch.bool, device=device)

    def place(
        self, rows: Tensor, prompt: PromptCache | None, source: Tensor, lengths: Tensor, more: bool
    ) -> None:
        """Copy prefilled prompts into `rows`, so that they end at the current column."""
        assert prompt is not None
        for layer, (keys, values) in enumerate(zip(prompt.keys, prompt.values, strict=True)):
            self.allocate(layer, keys, values)
            columns = slice(self.column - keys.shape[2], self.column)
            self.keys[layer][rows, :, columns] = keys[source]
            self.values[layer][rows, :, columns] = values[source]
        of_rows = {place: state[source] for place, state in prompt.states.items()}
        self.write_states(rows, len(self.start), of_rows)
        self._start(rows, self.column - lengths, used=True)

    def free(self, rows: Tensor) -> None:
        """Mark `rows` as ended: their columns are not read any more."""
        self._start(rows, self.column, used=False)

    def _start(self, rows: Tensor, column: Tensor | int, used: bool) -> None:
        self.used[rows], self.start[rows] = used, column
        self.first = int(self.start.min())

    def advance(self, most: int, step: Step) -> int:
        """Make at most `most` steps. Returns the number of steps made."""
        if self.column == len(self.columns):
            self._shift()
        self.masked = self.kinds.window is not None or bool((self.start != self.first).any())
        mask = additive(self.columns[None, :] >= self.start[:, None], self.dtype)[:, None, None, :]
        steps = min(most, len(self.columns) - self.column)
        for _ in range(steps):
            valid = slice(self.first, self.column + 1)
            of_step = self.kinds.masks(mask[..., valid], self.column, self.columns[valid])
            step(of_step, self.positions(self.column))
            self.column += 1
        return steps

    def positions(self, column: int | Tensor) -> Tensor:
        """Return the position, in its sequence, of each row's token at a column."""
        return column - self.start

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values [rows, heads, 1, size] of one step of `layer`; return all valid
        columns.
        """
        keys = keys.to(values.dtype)  # a rotation with float32 angles has widened them
        layer = self.number(layer)
        self.allocate(layer, keys, values)
        stop = self.column + 1
        self.keys[layer][:, :, self.column : stop] = keys
        self.values[layer][:, :, self.column : stop] = values
        valid = slice(self.first, stop)
        self.returned = self.keys[layer][:, :, valid], self.values[layer][:, :, valid]
        return self.returned

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Allocate the slots of `layer`, with the shapes of these keys and values, on the first
        call.
        """
        if layer == len(self.keys):
            for stored, new in ((self.keys, keys), (self.values, values)):
                shape = (len(self.start), new.shape[1], len(self.columns), new.shape[3])
                stored.append(new.new_zeros(shape))

    def read(self, rows: Tensor, token: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield per layer the keys and values, [n, m, heads, size], of tokens [n, m] of `rows` [n,
        1]. For a token that a row does not have they are arbitrary.
        """
        column = (self.start[rows] + token).clamp(max=len(self.columns) - 1)
        for keys, values in zip(self.keys, self.values, strict=True):
            yield keys[rows, :, column], values[rows, :, column]

    def worth_keeping(self, slots: int, used: int) -> int:
        """Return the number of `slots` to keep: `used`, or all if too few would be dropped to be
        worth the copy.
        """
        return used if used <= slots * self.shrink_share else slots

    def keep(self, rows: Tensor) -> None:
        """Drop all slots except `rows`."""
        for stored in (self.keys, self.values):
            for layer, tensor in enumerate(stored):  # not all at once: each frees the old one
                stored[layer] = tensor[rows]
        take_states(self, rows)
        self.start, self.used = self.start[rows], self.used[rows]
        self.first = int(self.start.min())

    def _shift(self) -> None:
        """Make room at the right end: move all columns to the left."""
        # The columns of ended rows are not needed.
        self.start.masked_fill_(~self.used, self.column)
        by = min(int(self.start.min()), self.column - self.begin)
        assert by > 0, "the cache is as long as the longest row"
        for stored in (*self.keys, *self.values):
            stored[:, :, : self.column - by] = stored[:, :, by : self.column].clone()
        self.column -= by
        self.start -= by
        self.first = int(self.start.min())

    def attend(self, layer: int, query: Tensor, scaling: float | None, *suffix: Any) -> Tensor:
        """Return the attention of one new token per row, [rows, 1, heads, size]. Query heads that
        share a key head are rows of one product, so that keys are not repeated for them.

        Args:
            query: [rows, heads, 1, size].
            suffix: keys and values as `update` returned them, and a mask.
        """
        key, value, mask = suffix
        if self.prefix is not None:
            check_stored((key, value), self.returned)
        query = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        scale = scaling if scaling is not None else query.shape[3] ** -0.5
        alike = key.shape[3] == value.shape[3]  # the fused kernel requires equal sizes
        fused = value.device.type == "cpu" and value.dtype != torch.float32 and alike
        attend = _attend_fused if fused else _attend
        suffix = (key, value, mask if self.masked else None)
        return attend(query, suffix, self.prefix, layer, scale).flatten(1, 2)[:, None]


class SharedPromptCache(ColumnCache):
    """Keys and values of generated tokens; prompts are stored once, in `prefix`."""

    shares: ClassVar = True

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, columns, 0, dtype, device)
        self.prefix: Prefix = Prefix()
        # The length of each row's prompt, and its place in the prefix.
        self.offset, self.prompts = torch.zeros(2, rows, dtype=torch.long, device=device)
        self.unfinished: int | None = None  # the place of a prompt whose samples are not all placed

    def place(
        self, rows: Tensor, prompt: PromptCache | None, source: Tensor, lengths: Tensor, more: bool
    ) -> None:
        """Assign prompts, which rows share, to `rows`, which begin at the current column."""
        places = [self.unfinished] if prompt is None else self._settle(prompt)
        self.unfinished = places[-1] if more else None
        self.prompts[rows] = torch.tensor(places, device=rows.device)[source]
        self.offset[rows] = lengths
        self.prefix.arrange(self.prompts)
        self._start(rows, self.column, used=True)

    def positions(self, column: int | Tensor) -> Tensor:
        """Return the position, in its sequence, of each row's token at a column."""
        return column - self.start + self.offset

    def read(self, rows: Tensor, token: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values in the same format as a cache without shared prompts."""
        prefix, offset, place = self.prefix, self.offset[rows], self.prompts[rows]
        width = prefix.keys[0].shape[2]
        of_prompt, own = token < offset, (token - offset + self.start[rows]).clamp(min=0)
        column = (width - offset + token).clamp(max=width - 1)
        own = own.clamp(max=len(self.columns) - 1)
        for layer, shared in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            both = [part[place, :, column] for part in shared]
            if self.keys:  # empty if every row has ended with its first token
                suffix = (stored[layer][rows, :, own] for stored in (self.keys, self.values))
                pairs = zip(both, suffix, strict=True)
                both = [torch.where(of_prompt[:, :, None, None], *pair) for pair in pairs]
            yield both[0], both[1]

    def keep(self, rows: Tensor) -> None:
        """Drop all slots except `rows`, and the prompts that no remaining row uses."""
        super().keep(rows)
        self.offset, self.prompts = self.offset[rows], self.prompts[rows]
        self._settle(PromptCache())
        self.prefix.arrange(self.prompts)

    def _settle(self, prompt: PromptCache) -> list[int]:
        """Store prompts in the prefix, in the place of those that no row uses any more. Returns
        their places.
        """
        needed = set(self.prompts[self.used].tolist())
        if self.unfinished is not None:
            needed.add(self.unfinished)
        stored, new = self.prefix.lengths, prompt.lengths
        free = [place for place in range(len(stored)) if place not in needed]
        if new and len(free) >= len(new) and max(new) <= max(stored):
            self.prefix.overwrite(free[: len(new)], prompt)
            return free[: len(new)]
        keep = sorted(needed)
        moved = torch.zeros(len(stored) or 1, dtype=torch.long)
        moved[keep] = torch.arange(len(keep))
        self.prompts = moved.to(self.prompts.device)[self.prompts]
        if self.unfinished is not None:
            self.unfinished = int(moved[self.unfinished])
        self.prefix.replace(keep, prompt)
        return list(range(len(keep), len(keep) + len(new)))


class RecordedCache(ColumnCache):
    """A cache whose steps are recorded as CUDA graphs, one per span of columns."""

    shrink_share: ClassVar = 1 / 2  # lower, since steps must be recorded again

    def __init__(self, recorder: Callable[[torch.device], CudaGraphs], *sizes: Any) -> None:
        super().__init__(*sizes)
        self.recorder, self.graphs = recorder, recorder(self.start.device)
        self.at = torch.zeros_like(self.start[:1])  # the column to be written, on the device
        self.span = slice(0, 0)  # the columns that a step computes with

    def advance(self, most: int, step: Step) -> int:
        """Make at most `most` steps, each by replaying the graph of the span that it needs, which
        is recorded after the first step in that span. Returns the number of steps made.
        """
        end = len(self.columns)
        if self.column == end:
            self._shift()
        self.at.fill_(self.column)
        replays, steps = self.graphs.replays, min(most, end - self.column)
        for _ in range(steps):
            # All valid columns and the next one, in whole multiples of `SPAN`.
            opens = self.first // SPAN * SPAN
            closes = min(-(-(self.column + 1) // SPAN) * SPAN, end)
            if (opens, closes) in replays:
                replays[opens, closes]()
            else:
                self.span = slice(opens, closes)
                self._step(step)  # loads and compiles kernels, which a recording may not do
                if self.column + 1 < closes:  # the span has further steps
                    replays[opens, closes] = self.graphs.record(partial(self._step, step))
            self.column += 1
        return steps

    def _step(self, step: Step) -> None:
        """Launch a step, with the same kernels on the same memory whichever column of the span is
        next.
        """
        columns = self.columns[self.span]
        visible = (columns >= self.start[:, None]) & (columns <= self.at)
        mask = additive(visible, self.dtype)[:, None, None, :]
        step(self.kinds.masks(mask, self.at, columns), self.positions(self.at))
        self.at += 1

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values [rows, heads, 1, size] of one step of `layer`; return the
        columns of the span.
        """
        keys = keys.to(values.dtype)  # a rotation with float32 angles has widened them
        layer = self.number(layer)
        self.allocate(layer, keys, values)
        self.keys[layer].index_copy_(2, self.at, keys)
        self.values[layer].index_copy_(2, self.at, values)
        return self.keys[layer][:, :, self.span], self.values[layer][:, :, self.span]

    def keep(self, rows: Tensor) -> None:
        """Drop all slots except `rows`, and the recordings, whose buffers are freed."""
        super().keep(rows)
        self.graphs = self.recorder(rows.device)


class Prefix:
    """Keys and values of prompts that rows share, [P, heads, T, size] per layer, padded on the
    left.

    Rows are grouped by prompt: [P, G], with G the most rows of one prompt.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths: list[int] = []  # tokens of each prompt
        # Additive [P, 1, 1, T]; None if all prompts are equally long.
        self.mask: Tensor | None = None
        self.shape = (0, 0)  # P, G
        # The row at each place [P * G], and the place of each row; None if they are in order.
        self.rows: Tensor | None = None
        self.places: Tensor | None = None

    def replace(self, keep: list[int], prompt: PromptCache) -> None:
        """Keep the prompts at places `keep`, in this order, and append those of `prompt`."""
        self.lengths = [self.lengths[place] for place in keep] + prompt.lengths
        width = max(self.lengths)

        def join(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
            if not new:
                return [tensor[keep, :, tensor.shape[2] - width :] for tensor in old]
            layers = []
            for layer, tensor in enumerate(new):
                shape = (len(self.lengths), tensor.shape[1], width, tensor.shape[3])
                stored = tensor.new_zeros(shape)
                if keep:
                    columns = min(width, old[layer].shape[2])
                    stored[: len(keep), :, width - columns :] = old[layer][keep, :, -columns:]
                stored[len(keep) :, :, width - tensor.shape[2] :] = tensor
                layers.append(stored)
            return layers

        self.keys, self.values = join(self.keys, prompt.keys), join(self.values, prompt.values)
        self.remask(width)

    def overwrite(self, places: list[int], prompt: PromptCache) -> None:
        """Replace the prompts at `places` by those of `prompt`, which are no longer than the
        longest one here.
        """
        for place, length in zip(places, prompt.lengths, strict=True):
            self.lengths[place] = length
        layers = zip((*self.keys, *self.values), (*prompt.keys, *prompt.values), strict=True)
        for stored, new in layers:
            stored[places, :, stored.shape[2] - new.shape[2] :] = new
        self.remask(self.keys[0].shape[2])

    def remask(self, width: int) -> None:
        """Mask the padding, and the columns that earlier prompts have left there."""
        self.mask = None
        if min(self.lengths) < width:
            device = self.keys[0].device
            first = torch.tensor([width - length for length in self.lengths], device=device)
            real = torch.arange(width, device=device)[None, :] >= first[:, None]
            self.mask = additive(real, torch.float32)[:, None, None, :]

    def arrange(self, prompts: Tensor) -> None:
        """Group rows by prompt.

        Args: prompts: the prompt of each row, int64 [rows]; arbitrary for rows that have ended.
        """
        ordered, rows = prompts.sort(stable=True)
        counts = ordered.bincount(minlength=len(self.lengths))
        most, before = int(counts.max()), counts.cumsum(0) - counts
        among = torch.arange(len(ordered), device=prompts.device) - before[ordered]
        places = ordered * most + among
        self.shape = (len(self.lengths), most)
        self.rows = self.places = None
        size = len(self.lengths) * most
        if len(rows) != size or not torch.equal(rows, places):
            self.rows = torch.zeros(size, dtype=torch.long, device=prompts.device)
            self.rows[places] = rows
            self.places = torch.empty_like(prompts)
            self.places[rows] = places

    def gather(self, x: Tensor) -> Tensor:
        """Group by prompt: [rows, heads, each, n] -> [P, heads, G * each, n]."""
        x = x if self.rows is None else x[self.rows]
        return x.unflatten(0, self.shape).transpose(1, 2).flatten(2, 3)

    def scatter(self, x: Tensor, each: int) -> Tensor:
        """Undo `gather`: [P, heads, G * each, n] -> [rows, heads, each, n]."""
        x = x.unflatten(2, (self.shape[1], each)).transpose(1, 2).flatten(0, 1)
        return x if self.places is None else x[self.places]


def _multiply(query: Tensor, key: Tensor) -> Tensor:
    """Return query @ key^T, [n, heads, each, T]. On CUDA the product is float32: a score of 64
    rounded to bfloat16 may be off by 0.25, and training does not round it.
    """
    if key.dtype == torch.float32 or not key.is_cuda:
        return query @ key.transpose(2, 3)
    rows, columns = query.to(key.dtype).flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    return torch.bmm(rows, columns, out_dtype=torch.float32).unflatten(0, key.shape[:2])


Suffix = tuple[Tensor, Tensor, Tensor | None]  # keys, values and mask of the rows' own columns


def _attend(
    query: Tensor, suffix: Suffix, prefix: Prefix | None, layer: int, scale: float
) -> Tensor:
    """Attend by matrix products: [rows, h, each, size] -> [rows, h, each, size]."""
    key, value, mask = suffix
    query = query * scale
    scores = _multiply(query, key)  # [rows, h, each, T]
    if mask is not None:
        scores = scores + mask
    if prefix is None:
        return torch.softmax(scores, dim=3, dtype=torch.float32).to(value.dtype) @ value
    # [P, h, G * each, prompt]
    to_prompt = _multiply(prefix.gather(query), prefix.keys[layer])
    if prefix.mask is not None:
        to_prompt = to_prompt + prefix.mask
    width, each = to_prompt.shape[3], query.shape[2]
    scores = torch.cat((prefix.scatter(to_prompt, each), scores), dim=3)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32).to(value.dtype)
    from_prompt = prefix.gather(weights[..., :width]) @ prefix.values[layer]
    return prefix.scatter(from_prompt, each) + weights[..., width:] @ value


def _attend_fused(
    query: Tensor, suffix: Suffix, prefix: Prefix | None, layer: int, scale: float
) -> Tensor:
    """Attend on a CPU in 16 bits with PyTorch's fused kernel, which reads keys in place; a matrix
    product would copy them for every token. The attention to the prompt and to a row's own tokens
    are combined by the sums of their softmax.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    key, value, mask = suffix
    query = query.to(value.dtype)  # a rotary embedding in float32 has widened it
    out, total = fused(query, key, value, attn_mask=mask, scale=scale)
    if prefix is None:
        return out
    keys, values, each = prefix.keys[layer], prefix.values[layer], query.shape[2]
    mask = None if prefix.mask is None else prefix.mask.to(query.dtype)
    of_prompt, prompt_total = fused(prefix.gather(query), keys, values, attn_mask=mask, scale=scale)
    share = prefix.scatter(prompt_total[..., None], each) - total[..., None]
    return torch.lerp(out, prefix.scatter(of_prompt, each), torch.sigmoid(share).to(out.dtype))


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer of the model: with `slots` in a decode step, else (prefill) as
    transformers does.
    """
    if slots is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return slots.attend(layer, query, scaling, key, value, attention_mask), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
