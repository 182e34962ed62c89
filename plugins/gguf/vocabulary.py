"""The tokenizer of a model as the fields of a GGUF file: tokens, their types, merges, special ids.

llama.cpp does not read how a tokenizer splits a text into words: it knows some ways by name. What
it has no name for is an error here, since other words would give the model other tokens.
"""

import json
from typing import Any

from common.config import ConfigError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a tokenizer.json splits a text -> llama.cpp's name, and whether its BPE takes a word that is a
# token without merges.
SPLITS = {
    (("ByteLevel", True),): ("gpt-2", False),
    (("Digits", True), ("ByteLevel", True)): ("smollm", False),
    (("Split", _WORDS % ""), ("ByteLevel", False)): ("qwen2", False),
    (("Split", _WORDS % "{1,3}"), ("ByteLevel", False)): ("llama-bpe", True),
}


def find_split(content: dict[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer.json splits a text into words.

    Raises: ConfigError with the reason if it has none.
    """
    model: dict[str, Any] = content["model"]
    before: dict[str, Any] = content["pre_tokenizer"] or {"type": "none"}
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ConfigError(f"it is no byte-level BPE but {model['type']}")
    if not model["merges"]:
        raise ConfigError("its tokens are single bytes, as those of model=tiny")
    if (content["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        raise ConfigError(f"it has the normalizer {content['normalizer']['type']}")
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    name, whole = SPLITS.get(tuple(_describe(step) for step in steps), (None, None))
    if name is None or bool(model.get("ignore_merges")) != whole:
        raise ConfigError("llama.cpp has no name for how it splits a text into words")
    return name


def _describe(step: dict[str, Any]) -> tuple[str, Any]:
    """Return the type of a pre-tokenizer, and the one option in which those of `SPLITS` differ.
    None in place of the option if another option is unusual.
    """
    kind = step["type"]
    if kind == "Split":
        usual = step["behavior"] == "Isolated" and not step["invert"]
        return kind, step["pattern"].get("Regex") if usual else None
    if kind == "ByteLevel":
        return kind, None if step["add_prefix_space"] else step["use_regex"]
    return kind, step.get("individual_digits")


def add_vocabulary(writer: Any, tokenizer: Any, rows: int, ends: list[int], types: Any) -> None:
    """Write the tokenizer's fields.

    Args:
        writer: a gguf.GGUFWriter.
        rows: how many rows the embedding has; ids without a token become unused ones.
        ends: the ids that end an answer.
        types: gguf.TokenType.
    Raises: ConfigError with the reason if llama.cpp has no such tokenizer.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(find_split(content))
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [types.UNUSED] * rows
    for token, i in tokenizer.get_vocab().items():
        if i < rows:  # an added token may have no row
            tokens[i], kinds[i] = token, types.NORMAL
    for i, added in tokenizer.added_tokens_decoder.items():
        if i < rows:
            kinds[i] = types.CONTROL if added.special else types.USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = content["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    _add_special_ids(writer, tokenizer, ends)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _add_special_ids(writer: Any, tokenizer: Any, ends: list[int]) -> None:
    """Write the ids of special tokens, and whether a prompt begins with one of them."""
    around = tokenizer("")["input_ids"]
    begins = bool(around) and around[0] == tokenizer.bos_token_id
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(False)
    eos = tokenizer.eos_token_id
    for id_, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (eos, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (next((one for one in ends if one != eos), None), writer.add_eot_token_id),
    ):
        if id_ is not None:
            add(id_)
