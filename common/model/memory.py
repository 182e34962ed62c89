"""Estimate how much memory weights, training state and activations need."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from common.distributed import fsdp


def head_size(config: Any) -> int:
    """Return the width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class StateMemory:
    """The memory of weights and training state in bytes.

    Attributes:
        whole: what opt=fsdp shares out between ranks.
        copies: half-precision copies, which only plain models have.
    """

    whole: float
    copies: float = 0.0

    @classmethod
    def of_training(
        cls, parameters: int, trained: int, frozen_copies: int = 0, half_copies: int = 0
    ) -> "StateMemory":
        """Count float32 weights and frozen copies, and the gradients and Adam's two moments of what
        is trained; half_copies: of the weights, 2 bytes per parameter.
        """
        whole = 4 * parameters * (1 + frozen_copies) + 12 * trained
        return cls(whole, 2.0 * half_copies * parameters)

    def on_rank(self, model: Any, rollout: bool) -> float:
        """Return the bytes on one rank, with what is gathered of a sharded model meanwhile."""
        copies = 0.0 if fsdp.of(model) else self.copies
        return self.whole / fsdp.share(model) + copies + fsdp.gathered_bytes(model, rollout)


def activation_bytes(
    model: PreTrainedModel,
    prompts: float,
    prompt_tokens: int,
    rows: int,
    new_tokens: int,
    compute: torch.dtype,
    recomputed: bool,
) -> float:
    """Return an estimate of what a training forward of `rows` completions keeps for its backward
    pass.

    Linear in prompts and rows; the logits (four times `LOGITS` floats at most) are not in it.
    Args: prompts: how many the rows share; compute: dtype under autocast; recomputed: blocks are
    checkpointed. Counted for Llama, Qwen2, Qwen3 and GPT-2 from the tensors that autograd saves
    (tests/oracles/test_logprobs.py) and from whole runs (tests/runs/test_standin.py).
    """
    config, narrow = model.config, compute.itemsize
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    heads = config.num_attention_heads * head_size(config)
    tokens = prompts * prompt_tokens + rows * new_tokens
    # Bytes per token and hidden number: the float32 residual and norms, the casts of what goes into
    # each linear layer, queries, and the norms of queries and keys where there are any.
    kept = 62 if narrow == 4 else 45
    kept += 10 * any("q_norm" in name for name, _ in model.named_parameters())
    # Every completion has its own copy of its prompt's keys and values.
    copied = rows * (prompt_tokens + new_tokens) * 2 * heads * narrow
    block = tokens * (kept * hidden + 4 * wide * narrow) + copied
    # A block that is recomputed keeps its input alone; two are whole while one goes backward.
    blocks = layers * tokens * hidden * 4 + 2 * block if recomputed else layers * block
    masks = rows * new_tokens * (prompt_tokens + new_tokens) * (1 + narrow)
    return blocks + masks
