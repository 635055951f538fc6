"""Parsed requests: prompts as token ids, defaults filled in, and the check that their texts fit; and vLLM's requests for ids and texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from phalanx_serve.http.admission import Demand, LengthLimit, pages_of
from phalanx_serve.http.protocol import (
    Chat,
    Common,
    Completion,
    Detokenize,
    RefusedError,
    Tokenize,
    prompts_of,
    read_fields,
    read_object,
    seed_of,
    stops_of,
)
from phalanx_serve.prompt import ModelText


@dataclass(frozen=True)
class GenerationRequest:
    """A request with its prompts encoded and its defaults filled in."""

    body: Common
    prompts: list[list[int]]
    texts: list[str]
    """The prompts to echo; empty strings without echo."""
    seed: int
    stops: list[str]
    logprobs: int
    max_tokens: list[int]
    at_start: list[bool]

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def chat(self) -> bool:
        return isinstance(self.body, Chat)

    @property
    def only_prompts(self) -> bool:
        """True if no text is to be generated."""
        return isinstance(self.body, Completion) and self.body.max_tokens == 0

    @property
    def scored(self) -> bool:
        """True if log-probabilities of prompts are needed."""
        echo = isinstance(self.body, Completion) and bool(self.body.echo) and self.logprobs >= 0
        return self.body.prompt_logprobs not in (None, False) or echo

    @cached_property
    def demand(self) -> Demand:
        """The texts and pages that the request needs at most."""
        lengths = zip(self.prompts, self.max_tokens, strict=True)
        pages = sum(pages_of(len(prompt) + most) for prompt, most in lengths)
        return Demand(len(self.prompts) * self.n, pages * self.n, self.prompt_tokens * self.n)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts, each counted once however many choices it has."""
        return sum(map(len, self.prompts))

    @property
    def most_tokens(self) -> int:
        """Tokens of prompts, and of all texts at their longest."""
        return self.prompt_tokens + sum(self.max_tokens) * self.n

    def id(self) -> str:
        """An id that contains the seed and is the same for a repeated request."""
        content = msgspec.json.encode(
            [self.prompts, msgspec.to_builtins(self.body) | {"seed": self.seed, "stream": None}]
        )
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.seed:x}-{digest}"


def require_model(name: str | None, model: ModelText) -> None:
    """Raise RefusedError (404) if a request names another model than the one that is served; None names none."""
    if name not in (None, model.name):
        raise RefusedError(
            f"there is no model {str(name)[:100]!r}: this server has {model.name!r}",
            "model",
            404,
            "model_not_found",
        )


def parse_request(
    body: Completion | Chat, model: ModelText, room: LengthLimit, most_prompts: int
) -> GenerationRequest:
    """Encode the prompts of a body and fill in its defaults.

    Texts without ``max_tokens`` get 16 tokens, conversations all that fit. 0 tokens, with ``echo`` only, become 1,
    which is not returned. Raises RefusedError for another model, options that contradict each other, and prompts too
    many or too long.
    """
    require_model(body.model, model)
    if body.stream_options is not None and not body.stream:
        raise RefusedError("stream_options is for stream: true alone", "stream_options")
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RefusedError("continuous_usage_stats needs include_usage: true", "stream_options")
    if body.top_p == 0:
        raise RefusedError("top_p: above 0; temperature 0 takes the likeliest token", "top_p")
    at_start = [False]
    max_tokens = body.max_tokens
    if isinstance(body, Chat):
        prompts, texts = [model.chat_ids(body, room)], [""]
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        if None not in (max_tokens, body.max_completion_tokens) and max_tokens != body.max_completion_tokens:
            raise RefusedError(
                f"max_tokens = {max_tokens} and max_completion_tokens = {body.max_completion_tokens}: send one of them",
                "max_completion_tokens",
            )
        max_tokens = max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    else:
        contents = prompts_of(body)
        if len(contents) > most_prompts:
            raise RefusedError(f"prompt: {len(contents)} prompts; at most {most_prompts} at once", "prompt")
        prompts = [model.prompt_ids(content, room) for content in contents]
        at_start = [content == "" for content in contents]
        decode = model.tokenizer.decode
        echoed = (content if isinstance(content, str) else decode(content) for content in contents)
        texts = list(echoed) if body.echo else [""] * len(contents)
        logprobs = -1 if body.logprobs is None else body.logprobs
        if body.best_of not in (None, body.n or 1):
            raise RefusedError(
                "best_of is not done here: ask for n and choose by logprobs",
                "best_of",
                code="unsupported_parameter",
            )
        if max_tokens == 0 and not body.echo:
            raise RefusedError(
                "max_tokens: at least 1, or 0 with echo: true, which scores the prompt", "max_tokens"
            )
        max_tokens = 16 if max_tokens is None else max_tokens
    lengths = []
    for prompt in prompts:
        room.require(len(prompt), max_tokens or 1, "messages" if isinstance(body, Chat) else "prompt")
        # A prompt is scored by generating one token, which is not returned if max_tokens is 0.
        lengths.append(room.tokens - len(prompt) if max_tokens is None else max_tokens or 1)
    return GenerationRequest(body, prompts, texts, seed_of(body), stops_of(body), logprobs, lengths, at_start)


# Requests for the ids of a text or a conversation, and for the text of ids.


def tokenize(body: bytes, model: ModelText, room: LengthLimit) -> dict[str, Any]:
    """Return the ids of a ``prompt``, or of ``messages`` if there are any, with their count and the most tokens of a
    text.

    Without ``add_special_tokens``, a prompt that is the name of a token in ``tokenizer_info`` is that token: clients
    look up its id so. As a part of a text it is text. Raises RefusedError for another model or a malformed body.
    """
    fields = read_object(body)
    if "messages" in fields:
        chat = read_fields(Chat, fields)
        require_model(chat.model, model)
        ids = model.chat_ids(chat, room)
    else:
        text = read_fields(Tokenize, fields)
        require_model(text.model, model)
        special = {} if text.add_special_tokens else dict(model.special_tokens.values())
        token = special.get(text.prompt)
        ids = model.prompt_ids(text.prompt, room, begin=text.add_special_tokens) if token is None else [token]
    return {"count": len(ids), "max_model_len": room.tokens, "tokens": ids, "token_strs": None}


def tokenizer_info(model: ModelText) -> dict[str, str | None]:
    """Return vLLM's description of a tokenizer: names of the tokens that begin and end a document, and the chat template; None for what it lacks."""
    names = {field: name for field, (name, _) in model.special_tokens.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{field: names.get(field) for field in ("bos_token", "eos_token", "pad_token")},
        "chat_template": None if model.template is None else model.template.source,
    }


def detokenize(body: bytes, model: ModelText, _room: LengthLimit) -> dict[str, Any]:
    """Return the text of ids, without that of special tokens.

    Raises RefusedError for another model, a malformed body or unknown ids.
    """
    request = read_fields(Detokenize, read_object(body))
    require_model(request.model, model)
    try:
        return {"prompt": model.tokenizer.decode(request.tokens)}
    except ValueError as error:
        raise RefusedError(f"tokens: {error}", "tokens") from error
