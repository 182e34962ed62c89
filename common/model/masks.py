"""Attention masks, and the windows of layers with sliding attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mask = Tensor | dict[str, Tensor | None]  # additive; by the kind of a layer where these differ


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask (True = attend) into an additive one of 0 and the most negative number; done
    once, not in each layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )


def causal(query: Tensor, keys: Tensor, first: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the causal additive mask [n, 1, queries, keys] of rows that are padded on the left.

    Padding attends only to itself: a softmax over no key would be NaN, and spread.
    Args:
        query, keys: the columns of queries and keys.
        first: int64 [n], the first column of each row that is not padding.
    """
    seen = (keys <= query[:, None]) & (keys >= first[:, None, None])
    return additive(seen | (keys == query[:, None]), dtype)[:, None]


@dataclass(frozen=True)
class Window:
    """A window of sliding attention.

    Attributes:
        size: the number of last tokens that a query sees, itself included.
        sliding: per layer, whether it has sliding attention.
    """

    size: int
    sliding: tuple[bool, ...]

    def hide(self, mask: Tensor, distance: Tensor) -> Tensor:
        """Return an additive mask that also hides keys outside of the window.

        Args: distance: columns from each key to each query.
        """
        return mask.masked_fill(distance >= self.size, torch.finfo(mask.dtype).min)


def find_window(config: Any, tokens: float) -> Window | None:
    """Return the window of a model (Mistral, Gemma 3, Phi-3, OLMo 3); None if it has no window, or
    if sequences of `tokens` tokens fit into it.
    """
    config = config.get_text_config()
    size, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not size or tokens <= size:
        return None
    if kinds is None:
        # A model whose class has no such setting ignores it in its config file.
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

# Models with such layers whose states are in transformers' cache.
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
    """The kinds of a model's layers, each of which needs a mask of its own.

    Attributes:
        window: the window of sliding attention; None if all rows fit into it.
        recurrent: the config of a model with recurrent layers, else None.
    """

    window: Window | None = None
    recurrent: Any = None

    @classmethod
    def of(cls, config: Any, tokens: float) -> "Kinds":
        """Return the kinds of layers of a model whose rows have at most `tokens` tokens."""
        return cls(find_window(config, tokens), config if keeps_states(config) else None)

    def masks(
        self, mask: Tensor, query: Tensor | int, keys: Tensor, real: Tensor | None = None
    ) -> Mask:
        """Return the attention mask for a transformers model, by kind of layer if the kinds differ.

        Args:
            mask: the additive mask of layers with full attention.
            query, keys: the columns of queries and keys.
            real: bool [rows, T], False on padding, which a recurrent layer must not read; None
                without padding.
        """
        near = mask if self.window is None else self.window.hide(mask, query - keys)
        if self.recurrent is not None:
            of_all = {"full_attention": mask, "sliding_attention": near}
            return of_all | dict.fromkeys(RECURRENT, real)
        if self.window is None or all(self.window.sliding):
            return near
        return {"full_attention": mask, "sliding_attention": near}
