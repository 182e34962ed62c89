"""Prefill prompts, in pieces: executes the plans of prefill_plan.py on a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from common.device import blocks_of, device_of
from common.distributed import sharding_of
from common.engine import Population, Requests
from common.model import (
    Kinds,
    Place,
    cache_name,
    can_go_on,
    causal,
    find_opening,
    read_states,
)
from common.sampling.prefill_plan import (
    Earlier,
    Fill,
    PrefillPlan,
    Rules,
    Tokens,
    TrunkPlan,
    plan_opening,
    plan_prefill,
)
from common.sampling.recurrent_cache import States
from common.sampling.turn_cache import TurnCache

# The least share of all tokens that a shared opening must save, since it needs a forward.
LEAST_SAVED = 0.5


class PromptCache(States):
    """Collects the keys and values of prompts, [prompts, heads, T, size] per layer, a few rows per
    forward.

    Prompts can continue from earlier keys: a forward computes the tokens after them and attends to
    both.
    Args:
        lengths: tokens of each prompt, with those that it continues from.
        earlier: the cache that prompts continue from; None = they are prefilled from their first
            token.
        origin: int64 [prompts], the row of `earlier` that each prompt continues from.
        recurrent: the configuration of a model with recurrent layers; None = the model has none.
    Attributes:
        rows: the rows of the current forward.
        source: columns [rows, T] in an order with all padding on the left, if there is padding
            between the earlier keys and the tokens after them; else None.
        states: the states of recurrent layers, [prompts, ...] each.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (),
        earlier: "PromptCache | None" = None,
        origin: Tensor | None = None,
        recurrent: Any = None,
    ) -> None:
        super().__init__(recurrent)
        self.lengths, self.earlier, self.origin = list(lengths), earlier, origin
        self.rows = torch.arange(len(lengths))
        self.source: Tensor | None = None
        self.states: dict[Place, Tensor] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @classmethod
    def of_turns(cls, turns: TurnCache, lengths: Sequence[int], width: int) -> "PromptCache":
        """Return the first `width` columns of the cache of turns, of which each episode has filled
        `lengths`.
        """
        cache = cls(lengths)
        cache.keys = [keys[:, :, :width] for keys in turns.keys]
        cache.values = [values[:, :, :width] for values in turns.values]
        return cache

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values [rows, heads, T, size] of whole prompts of `layer`, or of their
        tokens after the earlier keys. Returns all keys and values that the rows attend to.
        """
        keys, layer = keys.to(values.dtype), self.number(layer)
        if self.earlier is not None:
            keys = self._behind(self.earlier.keys[layer], keys)
            values = self._behind(self.earlier.values[layer], values)
        if layer == len(self.keys):
            self.keys.append(keys.new_empty(len(self.lengths), *keys.shape[1:]))
            self.values.append(values.new_empty(len(self.lengths), *values.shape[1:]))
        self.keys[layer].index_copy_(0, self.rows, keys)
        self.values[layer].index_copy_(0, self.rows, values)
        return keys, values

    def begin(self, rows: Tensor, source: Tensor | None) -> None:
        """Prepare for a forward of `rows`, which continue from the recurrent states of their
        earlier tokens.
        """
        self.rows, self.source = rows, source
        self.renew()
        if self.earlier is not None and self.origin is not None:
            of = self.origin[rows]
            states = {place: state[of] for place, state in self.earlier.states.items()}
            self.write_states(torch.arange(len(rows), device=rows.device), len(rows), states)

    def collect(self) -> None:
        """Store the recurrent states that a forward has computed for its rows."""
        for place, state in read_states(self):
            if place not in self.states:
                self.states[place] = state.new_empty((len(self.lengths), *state.shape[1:]))
            self.states[place].index_copy_(0, self.rows, state)

    def take_layers(self, cache: "PromptCache", origin: Tensor) -> None:
        """Take the first layers from another cache, whose row `origin[i]` is row i of this one."""
        self.keys = [keys[origin] for keys in cache.keys]
        self.values = [values[origin] for values in cache.values]

    def finish(self) -> None:
        """Drop the earlier keys, of which each prompt has its own copy now, and the columns that
        are padding in all rows.
        """
        self.earlier, longest = None, max(self.lengths)
        self.keys = [keys[:, :, keys.shape[2] - longest :] for keys in self.keys]
        self.values = [values[:, :, values.shape[2] - longest :] for values in self.values]

    @classmethod
    def join(cls, parts: Sequence["PromptCache"], rows: Tensor) -> "PromptCache":
        """Concatenate the prompts of several caches, and put them in the order `rows`."""
        lengths = [length for part in parts for length in part.lengths]
        whole = cls([lengths[row] for row in rows.tolist()])
        width = max(whole.lengths)

        def gather(layers: Sequence[Tensor]) -> Tensor:
            wide = [pad(layer, (0, 0, width - layer.shape[2], 0)) for layer in layers]
            return torch.cat(wide)[rows]

        whole.keys = [gather(layers) for layers in zip(*(p.keys for p in parts), strict=True)]
        whole.values = [gather(layers) for layers in zip(*(p.values for p in parts), strict=True)]
        for place in parts[0].states:
            whole.states[place] = torch.cat([part.states[place] for part in parts])[rows]
        return whole

    def _behind(self, earlier: Tensor, rest: Tensor) -> Tensor:
        """Return the `earlier` keys [n, heads, T, size] of each row of a forward, then its `rest`
        [rows, heads, T, size].
        """
        assert self.origin is not None
        whole = torch.cat((earlier[self.origin[self.rows]], rest), dim=2)
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
        self.model, self.pad_id, self.dtype = model, pad_id, dtype
        self.device = device_of(model)
        self.prompts, self.at = requests.prompts, requests.at
        self.kinds = Kinds.of(model.config, max(map(len, requests.prompts)))
        recurrent = self.kinds.recurrent is not None
        population = requests.population or Population(members=1)
        self.narrow: Callable[[range], AbstractContextManager[None]]
        self.narrow = population.narrow or (lambda _: nullcontext())
        # Sharded weights are gathered for a whole forward, so the trunk would save nothing.
        self.trunk = 0 if recurrent or sharding_of(model).shared else population.trunk
        self.rules = Rules(
            members=population.members,
            separable=population.narrow is not None,
            trunk=self.trunk > 0,
            recurrent=recurrent,
            piece=piece,
        )
        # The earlier turns of each episode. Their cache grows while this turn is sampled.
        turns = requests.turn_cache if requests.begun is not None else None
        self.begun = [] if turns is None else list(turns.lengths)
        self.turns = turns if any(self.begun) else None
        whole = self.turns is not None or (recurrent and not can_go_on(model))
        self.opening = () if whole else find_opening(requests.prompts, LEAST_SAVED)
        self.opened: PromptCache | None = None  # the opening of every member

    def run(self, places: Sequence[int]) -> tuple[PromptCache, Tensor]:
        """Prefill prompts, the same number per member. Returns their cache and last logits [n, V].

        Args: places: the indices of the prompts in the request.
        """
        turns = None
        if self.turns is not None:
            episodes = [self.at[place] for place in places]
            turns = [(episode, self.begun[episode]) for episode in episodes]
        prompts = [self.prompts[place] for place in places]
        plan = plan_prefill(prompts, self.rules, len(self.opening), turns)
        earlier = self._find_earlier(plan)
        filled = [self._fill(fill, earlier) for fill in plan.fills]
        if len(filled) == 1:
            return filled[0]
        caches, logits = zip(*filled, strict=True)
        order = self._index([row for fill in plan.fills for row in fill.rows]).argsort()
        return PromptCache.join(caches, order), torch.cat(logits)[order]

    def forget_opening(self) -> None:
        """Free the memory of the common opening; a later prefill would compute it again."""
        self.opened = None

    def _find_earlier(self, plan: PrefillPlan) -> PromptCache | None:
        """Return the cache that the rows of a plan continue from."""
        if plan.earlier is Earlier.NOTHING:
            return None
        if self.turns is not None:
            width = max(fill.before for fill in plan.fills)
            return PromptCache.of_turns(self.turns, self.begun, width)
        if self.opened is None:
            self.opened, _ = self._fill(plan_opening(self.opening, self.rules), None)
        return self.opened

    def _fill(self, fill: Fill, earlier: PromptCache | None) -> tuple[PromptCache, Tensor]:
        """Prefill rows into a new cache. Returns it with the last logits of each row [n, V]."""
        lengths = [n + len(some) for n, some in zip(fill.begun, fill.tokens, strict=True)]
        cache = PromptCache(lengths, earlier, self._index(fill.origin), self.kinds.recurrent)
        trunk = None
        if fill.trunk is not None:
            trunk, passed = self._pass_trunk(fill, fill.trunk, earlier)
            cache.take_layers(passed, trunk.origin)
            del passed  # before the other layers are computed
        logits, order = [], []
        for piece in fill.pieces:
            rows = self._index(piece.rows)
            tokens = [fill.tokens[row] for row in piece.rows]
            begun = [fill.begun[row] for row in piece.rows]
            with self.narrow(piece.members), trunk.skipped(rows) if trunk else nullcontext():
                logits.append(self._forward(tokens, begun, fill, rows, cache))
            order += piece.rows
        cache.finish()
        joined = torch.cat(logits)
        if order != sorted(order):
            joined = joined[self._index(order).argsort()]
        return cache, joined

    def _pass_trunk(
        self, fill: Fill, plan: TrunkPlan, earlier: PromptCache | None
    ) -> tuple["Trunk", PromptCache]:
        """Pass the different sequences of a fill through the trunk. Returns their hidden states,
        and their keys and values in the trunk.
        """
        first = self._index([0] * len(plan.tokens))  # the opening is the same for all members
        lengths = [fill.before + len(tokens) for tokens in plan.tokens]
        cache = PromptCache(lengths, earlier, first)

        def run(piece: range) -> None:
            tokens = [plan.tokens[place] for place in piece]
            self._forward(tokens, [fill.before] * len(piece), fill, self._index(piece), cache)

        blocks = blocks_of(self.model)[: self.trunk]
        return Trunk(
            blocks, [partial(run, p) for p in plan.pieces], self._index(plan.origin)
        ), cache

    def _forward(
        self,
        tokens: Sequence[Tokens],
        begun: Sequence[int],
        fill: Fill,
        rows: Tensor,
        cache: PromptCache,
    ) -> Tensor:
        """Run token sequences, padded on the left to the width of their fill, through the model.
        Returns the last logits [n, V].

        Args:
            begun: the tokens of each sequence whose keys exist before.
            rows: the rows of `cache` that the forward fills.
        """
        padding = [fill.width - len(some) for some in tokens]
        ids = [[self.pad_id] * n + list(some) for n, some in zip(padding, tokens, strict=True)]
        shorter = [fill.before - n for n in begun]  # than the longest earlier keys
        first = self._index(padding)[:, None]
        rest = fill.before + first  # where the tokens begin
        if any(shorter):
            first = first + self._index(shorter)[:, None]
        column = torch.arange(fill.before + fill.width, device=self.device)
        query = column[fill.before :]
        source = None
        if fill.before and (any(padding) or any(shorter)):
            source = torch.where(column < rest, column - first, column).clamp(min=0)
        mask = causal(query, column, first[:, 0], self.dtype)
        real = query >= rest if any(padding) else None
        cache.begin(rows, source)
        logits = self.model(
            input_ids=self._index(ids),
            attention_mask=self.kinds.masks(mask, query[:, None], column, real),
            position_ids=(query - first).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{cache_name(type(self.model)): cache},
        ).logits[:, -1]
        cache.collect()
        return logits

    def _index(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self.device)


class Trunk:
    """The hidden states of token sequences after some blocks of a model, at least one block.

    A block of a decoder returns its hidden states [rows, T, d], alone or first in a tuple.
    Args:
        blocks: the first blocks of the model.
        runs: each runs some of the sequences through the model, one run after the other.
        origin: int64 [rows], the sequence of each row.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], runs: Sequence[Callable[[], None]], origin: Tensor
    ) -> None:
        self.blocks, self.origin = blocks, origin
        outputs = [self._catch(run) for run in runs]
        self.alone = isinstance(outputs[0], Tensor)
        self.hidden = torch.cat([output if self.alone else output[0] for output in outputs])

    def _catch(self, run: Callable[[], None]) -> Any:
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
