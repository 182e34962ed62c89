"""Encode prompts as token ids, decode completions, and find a model's stop tokens and context
length.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.config import ConfigError
from common.system import first_line
from common.task import Messages, plain

# The fewest tokens of an opening that is computed once.
SHORT_OPENING = 32
BATCH = 4096  # texts that are encoded at a time; an encoding takes a hundred times its ids' memory
SENTINEL = "\u2603\u2603"  # an answer that occurs in no template
# The exceptions of chat templates: many refuse a system text, or two users in a row.
REFUSALS = (TemplateError, ValueError, TypeError, KeyError)


def context_length(model: PreTrainedModel) -> int:
    """Return the longest sequence, prompt and completion together in tokens, that the sampler
    computes exactly.

    It is the number of positions, or less if the model has a window that no mask here supports
    (GPT-Neo, and chunks of Llama 4); sliding attention is supported (masks.find_window).
    Raises: ConfigError if the model's config.json names no number of positions.
    """
    return min(_bounds(model))


def context_name(model: PreTrainedModel) -> str:
    """Return the name of this limit, for errors: "context", or "attention window"."""
    positions, *windows = _bounds(model)
    return "attention window" if min(windows, default=positions) < positions else "context"


def _bounds(model: PreTrainedModel) -> list[int]:
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    bounds = [value for name in names if isinstance(value := getattr(config, name, None), int)][:1]
    if not bounds:
        raise ConfigError(
            f"model.path={model.name_or_path!r}: its config.json ({config.model_type}) names no"
            ' context length. Add "max_position_embeddings" to a local copy: the longest sequence'
            " in tokens that it was trained on."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this length transformers rotates all rows of a forward by the long factors.
        name = "original_max_position_embeddings"
        bounds = [min(bounds[0], getattr(config, name, None) or rope[name])]
    layers = getattr(config, "layer_types", None)
    if layers and "chunked_attention" in layers:
        bounds.append(config.attention_chunk_size)
    if "local" in (getattr(config, "attention_layers", None) or []):  # GPT-Neo
        bounds.append(config.window_size)
    return bounds


def check_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], what: str
) -> None:
    """Raise ConfigError for a token without an embedding in the model, such as one that was added
    to the tokenizer.

    Args: what: the owner of the tokens, for the error.
    """
    rows: Any = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
    if (highest := max(ids, default=0)) >= rows:
        raise ConfigError(
            f"{what} holds {tokenizer.convert_ids_to_tokens(highest)!r}, which the model has no"
            " embedding of. Leave it out; or, if the chat template wrote it, put the tokenizer"
            " files that the model was trained with into its folder, or use task.chat=false."
        )


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of tokens that end a completion: the eos ids of the generation config and of
    the tokenizer, sorted. May be empty.
    """
    ids: list[Any] = [tokenizer.eos_token_id]
    if model.generation_config is not None:
        of_model: Any = model.generation_config.eos_token_id
        ids += of_model if isinstance(of_model, list) else [of_model]
    return sorted({token for token in ids if token is not None})


@dataclass(frozen=True)
class Decoder:
    """Decodes completions. Padding and the tokens that end a turn are left out; any other special
    token stays as text, such as <think> or <answer> if a tokenizer has one for it.

    Attributes:
        tokenizer: the tokenizer.
        ends: the ids of the tokens that are left out.
    """

    tokenizer: Any
    ends: frozenset[int] = frozenset()

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "Decoder":
        """Return the decoder of a model's tokenizer."""
        pad: Any = tokenizer.pad_token_id
        ends = {*stop_ids(model, tokenizer), *_turn_ends(tokenizer)}
        return cls(tokenizer, frozenset(ends if pad is None else ends | {pad}))

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of token ids."""
        kept = [[token for token in row if token not in self.ends] for row in rows]
        if not kept:  # transformers would return one text for no rows
            return []
        return self.tokenizer.batch_decode(kept, skip_special_tokens=False)


class Encoder:
    """Encodes texts that follow a prompt: without tokens that begin or end a sequence, and without
    the space that Llama 2's kind of tokenizer puts before every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Behind a line break a text is encoded as it goes on there.
        line, letter, both = self._encode(["\n", "a", "\na"])
        self.line = [] if both == line + letter else line

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        if not texts:
            return []
        if not self.line:
            return self._encode(texts)
        behind, size = self._encode([f"\n{text}" for text in texts]), len(self.line)
        if all(ids[:size] == self.line for ids in behind):
            return [ids[size:] for ids in behind]
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def _turn_ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens that the chat template writes after an answer."""
    if tokenizer.chat_template is None:
        return set()
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SENTINEL}]
    try:
        text: Any = tokenizer.apply_chat_template(as_parts(tokenizer, turns), tokenize=False)
    except REFUSALS:
        return set()
    _, found, behind = text.rpartition(SENTINEL)
    ids: Any = tokenizer(behind, add_special_tokens=False)["input_ids"] if found and behind else []
    added = tokenizer.added_tokens_decoder
    return {token for token in ids if token in added and added[token].special}


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, given: Sequence[str | Messages], numbers: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token ids of each prompt: the tokenizer's prefix (<s>) and the text, without any
    suffix.

    A suffix such as eos would end the text, but a prompt is to be continued. A conversation is
    rendered by the tokenizer's chat template, up to the beginning of the answer; without a template
    it is plain lines.
    Args: numbers: the numbers of the prompts, for errors; by default from 0 on.
    Raises: ConfigError for a prompt that encodes to nothing, and for a conversation that the
    template refuses.
    """
    if tokenizer.chat_template is not None and any(not isinstance(prompt, str) for prompt in given):
        return [
            (
                encode_prompts(tokenizer, [prompt])[0]
                if isinstance(prompt, str)
                else _conversation(tokenizer, prompt)
            )
            for prompt in given
        ]
    texts = [plain(prompt) for prompt in given]
    front = find_front(tokenizer)
    prompts = []
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        bare = tokenizer(
            part, add_special_tokens=False, padding=False, truncation=False, verbose=False
        )["input_ids"]
        prompts += [front + list(ids) for ids in bare]
    for index, ids in enumerate(prompts):
        if not ids:
            number = numbers[index] if numbers else index
            raise ConfigError(
                f"prompt {number} is {texts[index]!r}, which is no token at all, and this tokenizer"
                " puts none in front. A model needs at least one token to continue; give"
                " the task's prompt a text."
            )
    return prompts


class PromptBound:
    """Bounds the number of tokens of a prompt without encoding it: each token stands for at least
    one byte of the text as the tokenizer normalises it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.front = tokenizer, len(find_front(tokenizer))
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", "NFK")
        self.normalizer = str(normalizer)
        self.unfolds = any(name in self.normalizer for name in ("NFK", "Precompiled"))
        self.frames: dict[tuple[str, ...], int | None] = {}

    def __call__(self, prompt: str | Messages) -> float:
        """Return the upper bound; infinity for texts that must be encoded to find it."""
        if isinstance(prompt, str) or self.tokenizer.chat_template is None:
            text = plain(prompt)
            return self.front + self._bound(text) if text.strip() else math.inf
        frame = None
        if all(message.keys() == {"role", "content"} for message in prompt):
            roles = tuple(message["role"] for message in prompt)
            if roles not in self.frames:
                self.frames[roles] = self._measure(roles)
            frame = self.frames[roles]
        if frame is None or getattr(prompt, "tools", None):
            return self._bound(render(self.tokenizer, prompt))
        return frame + sum(self._bound(message["content"]) for message in prompt)

    def _bound(self, text: str) -> float:
        if text.isascii():  # SentencePiece makes the three bytes of "\u2581" of a space
            return 3 * len(text) if "Replace" in self.normalizer else len(text)
        return math.inf if self.unfolds else 3 * len(text.encode())  # NFC makes three bytes of one

    def _measure(self, roles: tuple[str, ...]) -> int | None:
        """Return the bytes that the chat template adds to the texts of these roles; None if they
        depend on the texts.
        """
        added = set()
        for longer in (0, 100):
            texts = [str(number % 10) * (1 + number + longer) for number in range(len(roles))]
            turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
            rendered = render(self.tokenizer, turns)
            added.add(len(rendered.encode()) - sum(map(len, texts)))
        return added.pop() if len(added) == 1 else None


def find_front(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer prepends to any text (<s>). They are found with a probe,
    not by stripping ids at the end: in some vocabularies bos and eos are the same token.
    """
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    return framed[: next(i for i in range(len(framed)) if framed[i : i + len(probe)] == probe)]


def find_opening(prompts: Sequence[Sequence[int]], least: float) -> Sequence[int]:
    """Return the tokens that all prompts begin with, such as instructions and worked examples; none
    if sharing them would save less than the share `least` of all tokens. Each prompt keeps a token
    of its own, whose logits are needed.
    """
    if not prompts:
        return ()
    # The common prefix of the first and the last prompt in lexical order is common to all.
    low, high = min(prompts, key=tuple), max(prompts, key=tuple)
    most = min(map(len, prompts)) - 1
    same = next((i for i in range(most) if low[i] != high[i]), most)
    saved = (len(prompts) - 1) * same
    if same < SHORT_OPENING or saved <= least * len(prompts) * max(map(len, prompts)):
        return ()
    return low[:same]


def as_parts(tokenizer: PreTrainedTokenizerBase, messages: Any) -> Any:
    """Return messages in the format of a chat template: those of LLaVA and SmolVLM expect lists of
    texts and images, and drop a plain text.
    """
    if _reads_texts(tokenizer, str(tokenizer.chat_template)):
        return messages
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []}
        for m in messages
    ]


@lru_cache(maxsize=8)
def _reads_texts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the tokenizer's chat template renders plain texts.

    Args: template: the template, as a cache key, since a tokenizer's template can be replaced.
    """
    del template
    probe: Any = [{"role": "user", "content": "probe"}]
    try:
        return "probe" in tokenizer.apply_chat_template(probe, tokenize=False)
    except REFUSALS:
        return True  # the refusal is reported when the template is used


def render(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, *, begin: bool = True
) -> str:
    """Return a prompt as text; a conversation is rendered by the chat template. Raises: ConfigError
    if the template refuses it.

    Args: begin: whether to append the beginning of an answer to a conversation.
    """
    if isinstance(prompt, str) or tokenizer.chat_template is None:
        return plain(prompt)
    return _apply(tokenizer, prompt, tokenize=False, add_generation_prompt=begin)


def _conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    ids = _apply(tokenizer, messages, return_dict=True)["input_ids"]
    if getattr(messages, "tools", None) or any(
        message["role"] == "tool" or "tool_calls" in message for message in messages
    ):
        _check_shown(tokenizer, messages)
    return list(ids)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any) -> Any:
    """Render a conversation with the chat template. The arguments of tool calls are passed as
    objects, or as JSON texts if the template refuses objects. Raises: ConfigError if it refuses
    both.
    """
    asked = {"tools": getattr(messages, "tools", None), "add_generation_prompt": True}
    options = asked | options
    try:
        return tokenizer.apply_chat_template(as_parts(tokenizer, messages), **options)
    except REFUSALS as error:
        refusal = error
    written = [_with_written_arguments(message) for message in messages]
    if written != messages:
        try:
            return tokenizer.apply_chat_template(as_parts(tokenizer, written), **options)
        except REFUSALS as error:
            refusal = error
    roles = ", ".join(message["role"] for message in messages)
    raise ConfigError(
        f"the chat template of {tokenizer.name_or_path!r} refuses a prompt of the roles"
        f" {roles}: {first_line(refusal)}. Leave out the system text (task.system='' in"
        " task=units), or give plain prompts (task.chat=false)."
    ) from None


def _with_written_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**of, "arguments": json.dumps(of["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
        if isinstance((of := call["function"])["arguments"], dict)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _check_shown(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> None:
    """Raise ConfigError for a tool, a call or a reply that the chat template leaves out: each is
    replaced by a unique text that must occur in the rendered prompt.
    """
    stands_for: dict[str, str] = {}

    def probe(what: str, name: str) -> str:
        text = f"probe_{len(stands_for)}_of_the_template"
        stands_for[text] = f"{what} {name!r:.60}"
        return text

    def renamed(what: str, function: dict[str, Any]) -> dict[str, Any]:
        """Return a tool or a call with a unique text as its name."""
        if "function" in function:
            return {**function, "function": renamed(what, function["function"])}
        return {**function, "name": probe(what, function.get("name", ""))}

    tools = [renamed("the tool", tool) for tool in getattr(messages, "tools", None) or ()]
    probed = []
    for message in messages:
        changed = dict(message)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [renamed("a call of", call) for call in calls]
        if message["role"] == "tool":
            changed["content"] = probe("the reply", message["content"].strip())
        probed.append(changed)
    text = _apply(tokenizer, probed, tokenize=False, tools=tools or None)
    for name, what in stands_for.items():
        if name not in text:
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} leaves out {what} of a prompt."
                " Give a model whose template takes calls of tools, or rows without them;"
                " task=environment plays episodes with tools."
            )
