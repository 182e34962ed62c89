"""Hidden states of completions in models with recurrent layers, whose states cannot be shared in
the layout of one sequence: a forward of the prompts, then a forward of all completions that
continues from the layers' states after their prompts.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.integrations import hub_kernels

from common.distributed import sharding_of
from common.model.masks import Kinds, additive, causal, keeps_states
from common.model.transfer import to_device


@lru_cache
def cache_name(kind: type) -> str:
    """Return the name of the cache argument of a model class: `cache` from transformers 5.24 on."""
    named = inspect.signature(kind.forward).parameters  # pyright: ignore[reportAttributeAccessIssue]
    return "cache" if "cache" in named else "past_key_values"


@contextmanager
def in_plain_torch() -> Iterator[None]:
    """Make recurrent layers use transformers' own code in the block, even if packages with kernels
    for them are installed: a kernel cannot run on meta tensors.
    """
    usual = hub_kernels.is_torchdynamo_exporting
    hub_kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = usual


# The place of a state: the number of its layer, one of `KINDS`, and its index within that kind.
Place = tuple[int, str, int]
KINDS = ("conv_states", "recurrent_states")


def read_states(cache: Cache) -> Iterator[tuple[Place, Tensor]]:
    """Yield the states of all rows, [rows, ...] each, that layers have so far, with
    their places.
    """
    for number, layer in enumerate(cache.layers):
        for kind in KINDS:
            for which, state in getattr(layer, kind, {}).items():
                if state is not None:
                    yield (number, kind, which), state


def take_states(cache: Cache, rows: Tensor) -> None:
    """Keep the states of `rows` and drop those of all other rows."""
    for (number, kind, which), state in list(read_states(cache)):
        getattr(cache.layers[number], kind)[which] = state[rows]


def can_go_on(model: PreTrainedModel) -> bool:
    """Return whether completions can continue from the states of a prompt that is computed once.
    Sharded models cannot: their weights are gathered for one forward at a time.
    """
    return keeps_states(model.config) and not sharding_of(model).shared


def goes_on(model: PreTrainedModel) -> bool:
    """Return whether completions do continue from such states: checkpointed blocks
    have no cache.
    """
    # Renamed in transformers 5.2x; the old name warns there.
    renamed = hasattr(type(model), "is_activation_checkpointing")
    again = getattr(model, f"is_{'activation' if renamed else 'gradient'}_checkpointing")
    return can_go_on(model) and not (again and model.training)


class Behind(Cache):
    """The cache of completions that continue from prompts, without changing the prompts' cache.
    Gradients flow back to the prompts.

    Args:
        prompts: the cache of the prompts.
        of: int64 [rows], the prompt of each row.
    """

    def __init__(self, prompts: Cache, of: Tensor) -> None:
        super().__init__(layers=prompts.layers)
        take_states(self, of)
        for layer in prompts.layers:
            for kind in ("keys", "values"):
                if getattr(layer, kind, None) is not None:
                    setattr(layer, kind, getattr(layer, kind)[of])

    def update(  # type: ignore[override]
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the prompts followed by those of the rows."""
        held: Any = self.layers[layer]
        pairs = (held.keys, keys.to(held.keys.dtype)), (held.values, values)
        before, after = (torch.cat(pair, dim=2) for pair in pairs)
        return before, after

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Return the inputs of a convolution, with the last inputs of the prompt before them."""
        layer: Any = self.layers[layer_idx]
        return torch.cat((layer.conv_states[state_idx], conv_states), dim=-1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Return the new state without storing it: a backward pass needs the unchanged state of the
        prompt.
        """
        return recurrent_states


def hidden_states(model: PreTrainedModel, groups: Any, dtype: torch.dtype) -> Tensor:
    """Return the hidden states that predict each real completion token of `logprobs.Groups`, [N,
    d].

    Args: dtype: the dtype of masks.
    """
    prompts, completions = groups.take_apart()
    device, ids = groups.ids.device, groups.ids[0]
    width, longest = max(map(len, prompts)), max(2, *(len(c) for _, c in completions))
    # Convolutions use a special kernel for one token, which has no backward pass.
    left = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    right = torch.tensor([c + [0] * (longest - len(c)) for _, c in completions])
    lengths = torch.tensor([len(p) for p in prompts])
    sizes = torch.tensor([len(c) for _, c in completions])
    of = torch.tensor([number for number, _ in completions])
    left, right, lengths, sizes, of = to_device([left, right, lengths, sizes, of], device)
    kinds = Kinds.of(model.config, width + longest)
    column = torch.arange(width + longest, device=device)
    place, first = column[:width], width - lengths
    real = place >= first[:, None]
    masks = kinds.masks(causal(place, place, first, dtype), place[:, None], place, real)
    positions = (place - first[:, None]).clamp(min=0)
    cache = DynamicCache(config=model.config)
    named = cache_name(type(model.base_model))

    def run(tokens: Tensor, positions: Tensor, masks: Any, cache: Cache) -> Tensor:
        return model.base_model(
            input_ids=ids[tokens],
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{named: cache},
        ).last_hidden_state

    of_prompts = run(left, positions, masks, cache)[:, -1]
    own = column[width:]
    whole = torch.cat((real[of], own.new_ones(len(of), longest, dtype=torch.bool)), dim=1)
    seen = (column <= own[:, None]) & whole[:, None]
    masks = kinds.masks(additive(seen, dtype)[:, None], own[:, None], column)
    positions = lengths[of][:, None] + own - width
    of_rows = run(right, positions, masks, Behind(cache, of))
    predicting = torch.cat((of_prompts[of][:, None], of_rows[:, :-1]), dim=1)  # [rows, longest, d]
    return predicting[(own - width)[None] < sizes[:, None]]
