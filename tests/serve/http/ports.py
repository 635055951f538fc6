"""Ports of a gateway without an engine behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from phalanx_serve.http.worker import ModelIdentity, WorkerLoad
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Token


class Immediate:
    """A port with two pages that answers at once."""

    identity = ModelIdentity("weights", "numerics", 1000, "trainer")

    async def submit(self, request: Request) -> AsyncGenerator[EngineOutput]:
        for index in range(request.max_tokens):
            yield Token(request.id, index, 97)
        yield Ended(request.id, "length")

    async def cancel(self, request_id: str) -> None: ...

    def trouble(self) -> str:
        return ""

    def load(self) -> WorkerLoad:
        return WorkerLoad(pages=2)

    def close(self) -> None: ...
