"""The HTTP server: uvicorn with a limit on connections, which drains on a signal.

On a signal the server accepts no new requests and finishes the running ones. The limit is the number of descriptors
that the process may have. Beyond it, the connection that was idle for the longest time is closed.

An idle connection costs only a descriptor, so a flood of them must not keep out clients with requests. As in nginx
(``worker_connections are not enough, reusing connections``), a new connection replaces an idle one: one without a
request, or with an incomplete head. If all have requests, a few more are accepted to send 503, or to answer
``/health`` and ``/ready``, which are always answered.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.observe.record.notes import Serving, ServingNote
from phalanx.process.this_process import host_name
from phalanx_serve.http.app import Gateway, application, misread, too_many
from phalanx_serve.http.limits import ACCEPTED_AT_ONCE, BACKLOG, REFUSED_CONNECTIONS, connections

# Connections.


_ALWAYS = ("/health", "/ready")


@dataclass
class ConnectionLimiter:
    """All connections of a server, in its event loop."""

    most: int
    head_s: float = 60.0
    """Seconds that a connection may be idle, or take to send the head of a request."""
    reader_s: float = 30.0
    """Seconds that a connection may leave a pending response unread."""
    misread: Callable[[str, int], bytes] | None = None
    """Function from the parser's reason and the status to the JSON error for malformed requests."""
    full: ASGIApp | None = None
    """Application for connections beyond ``most``, except for paths that are always answered."""
    there: set[Connection] = field(default_factory=set)
    idle: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """Connections without a request, idle for the longest first."""
    refused: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """Connections beyond ``most``, the oldest first."""

    def admit(self, connection: Connection) -> bool:
        """Add a connection; beyond ``most``, close the one that is idle for the longest.

        Return False if none is idle: it may only be refused. Of too many refused ones, the oldest is closed.
        """
        room = len(self.there) < self.most
        if not room and self.idle:
            next(iter(self.idle)).give_way()
            room = True
        if room:
            self.there.add(connection)
            self.rests(connection)
            return True
        if len(self.refused) >= REFUSED_CONNECTIONS:
            next(iter(self.refused)).give_way()
        self.refused[connection] = None
        return False

    def rests(self, connection: Connection) -> None:
        """Mark a connection as idle."""
        if connection in self.there:
            self.idle[connection] = None

    def works(self, connection: Connection) -> None:
        """Mark a connection as having a request."""
        self.idle.pop(connection, None)

    def left(self, connection: Connection) -> None:
        """Remove a connection."""
        self.there.discard(connection)
        self.idle.pop(connection, None)
        self.refused.pop(connection, None)

    def refusing(self, app: ASGIApp) -> ASGIApp:
        """Return the application for a connection beyond ``most``: a refusal for all paths but those in ``_ALWAYS``."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            """Answer the paths in ``_ALWAYS``, and refuse all others."""
            assert self.full is not None
            await (app if scope.get("path") in _ALWAYS else self.full)(scope, receive, send)

        return answer


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, with the limiter of its connections."""

    limiter: ConnectionLimiter


class Connection(H11Protocol):
    """uvicorn's connection, which reports to the limiter whether it is idle."""

    def __init__(self, config: LimitedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._limiter = config.limiter
        self._head: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a connection, and wait for its first request; beyond the limit it gets a refusal."""
        super().connection_made(transport)
        if not self._limiter.admit(self):
            self.app = self._limiter.refusing(self.app)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and remove the connection from the limiter."""
        self._head_is_whole()
        self._answer_is_read()
        self._limiter.left(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch whether the client reads, now that the write buffer is full."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Stop watching the client, which has read."""
        self._answer_is_read()
        super().resume_writing()

    def handle_events(self) -> None:
        """Handle received bytes; from a complete head until its response, the connection counts as working."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_is_whole()
            self._limiter.works(self)

    def on_response_complete(self) -> None:
        """Wait for the next request; the connection is idle until then."""
        self._wait_for_head()  # or, if the connection will end, until the client has read the response
        if not self.transport.is_closing():
            self._limiter.rests(self)
        super().on_response_complete()  # may start a request that arrived meanwhile

    def send_400_response(self, msg: str) -> None:
        """Answer malformed requests with the application's JSON error, and close the connection.

        Without a reply if a response has already begun. uvicorn calls this after h11 has raised the reason
        (``handle_events``), and would send ``msg`` as plain text, because no application receives such a request.
        """
        error = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # the response was sent; the error is in the rest of the body
            return
        if self._limiter.misread is None or not isinstance(error, h11.RemoteProtocolError):
            super().send_400_response(msg)
            return
        status = error.error_status_hint
        body = self._limiter.misread(str(error), status)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        reason = HTTPStatus(status).phrase.encode()
        for event in (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def give_way(self) -> None:
        """Close a connection that waits for no response; abort one whose request head is incomplete.

        It leaves the limiter's list. Bytes still to be written get ``head_s`` seconds; then the connection is aborted.
        """
        self._limiter.left(self)
        if self.conn.our_state is h11.IDLE:
            self.timeout_keep_alive_handler()
            if self.transport.get_write_buffer_size():
                self._wait_for_head()
        else:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        """Give the connection ``head_s`` seconds to send a whole request head."""
        self._head_is_whole()
        self._head = self.loop.call_later(self._limiter.head_s, self.give_way)

    def _head_is_whole(self) -> None:
        """Stop waiting for a request head."""
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _wait_for_reader(self) -> None:
        """Give the client ``reader_s`` seconds to read some of what is written."""
        self._answer_is_read()
        unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(self._limiter.reader_s, self._look_at_reader, unread)

    def _look_at_reader(self, unread: int) -> None:
        """Wait again if the client has read some of the ``unread`` bytes, else abort the connection."""
        if self.transport.get_write_buffer_size() < unread:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _answer_is_read(self) -> None:
        """Stop waiting for the client to read."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None


# The server.


class DrainingServer(uvicorn.Server):
    """A server that refuses new requests on the first signal and ends when the old ones have, at the latest after ``drain_s``."""

    def __init__(self, gateway: Gateway, drain_s: float, tell: Callable[[str], None]) -> None:
        """Configure uvicorn for the gateway, with at most ``gateway.limits.connections``; 0 allows what file
        descriptors permit.

        ``tell`` receives a line when draining begins.
        """
        config = LimitedConfig(
            application(gateway),
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",  # unused, and a second signal would print a traceback of it
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        most = gateway.limits.connections or connections()
        config.limiter = self.limiter = ConnectionLimiter(
            most, gateway.head_s, gateway.reader_s, partial(misread, gateway), too_many(gateway, most)
        )
        super().__init__(config)
        self._gateway, self._drain_s, self._tell = gateway, drain_s, tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, with a larger kernel backlog than asyncio's."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """On the first signal, drain in a thread: refuse new requests and end after the running ones. End at once on the second."""
        if self._gateway.draining:
            self.should_exit = self.force_exit = True
            return
        self._gateway.draining = True
        name = signal.Signals(sig).name
        threading.Thread(target=self._drain, args=(name,), daemon=True).start()

    def _drain(self, name: str) -> None:
        """Report the drain, wait until all texts are finished, for at most ``drain_s`` seconds, and end the server.

        A second signal ends it at once. Errors of reporting are ignored.
        """
        # In a thread: a handler may have interrupted a write to the same stream.
        with suppress(OSError):  # a full disk or a closed pipe must not stop the drain
            self._tell(f"{name}: {self._gateway.unfinished} texts are finished first; again to end at once")
        end = time.monotonic() + self._drain_s
        while self._gateway.unfinished and time.monotonic() < end and not self.should_exit:
            time.sleep(0.05)
        self.should_exit = True


def serve(
    gateway: Gateway,
    sock: socket.socket,
    *,
    drain_s: float,
    tell: Callable[[str], None],
    note: ServingNote | None = None,
) -> None:
    """Serve until a signal and the drain after it, at most ``drain_s`` seconds; then close the worker.

    ``note`` records the server's state meanwhile, and is closed too; None records nothing.
    """
    try:
        if note is not None:
            note.start()
        DrainingServer(gateway, drain_s, tell).run(sockets=[sock])
    finally:
        if note is not None:
            note.close()
        gateway.port.close()


def serving_of(gateway: Gateway, url: str) -> Serving:
    """Return the state of a server, for observers of the run that it serves."""
    load, counts = gateway.port.load(), gateway.counts
    return Serving(
        model=gateway.model.name,
        url=url,
        node=host_name(),
        since_s=gateway.created,
        seen_s=time.time(),
        state=gateway.port.trouble() or ("draining" if gateway.draining else "serving"),
        numerics_id=gateway.port.identity.numerics_id,
        step=load.weights_step,
        running=load.running,
        waiting=load.waiting,
        pages_share=load.pages_used / load.pages if load.pages else 0.0,
        finished=counts.finished,
        refused=counts.refusals,
        prompt_tokens=counts.prompt_tokens,
        generated_tokens=counts.generated_tokens,
        first_token_s=counts.first_token.mean,
        next_token_s=counts.next_token.mean,
    )
