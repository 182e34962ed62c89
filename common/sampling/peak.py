"""The peak memory of a call of the native engine in addition to the model, in bytes, for plans."""

from typing import Any

from common.config import SamplingConfig
from common.device import count_parameters, target_of
from common.memory import Load, cache_bytes
from common.model import (
    count_saved,
    find_window,
    has_wide_head,
    is_adapted,
    keeps_states,
    packs,
    quantized,
)
from common.sampling.slots import draw_floats


def peak_bytes(sampler: Any, rows: int, load: Load) -> float:
    """Return an estimate of the peak bytes of a call in addition to the model.

    The peak is reached while prompts are prefilled, while they are copied into slots and the first
    tokens are drawn, or while the last tokens are decoded.
    """
    config, size, tokens = sampler.model.config, sampler.dtype.itemsize, load.prompt_tokens
    waiting = load.completions is None or load.completions > rows
    rows = rows if waiting else load.completions or 0
    prompts = max(sampler.row_limit.floor, -(-rows // load.samples))
    beyond = find_window(config, tokens + load.sampling.max_new_tokens) is not None
    flash = sampler.flash and not beyond
    apart = sampler.shares and load.samples > 1 and not beyond  # slots hold only completions
    # Later requests start at any column, and need as many columns again.
    new = load.sampling.max_new_tokens * (2 if waiting and not flash else 1)
    token = cache_bytes(config, size)
    prefilled = prompts * (tokens * token * (2 if apart else 1) + sampler.state_bytes)
    slots = rows * ((new if apart else tokens + new) * token + sampler.state_bytes)
    opened = load.opening * token
    logits = rows * draw_floats(load.sampling) * 4.0 * config.vocab_size
    logits += (prompts + max(rows, prompts)) * _logit_bytes(sampler) * config.vocab_size
    packing = sampler.packs and packs(target_of(sampler.model), sampler.dtype)
    piece = piece_bytes(sampler, prompts, tokens, packing)
    placing = prefilled + slots + logits + opened * waiting
    # With flash attention slots are on a board, which may exist since the last call.
    filling = prefilled + opened + slots * (waiting or flash) + piece
    decoding = slots + prefilled * apart + opened * waiting
    columns = 0 if flash else tokens + new
    decoding += _step_bytes(sampler, rows, columns, load.sampling)
    weights = count_parameters(sampler.model) + quantized.packed_away(sampler.model)
    cached = load.cached_episodes * tokens * token
    return sampler.merged_bytes + 2.0 * weights * packing + cached + max(filling, placing, decoding)


def piece_bytes(sampler: Any, prompts: int, tokens: int, packing: bool) -> float:
    """Return the bytes of a piece of a prefill: activations, masks, and a weight that is
    dequantized.
    """
    config, size = sampler.model.config, sampler.dtype.itemsize
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    rows = min(max(sampler.piece // tokens, sampler.row_limit.floor), prompts)
    if keeps_states(config):  # about the bytes that one block would keep for a backward pass
        return rows * max(count_saved(sampler.model, tokens))
    # An adapter that is not merged adds its product to that of the weights.
    wides = 5 if not packing and any(map(is_adapted, sampler.used.modules())) else 3
    masks = 2 if find_window(config, tokens) else 1
    states = (wides * wide + 6 * config.hidden_size) * size + masks * (size + 2) * tokens
    return rows * tokens * states + quantized.remade_bytes(sampler.model, sampler.dtype)


def _step_bytes(sampler: Any, rows: int, columns: int, sampling: SamplingConfig) -> float:
    """Return the bytes of a decode step in addition to the cache: keys and values of a layer in the
    layout of its products, their scores, and the logits.

    Args: columns: columns of keys that are copied; 0 with flash attention.
    """
    config, size = sampler.model.config, sampler.dtype.itemsize
    layer = cache_bytes(config, size) / config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):  # latents, expanded to keys and values of all heads
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        layer += config.num_attention_heads * widths * size
    scores = 3 * 4.0 * config.num_attention_heads
    attending = columns * (layer + scores) + 3 * sampler.state_bytes / config.num_hidden_layers
    drawing = (4.0 * draw_floats(sampling) + _logit_bytes(sampler)) * config.vocab_size
    # Recorded steps have a memory pool of their own.
    step = rows * (attending + drawing) * (2 if sampler.recorder else 1)
    return step + quantized.remade_bytes(sampler.model, sampler.dtype)


def _logit_bytes(sampler: Any) -> int:
    return 4 if has_wide_head(sampler.model) else sampler.dtype.itemsize
