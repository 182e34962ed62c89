"""Given conversations as token ids, with the marks of the model's own turns, as episodes have them:
the model's turns carry loss, and what comes between them does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.config import ConfigError
from common.episodes.episodes import Turns
from common.episodes.tool_calls import REFUSED, Calls, render_chat
from common.model import SENTINEL, Decoder, encode_prompts
from common.task import Conversation, Messages


@dataclass(frozen=True)
class Given:
    """A conversation as token ids.

    Attributes:
        prompt: the tokens before the model's first turn.
        tokens: the tokens after it.
        trains: per token, whether it is of the model's turns, with the token that ends each.
    """

    prompt: list[int]
    tokens: list[int]
    trains: list[bool]


def encode_given(
    decode: Decoder, messages: Messages, first: int, tools: Sequence[dict[str, Any]] = ()
) -> Given:
    """Return a conversation as token ids. Turns are rendered one after the other, as in an episode
    that is played, so that a template which drops the thoughts of earlier turns keeps them.

    Args:
        first: the index of the first message of the model's that carries loss.
        tools: the tools that it may call, in the format of chat templates.
    Raises: ConfigError if the chat template refuses the conversation.
    """
    tokenizer = decode.tokenizer
    before = messages[:first]
    asked = Conversation(before, list(tools)) if tools else before
    calls = Calls.find(tokenizer, tools) if tools else None
    turns, end = Turns(None, decode, (), calls), find_end(decode)
    given = Given(encode_prompts(tokenizer, [asked])[0], [], [])

    def add(ids: Sequence[int], trains: bool) -> None:
        given.tokens.extend(ids)
        given.trains.extend([trains] * len(ids))

    at = first
    while True:
        text = _said(decode, messages[: at + 1], tools, end)
        add([*encode_answer(tokenizer, text), end], True)
        later = (n for n in range(at + 1, len(messages)) if messages[n]["role"] == "assistant")
        following = next(later, None)
        if following is None:
            return given
        add(turns.render(messages[at + 1 : following], end), False)
        at = following


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of an answer, without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def find_end(decode: Decoder) -> int:
    """Return the token that ends a turn: the one that the chat template puts after an answer, or
    the tokenizer's end of text. Raises: ConfigError if there is none.
    """
    tokenizer = decode.tokenizer
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SENTINEL}]
        behind = render_chat(tokenizer, turns).rpartition(SENTINEL)[2].lstrip()
        texts = {token: tokenizer.decode([token]) for token in decode.ends}
        found = [token for token, text in texts.items() if text and behind.startswith(text)]
        if found:
            return max(found, key=lambda token: len(texts[token]))
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no end of text, which an answer must"
            " end with. Give another model."
        )
    return int(tokenizer.eos_token_id)


def _said(decode: Decoder, messages: Messages, tools: Sequence[dict[str, Any]], end: int) -> str:
    """Return the text of the last message as the model would have written it, without the token
    that ends it.
    """
    tokenizer = decode.tokenizer
    if tokenizer.chat_template is None:
        return messages[-1]["content"]
    try:
        begun = render_chat(tokenizer, messages[:-1], tools, begin=True)
        whole = render_chat(tokenizer, messages, tools)
    except REFUSED as error:
        raise ConfigError(f"the chat template refuses a conversation: {error}") from error
    if not whole.startswith(begun):  # it begins an answer with thoughts that the answer lacks
        return messages[-1]["content"]
    text = whole.removeprefix(begun)
    before, found, _ = text.rpartition(tokenizer.decode([end]))
    return before if found else text
