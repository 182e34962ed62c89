"""Given conversations as token ids, with the marks of the model's own turns, as episodes have them:
the model's turns carry loss, and what comes between them does not.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from common.config import ConfigError
from common.episodes.episodes import Turns
from common.episodes.tool_calls import REFUSED, THOUGHTS, Calls, find_anchor
from common.model import Decoder, Encoder, encode_prompts, render
from common.task import Conversation, Messages
from common.tasks import MARKS

ASKED: Messages = [{"role": "user", "content": "?"}]
UNTRAINED = "weight"  # OpenAI's key of a message; 0 = it carries no loss


@dataclass
class Given:
    """A conversation as token ids.

    Attributes:
        prompt: the tokens before the model's first turn.
        tokens: the tokens after it.
        trains: per token, whether it is of the model's turns, with the token that ends each.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    trains: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], trains: bool) -> None:
        """Append tokens."""
        self.tokens.extend(ids)
        self.trains.extend([trains] * len(ids))


class Transcriber:
    """Turns given answers and conversations into token ids.

    Args:
        decode: the decoder of the model's tokens.
        stops: the ids of the tokens at which sampling stops.
    Raises: ConfigError if there are none.
    """

    def __init__(self, decode: Decoder, stops: Sequence[int]) -> None:
        self.decode, self.tokenizer, self.stops = decode, decode.tokenizer, frozenset(stops)
        self.encode = Encoder(decode.tokenizer)
        if not stops:
            raise ConfigError(
                f"the tokenizer of {self.tokenizer.name_or_path!r} has no end of text, which an"
                " answer must end with. Give another model."
            )
        eos = self.tokenizer.eos_token_id
        self.end: int = eos if eos in self.stops else min(stops)
        texts = {token: self.tokenizer.decode([token]) for token in decode.ends}
        self.begun, self.calls = dict[str, tuple[str, str]](), dict[str, Calls | None]()
        self.ends = {text: token for token, text in texts.items() if text.strip()}

    def answer(self, prompt: str, answer: str) -> Given:
        """Return a text and its answer."""
        given = Given(encode_prompts(self.tokenizer, [prompt])[0])
        given.add([*self.encode([answer])[0], self.end], True)
        return given

    def converse(
        self, messages: Messages, first: int, tools: Sequence[dict[str, Any]] = ()
    ) -> Given:
        """Return a conversation. Turns are rendered one after the other, as in an episode that is
        played, so that a template which drops the thoughts of earlier turns keeps them. A turn ends
        with a token at which sampling stops.

        Args:
            first: the index of the first message of the model's that carries loss.
            tools: the tools that it may call, in the format of chat templates.
        Raises: ConfigError if the chat template refuses the conversation.
        """
        offered = list(tools)
        asked = _offer(messages[:first], offered)
        given = Given(encode_prompts(self.tokenizer, [asked])[0])
        said = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
        for at, following in zip(said, [*said[1:], None], strict=True):
            text, end = self._say(messages[at], offered)
            given.add([*self.encode([text])[0], end], messages[at].get(UNTRAINED) != 0)
            if following is not None:
                between = messages[at + 1 : following]
                given.add(self._reply(between, offered, end), False)
        return given

    def _say(self, message: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, int]:
        """Return the text of a message as the model would have written it, and the token that ends
        it.
        """
        if self.tokenizer.chat_template is None:
            return message["content"], self.end
        begun, opened = self._begin(tools)
        whole = render(self.tokenizer, _offer([*ASKED, message], tools), begin=False)
        text = message["content"]
        if whole.startswith(begun):
            text = _after_thoughts(whole.removeprefix(begun), opened)
        for call in message.get("tool_calls", ()):
            if (name := call["function"]["name"]) not in text:
                raise ConfigError(
                    f"the chat template of {self.tokenizer.name_or_path!r} leaves out a call of"
                    f" {name!r:.60}, or begins it otherwise than it asks for an answer, so that"
                    " the model's own part cannot be found. Give another model, or rows without"
                    " calls."
                )
        bare = text.rstrip()
        ends = [end for end in self.ends if bare.endswith(end)]
        if not ends:
            return text, self.end
        end = max(ends, key=len)
        token = self.ends[end]
        return bare.removesuffix(end), token if token in self.stops else self.end

    def _begin(self, tools: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the text before an answer, and the beginning of thoughts behind it that the
        template writes for the model, if it does.
        """
        if (key := repr(tools)) not in self.begun:
            asked = _offer(ASKED, tools)
            begun = render(self.tokenizer, asked, begin=False) + find_anchor(self.tokenizer, tools)
            self.begun[key] = begun, render(self.tokenizer, asked).removeprefix(begun)
        return self.begun[key]

    def _reply(self, replies: Messages, tools: list[dict[str, Any]], end: int) -> list[int]:
        """Return the tokens between two turns of the model.

        Args: end: the token that ended the first of them.
        """
        calls = None
        if any(message["role"] == "tool" for message in replies) and tools:
            calls = self._find_calls(tools)
        try:
            return Turns(None, self.decode, (), calls).render(replies, end)
        except REFUSED as error:
            roles = ", ".join(message["role"] for message in replies)
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses messages of the"
                f" roles {roles} behind an answer: {error}. Leave out these rows, or give another"
                " model."
            ) from error

    def _find_calls(self, tools: list[dict[str, Any]]) -> Calls | None:
        """Return the form of calls; None if it is not known, since no call is read here."""
        if (key := repr(tools)) not in self.calls:
            with suppress(ConfigError):
                self.calls[key] = Calls.find(self.tokenizer, tools)
        return self.calls.setdefault(key, None)


def _offer(messages: Messages, tools: list[dict[str, Any]]) -> Messages:
    return Conversation(messages, tools) if tools else messages


def _after_thoughts(text: str, opened: str) -> str:
    """Return an answer behind the beginning of thoughts that a prompt ends with: an answer without
    thoughts closes them.
    """
    if not opened or text.startswith(opened):
        return text.removeprefix(opened)
    begin = next((mark for mark in THOUGHTS if opened.rstrip().endswith(mark)), None)
    if begin is None:  # they are closed already
        return text
    if text.startswith(begin):
        return text.removeprefix(begin)
    return text if MARKS[begin] in text else f"\n{MARKS[begin]}\n\n{text}"
