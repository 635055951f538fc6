"""Runs the gateway with uvicorn until a signal, upon which it takes nothing new and lets what goes on finish."""

from __future__ import annotations

import platform
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn

from phalanx.observe.serving import Serving, ServingNote
from phalanx.serve.http.app import Gateway, application, misread, too_many
from phalanx.serve.http.connections import Connection, ConnectionLimiter, LimitedConfig, descriptors

_WAITING = 1024
"""Connections that the kernel keeps for a server that has not accepted them yet."""
_AT_ONCE = 16
"""Connections that asyncio accepts before it calls a protocol, which may end another one: beyond the limit so many and a few times as many are open."""


class DrainingServer(uvicorn.Server):
    """A server that refuses new requests on the first signal and ends when the old ones have, at the latest after ``drain_s``."""

    def __init__(self, gateway: Gateway, drain_s: float, tell: Callable[[str], None]) -> None:
        config = LimitedConfig(
            application(gateway),
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",  # the application has none, and one that a second signal interrupts is printed as a traceback
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_AT_ONCE,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        most = gateway.limits.connections or descriptors()
        config.limiter = self.limiter = ConnectionLimiter(
            most, gateway.head_s, gateway.reader_s, partial(misread, gateway), too_many(gateway, most)
        )
        super().__init__(config)
        self._gateway, self._drain_s, self._tell = gateway, drain_s, tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to take connections; asyncio gives the kernel the number that it accepts at once, which are too few to keep."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_WAITING)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains, the second ends."""
        if self._gateway.draining:
            self.should_exit = self.force_exit = True
            return
        self._gateway.draining = True
        name = signal.Signals(sig).name
        threading.Thread(target=self._drain, args=(name,), daemon=True).start()

    def _drain(self, name: str) -> None:
        # In a thread: a handler may have interrupted a write to the same stream.
        with suppress(OSError):  # a full disk or a closed pipe is no reason to go on
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
    """Serves until a signal, and ends the worker; ``note`` records its state meanwhile."""
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
        node=platform.node(),
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
