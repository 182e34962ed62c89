"""Conversations in a row, in the common formats: TRL's and OpenAI's role and content, ShareGPT's
from and value, with tool calls and their replies.
"""

import json
from contextlib import suppress
from typing import Any

from common.config import ConfigError
from common.task import Messages
from common.tasks.base import told
from common.tasks.data import IncompleteError, Row, holds_messages

# The names of roles -> their names in chat templates.
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
ROLES |= {"function": "tool", "observation": "tool", "function_call": "assistant"}
KNOWN = ("system", "developer", "user", "assistant", "tool")
CALL = "function_call"  # ShareGPT's role of a message that is a call
OF_CALLS = ("tool_call_id", "name")  # further keys of a tool's reply
KEYS = (("role", "content"), ("from", "value"))


def read(row: Row, field: str, key: str) -> Messages | None:
    """Return the conversation in a field; None if the field holds another value.

    Raises: ConfigError, with the row, for a message that is no text.
    """
    found = value = row.get(field, key)
    if isinstance(found, str) and found.lstrip().startswith("[{"):  # as CSV files have them
        with suppress(ValueError, RecursionError):
            value = json.loads(found)
    keys = next((keys for keys in KEYS if holds_messages(value, keys)), None)
    if keys is None:
        return None
    numbered = enumerate(value, start=1)
    messages = [_message(message, keys, n, row, field, key) for n, message in numbered]
    system = row.whole.get("system")
    if keys == KEYS[1] and isinstance(system, str) and system.strip():  # ShareGPT's column
        return with_system(messages, system)
    return messages


def read_tools(row: Row) -> list[dict[str, Any]]:
    """Return the tools that a row offers, in the format of chat templates: TRL's column `tools`, a
    list of descriptions or its JSON. Empty if there is none.

    Raises: ConfigError, with the row, for a tool without a name.
    """
    found = row.whole.get("tools")
    if isinstance(found, str) and found.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(found)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return []  # a column of something else
    tools = [_present(one) for one in found]
    if any(not isinstance(tool_name(one), str) for one in tools):
        raise ConfigError(
            f"the column tools has a tool without a name in {row.where}. Give each as"
            ' {"type": "function", "function": {"name": ..., "parameters": ...}}, or rename the'
            " column."
        )
    return tools


def tool_name(tool: dict[str, Any]) -> Any:
    """Return the name of a tool, or of a call; None if it has none."""
    inner = tool.get("function", tool)
    return inner.get("name") if isinstance(inner, dict) else None


def _present(value: Any) -> Any:
    """Return a value without keys that are null, with which Parquet pads objects."""
    if isinstance(value, dict):
        return {key: _present(one) for key, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value


def _read_calls(given: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects. Raises: ConfigError."""
    calls: list[Any] = given if isinstance(given, list) else [given]
    taken: list[dict[str, Any]] = []
    for call in calls:
        inner: Any = call.get("function", call) if isinstance(call, dict) else {}
        inner = inner if isinstance(inner, dict) else {}
        arguments = inner.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments or "{}")
        arguments = {} if arguments is None else arguments
        if not isinstance(inner.get("name"), str) or not inner["name"]:
            raise ConfigError(
                f"{name} calls a tool without a name in {where}: {call!r:.60}. Fix or remove the"
                " row."
            )
        if not isinstance(arguments, dict):
            raise ConfigError(
                f"{name} calls {inner['name']} with arguments that are no object in {where}:"
                f" {arguments!r:.60}. Fix or remove the row."
            )
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": inner["name"], "arguments": _present(arguments)}
        taken.append({**own, "type": "function", "function": function})
    return taken


def holds(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return any(holds_messages(value, keys) for keys in KEYS)


def _message(
    message: dict[str, Any], keys: tuple[str, str], number: int, row: Row, field: str, key: str
) -> dict[str, Any]:
    name = f"{key}={field!r}: message {number}"
    role, content = (message[key] for key in keys)
    if isinstance(content, list):  # of parts; those of an image are refused
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if kinds and set(kinds) == {"text"}:
            content = "".join(str(part["text"]) for part in content)
    given, more = message.get("tool_calls"), {}
    if role == CALL and isinstance(content, str):
        try:
            given, content = json.loads(content), ""
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{name} is no call of a tool in {row.where}, but {content!r:.60}. Write it as"
                ' {"name": ..., "arguments": {...}}.'
            ) from None
    if given:
        more["tool_calls"] = _read_calls(given, name, row.where)
        content = content or ""
    if not isinstance(role, str) or not role.strip():
        raise ConfigError(f"{name} has no role in {row.where}. Fix or remove the row.")
    if not isinstance(content, str):
        raise ConfigError(
            f"{name} is not a text in {row.where}, but {type(content).__name__}: {content!r:.60}."
            " Fix or remove the row."
        )
    if not content.strip() and role in ("user", "human"):
        raise IncompleteError(f"{name} is empty in {row.where}. Fix or remove the row.")
    if (known := ROLES.get(role.lower(), role.lower())) not in KNOWN:
        raise ConfigError(
            f"{name} has the role {role!r} in {row.where}. Roles: {', '.join(KNOWN)}, and those of"
            f" ShareGPT: {', '.join(ROLES)}."
        )
    text = Row(row.where, {field: content}).text(field, key, blank=True)
    if known == "assistant" and message.get("weight") == 0:  # OpenAI's: not learnt from
        more["weight"] = 0
    if known == "tool":
        more |= {n: message[n] for n in OF_CALLS if isinstance(message.get(n), str)}
    return {"role": known, "content": text, **more}


def split_answer(messages: Messages) -> tuple[Messages, str | None]:
    """Return the messages before the answer that a conversation ends with, and the answer; None if
    it ends with a question, or with a tool call, which is no text.
    """
    if messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        return messages, None
    return messages[:-1], messages[-1]["content"]


def with_system(messages: Messages, system: str) -> Messages:
    """Return a conversation with a system text, unless it has one of its own."""
    if not system or (messages[0]["content"].strip() and messages[0]["role"] == "system"):
        return messages
    if messages[0]["role"] == "system":  # an empty one
        messages = messages[1:]
    return [{"role": "system", "content": system}, *messages]


def with_hint(messages: Messages, answer: str) -> Messages:
    """Return a conversation with the answer in its last question."""
    return [*messages[:-1], {**messages[-1], "content": told(messages[-1]["content"], answer)}]
