"""Transfer of KV pages between workers: pulls from another worker, and the page port that serves them.

A pull never fails: it returns the leading pages that arrived, without a gap, and why it ended early. Pages that do not arrive complete and
undamaged are computed locally. A page counts only if its digest is its producer's, so a fault costs time but changes no token. Pages of
a worker on this machine are read from its shared memory (``page_wire``), or over NIXL if configured (``nixl_client``). Otherwise they
are fetched over the connection that offered them.

The page port offers pages under leases to authenticated workers that compute the same bits. It is a ``ProvenPort``, as the snapshot
port. A page's digest is computed when it is offered. The SHA-256 of a page in shared memory is computed only if it is fetched over the
socket or NIXL.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Literal

from phalanx.hardware.local.network import dial
from phalanx.wire.connection import SealedConnection, sealed
from phalanx.wire.messages import WireError
from phalanx.wire.port import ProvenPort
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.traffic.scheduler import Leases
from phalanx_serve.workers.nixl_client import AgentProcess, Laying, NixlError, read_pages
from phalanx_serve.workers.page_wire import (
    MESSAGES,
    PURPOSE,
    Coming,
    Done,
    Fetch,
    Lay,
    Offer,
    OpenPages,
    PagesRefused,
    SharedPages,
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
    expected page size (None: any).

    ``nixl`` reads pages over NIXL, and then precedes all other transports. ``only`` allows a single transport.
    Returns what came, and the seconds it took; if the connection fails, the reason is its ``failure``, and nothing is
    raised.
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
        """Request pages, receive those that are offered into ``self.pulled``, and release the lease.

        A refusal, or pages that are not offered, is a ``failure`` of ``pulled``. Pages that no other transport brings
        come through the socket, unless ``only`` excludes it. Raises WireError for an invalid message or page, or if a
        page is not of ``page_bytes`` (None: any size).
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
        with suppress(WireError):  # the received pages are complete, even if the source has just died
            self.wire.send_message(Done())
        if missing := len(request.names) - len(offer.names):
            self.pulled.failure = f"{missing} pages are not offered: evicted, or their lease is over"

    def _bring(self, offer: Offer) -> bool:
        """Read the pages over NIXL if there is a process for it, else from shared memory, as ``only`` permits.

        Return True if all arrived, False if the socket must bring the rest. Raises WireError for a damaged page.
        """
        if self.nixl is not None and self.only in (None, "nixl"):
            return self._read(offer, self.nixl)
        return self.only in (None, "memory") and self._take(offer)

    def _read(self, offer: Offer, nixl: AgentProcess) -> bool:
        """Read the pages over NIXL; return False, with the reason in ``unreached``, if the remaining ones need
        another transport.

        Raises WireError for a damaged page.
        """
        self.pulled.way = "nixl"
        try:
            with closing(read_pages(self.wire, nixl, offer, self.until_s)) as pages:
                for name, copied in zip(offer.names, pages, strict=False):
                    self._keep(name, *copied)
                    self.pulled.over_nixl += 1
                    self._observe_time()
        except NixlError as error:
            self.pulled.unreached = str(error)
            return False
        return True

    def _take(self, offer: Offer) -> bool:
        """Read the pages from shared memory; return False if that is not possible: another machine, no such memory,
        or no access.

        Raises WireError for a damaged page, or an offer without digests.
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
        """Receive the remaining pages through the socket; they are hashed in a thread meanwhile. Raises WireError for
        damaged ones, or without a digest for each.
        """
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
                """Keep the oldest page that has arrived, once it is hashed."""
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


# The page port.


_log = logging.getLogger(__name__)
_SILENT_S = 30.0
_MOST_FILES = 256
"""Most jobs whose pages are in shared memory at a time: each needs a descriptor, and a process has few."""
UNLEASED = 0
"""Job number of pages that are cached now, without a lease."""


class _Batch:
    """Pages of a job, in shared memory if possible."""

    def __init__(self, pages: dict[bytes, bytes], shared: SharedPages | None) -> None:
        """Hash the pages: quickly if they are shared, and then keep only the hashes; else by SHA-256."""
        self._numbers = {name: number for number, name in enumerate(pages)}
        self._page_bytes = len(next(iter(pages.values()), b""))
        self._shared = shared
        # A reader of shared memory needs no SHA-256, which would cost the most.
        self._pages: Sequence[bytes | memoryview] = [] if shared else list(pages.values())
        self._fast = [fast_digest(page) for page in pages.values()] if shared else []
        self._digests = [] if shared else [digest(page) for page in pages.values()]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._numbers)

    def offer(self, names: Sequence[bytes]) -> Offer:
        """Offer the leading ``names`` that are here, with place, numbers and fast digests if they are in shared memory."""
        available = tuple(itertools.takewhile(self._numbers.__contains__, names))
        if self._shared is None:
            return Offer(available, self._page_bytes)
        numbers = tuple(self._numbers[name] for name in available)
        digests = tuple(self._fast[number] for number in numbers)
        return Offer(available, self._page_bytes, self._shared.place, numbers, digests)

    def fetched(self, names: Sequence[bytes]) -> list[tuple[bytes | memoryview, bytes]]:
        """Return the bytes and the SHA-256 of offered pages. Shared pages are mapped and hashed at the first call."""
        with self._lock:
            if self._shared is not None and not self._pages:
                self._pages = cut(self._shared.mapped(), range(len(self)), self._page_bytes)
                self._digests = [digest(page) for page in self._pages]
        numbers = [self._numbers[name] for name in names]
        return [(self._pages[number], self._digests[number]) for number in numbers]


_NONE = _Batch({}, None)


class OfferedPages:
    """Pages under lease, with their digests. Thread-safe."""

    def __init__(
        self,
        lease_s: float = 30.0,
        look_up: Callable[[Sequence[bytes]], dict[bytes, bytes]] | None = None,
        *,
        share: bool = True,
    ) -> None:
        """Begin without pages.

        ``share`` copies pages into memory that other processes of this machine can read, if the system allows it.

        ``look_up`` returns cached pages without a lease, which are requested under job 0; None has none.
        """
        self._leases, self._lock, self._look_up = Leases(lease_s), threading.Lock(), look_up
        self._batches: dict[object, _Batch] = {}
        self._share, self._is_failure_logged = share, False

    def offer(self, job: int, pages: dict[bytes, bytes]) -> None:
        """Keep ``pages`` (name -> bytes, all of one size) under a lease of ``job``, until they are fetched or it
        expires.

        In shared memory, where possible.
        """
        batch = self._batch(pages)
        with self._lock:
            self._batches[job] = batch
            self._leases.offer(job, tuple(pages), time.monotonic())

    def offered(self, job: int, names: Sequence[bytes]) -> _Batch:
        """Return the pages under the lease of ``job``; empty if there are none, or the lease has expired.

        The caller may still read them after the lease has ended. Under the job ``UNLEASED``, cached pages are looked
        up by ``names``.
        """
        if job == UNLEASED and self._look_up is not None:
            return self._batch(self._look_up(names))
        with self._lock:
            self._free(self._leases.expire(time.monotonic()))
            return self._batches.get(job, _NONE)

    def end_lease(self, job: int) -> None:
        """End the lease of a job."""
        with self._lock:
            self._leases.end(job)
            self._free([job])

    def forget(self) -> None:
        """End all leases and drop all pages."""
        with self._lock:
            self._leases.end_all()
            self._batches.clear()

    def expire(self) -> int:
        """End expired leases; return how many have expired since the start."""
        with self._lock:
            self._free(self._leases.expire(time.monotonic()))
            return self._leases.expired

    def count(self) -> int:
        """Return the number of leased pages."""
        with self._lock:
            return sum(map(len, self._batches.values()))

    def _free(self, jobs: Sequence[object]) -> None:
        """Drop the pages of these jobs."""
        for job in jobs:
            self._batches.pop(job, None)

    def _batch(self, pages: dict[bytes, bytes]) -> _Batch:
        """Return pages ready to be read.

        They are in shared memory if that is enabled and possible, and fewer than ``_MOST_FILES`` batches are kept.
        The first failure is logged.
        """
        shared = None
        if self._share and pages and len(self._batches) < _MOST_FILES:
            try:
                shared = SharedPages(pages.values())
            except OSError as error:
                if not self._is_failure_logged:
                    _log.warning(
                        "pages go through sockets, which is slower: no memory to share could be had (%s)",
                        error,
                    )
                self._is_failure_logged = True
        return _Batch(pages, shared)


class PageServer:
    """Serves ``OfferedPages`` from construction until ``close``."""

    def __init__(
        self,
        pages: OfferedPages,
        identity: WorkerIdentity,
        token: str,
        host: str = "127.0.0.1",
        nixl: AgentProcess | None = None,
    ) -> None:
        """Listen on any free port of ``host``; with ``nixl``, lay pages for others' agents. Raises OSError if the port cannot be had."""
        self._pages, self._identity, self._nixl = pages, identity, nixl
        self._port = ProvenPort(self._converse, "page-server", PURPOSE, token, host=host)

    @property
    def port(self) -> int:
        """The port number."""
        return self._port.port

    def close(self) -> None:
        """End all connections and stop listening."""
        self._port.close()

    def _converse(self, wire: SealedConnection) -> None:
        """Offer pages to a client and send them as it requests, through the socket or over NIXL, until it sends
        ``Done``, which ends the lease.

        A client of another identity is refused. Raises WireError for a silent or misbehaving client, and then keeps
        the lease.
        """
        wire.raw.set_timeout(_SILENT_S)
        request = wire.receive_message(MESSAGES)
        if not isinstance(request, OpenPages):
            raise WireError(f"{wire.peer}: begins with {type(request).__name__}")
        if request.identity != self._identity:
            reason = f"these pages are of {self._identity}, and {request.identity} would read them"
            wire.send_message(PagesRefused(reason))
            return
        batch = self._pages.offered(request.job, request.names)
        offer = batch.offer(request.names)
        wire.send_message(offer)
        with closing(Laying(self._nixl)) as laying:
            while True:
                match wire.receive_message(MESSAGES):
                    case Fetch(first, pages):
                        fetched = batch.fetched(offer.names[first : first + pages])
                        wire.send_message(Coming(tuple(digest for _, digest in fetched)))
                        for page, _ in fetched:
                            wire.raw.send(page)
                    case Lay(first, pages):
                        wire.send_message(laying.lay(batch.fetched(offer.names[first : first + pages])))
                    case Done():
                        self._pages.end_lease(request.job)
                        return
                    case other:
                        raise WireError(f"{wire.peer}: sends {type(other).__name__} after an offer")
