"""Conversations in rows of data: validated and stored as one line of JSON, which is the text of a document.

A row has a list of messages, each with a ``role`` and a ``content``. Other fields of a message (``tool_calls``, ``name``) and the row's list
of ``tools`` are passed to the template. The older ShareGPT form with ``from`` and ``value`` is supported too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from phalanx.run.directory.files import unique_keys

ASSISTANT = "assistant"
TOOLS = "tools"
"""The field of a row that lists the tools the assistant could use."""
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "system": "system",
    "user": "user",
    ASSISTANT: ASSISTANT,
}
_TRAINED_IF = ("weight", "train")
"""Fields of a message of the assistant that others' trainers learn from if it is 1 or true: OpenAI's and axolotl's."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a pair of surrogates, which is no character: JSON can write it, UTF-8 cannot."""

Message = dict[str, object]


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools the assistant could use."""

    messages: list[Message]
    tools: list[object] | None = None


def conversation_text(row: Mapping[str, object], field: str) -> str:
    """Return a row's conversation as one line of JSON: messages from ``field``, and tools if the row has any, as a list or its JSON text.

    ShareGPT messages ("from", "value") become "role" and "content". Null fields of messages are removed, but with tool calls a missing
    content is null. Parts of text are joined, and the arguments of calls parsed.

    Raises ``ValueError`` with the reason if the conversation is malformed, has no message of the assistant, or has one that is marked as
    not to be trained on.
    """
    if field not in row:
        raise ValueError(f"has no field {field!r}")
    messages = [_message(number, message) for number, message in enumerate(_list(row[field], field), 1)]
    if all(message["role"] != ASSISTANT for message in messages):
        raise ValueError(f"has no message of the {ASSISTANT} in {field!r} to train on")
    tools = row.get(TOOLS)
    if isinstance(tools, str):  # tables store values without a fixed schema as JSON
        tools = json.loads(tools, object_pairs_hook=unique_keys) if tools.strip() else None
    content = {"messages": messages, **({TOOLS: _list(tools, TOOLS)} if tools else {})}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if half := HALF_PAIR.search(text):
        raise ValueError(f"holds \\u{ord(half[0]):04x}, half of a pair of surrogates, which is no character")
    return text


def read_conversation(text: str) -> Conversation:
    """Parse a line that ``conversation_text`` wrote."""
    content = json.loads(text)
    return Conversation(content["messages"], content.get(TOOLS))


def parsed_call(call: object) -> object:
    """Return a tool call with its arguments as an object, as templates expect them: OpenAI's interface has them as JSON text.

    Null and an empty text are no arguments, as in vLLM. Raises ``ValueError`` for a call without a function, and for malformed arguments.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ValueError("each with a function")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"arguments that are no JSON: {error}") from error
    return call | {"function": function | {"arguments": parsed}}


def strings_in(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, including field names."""
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
    """Return ``value``. Raises ``ValueError`` unless it is a list that is not empty."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"its {field!r} is no list, or an empty one")
    return value


def _message(number: int, message: object) -> Message:
    """Return a message with role and content, without null fields.

    Fields of ShareGPT are converted, and parts of text joined. With tool calls, the content may be absent. ``number``
    is for error messages. Raises ``ValueError`` without a role or with an unknown ShareGPT author, for content that is
    not text, for malformed calls, and for an assistant's message that is marked as not to be trained on.
    """
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is no object with role and content")
    message = {
        name: value for name, value in message.items() if value is not None
    }  # tables have all fields in all rows
    author = message.get("role", _SHAREGPT_ROLES.get(str(message.get("from"))))
    skipped = [field for field in _TRAINED_IF if message.get(field, 1) != 1]
    if author == ASSISTANT and skipped:
        raise ValueError(
            f"message {number} is not to be trained on ({skipped[0]}), and every message of the {ASSISTANT} is; end the conversation before it"
        )
    if "from" in message and "role" not in message:
        role = _SHAREGPT_ROLES.get(str(message["from"]))
        if role is None or not isinstance(message.get("value"), str):
            raise ValueError(
                f"message {number} is from {message['from']!r}; known are {', '.join(_SHAREGPT_ROLES)}, each with a value"
            )
        return {"role": role, "content": message["value"]}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        try:
            message["tool_calls"] = [
                parsed_call(call) if isinstance(call, dict) and "function" in call else call for call in calls
            ]
        except ValueError as error:
            raise ValueError(f"message {number} has tool_calls: {error}") from error
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
        # As it is served: a template that trims or appends a content would write a list as Python does.
        return {**message, "content": "".join(part["text"] for part in content)}
    if not isinstance(content, str):
        raise ValueError(f"message {number} has a content that is no text")
    return message
