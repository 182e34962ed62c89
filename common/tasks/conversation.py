"""Conversations in a row, as people have them: TRL's and OpenAI's role and content, ShareGPT's from
and value.
"""

import json
from contextlib import suppress
from typing import Any

from common.config import ConfigError
from common.tasks import Messages
from common.tasks.data import IncompleteError, Row, holds_messages
from common.tasks.rows import told

# The names of roles, and what chat templates call them.
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
KNOWN = ("system", "developer", "user", "assistant")
OF_TOOLS = ("tool", "function", "function_call", "observation")  # roles of calls and replies
KEYS = (("role", "content"), ("from", "value"))


def read(row: Row, field: str, key: str) -> Messages | None:
    """Return the conversation in a field; None where the field holds something else.

    Raises: ConfigError, with the row, for one with a message that is no text.
    """
    found = value = row.get(field, key)
    if isinstance(found, str) and found.lstrip().startswith("[{"):  # as CSV files have them
        with suppress(ValueError, RecursionError):
            value = json.loads(found)
    keys = next((keys for keys in KEYS if holds_messages(value, keys)), None)
    if keys is None:
        return None
    numbered = enumerate(value, start=1)
    return [_message(message, keys, n, row, field, key) for n, message in numbered]


def holds(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return any(holds_messages(value, keys) for keys in KEYS)


def _message(
    message: dict[str, Any], keys: tuple[str, str], number: int, row: Row, field: str, key: str
) -> dict[str, str]:
    name = f"{key}={field!r}: message {number}"
    if message.get("tool_calls") or message[keys[0]] in OF_TOOLS:
        raise ConfigError(
            f"{name} is of a call of a tool in {row.where}, which task=custom does not take. Use"
            " task=environment, or leave out the row."
        )
    role, content = (message[key] for key in keys)
    if isinstance(content, list):  # of parts; those of an image are refused
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if kinds and set(kinds) == {"text"}:
            content = "".join(str(part["text"]) for part in content)
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
    return {"role": known, "content": text}


def split_answer(messages: Messages) -> tuple[Messages, str | None]:
    """Return what comes before the answer that a conversation ends with, and the answer; None where
    it ends with a question.
    """
    if messages[-1]["role"] != "assistant":
        return messages, None
    return messages[:-1], messages[-1]["content"]


def with_system(messages: Messages, system: str) -> Messages:
    """Return a conversation with a system text, where it has none of its own."""
    if not system or (messages[0]["content"].strip() and messages[0]["role"] == "system"):
        return messages
    if messages[0]["role"] == "system":  # an empty one
        messages = messages[1:]
    return [{"role": "system", "content": system}, *messages]


def with_hint(messages: Messages, answer: str) -> Messages:
    """Return a conversation whose last question tells the answer."""
    return [*messages[:-1], {**messages[-1], "content": told(messages[-1]["content"], answer)}]
