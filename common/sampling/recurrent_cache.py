"""The states of recurrent layers (linear attention, state spaces, short convolutions), which a row
has in place of keys and values. Their size does not grow with the length of the row.

transformers has a class for such a layer, which models call through their cache. Rows are added and
removed here in the same way as in the cache of keys and values.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from common.model import Kinds, Place, cache_name, in_plain_torch, read_states


class States(Cache):
    """The part of a transformers cache that holds recurrent states.

    Args: config: the configuration of a model with recurrent layers; None = the model has none.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(layers=[])
        self.config = config
        self.renew()
        attending = [i for i, one in enumerate(self.layers) if isinstance(one, DynamicLayer)]
        self.numbers = {layer: number for number, layer in enumerate(attending)}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0 for any cache. OPT and related models ask for the length to count positions and
        to widen masks, but every forward here is given both.
        """
        return 0

    def renew(self) -> None:
        """Reset the cache: rows have no state."""
        if self.config is not None:
            self.layers = DynamicCache(config=self.config).layers

    def number(self, layer: int) -> int:
        """Return the index of a layer among the layers with keys and values."""
        return self.numbers[layer] if self.numbers else layer

    def write_states(self, rows: Tensor, count: int, states: dict[Place, Tensor]) -> None:
        """Set the states of `rows`, of `count` rows in all; the states of other rows start as
        zeros.
        """
        for (number, kind, which), state in states.items():
            layer: Any = self.layers[number]
            held = getattr(layer, kind)
            if held[which] is None:
                held[which] = state.new_zeros((count, *state.shape[1:]))
                getattr(layer, f"is_{kind}_initialized")[which] = True
                layer.has_previous_state[which] = True
                if kind == "conv_states":
                    layer.conv_kernel_size[which] = state.shape[-1]
            held[which][rows] = state


def count_state_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the recurrent states of a row, with activations of `dtype`."""
    kinds, cache = Kinds.of(config, 1), DynamicCache(config=config)
    with torch.device("meta"), torch.no_grad():
        # Among the expert implementations, only this one supports meta tensors in float32.
        experts = {"experts_implementation": "batched_mm"}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **experts)
        mask = torch.zeros(1, 1, 1, 1, dtype=dtype)
        token = torch.zeros(1, 1, dtype=torch.long)
        masks = kinds.masks(mask, 0, torch.arange(1))
        rows = {cache_name(type(model)): cache}
        with in_plain_torch():
            model(input_ids=token, attention_mask=masks, position_ids=token, use_cache=True, **rows)
    return sum(state.nbytes for _, state in read_states(cache))
