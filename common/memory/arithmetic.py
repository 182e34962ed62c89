"""Estimate how much memory weights, training state and activations need."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from common.device import target_of
from common.distributed import sharding_of
from common.model import (
    KEYED,
    can_go_on,
    count_saved,
    find_window,
    head_size,
    is_apart,
    keeps_states,
    varlen,
)


@dataclass(frozen=True)
class StateMemory:
    """The bytes of weights and training state.

    Attributes:
        whole: bytes that opt=fsdp shards over the ranks: weights, gradients, optimizer state.
        copies: bytes of half-precision copies of the weights, which only unsharded models have.
        gradients: bytes of the gradients; they are part of `whole`, or of `adapter`.
        optimizer: bytes of the optimizer state; they are part of `whole`, or of `adapter`.
        adapter: bytes of an adapter with its gradients and optimizer state, unsharded on every
            rank.
        engine: bytes that an engine in another process holds while the model is trained.
    """

    whole: float
    copies: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    adapter: float = 0.0
    engine: float = 0.0

    @classmethod
    def of_training(
        cls,
        parameters: int,
        trained: int,
        frozen: float = 0.0,
        half_copies: int = 0,
        moments: float = 8.0,
    ) -> "StateMemory":
        """Count float32 weights, and the gradients and optimizer state of the trained parameters.

        Args:
            parameters: the number of weights.
            trained: the number of trained weights.
            frozen: bytes of a frozen copy of the model.
            half_copies: the number of half-precision copies, 2 bytes per parameter.
            moments: bytes per parameter of the optimizer state.
        """
        optimizer = moments * trained
        whole = 4 * parameters + frozen + 4 * trained + optimizer
        return cls(whole, 2.0 * half_copies * parameters, 4.0 * trained, optimizer)

    def on_rank(self, model: Any, rollout: bool) -> float:
        """Return the bytes on one rank, with the layers of a sharded model that are gathered at a
        time. A rollout has no gradients.
        """
        sharding = sharding_of(model)
        copies = 0.0 if sharding.shared else self.copies
        held = self.whole / sharding.ranks + self.adapter + copies
        held += self.engine * (not rollout)  # in a rollout, `peak_bytes` counts the engine
        held -= self.gradients_on_rank(model) * rollout
        return held + sharding.gathered_bytes(rollout)

    def describe(self, model: Any) -> str:
        """Describe the bytes of weights with their copies, gradients and optimizer state on one
        rank.
        """
        gradients = self.gradients_on_rank(model)
        optimizer = self.optimizer / (1 if self.adapter else sharding_of(model).ranks)
        weights = self.on_rank(model, rollout=True) - optimizer
        parts = {"weights": weights, "gradients": gradients, "optimizer state": optimizer}
        shown = {name: size for name, size in parts.items() if size or name == "weights"}
        return ", ".join(f"{name} {size / 2**30:.2f} GB" for name, size in shown.items())

    def gradients_on_rank(self, model: Any) -> float:
        """Return the bytes of gradients on one rank."""
        return self.gradients / (1 if self.adapter else sharding_of(model).ranks)


def training_peak(
    model: Any,
    state: StateMemory,
    held: float,
    single: bool,
    once: float = 0.0,
    passing: float = 0.0,
) -> float:
    """Return the peak bytes of a rank while it trains.

    Args:
        held: bytes that the largest forward keeps for its backward pass.
        single: whether this forward is the only one of a step.
        once: further bytes, which are freed before the backward pass reaches the blocks.
        passing: the part of `held` that exists only while one block is in its backward pass.
    """
    fixed, config = state.on_rank(model, rollout=False), getattr(model, "config", None)
    sharding, missing = sharding_of(model), 0.0
    if single and state.gradients:
        # The only backward pass of a step begins without gradients except those of the head.
        head = 4.0 * config.vocab_size * config.hidden_size if config and not state.adapter else 0.0
        missing = state.gradients_on_rank(model) - head / sharding.ranks
    begun = fixed - missing - sharding.gradient_bytes()
    begun += held - passing + max(once, passing)
    return max(begun, fixed + passing)  # at the last block all gradients exist


def cache_bytes(config: Any, size: int) -> int:
    """Return the bytes of the keys and values of one token in all layers; for latent attention
    (MLA) the bytes of the latents.

    Args: size: bytes per number.
    """
    if latent := getattr(config, "kv_lora_rank", None):
        return config.num_hidden_layers * (latent + config.qk_rope_head_dim) * size
    # The last layers may read the keys of others.
    stored = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    layers = varlen.each_layer(config)[:stored]
    if keeps_states(config):
        pairs = zip(layers, config.layer_types, strict=True)
        layers = [layer for layer, kind in pairs if kind in KEYED]
    return 2 * size * sum(varlen.key_heads(layer) * head_size(layer) for layer in layers)


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a training forward.

    Attributes:
        prompts: the number of prompts.
        prompt_tokens: the tokens of each prompt.
        rows: the number of completions, which share the prompts.
        new_tokens: the tokens of each completion.
        compute: the dtype under autocast.
        opening: the number of tokens that all prompts begin with.
    """

    prompts: float
    prompt_tokens: int
    rows: int
    new_tokens: int
    compute: torch.dtype
    opening: int = 0

    @property
    def places(self) -> float:
        """The number of tokens in the layout of attention, with each prompt once."""
        return self.prompts * self.prompt_tokens + self.rows * self.new_tokens

    @property
    def longest(self) -> int:
        """The tokens of a prompt and its completion."""
        return self.prompt_tokens + self.new_tokens

    @property
    def tokens(self) -> float:
        """The number of tokens that are computed: the common opening of the prompts counts once."""
        return self.places - max(0.0, self.prompts - 1) * self.opening


def activation_bytes(model: PreTrainedModel, batch: BatchShape, recomputed: bool) -> float:
    """Return an estimate of the bytes that a training forward keeps for its backward pass, without
    the logits (`logits_bytes`).

    It is linear in rows and in prompts from one on. The formula was fitted to Llama, Qwen2, Qwen3
    and GPT-2: to the tensors that autograd saves (tests/oracles/test_logprobs.py) and to whole runs
    (tests/runs/test_standin.py).
    Args: recomputed: whether blocks are checkpointed.
    """
    config = model.config
    if keeps_states(config):
        return _recurrent_bytes(model, batch, recomputed)
    batch = _lay_out(model, batch)
    if recomputed:  # only the input of each block is kept
        total = config.num_hidden_layers * batch.tokens * config.hidden_size * 4
        total += passing_bytes(model, batch)
    else:
        total = config.num_hidden_layers * _block_bytes(model, batch)
    if uses_flash(model, batch):
        return total
    masks = batch.rows * batch.new_tokens * batch.longest
    if find_window(config, batch.longest):  # two kinds of masks, for prompts as well
        masks = 2 * (masks + batch.prompts * batch.prompt_tokens**2)
    return total + masks * (1 + batch.compute.itemsize)


def _lay_out(model: PreTrainedModel, batch: BatchShape) -> BatchShape:
    """Return the batch in the layout of the model: some models need a copy of the prompt per
    completion.
    """
    return replace(batch, prompts=batch.rows, opening=0) if is_apart(model) else batch


def _recurrent_bytes(model: PreTrainedModel, batch: BatchShape, recomputed: bool) -> float:
    """Return `activation_bytes` for a model with recurrent layers."""
    config = model.config
    if recomputed:
        inputs = config.num_hidden_layers * batch.longest * config.hidden_size * 4
        return batch.rows * inputs + passing_bytes(model, batch)
    if not can_go_on(model):
        return batch.rows * sum(count_saved(model, batch.longest))
    prompt, new = (sum(count_saved(model, n)) for n in (batch.prompt_tokens, batch.new_tokens))
    # A row has its prompt's keys and values twice: as stored, and repeated for the query heads.
    times = 1 + config.num_attention_heads / varlen.key_heads(config)
    beside = times * batch.prompt_tokens * cache_bytes(config, 4)
    beside += batch.new_tokens * batch.longest * 5
    return batch.prompts * prompt + batch.rows * (new + beside)


def uses_flash(model: PreTrainedModel, batch: BatchShape) -> bool:
    """Return whether attention over these rows is flash attention, which supports no sliding
    window.
    """
    flash = varlen.has_flash(model.config, target_of(model), batch.compute)
    return flash and find_window(model.config, batch.longest) is None


def passing_bytes(model: PreTrainedModel, batch: BatchShape) -> float:
    """Return the part of `activation_bytes` that exists only during the backward pass of a
    recomputed block: the activations of two whole blocks.
    """
    if keeps_states(model.config):
        return 2 * batch.rows * max(count_saved(model, batch.longest))
    return 2 * _block_bytes(model, batch)


def _block_bytes(model: PreTrainedModel, batch: BatchShape) -> float:
    """Return the bytes that one block keeps for its backward pass."""
    batch = _lay_out(model, batch)
    config, narrow, tokens = model.config, batch.compute.itemsize, batch.tokens
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    heads = config.num_attention_heads * head_size(config)
    # Bytes per token and hidden dimension: the float32 residual and norms, the cast input of each
    # linear layer, queries, and the norms of queries and keys if the model has them.
    per_number = 42 if narrow == 4 else 35
    per_number += 10 * any("q_norm" in name for name, _ in model.named_parameters())
    # Frozen norms keep no normalised states; an adapter keeps the products with its first matrices.
    ranks = sum(p.shape[0] for name, p in model.named_parameters() if ".lora_A." in name)
    per_number -= 8 * (ranks > 0)
    # With masks every completion and every head has its own copy of the prompt's keys and values.
    # Fused attention has no copies, but is counted the same. All else is laid out once.
    copied = batch.rows * batch.longest * 2 * heads * narrow
    copied += (6 * batch.places - tokens) * narrow * hidden
    if config._attn_implementation == "eager":  # scores, and a softmax in float32
        copied += batch.rows * config.num_attention_heads * batch.longest**2 * (4 + 2 * narrow)
    if uses_flash(model, batch):
        # The queries, the keys and values that heads share, and the sums of the softmax.
        shared = 2 * varlen.key_heads(config) * head_size(config)
        copied = tokens * ((heads + shared) * narrow + 4 * config.num_attention_heads)
    return tokens * (per_number * hidden + (4 * wide + ranks / layers) * narrow) + copied
