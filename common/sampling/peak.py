"""The memory that a call of the native engine takes beside the model, in bytes, for plans."""

from typing import Any

from common.config import SamplingConfig
from common.distributed import fsdp
from common.memory import Load, cache_bytes, count_saved
from common.model import find_window, has_wide_head, is_adapted, keeps_states, packs, quantized
from common.sampling.slots import draw_floats


def peak_bytes(sampler: Any, rows: int, load: Load) -> float:
    """Return an estimate of the most that a call takes beside the model.

    It is at its peak while prompts are prefilled, while they are put into slots and the first
    tokens are drawn, or while the last tokens are decoded.
    """
    config, size, tokens = sampler.model.config, sampler.dtype.itemsize, load.prompt_tokens
    waiting = load.completions is None or load.completions > rows
    rows = rows if waiting else load.completions or 0
    prompts = max(sampler.limit.floor, -(-rows // load.samples))
    beyond = find_window(config, tokens + load.sampling.max_new_tokens) is not None
    flash = sampler.flash and not beyond
    apart = sampler.shares and load.samples > 1 and not beyond  # slots hold completions alone
    # Those that come later, at any column, need as many columns again.
    new = load.sampling.max_new_tokens * (2 if waiting and not flash else 1)
    token = cache_bytes(config, size)
    prefilled = prompts * (tokens * token * (2 if apart else 1) + sampler.state_bytes)
    slots = rows * ((new if apart else tokens + new) * token + sampler.state_bytes)
    opened = load.opening * token
    logits = rows * draw_floats(load.sampling) * 4.0 * config.vocab_size
    logits += (prompts + max(rows, prompts)) * _logit_bytes(sampler) * config.vocab_size
    packing = sampler.packs and packs(fsdp.target(sampler.model), sampler.dtype)
    piece = _piece_bytes(sampler, prompts, tokens, packing)
    placing = prefilled + slots + logits + opened * waiting
    # With flash attention they are on a board, which the last call may have left.
    filling = prefilled + opened + slots * (waiting or flash) + piece
    decoding = slots + prefilled * apart + opened * waiting
    columns = 0 if flash else tokens + new
    decoding += _step_bytes(sampler, rows, columns, load.sampling)
    weights = fsdp.parameters(sampler.model) + quantized.packed_away(sampler.model)
    kept = load.kept * tokens * token
    return sampler.merged_bytes + 2.0 * weights * packing + kept + max(filling, placing, decoding)


def _piece_bytes(sampler: Any, prompts: int, tokens: int, packing: bool) -> float:
    """Return what a piece of a prefill takes: activations, masks, and a weight that is made
    anew.
    """
    config, size = sampler.model.config, sampler.dtype.itemsize
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    rows = min(max(sampler.piece // tokens, sampler.limit.floor), prompts)
    if keeps_states(config):  # about what one block would keep for a backward pass
        return rows * max(count_saved(sampler.model, tokens))
    # An adapter beside the weights adds its product to theirs; merged it takes nothing.
    wides = 5 if not packing and any(map(is_adapted, sampler.used.modules())) else 3
    masks = 2 if find_window(config, tokens) else 1
    states = (wides * wide + 6 * config.hidden_size) * size + masks * (size + 2) * tokens
    return rows * tokens * states + quantized.remade_bytes(sampler.model, sampler.dtype)


def _step_bytes(sampler: Any, rows: int, columns: int, sampling: SamplingConfig) -> float:
    """Return what a decode step takes beside the cache: keys and values of a layer laid out for
    its products, their scores, and the logits. columns: of them; 0 with flash attention.
    """
    config, size = sampler.model.config, sampler.dtype.itemsize
    layer = cache_bytes(config, size) / config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):  # latents, of which all heads have keys and values
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        layer += config.num_attention_heads * widths * size
    scores = 3 * 4.0 * config.num_attention_heads
    attending = columns * (layer + scores) + 3 * sampler.state_bytes / config.num_hidden_layers
    drawing = (4.0 * draw_floats(sampling) + _logit_bytes(sampler)) * config.vocab_size
    # Recorded steps have memory of their own.
    step = rows * (attending + drawing) * (2 if sampler.recorder else 1)
    return step + quantized.remade_bytes(sampler.model, sampler.dtype)


def _logit_bytes(sampler: Any) -> int:
    return 4 if has_wide_head(sampler.model) else sampler.dtype.itemsize
