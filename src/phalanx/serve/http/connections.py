"""The gateway's connections: as many as the process may have descriptors for; beyond that the one that has asked for nothing for the longest time gives way.

A connection that waits costs a descriptor and nothing else, so a flood of idle ones must not keep out whoever asks for something. As nginx does with its keep-alive
connections (``worker_connections are not enough, reusing connections``), a new connection takes the place of an idle one: one without a request, or whose head is not whole. Where
all have requests, a few more are let in for as long as it takes to say 503, or to tell ``/health`` and ``/ready``, which must be told at any time.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

RESERVE = 256
"""Descriptors for all else: files, workers, and connections that are only told that there are too many."""
MOST = 65_536
"""Each connection takes some tens of KiB of memory, so that a limit of a million descriptors is no reason to hold a million."""
_TOLD = 64
"""Connections beyond the limit that may be waiting to be told so."""
_ALWAYS = ("/health", "/ready")


def descriptors() -> int:
    """Connections that this process may hold beside what it needs, after its limit of open files has been raised as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # a kernel may allow less than it says
    if soft == resource.RLIM_INFINITY:
        return MOST
    return max(1, min(MOST, soft - len(os.listdir("/proc/self/fd")) - RESERVE))


@dataclass
class Crowd:
    """All connections of a server. Belongs to its event loop."""

    most: int
    head_s: float = 60.0
    """How long a connection may be idle, or take to send the head of a request."""
    reader_s: float = 30.0
    """How long a connection may take nothing of an answer that waits for it."""
    misread: Callable[[str, int], bytes] | None = None
    """The JSON that is told, with a status, of what is no HTTP request, and why."""
    full: ASGIApp | None = None
    """What answers those beyond ``most`` whose path is not one that must be answered at any time."""
    there: set[Connection] = field(default_factory=set)
    idle: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """Those without a request, idle for the longest first."""
    told: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """Those beyond ``most``, the oldest first."""

    def came(self, one: Connection) -> bool:
        """Takes a connection up; whether it may ask for anything."""
        room = len(self.there) < self.most
        if not room and self.idle:
            next(iter(self.idle)).give_way()
            room = True
        if room:
            self.there.add(one)
            self.rests(one)
            return True
        if len(self.told) >= _TOLD:
            next(iter(self.told)).give_way()
        self.told[one] = None
        return False

    def rests(self, one: Connection) -> None:
        """Notes that a connection has no request."""
        if one in self.there:
            self.idle[one] = None

    def works(self, one: Connection) -> None:
        """Notes that it has one."""
        self.idle.pop(one, None)

    def left(self, one: Connection) -> None:
        """Forgets a connection."""
        self.there.discard(one)
        self.idle.pop(one, None)
        self.told.pop(one, None)

    def only_told(self, app: ASGIApp) -> ASGIApp:
        """What answers a connection beyond ``most``."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            assert self.full is not None
            await (app if scope.get("path") in _ALWAYS else self.full)(scope, receive, send)

        return answer


class CrowdConfig(uvicorn.Config):
    """uvicorn's settings, and the crowd that its connections belong to."""

    crowd: Crowd


class Connection(H11Protocol):
    """uvicorn's connection, which knows whether it is idle."""

    def __init__(self, config: CrowdConfig, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self._crowd = config.crowd
        self._head: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._crowd.came(self):
            self.app = self._crowd.only_told(self.app)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_whole()
        self._answer_is_read()
        self._crowd.left(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._answer_is_read()
        super().resume_writing()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_is_whole()
            self._crowd.works(self)

    def on_response_complete(self) -> None:
        self._wait_for_head()  # or, of a connection that is to end, until the rest of its answer is read
        if not self.transport.is_closing():
            self._crowd.rests(self)
        super().on_response_complete()  # which may begin with a request that has come meanwhile

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP request, in the form of the application's errors, and ends the connection.

        uvicorn calls this where h11 has raised the reason (``handle_events``), and would say ``msg`` as plain text: no application hears of such a request.
        """
        error = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # a request has its answer, and what is wrong comes behind it, in its body
            return
        if self._crowd.misread is None or not isinstance(error, h11.RemoteProtocolError):
            super().send_400_response(msg)
            return
        status = error.error_status_hint
        body = self._crowd.misread(str(error), status)
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
        """Ends a connection, of which nobody waits for an answer."""
        self._crowd.left(self)
        if self.conn.our_state is h11.IDLE:
            self.timeout_keep_alive_handler()
            if self.transport.get_write_buffer_size():
                self._wait_for_head()
        else:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        self._head_is_whole()
        self._head = self.loop.call_later(self._crowd.head_s, self.give_way)

    def _head_is_whole(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _wait_for_reader(self) -> None:
        self._answer_is_read()
        unread = self.transport.get_write_buffer_size()
        self._reader = self.loop.call_later(self._crowd.reader_s, self._look_at_reader, unread)

    def _look_at_reader(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _answer_is_read(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
