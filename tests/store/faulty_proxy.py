"""A TCP proxy in front of an HTTP server that misbehaves as networks and stores do, by the draws of a seed.

Per request it may answer 503 SlowDown or 403 AccessDenied without asking the server, reset the connection before the server hears of it, pass on the
request and lose the answer, or cut the answer off in its middle; every answer is late by an exponential latency and no quicker than a
bandwidth allows. ``done`` counts what it did, ``asked`` how often each object
was asked for, by method, path and range.
"""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socket import SO_LINGER, SOL_SOCKET

_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_DENIED = b"<Error><Code>AccessDenied</Code><AWSAccessKeyId>AKIASECRET</AWSAccessKeyId></Error>"
_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Faults:
    """Probabilities per request, the mean latency in seconds, and bytes per second of each connection (0: no limit)."""

    slow_down: float = 0.0
    reset: float = 0.0
    lost_answer: float = 0.0
    truncated: float = 0.0
    latency_s: float = 0.0
    steady_s: float = 0.0
    """By which every answer is late besides, in seconds."""
    bytes_per_s: float = 0.0
    late: float = 0.0
    """Share of the answers that take ``late_s`` more."""
    late_s: float = 2.0
    denied: str = ""
    """Part of what is asked for, as ``FaultyProxy.asked`` spells it: whatever has it is refused, as with credentials that may not do it."""


class FaultyProxy:
    """Passes HTTP/1.1 on to ``upstream_port`` of this machine."""

    def __init__(self, upstream_port: int, faults: Faults, seed: int) -> None:
        self.upstream_port = upstream_port
        self.faults = faults
        self.done: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.port = 0
        self._random = random.Random(seed)

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Handles one request of a connection; False where the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_content_length(head))
        self.asked[what := _what(head)] += 1
        fault = "denied" if self.faults.denied and self.faults.denied in what else self._draw()
        self.done[fault] += 1
        if self.faults.steady_s:
            await asyncio.sleep(self.faults.steady_s)
        if self.faults.latency_s:
            late_s = self.faults.late_s if self._random.random() < self.faults.late else 0.0
            await asyncio.sleep(self._random.expovariate(1 / self.faults.latency_s) + late_s)
        if fault == "reset":
            return _reset(writer)
        if fault == "slow_down":
            answer = b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n" % len(_SLOW_DOWN) + _SLOW_DOWN
        elif fault == "denied":
            answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(_DENIED) + _DENIED
        else:
            answer = await self._asked(head, body)
        if fault == "lost_answer":
            return _reset(writer)
        if fault == "truncated":
            answer = answer[: max(1, int(len(answer) * self._random.random()))]
        for start in range(0, len(answer), _CHUNK_BYTES):
            chunk = answer[start : start + _CHUNK_BYTES]
            writer.write(chunk)
            await writer.drain()
            if self.faults.bytes_per_s:
                await asyncio.sleep(len(chunk) / self.faults.bytes_per_s)
        return fault != "truncated"

    async def _asked(self, head: bytes, body: bytes) -> bytes:
        """The server's whole answer, asked for on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream_port, limit=1 << 20)
        try:
            writer.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            return answer.replace(b"connection: close\r\n", b"") + await reader.read()
        finally:
            writer.close()

    def _draw(self) -> str:
        value = self._random.random()
        for name in ("slow_down", "reset", "lost_answer", "truncated"):
            value -= getattr(self.faults, name)
            if value < 0:
                return name
        return "good"


def _what(head: bytes) -> str:
    """Method, path and range of a request."""
    request, *fields = head.decode("latin-1").split("\r\n")
    ranges = [field for field in fields if field.lower().startswith("range:")]
    return " ".join([*request.split()[:2], *ranges]).lower()


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Ends a connection with RST rather than FIN."""
    writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


@contextmanager
def faulty_proxy(upstream_port: int, faults: Faults, seed: int) -> Iterator[FaultyProxy]:
    """A proxy in a thread of its own; its ``port`` is where clients connect."""
    proxy, started = FaultyProxy(upstream_port, faults, seed), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(proxy.serve(started, stop))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
