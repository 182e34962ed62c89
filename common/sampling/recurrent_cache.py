"""The states that recurrent layers (linear attention, state spaces, short convolutions) keep of a
row in place of keys and values. Their size does not grow with the row.

transformers has a class for such a layer, which models call through their cache; rows come and go
in it here, as they do among keys and values.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from common.model import Kinds, Place, cache_name, in_plain_torch, read_states


class States(Cache):
    """Stands in for a transformers cache: the part of it that has states.

    Args: config: of a model that has recurrent layers; None = it has none.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(layers=[])
        self.config = config
        self.renew()
        attending = [i for i, one in enumerate(self.layers) if isinstance(one, DynamicLayer)]
        self.numbers = {layer: number for number, layer in enumerate(attending)}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0 as the length of any cache. OPT and its kin ask for it, to count positions and
        widen masks, and every forward here is given both.
        """
        return 0

    def renew(self) -> None:
        """Begin with rows that have no state yet."""
        if self.config is not None:
            self.layers = DynamicCache(config=self.config).layers

    def number(self, layer: int) -> int:
        """Return which of the layers with keys and values a layer is."""
        return self.numbers[layer] if self.numbers else layer

    def write_states(self, rows: Tensor, count: int, states: dict[Place, Tensor]) -> None:
        """Set the states of `rows`, of `count` in all; the others are zeros at first."""
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
    """Return what the states of a row take, with activations of `dtype`."""
    kinds, cache = Kinds.of(config, 1), DynamicCache(config=config)
    with torch.device("meta"), torch.no_grad():
        # Of products of experts there are shapes in float32 for these alone.
        experts = {"experts_implementation": "batched_mm"}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **experts)
        mask = torch.zeros(1, 1, 1, 1, dtype=dtype)
        token = torch.zeros(1, 1, dtype=torch.long)
        masks = kinds.masks(mask, 0, torch.arange(1))
        rows = {cache_name(type(model)): cache}
        with in_plain_torch():
            model(input_ids=token, attention_mask=masks, position_ids=token, use_cache=True, **rows)
    return sum(state.nbytes for _, state in read_states(cache))
