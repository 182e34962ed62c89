"""Attention masks, and the windows beyond which some layers do not look back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mask = Tensor | dict[str, Tensor | None]  # additive; by the kind of a layer where these differ


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool mask (True = attend) -> 0 and the most negative number; made once, not in each layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )


def causal(query: Tensor, keys: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [n, 1, queries, keys] of rows that are padded on the left. query,
    keys: columns; first: int64 [n], those where rows begin. Padding attends to itself alone: a
    softmax over nothing would be NaN, and spread.
    """
    seen = (keys <= query[:, None]) & (keys >= first[:, None, None])
    return additive(seen | (keys == query[:, None]), dtype)[:, None]


@dataclass(frozen=True)
class Window:
    """The last `size` tokens, a query's own among them, which are what layers of sliding attention
    see. sliding: whether it is one, of each layer.
    """

    size: int
    sliding: tuple[bool, ...]

    def hide(self, mask: Tensor, distance: Tensor) -> Tensor:
        """Return an additive mask without what lies further back. distance: from query to key."""
        return mask.masked_fill(distance >= self.size, torch.finfo(mask.dtype).min)


def find_window(config: Any, tokens: float) -> Window | None:
    """Return the window of a model (Mistral, Gemma 3, Phi-3, OLMo 3); None where it has none, or
    where sequences of so many tokens lie within it.
    """
    config = config.get_text_config()
    size, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not size or tokens <= size:
        return None
    if kinds is None:
        # A model whose class has no such setting does not look at one that its file has.
        slides = hasattr(type(config), "sliding_window")
        slides = slides and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    return Window(size, sliding) if any(sliding) else None


# Kinds of layers that keep a state of each row, whose size does not grow, in place of keys and
# values: linear attention and state spaces, short convolutions; "hybrid" ones have both.
RECURRENT = ("linear_attention", "conv", "hybrid")
ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
KEYED = (*ATTENDING, "hybrid")  # kinds with keys and values

# Models with such layers, of which transformers' cache holds the states.
HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h")
HYBRIDS += ("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "zamba2")


def has_layers(config: Any, kinds: Sequence[str]) -> bool:
    """Return whether some layers of a model are of one of `kinds`."""
    return not set(getattr(config.get_text_config(), "layer_types", None) or ()).isdisjoint(kinds)


def keeps_states(config: Any) -> bool:
    """Return whether some layers of a model are recurrent (Qwen3.5, LFM2, Granite 4, Falcon-H1)."""
    return has_layers(config, RECURRENT)


@dataclass(frozen=True)
class Kinds:
    """The kinds of a model's layers, of which each takes a mask of its own.

    window: of sliding attention; None where all rows lie within it. recurrent: the config of a
    model with recurrent layers, else None.
    """

    window: Window | None = None
    recurrent: Any = None

    @classmethod
    def of(cls, config: Any, tokens: float) -> "Kinds":
        """Return those of a model whose rows have so many tokens at most."""
        return cls(find_window(config, tokens), config if keeps_states(config) else None)

    def masks(
        self, mask: Tensor, query: Tensor | int, keys: Tensor, real: Tensor | None = None
    ) -> Mask:
        """Return what a model of transformers takes for an additive mask of layers that see all.
        query, keys: the columns of both. real: bool [rows, T], False on padding, which a recurrent
        layer must not read; None where there is none.
        """
        near = mask if self.window is None else self.window.hide(mask, query - keys)
        if self.recurrent is not None:
            of_all = {"full_attention": mask, "sliding_attention": near}
            return of_all | dict.fromkeys(RECURRENT, real)
        if self.window is None or all(self.window.sliding):
            return near
        return {"full_attention": mask, "sliding_attention": near}
