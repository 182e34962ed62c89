"""Estimate how much memory weights, training state and activations need."""

import torch
from transformers import PreTrainedModel


def activation_bytes(
    model: PreTrainedModel,
    prompts: float,
    prompt_tokens: int,
    rows: int,
    new_tokens: int,
    compute: torch.dtype,
    recomputed: bool,
) -> float:
    """An estimate, rather too large, of what a training forward of `rows` completions keeps for its
    backward pass.

    Linear in prompts and rows; the logits (four times `LOGITS` floats at most) are not in it.
    Args: prompts: how many the rows share; compute: dtype under autocast; recomputed: blocks are
    checkpointed. Counted from the tensors that autograd saves for Llama, Qwen3 and GPT-2;
    tests/oracles/test_logprobs.py counts again.
    """
    config, narrow = model.config, compute.itemsize
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    heads = config.num_attention_heads * (
        getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    )
    tokens = prompts * prompt_tokens + rows * new_tokens
    # Norms and residuals stay float32; every completion has its own copy of its prompt's keys and
    # values.
    block = (
        tokens * (12 * hidden * 4 + 5 * wide * narrow)
        + rows * (prompt_tokens + new_tokens) * 2 * heads * narrow
    )
    # One block more for what its backward pass makes; a block that is recomputed keeps its input
    # alone.
    blocks = layers * tokens * hidden * 4 + 2 * block if recomputed else (layers + 1) * block
    masks = rows * new_tokens * (prompt_tokens + new_tokens) * (4 + narrow)
    return blocks + 4 * tokens * hidden * 4 + masks
