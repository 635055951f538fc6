"""Request bodies of OpenAI's two interfaces, and of vLLM's for ids: known fields are typed and bounded, all others are refused by name.

A field that is silently ignored gives text that the client did not request. So unknown fields are refused, and fields of OpenAI's and vLLM's
interfaces that are not implemented are refused with the remedy, except where their value is neutral (``"logit_bias": {}``).
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from phalanx.data.chat.messages import HALF_PAIR, strings_in
from phalanx.run.directory.files import RepeatedKeyError, unique_keys


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


BodyT = TypeVar("BodyT", bound=Struct)


class Completion(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 scores an echoed prompt and generates nothing."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    """As many as ``n``: no text is computed to be left out."""


class Chat(Common, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """False ends the prompt behind the last message; the default begins an answer, unless ``continue_final_message``."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as ``enable_thinking``."""
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class Tokenize(Struct, kw_only=True):
    """vLLM's request for the ids of a text; for those of a conversation it is a ``Chat``."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    """False leaves out what begins a text."""


class Detokenize(Struct, kw_only=True):
    """vLLM's request for the text of ids."""

    tokens: list[int]
    model: str | None = None


_UNUSED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "metadata")
"""Fields for storage and billing, which change no text: any value is accepted."""
_NO_GUIDE = "ask for the form in a message or in the prompt, and check the answer"
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "tool_choice": (("none", "auto"), "read from the text whether the model calls a tool"),
    "parallel_tool_calls": ((True, False), "leave it out"),
    "functions": (([],), "give tools"),
    "function_call": (("none", "auto"), "leave it out"),
    "response_format": (({"type": "text"},), _NO_GUIDE),
    **dict.fromkeys(
        (*("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
        ((), _NO_GUIDE),
    ),
    "logit_bias": (({},), "leave it out"),
    "presence_penalty": ((0,), "use temperature, top_p or min_p"),
    "frequency_penalty": ((0,), "use temperature, top_p or min_p"),
    "repetition_penalty": ((1,), "use temperature, top_p or min_p"),
    "length_penalty": ((1,), "leave it out"),
    "use_beam_search": ((False,), "ask for n and choose by logprobs"),
    "suffix": (("",), "write what comes before into the prompt"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens"),
    "stop_token_ids": (([],), "use stop, with the tokens' text"),
    "include_stop_str_in_output": ((False,), "append the stop string yourself"),
    "skip_special_tokens": ((True,), "use return_token_ids"),
    "spaces_between_special_tokens": ((True,), "use return_token_ids"),
    "bad_words": (([],), "leave it out"),
    "allowed_token_ids": ((), "leave it out"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "priority": ((0,), "leave it out"),
    "documents": (([],), "write them into a message"),
    "modalities": ((["text"],), "ask for text"),
    "audio": ((), "ask for text"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": ((), "use chat_template_kwargs, with a variable that the model's chat template has"),
    "verbosity": ((), "leave it out"),
    "service_tier": (("auto", "default"), "leave it out"),
    "web_search_options": ((), "leave it out"),
}
"""Fields that are not implemented: the values that change nothing, and the remedy for all others."""
_UNSUPPORTED_BY_KIND: dict[type[Struct], dict[str, tuple[tuple[object, ...], str]]] = {
    Completion: {
        "tools": (([],), "use /v1/chat/completions"),
        "add_special_tokens": ((True,), "give the prompt as token ids"),
    },
    Chat: {
        "best_of": ((1,), "ask for n and choose by logprobs"),
        "add_special_tokens": ((False,), "the chat template writes what begins a text"),
        "echo": ((False,), "keep the messages"),
    },
    Tokenize: {"return_token_strs": ((False, None), "use /detokenize")},
}


def read_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Decode a request's body. Raises RefusedError, which names the field."""
    return read_fields(kind, read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that is a JSON object.

    Raises RefusedError, also for a repeated key, a number that JSON lacks (``NaN``) or that is no fp64 number
    (``1e999``), and half of a pair of surrogates.
    """
    try:
        fields = json.loads(
            body.decode(), object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_finite
        )
    except RepeatedKeyError as error:
        raise RefusedError(str(error)[:300], error.key[:100]) from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedError("the body must be a JSON object")
    for name, value in fields.items():
        if half := next(filter(None, map(HALF_PAIR.search, strings_in([name, value]))), None):
            field = HALF_PAIR.sub("\ufffd", name)[:100]
            raise RefusedError(
                f"{field}: \\u{ord(half[0]):04x} is half of a pair of surrogates, which is no character; leave it out",
                field,
            )
    return fields


def _finite(digits: str) -> float:
    """Return a number of a body. Raises ``ValueError`` for one that is not finite."""
    number = float(digits)  # parses "NaN" and "-Infinity" as Python's JSON parser does
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is no finite number")
    return number


def read_fields(kind: type[BodyT], fields: dict[str, Any]) -> BodyT:
    """Return the fields of a body, typed.

    Unused fields, and unsupported ones with a harmless value, are dropped from ``fields``. Raises RefusedError, which
    names the field, for one that is unknown, unsupported or of another type (400), or out of range (422).
    """
    names = set(kind.__struct_fields__)
    unsupported = _UNSUPPORTED | _UNSUPPORTED_BY_KIND.get(kind, {})
    for name in list(fields):
        if name in _UNUSED:
            del fields[name]
        elif name in unsupported:
            harmless, remedy = unsupported[name]
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
        # msgspec writes "Expected `int` >= 1 - at `$.n`".
        reason = str(error).replace("`", "").partition(" - at $")[0]
        raise RefusedError(
            f"{param}: {reason}" if param else str(error), param, 422 if "range" in str(error) else 400
        ) from error


def seed_of(body: Common) -> int:
    """Return the request's seed, or a new one; the response's id contains it."""
    return secrets.randbits(48) if body.seed is None else body.seed % 2**63


def stops_of(body: Common) -> list[str]:
    """Return the stop strings, ``[]`` if there are none. Raises RefusedError for more than 16, or one empty or over 1,000 characters."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > 16 or any(not stop or len(stop) > 1000 for stop in stops):
        raise RefusedError("stop: at most 16 strings of 1 to 1000 characters", "stop")
    return stops


def prompts_of(body: Completion) -> list[str | list[int]]:
    """Return the prompts of a completion, each text or ids. Raises RefusedError for an empty or a mixed list."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RefusedError("prompt: an empty list", "prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return [ids]
    prompts = [part for part in prompt if not isinstance(part, int)]
    if ids or len({type(part) for part in prompts}) > 1:
        raise RefusedError("prompt: either texts, or ids, or lists of ids", "prompt")
    return prompts
