"""Prefill prompts, in pieces.

The common opening of all prompts of a call, such as instructions and worked examples, is prefilled
once, or once per member of a population (`find_opening`). Blocks below the first one that a
population perturbs are the same for all members: a prompt passes them once and not once per member.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from common.device import blocks_of, device_of
from common.distributed import sharding_of
from common.engine import Population, Requests
from common.model import (
    SAVED,
    Kinds,
    Place,
    cache_name,
    can_go_on,
    causal,
    find_opening,
    read_states,
)
from common.sampling.recurrent_cache import States
from common.sampling.turn_cache import Kept

Prompts = Sequence[Sequence[int]]


class PromptCache(States):
    """Collects the keys and values of `count` prompts, [count, heads, T, size] per layer, a few
    rows per forward.

    Prompts with a common beginning continue from an `opening`: a forward computes the tokens after
    it and attends to both.
    Attributes:
        opening: the cache of the openings; None = prompts are prefilled from their first token.
        origin: int64 [count], the row of `opening` that each prompt continues from.
        rows: the rows of the current forward.
        source: columns [rows, T] in an order with all padding on the left, if there is padding
            between an opening and the tokens after it; else None.
        lengths: tokens of each prompt, with its opening.
        begun: tokens of the opening of each prompt.
        states: the states of recurrent layers, [count, ...] each.
    """

    def __init__(
        self,
        count: int = 0,
        opening: "PromptCache | None" = None,
        origin: Tensor | None = None,
        recurrent: Any = None,
    ) -> None:
        super().__init__(recurrent)
        self.states: dict[Place, Tensor] = {}
        self.count, self.opening, self.origin = count, opening, origin
        self.rows = torch.arange(count)
        self.source: Tensor | None = None
        self.lengths: list[int] = []  # tokens of each prompt, its opening included
        self.begun: list[int] = [0] * count
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values [rows, heads, T, size] of whole prompts of `layer`, or of their
        tokens after the opening. Returns all keys and values that the rows attend to.
        """
        keys, layer = keys.to(values.dtype), self.number(layer)
        if self.opening is not None:
            keys = self._behind(self.opening.keys[layer], keys)
            values = self._behind(self.opening.values[layer], values)
        if layer == len(self.keys):
            self.keys.append(keys.new_empty(self.count, *keys.shape[1:]))
            self.values.append(values.new_empty(self.count, *values.shape[1:]))
        self.keys[layer].index_copy_(0, self.rows, keys)
        self.values[layer].index_copy_(0, self.rows, values)
        return keys, values

    def begin(self, rows: Tensor) -> None:
        """Prepare for a forward of `rows`, which continue from the recurrent states of their
        openings.
        """
        self.rows = rows
        self.renew()
        if self.opening is not None and self.origin is not None:
            of = self.origin[rows]
            states = {place: state[of] for place, state in self.opening.states.items()}
            self.write_states(torch.arange(len(rows), device=rows.device), len(rows), states)

    def collect(self) -> None:
        """Store the recurrent states that a forward has computed for its rows."""
        for place, state in read_states(self):
            if place not in self.states:
                self.states[place] = state.new_empty((self.count, *state.shape[1:]))
            self.states[place].index_copy_(0, self.rows, state)

    @classmethod
    def join(cls, parts: Sequence["PromptCache"], rows: Tensor) -> "PromptCache":
        """Concatenate the prompts of several caches, and put them in the order `rows`."""
        whole = cls(len(rows))
        lengths = [length for part in parts for length in part.lengths]
        whole.lengths = [lengths[row] for row in rows.tolist()]
        width = max(whole.lengths)

        def gather(layers: Sequence[Tensor]) -> Tensor:
            wide = [pad(layer, (0, 0, width - layer.shape[2], 0)) for layer in layers]
            return torch.cat(wide)[rows]

        whole.keys = [gather(layers) for layers in zip(*(p.keys for p in parts), strict=True)]
        whole.values = [gather(layers) for layers in zip(*(p.values for p in parts), strict=True)]
        for place in parts[0].states:
            whole.states[place] = torch.cat([part.states[place] for part in parts])[rows]
        return whole

    def _behind(self, opening: Tensor, rest: Tensor) -> Tensor:
        """Return the opening [n, heads, T, size] of each row of a forward, followed by its `rest`
        [rows, heads, T, size].
        """
        assert self.origin is not None
        whole = torch.cat((opening[self.origin[self.rows]], rest), dim=2)
        if self.source is None:
            return whole
        row = torch.arange(len(whole), device=whole.device)[:, None]
        return whole[row, :, self.source].transpose(1, 2)


class Prefill:
    """The prefills of one call of `generate`.

    Args:
        pad_id: the token that fills prompts on the left.
        dtype: the dtype of the model's activations.
        piece: the most tokens of a forward, unless it is one prompt of a mirrored pair.
    """

    def __init__(
        self, model: Any, requests: Requests, pad_id: int, dtype: torch.dtype, piece: int
    ) -> None:
        self.model, self.pad_id, self.dtype, self.piece = model, pad_id, dtype, piece
        self.device = device_of(model)
        self.population = requests.population or Population(members=1)
        self.prompts, self.at = requests.prompts, requests.at
        self.kinds = Kinds.of(model.config, max(map(len, requests.prompts)))
        # Sharded weights are gathered for a whole forward, so the trunk would save nothing.
        parted = not sharding_of(model).shared and self.kinds.recurrent is None
        self.trunk = self.population.trunk if parted else 0
        # Keys and values of earlier turns of each episode; they grow while this turn is sampled.
        self.kept = requests.kept if requests.begun is not None else None
        self.begun = [] if self.kept is None else list(self.kept.lengths)
        recurs = self.kinds.recurrent is not None
        whole = any(self.begun) or (recurs and not can_go_on(model))
        self.opening = () if whole else find_opening(requests.prompts, SAVED)
        self.opened: PromptCache | None = None  # the opening of every member

    def run(self, places: Sequence[int]) -> tuple[PromptCache, Tensor]:
        """Prefill prompts, the same number per member. Returns their cache and last logits [n, V].

        Args: places: the indices of the prompts in the request.
        """
        prompts = [self.prompts[place] for place in places]
        if self.kept is not None and any(self.begun):
            return self._go_on(prompts, [self.at[place] for place in places], self.kept)
        if not self.opening:
            return self._run(prompts)
        alike = self._group_by_length(prompts) if self.kinds.recurrent is not None else None
        if alike == []:
            return self._run(prompts)
        if self.opened is None:
            self.opened, _ = self._run([self.opening] * self.population.members)
        rests = [prompt[len(self.opening) :] for prompt in prompts]
        if alike is None:
            return self._run(rests, self.opened)
        runs = [self._run([rests[row] for row in rows], self.opened) for rows in alike]
        parts, logits = zip(*runs, strict=True)
        order = torch.tensor(list(chain(*alike)), device=self.device).argsort()
        return PromptCache.join(parts, order), torch.cat(logits)[order]

    def _group_by_length(self, prompts: Prompts) -> list[list[int]]:
        """Return the rows of the prompts of each length, the same number per member; empty if the
        lengths differ between members.

        Recurrent layers need it: padding between an opening and the tokens after it would change
        their state.
        """
        each = len(prompts) // self.population.members
        of_member = [range(row, row + each) for row in range(0, len(prompts), each)]
        ordered = [sorted(rows, key=lambda row: len(prompts[row])) for rows in of_member]
        across = list(zip(*ordered, strict=True))  # the rows at each place in that order
        if any(len({len(prompts[row]) for row in rows}) > 1 for rows in across):
            return []
        grouped = groupby(across, key=lambda rows: len(prompts[rows[0]]))
        return [[row for rows in zip(*some, strict=True) for row in rows] for _, some in grouped]

    def _go_on(
        self, prompts: Prompts, episodes: Sequence[int], kept: Kept
    ) -> tuple[PromptCache, Tensor]:
        """Prefill the tokens of episodes that were added since their last turn."""
        begun = [self.begun[episode] for episode in episodes]
        opening, width = PromptCache(), max(begun)
        opening.keys = [keys[:, :, :width] for keys in kept.keys]
        opening.values = [values[:, :, :width] for values in kept.values]
        opening.lengths = self.begun
        rests = [prompt[n:] for prompt, n in zip(prompts, begun, strict=True)]
        return self._run(rests, opening, episodes)

    def _run(
        self,
        prompts: Prompts,
        opening: PromptCache | None = None,
        episodes: Sequence[int] | None = None,
    ) -> tuple[PromptCache, Tensor]:
        """Prefill the tokens after the opening, or whole prompts without one.

        Args: episodes: the row of `opening` for each prompt; None = the row of its member.
        """
        members, width = self.population.members, max(map(len, prompts))
        each = len(prompts) // members
        before = 0 if opening is None else opening.keys[0].shape[2]
        # A token of an opening has only keys and values: less than a quarter of a token's memory.
        size = max(width, (width + before) // 4)
        origin = [row // each for row in range(len(prompts))] if episodes is None else episodes
        at = torch.tensor(origin, device=self.device)
        cache = PromptCache(len(prompts), opening, at, self.kinds.recurrent)
        logits, order, trunk = [], [], None
        if opening is not None:
            cache.begun = [opening.lengths[row] for row in origin]
        pairs = zip(cache.begun, prompts, strict=True)
        cache.lengths = [begun + len(prompt) for begun, prompt in pairs]
        if self.trunk and members > 1 and episodes is None:

            def run(some: Prompts, cache: PromptCache) -> Any:
                return self._forward(some, [before] * len(some), cache, width)

            most = max(1, self.piece // size)
            trunk = Trunk(self.model, self.trunk, prompts, run, most, opening)
            trunk.hand_over(cache)
        narrow = self.population.narrow or nullcontext
        for some, rows in self._pieces(each, size):
            cache.begin(torch.tensor(rows, device=self.device))
            with narrow(some), trunk.skipped(cache.rows) if trunk else nullcontext():
                cut = [prompts[row] for row in rows], [cache.begun[row] for row in rows]
                logits.append(self._forward(*cut, cache, width))
            cache.collect()
            order += rows
        cache.opening = None  # each prompt has its own copy of it now
        if spare := before + width - max(cache.lengths):  # columns that are padding in all rows
            cache.keys = [keys[:, :, spare:] for keys in cache.keys]
            cache.values = [values[:, :, spare:] for values in cache.values]
        joined = torch.cat(logits)
        if order != sorted(order):
            joined = joined[torch.tensor(order, device=self.device).argsort()]
        return cache, joined

    def _pieces(self, each: int, size: int) -> Iterator[tuple[range, list[int]]]:
        """Yield the members and the rows of each piece of a prefill of `each` rows per member, with
        a row counted as `size` tokens.
        """
        members, fitting = self.population.members, max(1, self.piece // size)
        # Members that cannot be separated stay together, and so do mirrored pairs.
        together = min(members, 2 if self.population.narrow else members)
        rows = min(each, max(1, fitting // together))
        count = max(together, fitting // rows // together * together)
        for first in range(0, members, count):
            some = range(first, min(first + count, members))
            for start in range(0, each, rows):
                part = range(start, min(start + rows, each))
                yield some, [member * each + row for member in some for row in part]

    def _forward(
        self, prompts: Prompts, begun: Sequence[int], cache: PromptCache, width: int
    ) -> Tensor:
        """Run prompts, padded on the left to `width`, through the model, after `begun` tokens of
        their openings. Returns the last logits [n, V].
        """
        before = 0 if cache.opening is None else cache.opening.keys[0].shape[2]
        padding = [width - len(prompt) for prompt in prompts]
        rows = [[self.pad_id] * n + list(p) for n, p in zip(padding, prompts, strict=True)]
        ids = torch.tensor(rows, device=self.device)
        shorter = [before - n for n in begun]  # than the widest opening
        first = torch.tensor(padding, device=self.device)[:, None]
        rest = before + first  # where the prompt begins
        if any(shorter):
            first = first + torch.tensor(shorter, device=self.device)[:, None]
        column = torch.arange(before + width, device=self.device)
        query = column[before:]
        cache.source = None
        if before and (any(padding) or any(shorter)):
            cache.source = torch.where(column < rest, column - first, column).clamp(min=0)
        mask = causal(query, column, first[:, 0], self.dtype)
        real = query >= rest if any(padding) else None
        return self.model(
            input_ids=ids,
            attention_mask=self.kinds.masks(mask, query[:, None], column, real),
            position_ids=(query - first).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{cache_name(type(self.model)): cache},
        ).logits[:, -1]


class Trunk:
    """The hidden states of prompts after the first `count` blocks of `model`, at least one block.

    A block of a decoder returns its hidden states [rows, T, d], alone or first in a tuple.
    Args:
        prompts: the prompt of each row.
        run: runs some prompts through the model and fills a cache.
        most: the most prompts of one forward.
        opening: the common opening that all prompts continue from, if they have one.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        prompts: Prompts,
        run: Callable[[Prompts, PromptCache], Any],
        most: int,
        opening: PromptCache | None = None,
    ) -> None:
        self.blocks, device = blocks_of(model)[:count], device_of(model)
        places = {tuple(p): place for place, p in enumerate(dict.fromkeys(map(tuple, prompts)))}
        self.origin = torch.tensor([places[tuple(prompt)] for prompt in prompts], device=device)
        first = torch.zeros(len(places), dtype=torch.long, device=device)  # members' are the same
        self.cache, different, outputs = PromptCache(len(places), opening, first), list(places), []
        for start in range(0, len(different), most):
            part = different[start : start + most]
            self.cache.rows = torch.arange(start, start + len(part), device=device)
            outputs.append(self._catch(partial(run, part, self.cache)))
        self.alone = isinstance(outputs[0], Tensor)
        self.hidden = torch.cat([output if self.alone else output[0] for output in outputs])

    def _catch(self, run: Callable[[], Any]) -> Any:
        """Return the output of the last of the blocks while `run` runs the model, which is stopped
        there.
        """
        outputs, forward = [], self.blocks[-1].forward

        def end(*args: Any, **kwargs: Any) -> None:
            outputs.append(forward(*args, **kwargs))
            raise _PassedError

        with suppress(_PassedError), _replaced(self.blocks[-1:], end):
            run()
        return outputs[0]

    def hand_over(self, cache: PromptCache) -> None:
        """Write the keys and values of these blocks into an empty cache of all rows."""
        cache.keys = [keys[self.origin] for keys in self.cache.keys]
        cache.values = [values[self.origin] for values in self.cache.values]
        del self.cache

    @contextmanager
    def skipped(self, rows: Tensor) -> Iterator[None]:
        """Let forwards of these rows in the block start after the trunk."""
        hidden = self.hidden[self.origin[rows]]
        with _replaced(self.blocks, lambda *_, **__: hidden if self.alone else (hidden,)):
            yield


class _PassedError(Exception):
    """Raised after the last block of a trunk: the rest of the model is not needed."""


@contextmanager
def _replaced(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    try:
        for block in blocks:
            block.forward = forward  # an instance attribute, which hides the class's method
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
