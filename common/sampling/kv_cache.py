"""Keys and values of rows that are sampled side by side, and the attention that reads them.

Rows have slots in a cache that is allocated once; those of one prompt can share its keys and
values. See common/sampling/native.py.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from common.model.masks import additive
from common.sampling.flash import RowCache

ATTENTION = "clutch_slots"
# A step that is recorded computes with whole multiples of so many columns, so that one recording
# serves many steps.
WINDOW = 64


class SlotCache:
    """Keys and values of all slots, [rows, heads, columns, head size] a layer, written at one
    common column.

    Stands in for a transformers cache: a model's attention calls `update` and attends to what comes
    back, and to `prefix` where there is one.
    """

    def __init__(self, columns: int, slots: int, prefix: "Prefix | None") -> None:
        self.columns = columns
        self.slots = slots
        self.prefix = prefix
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.first = 0  # columns before this one are valid in no row
        self.column = 0  # the next to be written
        self.masked = True  # False: all rows attend to all columns from `first` on
        # Of a step that is recorded: the column to be written, [1], and the first column and the
        # end of those that it computes with.
        self.at: Tensor | None = None
        self.opens = self.closes = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one step of `layer`, [rows, heads, 1, size]; return all valid columns, or the
        window.
        """
        keys = keys.to(values.dtype)  # a rotation with float32 angles has widened them
        self.allocate(layer, keys, values)
        if self.at is not None:
            self.keys[layer].index_copy_(2, self.at, keys)
            self.values[layer].index_copy_(2, self.at, values)
            return (
                self.keys[layer][:, :, self.opens : self.closes],
                self.values[layer][:, :, self.opens : self.closes],
            )
        stop = self.column + 1
        self.keys[layer][:, :, self.column : stop] = keys
        self.values[layer][:, :, self.column : stop] = values
        return (
            self.keys[layer][:, :, self.first : stop],
            self.values[layer][:, :, self.first : stop],
        )

    def open(self) -> tuple[int, int]:
        """Compute with all valid columns and the next one, in whole multiples of `WINDOW`. Returns
        from where to where.
        """
        self.opens = self.first // WINDOW * WINDOW
        self.closes = min(-(-(self.column + 1) // WINDOW) * WINDOW, self.columns)
        return self.opens, self.closes

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Make the slots of `layer`, of the shape and dtype of `keys` and `values`, unless they are
        there.
        """
        if layer == len(self.keys):
            self.keys.append(keys.new_zeros(self.slots, keys.shape[1], self.columns, keys.shape[3]))
            self.values.append(
                values.new_zeros(self.slots, values.shape[1], self.columns, values.shape[3])
            )

    def place(self, rows: Tensor, prompt: "PromptCache", source: Tensor) -> None:
        """Copy prefilled prompts (rows `source` of `prompt`) into `rows`, to end at the current
        column.
        """
        for layer, (keys, values) in enumerate(zip(prompt.keys, prompt.values, strict=True)):
            self.allocate(layer, keys, values)
            where = slice(self.column - keys.shape[2], self.column)
            self.keys[layer][rows, :, where] = keys[source]
            self.values[layer][rows, :, where] = values[source]

    def keep(self, rows: Tensor) -> None:
        """Drop all slots but `rows`."""
        for stored in (self.keys, self.values):
            for layer, tensor in enumerate(stored):  # not all at once: each frees the old one
                stored[layer] = tensor[rows]
        self.slots = len(rows)

    def shift(self, by: int) -> None:
        """Move everything `by` columns to the left."""
        for stored in (*self.keys, *self.values):
            stored[:, :, : self.column - by] = stored[:, :, by : self.column].clone()
        self.column -= by


class PromptCache:
    """Collects the keys and values of `count` prompts, [count, heads, T, size] a layer, of which
    each forward makes those of `rows`.

    Prompts that begin alike go on from an `opening`, at row `origin` [count] of it: a forward makes
    what comes after it and attends to both. `source`: where padding stands between the two, the
    columns [rows, T] in an order with all of it on the left; else None.
    """

    def __init__(
        self, count: int = 0, opening: "PromptCache | None" = None, origin: Tensor | None = None
    ) -> None:
        self.count, self.opening, self.origin = count, opening, origin
        self.rows = torch.arange(count)
        self.source: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store whole prompts of `layer`, or the rest of them, [rows, heads, T, size]. Returns what
        they attend to.
        """
        keys = keys.to(values.dtype)
        if self.opening is not None:
            keys = self.continued(self.opening.keys[layer], keys)
            values = self.continued(self.opening.values[layer], values)
        if layer == len(self.keys):
            self.keys.append(keys.new_empty(self.count, *keys.shape[1:]))
            self.values.append(values.new_empty(self.count, *values.shape[1:]))
        self.keys[layer].index_copy_(0, self.rows, keys)
        self.values[layer].index_copy_(0, self.rows, values)
        return keys, values

    def continued(self, opening: Tensor, own: Tensor) -> Tensor:
        """Return what the rows of a forward have of an opening [n, heads, T, size], and their own
        [rows, heads, T, size] behind it.
        """
        assert self.origin is not None
        whole = torch.cat((opening[self.origin[self.rows]], own), dim=2)
        if self.source is None:
            return whole
        row = torch.arange(len(whole), device=whole.device)[:, None]
        return whole[row, :, self.source].transpose(1, 2)


class Prefix:
    """Keys and values of the prompts in flight, [P, heads, T, size] a layer, padded on the left;
    and which rows share them.

    Rows are looked at by prompt: [P, G], where G is the most rows that one prompt has.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths: list[int] = []  # tokens of each prompt
        self.mask: Tensor | None = (
            None  # additive [P, 1, 1, T]; None where all prompts are equally long
        )
        self.shape = (0, 0)  # P, G
        self.rows: Tensor | None = (
            None  # [P * G], the row at each place; None where rows lie in order already
        )
        self.places: Tensor | None = None  # [rows], the place of each row

    def replace(self, keep: list[int], prompt: PromptCache, lengths: list[int]) -> None:
        """Keep the prompts `keep`, in this order, and put those of `prompt` behind them."""
        self.lengths = [self.lengths[index] for index in keep] + lengths
        width = max(self.lengths)

        def joined(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
            if not new:
                return [kept[keep, :, kept.shape[2] - width :] for kept in old]
            out = []
            for layer, tensor in enumerate(new):
                stored = tensor.new_zeros(
                    len(self.lengths), tensor.shape[1], width, tensor.shape[3]
                )
                if keep:
                    columns = min(width, old[layer].shape[2])
                    stored[: len(keep), :, width - columns :] = old[layer][keep, :, -columns:]
                stored[len(keep) :, :, width - tensor.shape[2] :] = tensor
                out.append(stored)
            return out

        self.keys, self.values = joined(self.keys, prompt.keys), joined(self.values, prompt.values)
        self.remask(width)

    def overwrite(self, places: list[int], prompt: PromptCache, lengths: list[int]) -> None:
        """Put prompts no longer than the longest here in the place of others."""
        for place, length in zip(places, lengths, strict=True):
            self.lengths[place] = length
        for stored, new in zip(
            (*self.keys, *self.values), (*prompt.keys, *prompt.values), strict=True
        ):
            stored[places, :, stored.shape[2] - new.shape[2] :] = new
        self.remask(self.keys[0].shape[2])

    def remask(self, width: int) -> None:
        """Hide the padding, and what lay there before."""
        self.mask = None
        if min(self.lengths) < width:
            device = self.keys[0].device
            first = torch.tensor([width - length for length in self.lengths], device=device)
            real = torch.arange(width, device=device)[None, :] >= first[:, None]
            self.mask = additive(real, torch.float32)[:, None, None, :]

    def arrange(self, prompts: Tensor) -> None:
        """Take note of the prompt of each row, int64 [rows]. That of a row that has ended may be
        any.
        """
        ordered, rows = prompts.sort(stable=True)
        counts = ordered.bincount(minlength=len(self.lengths))
        group = int(counts.max())
        among = (
            torch.arange(len(ordered), device=prompts.device) - (counts.cumsum(0) - counts)[ordered]
        )
        places = ordered * group + among
        self.shape = (len(self.lengths), group)
        self.rows = self.places = None
        if len(rows) != len(self.lengths) * group or not torch.equal(rows, places):
            self.rows = torch.zeros(
                len(self.lengths) * group, dtype=torch.long, device=prompts.device
            )
            self.rows[places] = rows
            self.places = torch.empty_like(prompts)
            self.places[rows] = places

    def gather(self, x: Tensor) -> Tensor:
        """[rows, heads, each, n] -> by prompt [P, heads, G * each, n]."""
        x = x if self.rows is None else x[self.rows]
        return x.unflatten(0, self.shape).transpose(1, 2).flatten(2, 3)

    def scatter(self, x: Tensor, each: int) -> Tensor:
        """The way back: [P, heads, G * each, n] -> [rows, heads, each, n]."""
        x = x.unflatten(2, (self.shape[1], each)).transpose(1, 2).flatten(0, 1)
        return x if self.places is None else x[self.places]


def _multiply(query: Tensor, key: Tensor) -> Tensor:
    """Return query @ key^T, [n, heads, each, T]; on CUDA in float32, as a score of 64 in bfloat16
    may be off by 0.25, and in training it is not rounded.
    """
    if key.dtype == torch.float32 or not key.is_cuda:
        return query @ key.transpose(2, 3)
    rows, columns = query.to(key.dtype).flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    return torch.bmm(rows, columns, out_dtype=torch.float32).unflatten(0, key.shape[:2])


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: SlotCache | RowCache | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token a row to its prompt and to its own tokens; called by the model's
    layers.

    query: [rows, heads, 1, size]; key, value: [rows, key heads, T, size]. Elsewhere (prefill) it is
    transformers' own. Query heads that share a key head are rows of one product: nothing is
    repeated for them.
    """
    if slots is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    if isinstance(slots, RowCache):
        return slots.attend(int(module.layer_idx), query, scaling), None  # type: ignore[arg-type]
    prefix = slots.prefix
    each = query.shape[1] // key.shape[1]  # query heads that share a key head
    query = query.reshape(query.shape[0], key.shape[1], each, query.shape[3])
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    alike = key.shape[3] == value.shape[3]  # else the kernel takes none of it
    if value.device.type == "cpu" and value.dtype != torch.float32 and alike:
        mask = attention_mask if slots.masked else None
        out = _attend_fused(module, query, (key, value, mask), prefix, scale)
        return out.flatten(1, 2)[:, None], None
    query = query * scale
    scores = _multiply(query, key)  # [rows, h, each, T]
    if slots.masked:
        assert attention_mask is not None
        scores = scores + attention_mask
    if prefix is None:
        out = torch.softmax(scores, dim=3, dtype=torch.float32).to(value.dtype) @ value
    else:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        # [P, h, G * each, prompt]
        to_prompt = _multiply(prefix.gather(query), prefix.keys[layer])
        if prefix.mask is not None:
            to_prompt = to_prompt + prefix.mask
        scores = torch.cat((prefix.scatter(to_prompt, each), scores), dim=3)
        weights = torch.softmax(scores, dim=3, dtype=torch.float32).to(value.dtype)
        width = to_prompt.shape[3]
        from_prompt = prefix.gather(weights[..., :width]) @ prefix.values[layer]
        # [rows, h, each, size]
        out = prefix.scatter(from_prompt, each) + weights[..., width:] @ value
    return out.flatten(1, 2)[:, None], None  # [rows, 1, heads, size]


def _attend_fused(
    module: torch.nn.Module,
    query: Tensor,
    own: tuple[Tensor, Tensor, Tensor | None],
    prefix: Prefix | None,
    scale: float,
) -> Tensor:
    """Attend on a CPU in 16 bits with PyTorch's fused kernel, which takes keys as they lie; a
    product of matrices would copy the window for every token.

    query [rows, h, each, size]; own: keys, values and mask of the rows' own tokens. The two parts
    of a row are put together by the sums of their softmax. Returns [rows, h, each, size].
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    key, value, mask = own
    query = query.to(value.dtype)  # a rotation with float32 angles has widened it
    out, total = fused(query, key, value, attn_mask=mask, scale=scale)
    if prefix is None:
        return out
    layer, each = int(module.layer_idx), query.shape[2]  # type: ignore[arg-type]
    keys, values = prefix.keys[layer], prefix.values[layer]
    mask = None if prefix.mask is None else prefix.mask.to(query.dtype)
    of_prompt, prompt_total = fused(prefix.gather(query), keys, values, attn_mask=mask, scale=scale)
    share = prefix.scatter(prompt_total[..., None], each) - total[..., None]
    return torch.lerp(out, prefix.scatter(of_prompt, each), torch.sigmoid(share).to(out.dtype))


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
