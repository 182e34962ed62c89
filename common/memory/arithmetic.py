"""Estimate how much memory weights, training state and activations need."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from common.config import SamplingConfig
from common.distributed import fsdp
from common.model import (
    CUTS,
    KEYED,
    LOGITS,
    RECURRENT,
    find_window,
    head_size,
    is_apart,
    keeps_states,
    recurrent,
    varlen,
)

COUNTED = "clutch_counted"  # an attention for shapes alone


@dataclass(frozen=True)
class StateMemory:
    """The memory of weights and training state in bytes.

    Attributes:
        whole: what opt=fsdp shares out between ranks.
        copies: half-precision copies, which only plain models have.
        gradients: what they are of the whole, or of the adapter.
        optimizer: what it keeps, of the whole or of the adapter.
        adapter: an adapter with all that belongs to it, which every rank has whole.
        engine: what an engine in another process holds while the model is trained.
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
        """Count float32 weights, and the gradients and optimizer state of what is trained.

        frozen: bytes of a copy of the model; half_copies: of the weights, 2 bytes per parameter;
        moments: bytes per parameter that the optimizer keeps.
        """
        optimizer = moments * trained
        whole = 4 * parameters + frozen + 4 * trained + optimizer
        return cls(whole, 2.0 * half_copies * parameters, 4.0 * trained, optimizer)

    def on_rank(self, model: Any, rollout: bool) -> float:
        """Return the bytes on one rank, with what is gathered of a sharded model meanwhile. A
        rollout has no gradients beside it.
        """
        copies = 0.0 if fsdp.of(model) else self.copies
        held = self.whole / fsdp.share(model) + self.adapter + copies
        held += self.engine * (not rollout)  # which counts it among its own needs then
        held -= self.gradients_on_rank(model) * rollout
        return held + fsdp.gathered_bytes(model, rollout)

    def describe(self, model: Any) -> str:
        """Say what weights, with their copies, gradients and optimizer state take on one rank."""
        gradients = self.gradients_on_rank(model)
        optimizer = self.optimizer / (1 if self.adapter else fsdp.share(model))
        weights = self.on_rank(model, rollout=True) - optimizer
        parts = {"weights": weights, "gradients": gradients, "optimizer state": optimizer}
        shown = {name: size for name, size in parts.items() if size or name == "weights"}
        return ", ".join(f"{name} {size / 2**30:.2f} GB" for name, size in shown.items())

    def gradients_on_rank(self, model: Any) -> float:
        """Return the bytes of gradients on one rank."""
        return self.gradients / (1 if self.adapter else fsdp.share(model))


def training_peak(
    model: Any,
    state: StateMemory,
    held: float,
    single: bool,
    once: float = 0.0,
    passing: float = 0.0,
) -> float:
    """Return the most bytes that a rank holds while it trains.

    Args: held: bytes that its largest forward has for the backward pass; single: whether it is the
    only one of a step; once: bytes beside them that are gone when the blocks go backward; passing:
    of `held`, what is there only while one of them does.
    """
    fixed, config = state.on_rank(model, rollout=False), getattr(model, "config", None)
    missing = 0.0
    if single and state.gradients:
        # The only backward pass of a step begins without gradients but for a language model's head.
        head = 4.0 * config.vocab_size * config.hidden_size if config and not state.adapter else 0.0
        missing = state.gradients_on_rank(model) - head / fsdp.share(model)
    begun = fixed - missing - fsdp.block_gradients(model)
    begun += held - passing + max(once, passing)
    return max(begun, fixed + passing)  # the last block goes backward beside all gradients


def cache_bytes(config: Any, size: int) -> int:
    """Return what the keys and values of one token take, in numbers of `size` bytes; of latent
    attention (MLA) what both are made from.
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


def logits_bytes(model: PreTrainedModel, tokens: int, sampling: SamplingConfig) -> float:
    """Return what the logits of `tokens` need at a time, and what comes of them."""
    held = LOGITS["cpu" if fsdp.target(model).type == "cpu" else "cuda"]
    each = 14.0 if getattr(model.config, "final_logit_softcapping", None) else 10.0
    return each * min(tokens * model.config.vocab_size * (CUTS if sampling.cuts else 1), held)


@dataclass(frozen=True)
class Batch:
    """The rows of a training forward: `rows` completions of `new_tokens`, which share `prompts` of
    `prompt_tokens`. compute: dtype under autocast; opening: tokens that all prompts begin with.
    """

    prompts: float
    prompt_tokens: int
    rows: int
    new_tokens: int
    compute: torch.dtype
    opening: int = 0

    @property
    def places(self) -> float:
        """The tokens where attention lays them out, prompts once."""
        return self.prompts * self.prompt_tokens + self.rows * self.new_tokens

    @property
    def longest(self) -> int:
        """The tokens of a prompt and a completion of it."""
        return self.prompt_tokens + self.new_tokens

    @property
    def tokens(self) -> float:
        """The tokens that are computed: of all prompts the opening once."""
        return self.places - max(0.0, self.prompts - 1) * self.opening


def activation_bytes(model: PreTrainedModel, batch: Batch, recomputed: bool) -> float:
    """Return an estimate of what a training forward keeps for its backward pass.

    Linear in rows and in prompts from one on; the logits (`logits_bytes`) are not in it.
    recomputed: blocks are checkpointed. Counted for Llama, Qwen2, Qwen3 and GPT-2 from the tensors
    that autograd saves (tests/oracles/test_logprobs.py) and from whole runs
    (tests/runs/test_standin.py).
    """
    config = model.config
    if keeps_states(config):
        return _recurrent_bytes(model, batch, recomputed)
    batch = _lay_out(model, batch)
    if recomputed:  # of a block its input alone is kept
        total = config.num_hidden_layers * batch.tokens * config.hidden_size * 4
        total += passing_bytes(model, batch)
    else:
        total = config.num_hidden_layers * _block_bytes(model, batch)
    if uses_flash(model, batch):
        return total
    masks = batch.rows * batch.new_tokens * batch.longest
    if find_window(config, batch.longest):  # then there are two kinds, of prompts too
        masks = 2 * (masks + batch.prompts * batch.prompt_tokens**2)
    return total + masks * (1 + batch.compute.itemsize)


def _lay_out(model: PreTrainedModel, batch: Batch) -> Batch:
    """Return the batch as the model computes it: some need a prompt for each completion."""
    return replace(batch, prompts=batch.rows, opening=0) if is_apart(model) else batch


def _recurrent_bytes(model: PreTrainedModel, batch: Batch, recomputed: bool) -> float:
    """Return `activation_bytes` of a model with recurrent layers."""
    config = model.config
    if recomputed:
        inputs = config.num_hidden_layers * batch.longest * config.hidden_size * 4
        return batch.rows * inputs + passing_bytes(model, batch)
    if not recurrent.can_go_on(model):
        return batch.rows * sum(count_saved(model, batch.longest))
    prompt, new = (sum(count_saved(model, n)) for n in (batch.prompt_tokens, batch.new_tokens))
    # A row has its prompt's keys and values twice: as they are, and as its heads attend to them.
    times = 1 + config.num_attention_heads / varlen.key_heads(config)
    beside = times * batch.prompt_tokens * cache_bytes(config, 4)
    beside += batch.new_tokens * batch.longest * 5
    return batch.prompts * prompt + batch.rows * (new + beside)


def uses_flash(model: PreTrainedModel, batch: Batch) -> bool:
    """Return whether attention over these rows is flash attention, which has no window."""
    flash = varlen.has_flash(model.config, fsdp.target(model), batch.compute)
    return flash and find_window(model.config, batch.longest) is None


def passing_bytes(model: PreTrainedModel, batch: Batch) -> float:
    """Return what of `activation_bytes` is there only while a block that is recomputed goes
    backward: two whole blocks.
    """
    if keeps_states(model.config):
        return 2 * batch.rows * max(count_saved(model, batch.longest))
    return 2 * _block_bytes(model, batch)


def _block_bytes(model: PreTrainedModel, batch: Batch) -> float:
    """Return what one block keeps for its backward pass."""
    batch = _lay_out(model, batch)
    config, narrow, tokens = model.config, batch.compute.itemsize, batch.tokens
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    heads = config.num_attention_heads * head_size(config)
    # Bytes per token and hidden number: the float32 residual and norms, the casts of what goes into
    # each linear layer, queries, and the norms of queries and keys where there are any.
    per_number = 42 if narrow == 4 else 35
    per_number += 10 * any("q_norm" in name for name, _ in model.named_parameters())
    # Frozen norms keep no normalised states; an adapter keeps the products with its first matrices.
    ranks = sum(p.shape[0] for name, p in model.named_parameters() if ".lora_A." in name)
    per_number -= 8 * (ranks > 0)
    # With masks every completion has its own copy of its prompt's keys and values, and every head
    # its own; fused attention has none, and is counted alike. The rest is laid out once.
    copied = batch.rows * batch.longest * 2 * heads * narrow
    copied += (6 * batch.places - tokens) * narrow * hidden
    if config._attn_implementation == "eager":  # scores, and a softmax in float32
        copied += batch.rows * config.num_attention_heads * batch.longest**2 * (4 + 2 * narrow)
    if uses_flash(model, batch):
        # The queries, the keys and values that heads share, and the sums of the softmax.
        shared = 2 * varlen.key_heads(config) * head_size(config)
        copied = tokens * ((heads + shared) * narrow + 4 * config.num_attention_heads)
    return tokens * (per_number * hidden + (4 * wide + ranks / layers) * narrow) + copied


def count_saved(model: PreTrainedModel, tokens: int) -> list[int]:
    """Return what each block keeps of a row of so many tokens for the backward pass, in float32.
    Recurrent layers differ too much between models for a formula, and compute in float32 in 16 bits
    as well; so it is counted in a forward of shapes alone.
    """
    known = model.__dict__.setdefault("counted", {})
    if tokens not in known:
        known[tokens] = _count_saved(model.config, tokens)
    return known[tokens]


class _Attention(torch.autograd.Function):
    """The shapes of fused attention, which keeps what goes in and what comes out."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """[rows, heads, T, size] -> [rows, T, heads, size]"""
        out = query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out)
        return out


def _attend(module: Any, *states: Tensor, **_: Any) -> tuple[Tensor, None]:
    return _Attention.apply(*states[:3]), None


AttentionInterface.register(COUNTED, _attend)


def _count_saved(config: Any, tokens: int) -> list[int]:
    counts = [0]  # the first is of what comes before the blocks
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:  # a tensor of shapes alone has no address
            kept[storage._cdata] = storage
            counts[-1] += storage.nbytes()
        return tensor

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=COUNTED
        )
        model = whole.base_model
        # Products of experts have shapes in bfloat16 alone.
        mixture = any(".experts." in name for name, _ in model.named_parameters())
        model.to(torch.bfloat16 if mixture else torch.float32)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    kept |= {p.untyped_storage()._cdata: p for p in model.parameters()}
    for block in fsdp.blocks(model):
        block.register_forward_pre_hook(lambda *_: counts.append(0))
    masks = dict.fromkeys((*KEYED, *RECURRENT))
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with recurrent.in_plain_torch(), torch.enable_grad(), keeping:
        model(input_ids=ids, position_ids=ids, attention_mask=masks, use_cache=False)
    return [count * (2 if mixture else 1) for count in counts]
