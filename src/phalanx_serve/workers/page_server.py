"""A worker's page port: offers pages under leases to workers that have proven themselves and compute the same bits.

The port is a ``ProvenPort``, as the snapshot port. A page's digest is computed when it is offered; the SHA-256 of one that others can read in memory, when it is
fetched all the same, or read over NIXL.
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
from phalanx_serve.traffic.events import Identity
from phalanx_serve.workers.over_nixl.agent_process import AgentProcess, Laying
from phalanx_serve.workers.page_wire import (
    MESSAGES,
    PURPOSE,
    Coming,
    Done,
    Fetch,
    Lay,
    Offer,
    Open,
    Refused,
    SharedPages,
    cut,
    digest,
    fast_digest,
)

_log = logging.getLogger(__name__)
_SILENT_S = 30.0
_MOST_FILES = 256
"""Jobs whose pages are in shared memory at a time: each has a descriptor, of which a process has not many."""
UNLEASED = 0
"""Pages asked for under this job are those that are held just now, under no lease."""


class _Batch:
    """The pages of a job, in memory that others can read if there is such."""

    def __init__(self, pages: dict[bytes, bytes], shared: SharedPages | None) -> None:
        self._numbers = {name: number for number, name in enumerate(pages)}
        self._page_bytes = len(next(iter(pages.values()), b""))
        self._shared = shared
        # Whoever reads in memory needs no SHA-256, which costs more than all else.
        self._pages: Sequence[bytes | memoryview] = [] if shared else list(pages.values())
        self._fast = [fast_digest(page) for page in pages.values()] if shared else []
        self._digests = [] if shared else [digest(page) for page in pages.values()]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._numbers)

    def offer(self, names: Sequence[bytes]) -> Offer:
        """Those of ``names``, from the first on, that are here."""
        found = tuple(itertools.takewhile(self._numbers.__contains__, names))
        if self._shared is None:
            return Offer(found, self._page_bytes)
        numbers = tuple(self._numbers[name] for name in found)
        digests = tuple(self._fast[number] for number in numbers)
        return Offer(found, self._page_bytes, self._shared.place, numbers, digests)

    def fetched(self, names: Sequence[bytes]) -> list[tuple[bytes | memoryview, bytes]]:
        """The bytes and the SHA-256 of pages that were offered."""
        with self._lock:
            if self._shared is not None and not self._pages:
                self._pages = cut(self._shared.mapped(), range(len(self)), self._page_bytes)
                self._digests = [digest(page) for page in self._pages]
        numbers = [self._numbers[name] for name in names]
        return [(self._pages[number], self._digests[number]) for number in numbers]


_NONE = _Batch({}, None)


class OfferedPages:
    """Pages under lease, with their digests; for all threads of a worker."""

    def __init__(
        self,
        lease_s: float = 30.0,
        look_up: Callable[[Sequence[bytes]], dict[bytes, bytes]] | None = None,
        *,
        share: bool = True,
    ) -> None:
        """``look_up`` finds pages that are held without a lease, which are asked for under job 0. ``share`` lays pages into memory that other processes
        of this machine can read, as long as the system gives it."""
        self._leases, self._lock, self._look_up = Leases(lease_s), threading.Lock(), look_up
        self._batches: dict[object, _Batch] = {}
        self._share, self._told = share, False

    def offer(self, job: int, pages: dict[bytes, bytes]) -> None:
        """Holds ``pages`` (name -> bytes, all of one size) until they were fetched or their lease is over."""
        batch = self._batch(pages)
        with self._lock:
            self._batches[job] = batch
            self._leases.offer(job, tuple(pages), time.monotonic())

    def offered(self, job: int, names: Sequence[bytes]) -> _Batch:
        """What the lease of ``job`` holds, which the caller may go on to read when it is over."""
        if job == UNLEASED and self._look_up is not None:
            return self._batch(self._look_up(names))
        with self._lock:
            self._free(self._leases.expire(time.monotonic()))
            return self._batches.get(job, _NONE)

    def done(self, job: int) -> None:
        """Ends the lease of a job."""
        with self._lock:
            self._leases.done(job)
            self._free([job])

    def forget(self) -> None:
        """Ends all leases and drops all pages."""
        with self._lock:
            self._leases.end_all()
            self._batches.clear()

    def expire(self) -> int:
        """Ends leases that are over; returns how many have ended so since the start."""
        with self._lock:
            self._free(self._leases.expire(time.monotonic()))
            return self._leases.expired

    def count(self) -> int:
        """Pages that are held."""
        with self._lock:
            return sum(map(len, self._batches.values()))

    def _free(self, jobs: Sequence[object]) -> None:
        for job in jobs:
            self._batches.pop(job, None)

    def _batch(self, pages: dict[bytes, bytes]) -> _Batch:
        shared = None
        if self._share and pages and len(self._batches) < _MOST_FILES:
            try:
                shared = SharedPages(pages.values())
            except OSError as error:
                if not self._told:
                    _log.warning(
                        "pages go through sockets, which is slower: no memory to share could be had (%s)",
                        error,
                    )
                self._told = True
        return _Batch(pages, shared)


class PageServer:
    """Serves ``OfferedPages`` from construction until ``close``."""

    def __init__(
        self,
        pages: OfferedPages,
        identity: Identity,
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
        wire.raw.set_timeout(_SILENT_S)
        request = wire.receive_message(MESSAGES)
        if not isinstance(request, Open):
            raise WireError(f"{wire.peer}: begins with {type(request).__name__}")
        if request.identity != self._identity:
            reason = f"these pages are of {self._identity}, and {request.identity} would read them"
            wire.send_message(Refused(reason))
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
                        self._pages.done(request.job)
                        return
                    case other:
                        raise WireError(f"{wire.peer}: sends {type(other).__name__} after an offer")
