"""A worker's page port: offers pages under leases to authenticated workers that compute the same bits.

The port is a ``ProvenPort``, as the snapshot port. A page's digest is computed when it is offered. The SHA-256 of a
page in shared memory is computed only if it is fetched over the socket or NIXL.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from phalanx.wire.connection import SealedConnection
from phalanx.wire.messages import WireError
from phalanx.wire.port import ProvenPort
from phalanx_serve.traffic.block_table import Leases
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.workers.over_nixl.agent_process import AgentProcess, Laying
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
)

_log = logging.getLogger(__name__)
_SILENT_S = 30.0
_MOST_FILES = 256
"""Most jobs whose pages are in shared memory at a time: each needs a descriptor, and a process has few."""
UNLEASED = 0
"""Job number of pages that are cached now, without a lease."""


class _Batch:
    """Pages of a job, in shared memory if possible."""

    def __init__(self, pages: dict[bytes, bytes], shared: SharedPages | None) -> None:
        """Hash the pages: quickly if they are shared, else by SHA-256."""
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
        """Offer the leading ``names`` that are here."""
        available = tuple(itertools.takewhile(self._numbers.__contains__, names))
        if self._shared is None:
            return Offer(available, self._page_bytes)
        numbers = tuple(self._numbers[name] for name in available)
        digests = tuple(self._fast[number] for number in numbers)
        return Offer(available, self._page_bytes, self._shared.place, numbers, digests)

    def fetched(self, names: Sequence[bytes]) -> list[tuple[bytes | memoryview, bytes]]:
        """Return the bytes and the SHA-256 of offered pages. Each page is hashed once."""
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
        """``look_up`` returns cached pages without a lease, which are requested under job 0. ``share`` copies
        pages into memory that other processes of this machine can read, if the system allows it.
        """
        self._leases, self._lock, self._look_up = Leases(lease_s), threading.Lock(), look_up
        self._batches: dict[object, _Batch] = {}
        self._share, self._is_failure_logged = share, False

    def offer(self, job: int, pages: dict[bytes, bytes]) -> None:
        """Keep ``pages`` (name -> bytes, all of one size) until they are fetched or their lease expires.

        In shared memory, where possible.
        """
        batch = self._batch(pages)
        with self._lock:
            self._batches[job] = batch
            self._leases.offer(job, tuple(pages), time.monotonic())

    def offered(self, job: int, names: Sequence[bytes]) -> _Batch:
        """Return the pages under the lease of ``job``.

        The caller may still read them after the lease has ended. Pages of other jobs may be looked up without a lease;
        empty if there are none.
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
        for job in jobs:
            self._batches.pop(job, None)

    def _batch(self, pages: dict[bytes, bytes]) -> _Batch:
        """Return pages ready to be read, in shared memory if this is enabled and possible; the first failure is logged."""
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
        most_newcomers: int = 64,
        nixl: AgentProcess | None = None,
    ) -> None:
        """Listen on any free port of ``host``; with ``nixl``, lay pages for others' agents. Raises OSError if the port cannot be had."""
        self._pages, self._identity, self._nixl = pages, identity, nixl
        self._port = ProvenPort(
            self._converse, "page-server", PURPOSE, token, host=host, most_newcomers=most_newcomers
        )

    @property
    def port(self) -> int:
        """The port number."""
        return self._port.port

    def close(self) -> None:
        """End all connections and stop listening."""
        self._port.close()

    def _converse(self, wire: SealedConnection) -> None:
        """Offer pages to a client of the same identity and send them as it requests, until it is done. Raises WireError."""
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
