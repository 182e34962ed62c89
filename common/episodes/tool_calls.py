"""Calls of tools in a model's answers, parsed by transformers' `parse_response`.

A model calls tools in the form of its chat template, which `Calls.find` finds by rendering a call
and parsing it again. Text in a model's thoughts is no call.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from common.config import ConfigError
from common.model import SENTINEL, as_parts
from common.tasks import MARKS, Behind

# The marks of common/tasks/thoughts.py after which a call of any form may follow; the others belong
# to one form each.
PLAIN = [begin for begin in MARKS if "channel" not in begin]
THOUGHTS = ["<think>", "[THINK]"]  # the marks with which templates begin thoughts
_THINKING = {"open": THOUGHTS, "close": [MARKS[begin] for begin in THOUGHTS]}
_CALL = {"type": "function", "function": "{content}"}  # the content has name and arguments
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _in_tags(key: str, value: str) -> dict[str, Any]:
    """Return the settings that parse arguments in tags as texts, to which the tool's schema gives
    types.
    """
    pattern = rf"{key}\s*{value}"
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}}


# The fields of a `response_template` in which a family of models writes its calls.
FORMS: dict[str, dict[str, Any]] = {
    # Qwen 2.5 and 3, Hermes, SmolLM3 and many others
    "JSON in <tool_call>": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": _CALL,
    },
    # Qwen3-Coder, Qwen 3.5, Nemotron 3
    "<function=NAME> in <tool_call>": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        **_in_tags(r"<parameter=(?P<key>[^>\n]+)>\n?", r"(?P<value>.*?)\n?</parameter>"),
        "repeats": True,
        "transform": _NAMED,
    },
    # GLM 4.5
    "<arg_key> in <tool_call>": {
        "open_pattern": r"<tool_call>(?P<name>[^<\s]+)",
        "close": "</tool_call>",
        **_in_tags("<arg_key>(?P<key>[^<]+)</arg_key>", r"<arg_value>(?P<value>.*?)</arg_value>"),
        "repeats": True,
        "transform": _NAMED,
    },
    # Llama 3: the whole answer
    "an object with name and parameters": {
        "open_pattern": r'\A\s*(?:<\|python_tag\|>)?\{\s*"name":\s*"(?P<name>[^"]+)",'
        r'\s*"parameters":\s*',
        "close_pattern": r"\}\s*(?=<\|eo[tm]_id\|>|\Z)",
        "content": "json",
        "repeats": True,
        "transform": _NAMED,
    },
    # Mistral, up to the tokenizer's version 7
    "[TOOL_CALLS] and a list": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
        "close_pattern": r"(?:</s>|\Z)",
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{arguments}"},
        },
        "transform_each": True,
    },
    # Mistral from version 11 on
    "[TOOL_CALLS]NAME": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)",
        "close_pattern": r"(?:</s>|(?=\[TOOL_CALLS\])|\Z)",
        "content": "json",
        "repeats": True,
        "transform": _NAMED,
    },
    # DeepSeek V3, with arguments in a block of code, and V3.1
    "<｜tool▁call▁begin｜>": {
        "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]+)"
        r"(?:<｜tool▁sep｜>|\s*```json)\s*",
        "close_pattern": r"(?:\s*```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
        "content": "json",
        "repeats": True,
        "transform": _NAMED,
    },
    # gpt-oss: a model writes the receiver after the channel, its template before it
    "<|channel|>commentary": {
        "open_pattern": r"(?:<\|start\|>assistant)?(?:\s*to=functions\.(?P<name>[\w.-]+)"
        r"<\|channel\|>commentary|<\|channel\|>commentary\s+to=functions\.(?P<name>[\w.-]+))"
        r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        "close_pattern": r"(?:<\|call\|>|\Z)",
        "content": "json",
        "repeats": True,
        "transform": _NAMED,
    },
    # Gemma 4
    "<|tool_call>call:NAME": {
        "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        "repeats": True,
        "transform": _NAMED,
    },
}
# The marks of thoughts of the other forms.
_OTHER_THOUGHTS: dict[str, dict[str, Any]] = {
    "<|channel|>commentary": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    "<|tool_call>call:NAME": {"open": "<|channel>thought", "close": "<channel|>"},
}


# The exceptions of a chat template for messages that it refuses.
REFUSED = (TemplateError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Calls:
    """The form in which a model calls tools.

    Attributes:
        tokenizer: the model's tokenizer.
        template: the `response_template` of tokenizer_config.json, or an equivalent one.
        tools: the definitions of the tools, in the format of chat templates.
        as_text: whether the chat template takes the arguments of a call as a JSON text, not an
            object.
    """

    tokenizer: Any
    template: dict[str, Any]
    tools: list[dict[str, Any]]
    as_text: bool = False

    @classmethod
    def find(cls, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> "Calls":
        """Return the form in which a model calls tools: the one that its tokenizer declares, or the
        form of `FORMS` in which its chat template renders a call. Raises: ConfigError if there is
        neither, or if the template shows no tools.
        """
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"tools need a chat template, and the tokenizer {tokenizer.name_or_path!r} has"
                " none. Give an instruction model, or an environment with text steps."
            )
        said = "its chat template shows none to it, or does not write calls in a known form"
        template = getattr(tokenizer, "response_template", None)
        for as_text in (False, True):
            calls = cls(tokenizer, template or {}, [*tools], as_text)
            try:
                shown = calls.tools[0]["function"]["name"] in calls.render([])
                found = template or (calls._recognise() if shown else None)
            except REFUSED as error:
                if not as_text:
                    said = f"its chat template refuses a call: {error}"
                continue
            if shown and found is not None:
                return cls(tokenizer, found, [*tools], as_text)
        raise ConfigError(
            f"the model of {tokenizer.name_or_path!r} cannot call tools: {said}. Forms that are"
            f" known: {'; '.join(FORMS)}. Give a model that can, add response_template to its"
            " tokenizer_config.json, or use text steps."
        )

    def render(self, behind: Sequence[dict[str, Any]], begin: bool = False) -> str:
        """Return the text of a question followed by the messages `behind`.

        Args: begin: whether to append the beginning of the next answer.
        """
        messages = [{"role": "user", "content": "?"}, *behind]
        return render_chat(self.tokenizer, messages, self.tools, begin)

    def message(self, count: int = 1, value: Any = SENTINEL) -> dict[str, Any]:
        """Return an answer that calls a tool `count` times.

        Args: value: the value of its argument.
        """
        arguments: Any = {"x": value}
        function = {
            "name": self.tools[0]["function"]["name"],
            "arguments": json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments,
        }
        calls = [
            {"id": identify(number), "type": "function", "function": function}
            for number in range(count)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def render_replies(
        self, replies: Sequence[dict[str, Any]], end: str, ends: Sequence[str]
    ) -> str:
        """Return the text that follows an answer whose calls get these replies, up to the beginning
        of the next answer.

        Args:
            end: the text of the token that the answer ended with, which is left out.
            ends: the texts of all tokens that may end a turn, in case the template writes another
                one.
        """
        called = sum(
            reply["role"] == "tool" for reply in replies
        )  # given rows may also have users' turns
        answered = [
            {**reply, "tool_call_id": identify(n)} if reply["role"] == "tool" else reply
            for n, reply in enumerate(replies)
        ]
        text = self.render([self.message(called), *answered], begin=True)
        behind = text.rpartition(SENTINEL)[2]
        if end and end in behind:
            return behind.partition(end)[2]
        closing = self.render([self.message(called)]).rpartition(SENTINEL)[2]
        cut = min((closing.find(one) for one in ends if one in closing), default=len(closing))
        return behind[cut:]

    def _recognise(self) -> dict[str, Any] | None:
        """Return the template of the form in which the chat template renders a call; None if no
        form parses it.
        """
        asked, anchor = self.render([]), find_anchor(self.tokenizer, self.tools)
        wanted = [{"x": SENTINEL}]
        answer = self.render([self.message()]).removeprefix(asked).removeprefix(anchor)
        for template in _templates(anchor):
            try:
                parsed = self.tokenizer.parse_response(answer, template, prefix=anchor)
                calls = parsed.get("tool_calls") or []
                if [_arguments(call["function"]) for call in calls] == wanted:
                    return template
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
        return None

    def read(self, ids: Sequence[int], before: Sequence[int]) -> dict[str, Any]:
        """Return the calls of an answer under `tool_calls`; if they cannot be parsed, the reason
        under `error`; an empty dict if there are none.

        Args: ids: the tokens of the answer; before: all tokens before it.
        """
        text, start = (
            self.tokenizer.decode(list(part), skip_special_tokens=False) for part in (ids, before)
        )
        answer, start = _end_thoughts(text, start)
        try:
            parsed = self.tokenizer.parse_response(
                answer, self.template, prefix=start, tools=self.tools
            )
            calls = parsed.get("tool_calls") or []
            for call in calls:
                call["function"]["arguments"] = _arguments(call["function"])
                call["function"]["name"].lower()  # a text
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return {"error": f"the call cannot be read: {error}"}
        return {"tool_calls": calls} if calls else {}


def _end_thoughts(text: str, before: str) -> tuple[str, str]:
    """Return the part of an answer after its thoughts, and the prompt without the mark that begins
    them. The marks are `PLAIN`.
    """
    for begin in PLAIN:
        begun = before.rstrip().endswith(begin)
        if begun or begin in text or MARKS[begin] in text:
            text = Behind(MARKS[begin], begin, begun)(text)
        if begun:
            before = before.rstrip().removesuffix(begin)
    return text, before


def render_chat(
    tokenizer: Any, messages: Sequence[Any], tools: Sequence[Any] = (), begin: bool = False
) -> str:
    """Return messages as rendered by the chat template.

    Args: begin: whether to append the beginning of the next answer.
    """
    return tokenizer.apply_chat_template(
        as_parts(tokenizer, messages),
        tools=[*tools] or None,
        tokenize=False,
        add_generation_prompt=begin,
    )


def find_anchor(tokenizer: Any, tools: Sequence[Any] = ()) -> str:
    """Return the text that an answer begins with, without the beginning of thoughts."""
    asked = [{"role": "user", "content": "?"}]
    whole = render_chat(tokenizer, asked, tools, begin=True)
    header = whole.removeprefix(render_chat(tokenizer, asked, tools))
    for mark in THOUGHTS:
        header = header.partition(mark)[0]
    return header


def identify(number: int) -> str:
    """Return the id of call number `number` of an answer, in the format that Mistral requires."""
    return f"call{number:05d}"


def _templates(anchor: str) -> Iterator[dict[str, Any]]:
    """Yield a `response_template` for each form.

    Args: anchor: the text that an answer begins with; if it is empty, as with Mistral, the answer
    begins at the end of the prompt.
    """
    for name, form in FORMS.items():
        fields = {"thinking": _OTHER_THOUGHTS.get(name, _THINKING), "tool_calls": form}
        begin = {"start_anchor": anchor} if anchor else {"start_anchor_pattern": r"\Z"}
        yield {"fields": {**fields, "content": {}}, **begin}


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call. Raises: ValueError if they are no object."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return arguments
