"""Attention masks, and the windows beyond which some layers do not look back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mask = Tensor | dict[str, Tensor]  # additive; by the kind of a layer where these differ


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool mask (True = attend) -> 0 and the most negative number; made once, not in each layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )


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


def by_layer(mask: Tensor, query: Tensor | int, keys: Tensor, window: Window | None) -> Mask:
    """Return what a model of transformers takes for an additive mask of layers that see all. query,
    keys: the columns of both.
    """
    if window is None:
        return mask
    near = window.hide(mask, query - keys)
    return near if all(window.sliding) else {"full_attention": mask, "sliding_attention": near}
