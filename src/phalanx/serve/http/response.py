"""Responses to admitted requests: the texts of all prompts and choices, as one body or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any

from phalanx.serve.http.access.admission import Workload
from phalanx.serve.http.counts import Counts
from phalanx.serve.http.detokenizer import TextDelta, text_deltas
from phalanx.serve.http.protocol import RefusedError
from phalanx.serve.http.request import GenerationRequest
from phalanx.serve.http.response_format import ResponseFormat, error_body, join_deltas, sse_event, usage
from phalanx.serve.http.served.model_text import ModelText
from phalanx.serve.http.worker import WorkerPort
from phalanx.traffic.requests import PromptScored, Request, Sampling

_QUEUED_EVENTS = 64
"""Events that may wait for a slow reader before the detokenizer waits too."""
_numbers = count()


class GenerationResponse:
    """The response to one request, written while its texts are generated."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ModelText,
        port: WorkerPort,
        counts: Counts,
        workload: Workload,
    ) -> None:
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
        request = self.request
        number = index // request.n
        with_logprobs = request.body.prompt_logprobs not in (None, False)
        return self._format.prompt_fields(
            index, request.texts[number], request.prompts[number], scored, with_logprobs=with_logprobs
        )

    def _usage(self) -> dict[str, Any]:
        return usage(self.request.prompt_tokens, self.generated_tokens, self._cached)

    async def body(self) -> dict[str, Any]:
        """Return the full body. Raises RefusedError; then, or if the task is cancelled, all texts are cancelled."""

        async def full_choice(index: int) -> dict[str, Any]:
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
        """Yield the response as server-sent events; an error after the start is the last of them."""
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
        """Yield the events of one text, with ``more`` fields. Raises RefusedError."""
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
        """Yield the events of all texts as they arrive. Raises RefusedError at the first text that cannot be computed."""
        ready: asyncio.Queue[bytes | RefusedError | None] = asyncio.Queue(_QUEUED_EVENTS)

        async def enqueue(index: int) -> None:
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
    """Return ``choice`` with the fields of its prompt put before it."""
    merged = choice | {name: value for name, value in before.items() if name not in ("text", "logprobs")}
    if "text" in before:
        merged["text"] = before["text"] + choice["text"]
    if "logprobs" in before:
        after = choice["logprobs"] or {}
        merged["logprobs"] = {k: v + after.get(k, []) for k, v in before["logprobs"].items()}
    return merged


class _TaskGroup:
    """Tasks that are all cancelled when the block is left."""

    async def __aenter__(self) -> _TaskGroup:
        self._tasks: list[asyncio.Task[Any]] = []
        return self

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(coroutine))
        return self._tasks[-1]

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
