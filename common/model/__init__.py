"""Language models: load, encode, train, copy, export.

load, tiny, adapter, export: read a model or build a tiny one, put an adapter on it, write it.
prompts: texts to token ids and back, how long they may be, the opening that prompts share.
logprobs, token_filters, varlen, training_graph: log-probabilities of given completions.
masks, recurrent: who attends to whom; the states of recurrent layers.
precision_copies, quantized, packed_linear, wide_layers: weights in other dtypes.
transfer: tensors to and from the device.
saved_bytes: what a forward keeps for its backward pass.
"""

from common.model import logprobs, quantized, training_graph, varlen
from common.model.adapter import Adapter, load_adapted, merge_folder
from common.model.export import empty_like, export_model, write_weights
from common.model.load import load_model, model_commit, template_date
from common.model.logprobs import is_apart, logits_bytes
from common.model.masks import (
    KEYED,
    Kinds,
    Mask,
    additive,
    causal,
    find_window,
    has_layers,
    keeps_states,
)
from common.model.packed_linear import is_adapted, multiply, packed, packs, plain_weight
from common.model.precision_copies import (
    WITHOUT_GRAPHS,
    Narrow,
    compiled,
    evaluating,
    keep_wide,
    narrow,
    narrowed,
    round_layers,
)
from common.model.prompts import (
    BATCH,
    SENTINEL,
    Decoder,
    Encoder,
    PromptBound,
    as_parts,
    check_ids,
    context_length,
    context_name,
    encode_prompts,
    find_front,
    find_opening,
    render,
    stop_ids,
)
from common.model.quantized import QuantizedLinear
from common.model.recurrent import (
    Place,
    cache_name,
    can_go_on,
    in_plain_torch,
    read_states,
    take_states,
)
from common.model.saved_bytes import count_saved
from common.model.tiny import byte_tokenizer
from common.model.token_filters import cut
from common.model.transfer import on_device, to_device, to_host
from common.model.varlen import Sequences, attend, head_size
from common.model.wide_layers import WideBias, has_wide_head, widen_head

__all__ = [
    "BATCH",
    "KEYED",
    "SENTINEL",
    "WITHOUT_GRAPHS",
    "Adapter",
    "Decoder",
    "Encoder",
    "Kinds",
    "Mask",
    "Narrow",
    "Place",
    "PromptBound",
    "QuantizedLinear",
    "Sequences",
    "WideBias",
    "additive",
    "as_parts",
    "attend",
    "byte_tokenizer",
    "cache_name",
    "can_go_on",
    "causal",
    "check_ids",
    "compiled",
    "context_length",
    "context_name",
    "count_saved",
    "cut",
    "empty_like",
    "encode_prompts",
    "evaluating",
    "export_model",
    "find_front",
    "find_opening",
    "find_window",
    "has_layers",
    "has_wide_head",
    "head_size",
    "in_plain_torch",
    "is_adapted",
    "is_apart",
    "keep_wide",
    "keeps_states",
    "load_adapted",
    "load_model",
    "logits_bytes",
    "logprobs",
    "merge_folder",
    "model_commit",
    "multiply",
    "narrow",
    "narrowed",
    "on_device",
    "packed",
    "packs",
    "plain_weight",
    "quantized",
    "read_states",
    "render",
    "round_layers",
    "stop_ids",
    "take_states",
    "template_date",
    "to_device",
    "to_host",
    "training_graph",
    "varlen",
    "widen_head",
    "write_weights",
]
