"""Request bodies of OpenAI's two interfaces: known fields are typed and bounded, all others are refused by name.

A field that is silently ignored gives text that the client did not request. So unknown fields are refused, and fields of OpenAI's interface
that are not implemented are refused with the remedy, except where their value is neutral (``"tools": []``).
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct


class RefusedError(ValueError):
    """The server refused a request, with an HTTP status and the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str = "", retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.retry_after = param, status, code, retry_after


Count = Annotated[int, Meta(ge=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: with ``include_usage``, each event has the usage so far; programs that measure servers count tokens by it."""


class Common(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both interfaces have."""

    model: str
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    choice: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """The number of the first choice: one of ``n`` can be requested alone."""
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    prompt_logprobs: bool | Annotated[int, Meta(ge=0, le=0)] | None = None
    user: str | None = None


BodyT = TypeVar("BodyT", bound="Common")


class Completion(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class ChatMessage(Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class Chat(Common, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), "describe the tools in a message, and read the answer yourself"),
    "tool_choice": (("none", "auto"), "leave it out"),
    "parallel_tool_calls": ((True, False), "leave it out"),
    "functions": (([],), "describe the functions in a message"),
    "function_call": (("none", "auto"), "leave it out"),
    "response_format": (({"type": "text"},), "ask for the form in a message, and check the answer"),
    "logit_bias": (({},), "leave it out"),
    "presence_penalty": ((0,), "use temperature, top_p or min_p"),
    "frequency_penalty": ((0,), "use temperature, top_p or min_p"),
    "repetition_penalty": ((1,), "use temperature, top_p or min_p"),
    "best_of": ((1,), "ask for n and choose by logprobs"),
    "suffix": (("",), "write what comes before into the prompt"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens"),
    "modalities": ((["text"],), "ask for text"),
    "audio": ((), "ask for text"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": ((), "leave it out"),
    "service_tier": (("auto", "default"), "leave it out"),
    "store": ((False,), "keep the answer yourself"),
    "metadata": (({},), "keep it beside the answer's id"),
    "web_search_options": ((), "leave it out"),
}


def read_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Decode a request's body. Raises RefusedError, which names the field."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError("the body must be a JSON object")
    names = set(kind.__struct_fields__)
    for name in list(fields):
        if name in _UNSUPPORTED:
            harmless, remedy = _UNSUPPORTED[name]
            if fields[name] is not None and fields[name] not in harmless:
                raise RefusedError(f"{name} is not done here: {remedy}", name, code="unsupported_parameter")
            del fields[name]
        elif name not in names:
            raise RefusedError(f"unknown field {name[:100]!r}", name[:100], code="unknown_parameter")
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        match = re.search(r"`\$\.(\w+)|(?:required|unknown) field `(\w+)`", str(error))
        param = (match[1] or match[2]) if match else None
        raise RefusedError(str(error), param, 422 if "range" in str(error) else 400) from error


def seed_of(body: Common) -> int:
    """Return the request's seed, or a new one; the response's id contains it."""
    return secrets.randbits(48) if body.seed is None else body.seed % 2**63


def stops_of(body: Common) -> list[str]:
    """Return the stop strings. Raises RefusedError."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > 16 or any(not stop or len(stop) > 1000 for stop in stops):
        raise RefusedError("stop: at most 16 strings of 1 to 1000 characters", "stop")
    return stops


def prompts_of(body: Completion) -> list[str | list[int]]:
    """Return the prompts of a completion, each text or ids. Raises RefusedError."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RefusedError("prompt: an empty list", "prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return [ids]
    rest = [part for part in prompt if not isinstance(part, int)]
    if ids or len({type(part) for part in rest}) > 1:
        raise RefusedError("prompt: either texts, or ids, or lists of ids", "prompt")
    return rest
