"""A client that does not read: its request is given up, and nothing more is computed for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

from phalanx.data.tokenizers.tokenizer import BytesTokenizer
from phalanx_serve.http.app import Gateway, application
from phalanx_serve.http.worker import ModelIdentity, WorkerLoad
from phalanx_serve.prompt import ModelText
from phalanx_serve.traffic.events import EngineOutput, Request, Token

BODY = json.dumps({"model": "run", "prompt": "a", "max_tokens": 100, "stream": True}).encode()


class Endless:
    """A port that tells tokens for as long as somebody takes them."""

    identity = ModelIdentity("weights", "numerics", 200)

    def __init__(self) -> None:
        self.given_up = asyncio.Event()

    async def submit(self, request: Request) -> AsyncGenerator[EngineOutput]:
        try:
            for index in range(request.max_tokens):
                yield Token(request.id, index, 97)
                await asyncio.sleep(0)
        finally:
            self.given_up.set()

    async def cancel(self, request_id: str) -> None: ...

    def load(self) -> WorkerLoad:
        return WorkerLoad()

    def close(self) -> None: ...


async def read_nothing(reader_s: float) -> tuple[Gateway, bool]:
    """Asks for a stream, takes its head and its first pieces, and then nothing; tells whether the request was given up."""
    tokenizer = BytesTokenizer()
    port = Endless()
    gateway = Gateway(ModelText("run", tokenizer, frozenset(), tokenizer.vocab_size), port, reader_s=reader_s)
    asked = iter([{"type": "http.request", "body": BODY, "more_body": False}])
    sent = 0

    async def receive() -> MutableMapping[str, Any]:
        one = next(asked, None)
        if one is None:
            await asyncio.Event().wait()
        return one or {}

    async def send(_message: MutableMapping[str, Any]) -> None:
        nonlocal sent
        sent += 1
        if sent > 3:
            await asyncio.Event().wait()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 9),
    }
    async with asyncio.timeout(60):
        await application(gateway)(scope, receive, send)
    return gateway, port.given_up.is_set()


def test_an_answer_that_is_left_unread_is_given_up() -> None:
    gateway, given_up = asyncio.run(read_nothing(0.05))
    assert given_up
    assert gateway.unfinished == 0
    assert b'phalanx_requests_cancelled_total{model_name="run"} 1.0' in gateway.counts.render(WorkerLoad())
