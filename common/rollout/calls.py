"""Calls of tools in what a model writes, read by transformers' own `parse_response`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from common.config import ConfigError

# How Qwen, Hermes and many others call: <tool_call>{"name": ..., "arguments": ...}</tool_call>.
HERMES = {
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    }
}


@dataclass(frozen=True)
class Calls:
    """The form in which a model calls tools.

    Attributes: template: the `response_template` of tokenizer_config.json, or one like it; tools:
    as chat templates take them.
    """

    tokenizer: Any
    template: dict[str, Any]
    tools: list[dict[str, Any]]

    @classmethod
    def find(cls, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> "Calls":
        """Return how a model calls tools: as its tokenizer says, or as its chat template renders a
        call. Raises: ConfigError where neither tells, or the template shows no tools.
        """
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"tools need a chat template, and the tokenizer {tokenizer.name_or_path!r} has"
                " none. Give an instruction model, or an environment with text steps."
            )
        call = {"name": "probe", "arguments": {"x": 1}}
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        ]
        try:
            text = tokenizer.apply_chat_template(turns, tools=[*tools], tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            text = str(error)
        template = getattr(tokenizer, "response_template", None)
        between = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
        if template is None and _is_call(between, call):
            texts = [
                tokenizer.apply_chat_template(
                    turns[:1], tokenize=False, add_generation_prompt=begun
                )
                for begun in (False, True)
            ]
            template = HERMES | {"start_anchor": texts[1].removeprefix(texts[0])}
        if template is None or tools[0]["function"]["name"] not in text:
            raise ConfigError(
                f"the model of {tokenizer.name_or_path!r} cannot call tools: its chat template"
                " shows none to it, or does not write calls in a known form. Give a model that"
                " can, add response_template to its tokenizer_config.json, or use text steps."
            )
        return cls(tokenizer, template, [*tools])

    def read(self, ids: Sequence[int], before: Sequence[int]) -> dict[str, Any]:
        """Return an answer as a message, with its calls under `tool_calls`; where these cannot be
        read, with the reason under `error`.

        ids: of the answer; before: of all that comes before it.
        """
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        try:
            parsed = self.tokenizer.parse_response(
                list(ids), self.template, prefix=list(before), tools=self.tools
            )
            calls = [call["function"] for call in parsed.get("tool_calls") or ()]
            if any(not isinstance(call.get("arguments", {}), dict) for call in calls):
                raise ValueError("the arguments of a call are an object")
            names = [call["name"] for call in calls]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return message | {"error": f"the call cannot be read: {error}"}
        if not names:
            return message
        return message | {"tool_calls": parsed["tool_calls"]}


def _is_call(text: str, call: dict[str, Any]) -> bool:
    try:
        return json.loads(text) == call
    except (ValueError, RecursionError):
        return False
