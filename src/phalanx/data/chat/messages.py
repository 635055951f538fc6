"""Conversations in rows of data: checked, and written as one line of JSON, which is the text of a document.

A row has a list of messages, each with a ``role`` and a ``content``; whatever else a message has (``tool_calls``, ``name``) is the template's
business and goes with it, as does the row's list of ``tools``. The older form of ShareGPT, ``from`` and ``value``, is read as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

ASSISTANT = "assistant"
TOOLS = "tools"
"""The field of a row that lists the tools that the assistant was offered."""
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "system": "system",
    "user": "user",
    ASSISTANT: ASSISTANT,
}
_HALF_PAIR = re.compile("[\ud800-\udfff]")

Message = dict[str, object]


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that the assistant was offered."""

    messages: list[Message]
    tools: list[object] | None = None


def conversation_text(row: Mapping[str, object], field: str) -> str:
    """The conversation in a row, whose messages are in ``field``, as one line of JSON. Raises ``ValueError`` with what is wrong with it."""
    if field not in row:
        raise ValueError(f"has no field {field!r}")
    messages = [_message(number, message) for number, message in enumerate(_list(row[field], field), 1)]
    if all(message["role"] != ASSISTANT for message in messages):
        raise ValueError(
            f"has no message of the {ASSISTANT} in {field!r}, of which there would be something to learn"
        )
    tools = row.get(TOOLS)
    if isinstance(tools, str):  # tables keep what has no fixed form as JSON
        tools = json.loads(tools) if tools.strip() else None
    content = {"messages": messages, **({TOOLS: _list(tools, TOOLS)} if tools else {})}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if half := _HALF_PAIR.search(text):
        raise ValueError(f"holds \\u{ord(half[0]):04x}, half of a pair of surrogates, which is no character")
    return text


def read_conversation(text: str) -> Conversation:
    """What ``conversation_text`` wrote."""
    content = json.loads(text)
    return Conversation(content["messages"], content.get(TOOLS))


def strings_in(value: object) -> Iterator[str]:
    """All texts in a value of JSON, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)


def _list(value: object, field: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"its {field!r} is no list, or an empty one")
    return value


def _message(number: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is no object with role and content")
    message = {
        name: value for name, value in message.items() if value is not None
    }  # tables have all fields in all rows
    if "from" in message and "role" not in message:
        role = _SHAREGPT_ROLES.get(str(message["from"]))
        if role is None or not isinstance(message.get("value"), str):
            raise ValueError(
                f"message {number} is from {message['from']!r}; known are {', '.join(_SHAREGPT_ROLES)}, each with a value"
            )
        return {"role": role, "content": message["value"]}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise ValueError(f"message {number} has no content")
        return {**message, "content": None}
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"message {number} has a part of type {kind!r}; only text can be trained on")
    elif not isinstance(content, str):
        raise ValueError(f"message {number} has a content that is no text")
    return message
