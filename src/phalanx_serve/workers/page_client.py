"""Pulling pages from another worker: whatever does not come, whole and undamaged, is left to be computed here.

A pull never fails: it returns the pages that came, from the first on without a gap, and why it ended early. Slower is allowed, other tokens
are not, so a page counts only if its digest is that of its producer. Pages of a worker of this machine are taken where they lie in its memory
(``shared_pages``), or, where that was asked for, read over NIXL (``over_nixl``); those that cannot be had so are fetched over the connection that offered them.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Literal

from phalanx.wire.connection import SealedConnection, sealed
from phalanx.wire.messages import WireError
from phalanx_serve.traffic.events import Identity
from phalanx_serve.workers.over_nixl.agent_process import AgentProcess, NixlError, read_pages
from phalanx_serve.workers.page_wire import (
    MESSAGES,
    PURPOSE,
    Coming,
    Done,
    Fetch,
    Offer,
    Open,
    Refused,
    cut,
    digest,
    fast_digest,
    opened,
    this_machine,
)

_UNHASHED = 2
"""Pages that may wait for their hash."""

Way = Literal["memory", "nixl", "socket"]
"""How pages come."""
PageWay = Literal["auto", "socket", "nixl"]
"""How the workers of a service are to take pages: in memory where that can be had; never so; over NIXL where that can be had. Else through the socket."""


@dataclass
class Pulled:
    """What a pull has brought."""

    pages: dict[bytes, bytearray | memoryview] = field(default_factory=dict)
    """Name -> bytes, in the order asked for, without a gap."""
    failure: str = ""
    """Why the rest did not come; empty if all did."""
    way: Way | None = None
    """How they came, the last ones if not all came in one way; None if nothing was offered."""
    unreached: str = ""
    """Why they could not be taken in memory, though they lie in that of this machine, or not all over NIXL; empty where that is as it should be."""
    over_nixl: int = 0
    """The first of them, which came over NIXL."""


def pull(
    host: str,
    port: int,
    token: str,
    identity: Identity,
    job: int,
    names: Sequence[bytes],
    *,
    within_s: float = 10.0,
    page_bytes: int | None = None,
    only: Way | None = None,
    nixl: AgentProcess | None = None,
) -> Pulled:
    """Pulls the pages ``names`` that are offered under ``job``, within ``within_s`` seconds; ``page_bytes`` is what one must have.

    ``nixl`` is what reads pages over NIXL, which comes before all other ways then. ``only`` allows one way alone.
    """
    pulled = Pulled()
    until_s = time.monotonic() + within_s
    try:
        with socket.create_connection((host, port), within_s) as connection:
            wire = sealed(connection, f"{host}:{port}", token, "client", PURPOSE, within_s)
            wire.raw.set_deadline(until_s - time.monotonic())
            _Pull(wire, pulled, until_s, only, nixl).run(Open(identity, job, tuple(names)), page_bytes)
    except (WireError, OSError) as error:
        pulled.failure = str(error) or type(error).__name__
    return pulled


@dataclass(frozen=True)
class _Pull:
    """A conversation with a page port, and what it brings."""

    wire: SealedConnection
    pulled: Pulled
    until_s: float
    only: Way | None
    nixl: AgentProcess | None

    def run(self, asked: Open, page_bytes: int | None) -> None:
        """Takes what is offered. Raises WireError where something does not come as it should."""
        self.wire.send_message(asked)
        offer = self.wire.receive_message(MESSAGES)
        if isinstance(offer, Refused):
            self.pulled.failure = offer.why
            return
        if not isinstance(offer, Offer) or offer.names != asked.names[: len(offer.names)]:
            raise WireError(f"{self.wire.peer}: offers other pages than were asked for")
        if offer.names and page_bytes not in (None, offer.page_bytes):
            raise WireError(
                f"{self.wire.peer}: offers pages of {offer.page_bytes:,} bytes, where {page_bytes} are one"
            )
        if offer.names and not self._bring(offer):
            if self.only not in (None, "socket"):
                raise WireError(f"{self.wire.peer}: its memory is not to be had: {self.pulled.unreached}")
            self._fetch(offer)
        with suppress(WireError):  # what came is whole, also if its source has just died
            self.wire.send_message(Done())
        if missing := len(asked.names) - len(offer.names):
            self.pulled.failure = f"{missing} pages are not offered: evicted, or their lease is over"

    def _bring(self, offer: Offer) -> bool:
        """Brings the pages out of memory, in the way that there is; whether all came so. Raises WireError for a damaged one."""
        if self.nixl is not None and self.only in (None, "nixl"):
            return self._read(offer, self.nixl)
        return self.only in (None, "memory") and self._take(offer)

    def _read(self, offer: Offer, nixl: AgentProcess) -> bool:
        self.pulled.way = "nixl"
        try:
            with closing(read_pages(self.wire, nixl, offer, self.until_s)) as pages:
                for name, came in zip(offer.names, pages, strict=False):
                    self._keep(name, came.page, came.right, came.found)
                    self.pulled.over_nixl += 1
                    self._observe_time()
        except NixlError as error:
            self.pulled.unreached = str(error)
            return False
        return True

    def _take(self, offer: Offer) -> bool:
        """Takes the pages where they lie; whether that is possible. Raises WireError for a damaged one."""
        place = offer.place
        if place is None or place.machine != this_machine():
            return False
        if not len(offer.names) == len(offer.numbers) == len(offer.digests):
            raise WireError(f"{self.wire.peer}: offers names without digests")
        try:
            memory = opened(place, (max(offer.numbers) + 1) * offer.page_bytes)
        except OSError as error:
            self.pulled.unreached = str(error)
            return False
        self.pulled.way = "memory"
        pages = cut(memory, offer.numbers, offer.page_bytes)
        for name, right, page in zip(offer.names, offer.digests, pages, strict=True):
            self._keep(name, page, right, fast_digest(page))
            self._observe_time()
        return True

    def _fetch(self, offer: Offer) -> None:
        self.pulled.way = "socket"
        names = offer.names[len(self.pulled.pages) :]
        self.wire.send_message(Fetch(len(self.pulled.pages), len(names)))
        coming = self.wire.receive_message(MESSAGES)
        if not isinstance(coming, Coming) or len(coming.digests) != len(names):
            raise WireError(f"{self.wire.peer}: sends pages without digests")
        # A page is hashed, which holds no lock of Python's, while the next one comes.
        with ThreadPoolExecutor(1) as hashing:
            came: deque[tuple[bytes, bytes, bytearray, Future[bytes]]] = deque()

            def keep_next() -> None:
                name, right, page, found = came.popleft()
                self._keep(name, page, right, found.result())

            for name, right in zip(names, coming.digests, strict=True):
                page = bytearray(offer.page_bytes)
                self.wire.raw.receive_into(memoryview(page))
                came.append((name, right, page, hashing.submit(digest, page)))
                if len(came) > _UNHASHED:
                    keep_next()
                self._observe_time()
            while came:
                keep_next()

    def _keep(self, name: bytes, page: bytearray | memoryview, right: bytes, found: bytes) -> None:
        if found != right:
            raise WireError(f"page {name.hex()} came damaged")
        self.pulled.pages[name] = page

    def _observe_time(self) -> None:
        if time.monotonic() > self.until_s:
            raise WireError(f"{self.wire.peer}: too slow")
