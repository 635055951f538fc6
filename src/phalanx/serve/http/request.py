"""A parsed request: prompts as token ids, defaults filled in, and the check that its texts fit into the server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import msgspec

from phalanx.serve.http.access.admission import Demand, pages_of
from phalanx.serve.http.protocol import (
    Chat,
    Common,
    Completion,
    RefusedError,
    prompts_of,
    seed_of,
    stops_of,
)
from phalanx.serve.http.served.model_text import ModelText
from phalanx.traffic.block_table import PAGE


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


@dataclass(frozen=True)
class LengthLimit:
    """The longest text that the server takes."""

    context: int
    """The model's context, in tokens."""
    pages: int
    """Pages of the KV cache; 0 if memory is not counted in pages."""

    @property
    def tokens(self) -> int:
        """The lower of context and KV cache, in tokens."""
        return min(self.context, self.pages * PAGE) if self.pages else self.context

    def require(self, prompt_tokens: int, new_tokens: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long."""
        tokens = prompt_tokens + new_tokens
        field = "max_tokens" if prompt_tokens < self.tokens else prompt_field
        if tokens > self.context:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones do not fit into the model's context of "
                f"{self.context}: shorten the prompt, or ask for fewer tokens",
                field,
                code="context_length_exceeded",
            )
        if tokens > self.tokens:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones take {pages_of(tokens)} pages of {PAGE} tokens, and this server "
                f"has {self.pages}: shorten the prompt, ask for fewer tokens, or start the server with more --memory",
                field,
                code="context_length_exceeded",
            )


def parse_request(
    body: Completion | Chat, model: ModelText, room: LengthLimit, most_prompts: int
) -> GenerationRequest:
    """Encode the prompts of a body and fill in its defaults. Raises RefusedError."""
    if body.model != model.name:
        raise RefusedError(
            f"there is no model {body.model[:100]!r}: this server has {model.name!r}",
            "model",
            404,
            "model_not_found",
        )
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
        prompts, texts = [model.chat_ids(body.messages)], [""]
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        max_tokens = max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    else:
        contents = prompts_of(body)
        if len(contents) > most_prompts:
            raise RefusedError(f"prompt: {len(contents)} prompts; at most {most_prompts} at once", "prompt")
        prompts = [model.prompt_ids(content) for content in contents]
        at_start = [content == "" for content in contents]
        decode = model.tokenizer.decode
        echoed = (content if isinstance(content, str) else decode(content) for content in contents)
        texts = list(echoed) if body.echo else [""] * len(contents)
        logprobs = -1 if body.logprobs is None else body.logprobs
        max_tokens = 16 if max_tokens is None else max_tokens
    lengths = []
    for prompt in prompts:
        room.require(len(prompt), max_tokens or 1, "messages" if isinstance(body, Chat) else "prompt")
        lengths.append(max_tokens or room.tokens - len(prompt))
    return GenerationRequest(body, prompts, texts, seed_of(body), stops_of(body), logprobs, lengths, at_start)
