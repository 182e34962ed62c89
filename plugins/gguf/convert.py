"""Write a causal language model as a GGUF file: Llama, Qwen2 and Qwen3, dense.

The names of tensors and fields, the file's layout and the rounding to Q8_0 are those of llama.cpp's
own package gguf. Its converter of Hugging Face folders is in no package of llama.cpp's authors.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config import ConfigError
from common.model import stop_ids
from common.system import TEMPORARY, import_optional
from plugins.gguf.vocabulary import add_vocabulary

TYPES = ("q8_0", "f16", "f32")  # of the matrices; norms and biases are float32
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
CONVERTER = "python llama.cpp/convert_hf_to_gguf.py {folder} --outtype {kind}"  # of llama.cpp


def explain_other(what: str, folder: Path, kind: str) -> ConfigError:
    """Return the error for a model that this command does not write, with llama.cpp's command."""
    command = CONVERTER.format(folder=folder, kind=kind)
    return ConfigError(
        f"{folder} cannot be written as GGUF here: {what}. This command writes Llama, Qwen2 and"
        " Qwen3 with the tokenizers of SmolLM2, Llama 3, Qwen2 and GPT-2. llama.cpp's converter"
        f" knows more: git clone https://github.com/ggml-org/llama.cpp, then {command}"
    )


def check_architecture(config: Any) -> None:
    """Raise ConfigError with the reason if the model of a transformers config is not one of ours.

    What is checked would otherwise be left out of the file, and the answers would be wrong.
    """
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(f"its architecture is {kind}")
    if config.hidden_act != "silu":
        raise ConfigError(f"its activation is {config.hidden_act}, not silu")
    if set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
        raise ConfigError("it has sliding attention")
    rope = config.rope_parameters or {}
    known = ("default", "linear", "llama3") if kind == "llama" else ("default",)
    if rope.get("rope_type", "default") not in known:
        raise ConfigError(f"its rotary positions are scaled by {rope['rope_type']}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("its rotary positions turn only a part of each head")


def write(model: Any, tokenizer: Any, path: Path, kind: str, name: str) -> None:
    """Write the file: whole, or not at all.

    Args:
        model: in float32, on the CPU.
        kind: one of `TYPES`.
        name: the model's name, which programs show.
    Raises: ConfigError with the reason for another architecture or tokenizer.
    """
    gguf = import_gguf()
    check_architecture(model.config)
    beside = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    writer = gguf.GGUFWriter(beside, ARCHITECTURES[model.config.model_type].lower())
    try:
        _add_settings(writer, model.config, kind, name, gguf)
        rows = model.get_input_embeddings().weight.shape[0]
        add_vocabulary(writer, tokenizer, rows, stop_ids(model, tokenizer), gguf.TokenType)
        for tensor_name, tensor in _tensors(model, gguf):
            stored = _choose_type(tensor, kind, gguf)
            shape = gguf.quants.quant_shape_to_byte_shape(tensor.shape, stored)
            size = int(np.prod(shape))
            writer.add_tensor_info(tensor_name, shape, np.dtype(np.uint8), size, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor_name, tensor in _tensors(model, gguf):
            stored = _choose_type(tensor, kind, gguf)
            writer.write_tensor_data(_convert(tensor_name, tensor, stored, gguf))
        writer.close()
        os.replace(beside, path)
    finally:
        writer.close()
        beside.unlink(missing_ok=True)


def import_gguf() -> Any:
    """Return the package gguf. Raises: ConfigError if it is not installed."""
    return import_optional("gguf", "--gguf needs the package gguf: pip install -e '.[gguf]'")


def _add_settings(writer: Any, config: Any, kind: str, name: str, gguf: Any) -> None:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(
        gguf.LlamaFileType[{"q8_0": "MOSTLY_Q8_0", "f16": "MOSTLY_F16"}.get(kind, "ALL_F32")]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _tensors(model: Any, gguf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the file's tensors with their names, in float32."""
    config = model.config
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    if (factors := _rotary_factors(model)) is not None:
        yield "rope_freqs.weight", factors
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama":  # llama.cpp turns neighbours, transformers halves
            for part, heads in (
                ("q", config.num_attention_heads),
                ("k", config.num_key_value_heads),
            ):
                if f".{part}_proj." in name:
                    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
                    tensor = halves.transpose(1, 2).reshape(tensor.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ConfigError(f"llama.cpp has no name for its {name}")
        yield stored, tensor.detach().float().contiguous()


def _rotary_factors(model: Any) -> torch.Tensor | None:
    """Return by how much each rotary frequency is divided; None if none is."""
    rope = model.config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return None
    scaled = model.model.rotary_emb.inv_freq.float()
    steps = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    return rope["rope_theta"] ** -steps / scaled


def _choose_type(tensor: torch.Tensor, kind: str, gguf: Any) -> Any:
    """Return how a tensor is stored: Q8_0 has blocks of 32 numbers of a row."""
    if tensor.ndim < 2 or kind == "f32":
        return gguf.GGMLQuantizationType.F32
    rounded = kind == "q8_0" and tensor.shape[-1] % 32 == 0
    return gguf.GGMLQuantizationType["Q8_0" if rounded else "F16"]


def _convert(name: str, tensor: torch.Tensor, stored: Any, gguf: Any) -> np.ndarray:
    """Return a tensor as it is stored. Raises: ConfigError for numbers that float16 has not."""
    numbers = tensor.numpy()
    largest = float(np.abs(numbers).max(initial=0.0))
    if not np.isfinite(largest):
        raise ConfigError(f"its {name} has numbers that are not finite")
    if stored == gguf.GGMLQuantizationType.F16 and largest > torch.finfo(torch.float16).max:
        raise ConfigError(f"its {name} has numbers up to {largest:g}, too large for float16")
    return gguf.quants.quantize(numbers, stored)
