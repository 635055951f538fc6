"""Pulls of pages from another worker. Pages that do not arrive complete and undamaged are computed locally.

A pull never fails: it returns the leading pages that arrived, without a gap, and why it ended early. A page counts
only if its digest is its producer's, so a fault costs time but changes no token. Pages of a worker on this machine
are read from its shared memory (``shared_pages``), or over NIXL if configured (``over_nixl``). Otherwise they are
fetched over the connection that offered them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Literal

from phalanx.hardware.local.network import dial
from phalanx.wire.connection import SealedConnection, sealed
from phalanx.wire.messages import WireError
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.workers.over_nixl.agent_process import AgentProcess, NixlError, read_pages
from phalanx_serve.workers.page_wire import (
    MESSAGES,
    PURPOSE,
    Coming,
    Done,
    Fetch,
    Offer,
    OpenPages,
    PagesRefused,
    cut,
    digest,
    fast_digest,
    opened,
    this_machine,
)

_UNHASHED = 2
"""Most pages that wait for their hash."""

Way = Literal["memory", "nixl", "socket"]
"""Transport of pages."""
PageWay = Literal["auto", "socket", "nixl"]
"""Configured transport of pages: shared memory if possible, never shared memory, or NIXL if possible; the socket
is the fallback.
"""


@dataclass
class Pulled:
    """Result of a pull."""

    pages: dict[bytes, bytearray | memoryview] = field(default_factory=dict)
    """Name -> bytes, in the requested order, without a gap."""
    failure: str = ""
    """Why the remaining pages did not arrive; empty if all did."""
    way: Way | None = None
    """Transport of the last pages; None if nothing was offered."""
    unreached: str = ""
    """Why shared memory or NIXL could not be used as configured; empty if it was."""
    over_nixl: int = 0
    """Number of leading pages that arrived over NIXL."""


def pull(
    host: str,
    port: int,
    token: str,
    identity: WorkerIdentity,
    job: int,
    names: Sequence[bytes],
    *,
    within_s: float = 10.0,
    page_bytes: int | None = None,
    only: Way | None = None,
    nixl: AgentProcess | None = None,
) -> Pulled:
    """Pull the pages ``names`` that are offered under ``job``, within ``within_s`` seconds; ``page_bytes`` is the
    expected page size.

    ``nixl`` reads pages over NIXL, and then precedes all other transports. ``only`` allows a single transport. Returns
    what came; if the connection fails, the reason is its ``failure``.
    """
    pulled = Pulled()
    until_s = time.monotonic() + within_s
    try:
        with dial(host, port, within_s) as connection:
            wire = sealed(connection, f"{host}:{port}", token, "client", PURPOSE, within_s)
            wire.raw.set_deadline(until_s - time.monotonic())
            _Pull(wire, pulled, until_s, only, nixl).run(OpenPages(identity, job, tuple(names)), page_bytes)
    except (WireError, OSError) as error:
        pulled.failure = str(error) or type(error).__name__
    return pulled


@dataclass(frozen=True)
class _Pull:
    """A conversation with a page port, and its result."""

    wire: SealedConnection
    pulled: Pulled
    until_s: float
    only: Way | None
    nixl: AgentProcess | None

    def run(self, request: OpenPages, page_bytes: int | None) -> None:
        """Request pages and receive those that are offered, into ``self.pulled``.

        A refusal, or pages that are not offered, is a ``failure`` of ``pulled``. Raises WireError for an invalid message
        or page, or if a page is not of ``page_bytes`` (None: any size).
        """
        self.wire.send_message(request)
        offer = self.wire.receive_message(MESSAGES)
        if isinstance(offer, PagesRefused):
            self.pulled.failure = offer.reason
            return
        if not isinstance(offer, Offer) or offer.names != request.names[: len(offer.names)]:
            raise WireError(f"{self.wire.peer}: offers other pages than requested")
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
        if missing := len(request.names) - len(offer.names):
            self.pulled.failure = f"{missing} pages are not offered: evicted, or their lease is over"

    def _bring(self, offer: Offer) -> bool:
        """Read the pages from memory or over NIXL; return True if all arrived. Raises WireError for a damaged
        page.
        """
        if self.nixl is not None and self.only in (None, "nixl"):
            return self._read(offer, self.nixl)
        return self.only in (None, "memory") and self._take(offer)

    def _read(self, offer: Offer, nixl: AgentProcess) -> bool:
        """Read the pages over NIXL; return False if the remaining ones need another transport.

        Raises WireError for a damaged page.
        """
        self.pulled.way = "nixl"
        try:
            with closing(read_pages(self.wire, nixl, offer, self.until_s)) as pages:
                for name, arrival in zip(offer.names, pages, strict=False):
                    self._keep(name, arrival.page, arrival.expected, arrival.actual)
                    self.pulled.over_nixl += 1
                    self._observe_time()
        except NixlError as error:
            self.pulled.unreached = str(error)
            return False
        return True

    def _take(self, offer: Offer) -> bool:
        """Read the pages from shared memory; return False if that is not possible. Raises WireError for a damaged
        page.
        """
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
        """Receive the remaining pages through the socket. Raises WireError for damaged ones."""
        self.pulled.way = "socket"
        names = offer.names[len(self.pulled.pages) :]
        self.wire.send_message(Fetch(len(self.pulled.pages), len(names)))
        coming = self.wire.receive_message(MESSAGES)
        if not isinstance(coming, Coming) or len(coming.digests) != len(names):
            raise WireError(f"{self.wire.peer}: sends pages without digests")
        # A page is hashed, which holds no lock of Python's, while the next one comes.
        with ThreadPoolExecutor(1) as hashing:
            arrived: deque[tuple[bytes, bytes, bytearray, Future[bytes]]] = deque()

            def keep_next() -> None:
                name, expected, page, actual = arrived.popleft()
                self._keep(name, page, expected, actual.result())

            for name, expected in zip(names, coming.digests, strict=True):
                page = bytearray(offer.page_bytes)
                self.wire.raw.receive_into(memoryview(page))
                arrived.append((name, expected, page, hashing.submit(digest, page)))
                if len(arrived) > _UNHASHED:
                    keep_next()
                self._observe_time()
            while arrived:
                keep_next()

    def _keep(self, name: bytes, page: bytearray | memoryview, expected: bytes, actual: bytes) -> None:
        """Keep a page. Raises WireError if its digest is wrong."""
        if actual != expected:
            raise WireError(f"page {name.hex()} came damaged")
        self.pulled.pages[name] = page

    def _observe_time(self) -> None:
        """Raise WireError if the time is over."""
        if time.monotonic() > self.until_s:
            raise WireError(f"{self.wire.peer}: too slow")
