"""Responses to admitted requests: the texts of all prompts and choices, as one body or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx_serve.http.admission import AdmittedLoad
from phalanx_serve.http.counts import Counts
from phalanx_serve.http.detokenizer import TextDelta, text_deltas
from phalanx_serve.http.limits import QUEUED_EVENTS
from phalanx_serve.http.protocol import RefusedError
from phalanx_serve.http.request import GenerationRequest
from phalanx_serve.http.worker import WorkerPort
from phalanx_serve.prompt import ModelText
from phalanx_serve.traffic.events import PromptScored, Request, Sampling, Token

# Bodies of OpenAI's two interfaces: full, in chunks, and errors.


_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def error_body(error: RefusedError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code or None}}


_TEXT_HOLE = "\ue000 text \ue000"
"""Placeholder text that no field of an event contains by chance."""


def sse_event(content: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass
class ResponseFormat:
    """Fields that the choices of one response share, and the encoding of its choices."""

    id: str
    created: int
    model: str
    weights: str
    """The hash of the current weights."""
    numerics_id: str
    bits: str
    """The origin of the bits of tokens and log-probabilities."""
    chat: bool
    tokenizer: Tokenizer
    logprobs: int
    """Top log-probabilities of each token; -1 for no log-probabilities."""
    token_ids: bool
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    """For each choice, the places of its tokens in its text."""
    _around: dict[tuple[int, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """For each choice and its weights, the bytes before and after the text of an event that has only text."""

    def set_weights(self, tokens: Sequence[Token]) -> None:
        """Name the weights of the last of these tokens from now on."""
        if tokens and tokens[-1].weights:
            self.weights = tokens[-1].weights

    @property
    def plain(self) -> bool:
        """True if events within a text have its text alone."""
        return self.logprobs < 0 and not self.token_ids

    def text_event(self, index: int, text: str, more: Mapping[str, None]) -> bytes:
        """Encode the event of a ``chunk`` within a text, with ``more`` fields, if the format is ``plain``.

        Building and encoding the full chunk for each token takes longer than everything else that the server does with it.
        """
        around = self._around.get((index, self.weights))
        if around is None:
            chunk = self.envelope([self.chunk(index, TextDelta(_TEXT_HOLE), first=False)], chunk=True) | dict(
                more
            )
            before, _, after = sse_event(chunk).partition(msgspec.json.encode(_TEXT_HOLE))
            around = self._around[index, self.weights] = (before, after)
        return b"%b%b%b" % (around[0], msgspec.json.encode(text), around[1])

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """Return a response, or a chunk of it, around its choices. Its fingerprint names weights, numerics and whose bits they are."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind + (".chunk" if chunk and self.chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"{self.weights}:{self.numerics_id}:{self.bits}",
            "choices": choices,
        }

    def chunk(self, index: int, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        """Return a choice of a chunk. ``first``: it is the first of its text, and has the role."""
        choice = self._choice(index, delta)
        if self.chat:
            role: dict[str, Any] = {"role": "assistant"} if first else {}
            choice["delta"] = role | ({"content": delta.text} if delta.text or first else {})
        else:
            choice["text"] = delta.text
        return choice

    def full_choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """Return a choice of a full response. Names its weights if several made it, and keeps them for the envelope."""
        choice = self._choice(index, delta)
        self.set_weights(delta.tokens)
        weights = _weights_of(delta.tokens)
        if len(weights) > 1:
            choice["weights"] = weights
        if self.chat:
            choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
        else:
            choice["text"] = delta.text
        return choice

    def prompt_fields(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        scored: PromptScored | None,
        *,
        with_logprobs: bool,
    ) -> dict[str, Any]:
        """Return the fields of a choice about its prompt: its text if it is echoed, log-probabilities, and ids if
        requested.

        ``scored`` None leaves out log-probabilities. Those of the first token are None. Starts the text offsets of an
        echoed prompt.
        """
        choice: dict[str, Any] = {"text": text} if text else {}
        if scored is not None and with_logprobs:
            choice["prompt_logprobs"] = [None, *scored.logprobs]
        if scored is not None and text and self.logprobs >= 0:
            # The space that a tokenizer puts before a text is not the text's.
            begins_with_space = b"".join(map(self._bytes, ids)).startswith(b" ")
            self._offsets[index] = TextOffsets(self.tokenizer.prefix_bytes if begins_with_space else 0)
            tops = scored.top or ((),) * len(scored.logprobs)
            tokens = [
                Token("", 0, token_id, value, top)
                for token_id, value, top in zip(ids, (0.0, *scored.logprobs), ((), *tops), strict=True)
            ]
            choice["logprobs"] = self._completion_logprobs(index, tokens)
            choice["logprobs"]["token_logprobs"][0] = choice["logprobs"]["top_logprobs"][0] = None
        if self.token_ids:
            choice["prompt_token_ids"] = list(ids)
        return choice

    def _choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """Return the fields that chunks and full choices share: index, reason to end (None before), log-probabilities
        and ids if requested.
        """
        choice: dict[str, Any] = {"index": index, "finish_reason": delta.finish or None, "logprobs": None}
        if self.logprobs >= 0 and delta.tokens:
            if self.chat:
                choice["logprobs"] = {
                    "content": [self._chat_logprob(token) for token in delta.tokens],
                    "refusal": None,
                }
            else:
                choice["logprobs"] = self._completion_logprobs(index, delta.tokens)
        if self.token_ids:
            choice["token_ids"] = [token.id for token in delta.tokens]
        return choice

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token) if token < self.tokenizer.vocab_size else b""

    def _word(self, token: int) -> str:
        """Return a token's text; of a part of a character its bytes as ``bytes:`` and hexadecimal escapes, as OpenAI
        writes them.

        ``<ID>`` for ids beyond the tokenizer's.
        """
        if token >= self.tokenizer.vocab_size:
            return f"<{token}>"
        spelled = self._bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _chat_logprob(self, token: Token) -> dict[str, Any]:
        """Return a token's entry in a chat response: text, log-probability, bytes, and the same of its likeliest alternatives."""

        def entry(number: int, logprob: float) -> dict[str, Any]:
            return {
                "token": self._word(number),
                "logprob": _finite(logprob),
                "bytes": list(self._bytes(number)),
            }

        return entry(token.id, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}

    def _completion_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return tokens, log-probabilities and text offsets as completions have them. Advances the offset of the text ``index``."""
        offsets = self._offsets.setdefault(index, TextOffsets())
        return {
            "tokens": [self._word(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            # Different ids may have the same text: the likeliest is returned.
            "top_logprobs": [{self._word(n): _finite(p) for n, p in reversed(token.top)} for token in tokens],
            "text_offset": [offsets.place(self._bytes(token.id)) for token in tokens],
        }


class TextOffsets:
    """Places of tokens in the characters of their text: a token within a character has the place of that character."""

    def __init__(self, dropped: int = 0) -> None:
        """Begin at place 0; ``dropped`` leading characters of the first token are not part of the text."""
        self._characters = -dropped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, spelled: bytes) -> int:
        """Return the place of the next token, which has these bytes."""
        place = max(0, self._characters)
        self._characters += len(self._decoder.decode(spelled))
        return place


def join_deltas(parts: Sequence[TextDelta]) -> TextDelta:
    """Join all deltas of a text, at least one, into a single delta that ends as the last does."""
    last = parts[-1]
    tokens = [token for part in parts for token in part.tokens]
    scored = next((part.scored for part in parts if part.scored is not None), None)
    return TextDelta("".join(part.text for part in parts), tokens, scored, last.finish, last.cached_tokens)


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the token usage of a response."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _weights_of(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the weights that generated a text, each with the index of its first token."""
    begins: list[dict[str, Any]] = []
    for number, token in enumerate(tokens):
        if not begins or begins[-1]["weights"] != token.weights:
            begins.append({"from_token": number, "weights": token.weights})
    return begins


def _finite(logprob: float) -> float:
    """Return a log-probability of at least -9999, since JSON has no infinity."""
    return max(logprob, -9999.0)  # JSON has no infinity; OpenAI's own lowest value.


# The response to one request.


_numbers = count()


class GenerationResponse:
    """The response to one request, written while its texts are generated."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ModelText,
        port: WorkerPort,
        counts: Counts,
        workload: AdmittedLoad,
    ) -> None:
        """Count the prompt's tokens, and fix the id and time of the response; nothing is computed before ``body`` or ``events``."""
        self.request, self._model, self._port = request, model, port
        self._counts, self._workload = counts, workload
        identity = port.identity
        self._format = ResponseFormat(
            request.id(),
            int(time.time()),
            model.name,
            identity.weights_sha,
            identity.numerics_id,
            identity.bits,
            request.chat,
            model.tokenizer,
            request.logprobs,
            request.body.return_token_ids,
        )
        self.generated_tokens = self._cached = 0
        """Tokens generated so far, and prompt tokens found in the prefix cache."""
        counts.prompt_tokens += request.prompt_tokens
        self._continuous = False

    async def _text(self, index: int) -> AsyncGenerator[TextDelta]:
        """Submit a text and yield its deltas. ``index`` counts choices, those of a prompt in a row.

        Counts tokens, latencies, cached tokens and how it ends, and its prompt as read at the first token. A text
        left early is canceled; it counts as canceled, and so does one that fails. Raises RefusedError.
        """
        params, body = self.request, self.request.body
        number, choice = divmod(index, params.n)
        request = Request(
            id=f"{self._format.id}-{next(_numbers)}",
            prompt=tuple(params.prompts[number]),
            max_tokens=params.max_tokens[number],
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=max(0, body.top_k or 0),
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p or 0.0,
                seed=params.seed,
                choice=body.choice + choice,
                vocab_size=self._model.tokenizer.vocab_size,
            ),
            stop_tokens=frozenset() if body.ignore_eos or params.only_prompts else self._model.stop_tokens,
            top_logprobs=params.logprobs,
            prompt_logprobs=params.scored,
        )
        self._counts.queried_tokens += len(request.prompt)
        start = last = time.monotonic()
        first, finish = True, ""
        try:
            stream = text_deltas(
                self._port, request, self._model, params.stops, at_start=params.at_start[number]
            )
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    if params.only_prompts:
                        delta = delta.without_text()
                    now = time.monotonic()
                    if delta.tokens:
                        self.generated_tokens += len(delta.tokens)
                        self._counts.generated_tokens += len(delta.tokens)
                        (self._counts.first_token if first else self._counts.next_token).observe(now - last)
                        if first:
                            self._workload.read(len(request.prompt), now)
                        first, last = False, now
                    if delta.finish:
                        finish = delta.finish
                        self._cached += delta.cached_tokens
                        self._counts.cached_tokens += delta.cached_tokens
                    yield delta
        finally:
            if first:
                self._workload.left_unread(len(request.prompt))
            if finish:
                self._counts.ended(finish, time.monotonic() - start)
            else:
                self._counts.cancelled += 1

    def _prompt_fields(self, index: int, scored: PromptScored | None) -> dict[str, Any]:
        """Return the fields of a choice about its prompt, with log-probabilities if the request sets ``prompt_logprobs``."""
        request = self.request
        number = index // request.n
        with_logprobs = request.body.prompt_logprobs not in (None, False)
        return self._format.prompt_fields(
            index, request.texts[number], request.prompts[number], scored, with_logprobs=with_logprobs
        )

    def _usage(self) -> dict[str, Any]:
        return usage(self.request.prompt_tokens, self.generated_tokens, self._cached)

    async def body(self) -> dict[str, Any]:
        """Compute all texts at the same time, and return the full body with usage.

        Raises RefusedError; then, or if the task is canceled, all texts are canceled.
        """

        async def full_choice(index: int) -> dict[str, Any]:
            """Compute one text and return its complete choice, joined with its prompt's fields."""
            delta = join_deltas([delta async for delta in self._text(index)])
            before = self._prompt_fields(index, delta.scored)
            choice = self._format.full_choice(index, delta)
            return _merge_choice(before, choice)

        choices: list[dict[str, Any]] = []
        async with _TaskGroup() as group:
            tasks = [
                group.start(full_choice(index)) for index in range(len(self.request.prompts) * self.request.n)
            ]
            choices = [await task for task in tasks]
        return self._format.envelope(choices, chunk=False) | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events. An error is the last event, and may be the only one.

        Usage follows if it was requested, then ``[DONE]``; neither follows an error.
        """
        total = len(self.request.prompts) * self.request.n
        options = self.request.body.stream_options
        with_usage = options is not None and options.include_usage
        self._continuous = options is not None and options.continuous_usage_stats
        more: dict[str, None] = {"usage": None} if with_usage else {}
        # A queue between tasks wakes the event loop once more for each token.
        source = self._events_of(0, more) if total == 1 else self._events_of_all(total, more)
        try:
            async with aclosing(source) as events:
                async for event in events:
                    yield event
        except RefusedError as error:
            yield sse_event(error_body(error))
            return
        if with_usage:
            yield sse_event(self._format.envelope([], chunk=True) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _events_of(self, index: int, more: Mapping[str, None]) -> AsyncGenerator[bytes]:
        """Yield the events of one text, with ``more`` fields; the first has the role, and the prompt's fields. Raises
        RefusedError.

        Plain text takes a faster path, on which deltas without text send no event.
        """
        format_, first = self._format, True
        scored: PromptScored | None = None
        async with aclosing(self._text(index)) as deltas:
            async for delta in deltas:
                if delta.scored is not None:
                    scored = delta.scored
                    continue
                format_.set_weights(delta.tokens)
                if format_.plain and not delta.finish:
                    if not delta.text:
                        continue
                    if not first and not self._continuous:
                        yield format_.text_event(index, delta.text, more)
                        continue
                before = self._prompt_fields(index, scored) if first else {}
                choice = _merge_choice(before, format_.chunk(index, delta, first=first))
                first = False
                used: Mapping[str, Any] = {"usage": self._usage()} if self._continuous else more
                yield sse_event(format_.envelope([choice], chunk=True) | dict(used))

    async def _events_of_all(self, total: int, more: Mapping[str, None]) -> AsyncGenerator[bytes]:
        """Yield the events of all texts as they arrive. At most ``QUEUED_EVENTS`` wait for the reader.

        Raises RefusedError at the first text that cannot be computed, and cancels the others.
        """
        ready: asyncio.Queue[bytes | RefusedError | None] = asyncio.Queue(QUEUED_EVENTS)

        async def enqueue(index: int) -> None:
            """Put the events of one text into ``ready``, then None, or the error that ended it."""
            try:
                async with aclosing(self._events_of(index, more)) as events:
                    async for event in events:
                        await ready.put(event)
                await ready.put(None)
            except RefusedError as error:
                await ready.put(error)

        async with _TaskGroup() as group:
            for index in range(total):
                group.start(enqueue(index))
            remaining = total
            while remaining:
                event = await ready.get()
                if isinstance(event, RefusedError):
                    raise event
                remaining -= event is None
                if event is not None:
                    yield event


def _merge_choice(before: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Return ``choice`` with the fields of its prompt: texts and log-probabilities are concatenated, others added."""
    merged = choice | {name: value for name, value in before.items() if name not in ("text", "logprobs")}
    if "text" in before:
        merged["text"] = before["text"] + choice["text"]
    if "logprobs" in before:
        after = choice["logprobs"] or {}
        merged["logprobs"] = {k: v + after.get(k, []) for k, v in before["logprobs"].items()}
    return merged


class _TaskGroup:
    """Tasks that are all canceled at the end of the block."""

    async def __aenter__(self) -> _TaskGroup:
        self._tasks: list[asyncio.Task[Any]] = []
        return self

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task, which is cancelled with the group."""
        self._tasks.append(asyncio.create_task(coroutine))
        return self._tasks[-1]

    async def __aexit__(self, *_error: object) -> None:
        """Cancel all tasks and wait for them; their errors are ignored."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
