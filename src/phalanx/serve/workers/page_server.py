"""A worker's page port: offers pages under leases to workers that have proven themselves and compute the same bits.

Each connection has a thread with a blocking socket, since bulk bytes have no place in an event loop; strangers wait in a bounded doorway with
a deadline, as at the snapshot port. A page's digest is computed when it is first offered, not when it is fetched.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.doorway import Doorway, Newcomer, shut
from phalanx.checkpoint.snapshot.wire import Wire, WireError, secured_server
from phalanx.serve.workers.page_wire import PURPOSE, Done, Fetch, Offer, Open, Refused, digest, hear, say
from phalanx.serve.workers.sealed_wire import SealedWire
from phalanx.traffic.events import Identity
from phalanx.traffic.leases import Leases

_log = logging.getLogger(__name__)
_HANDSHAKE_S = 5.0
_SILENT_S = 30.0
UNLEASED = 0
"""Pages asked for under this job are those that are held just now, under no lease."""


class OfferedPages:
    """Pages under lease, with their digests; for all threads of a worker."""

    def __init__(
        self,
        lease_s: float = 30.0,
        look_up: Callable[[Sequence[bytes]], dict[bytes, bytes]] | None = None,
    ) -> None:
        """``look_up`` finds pages that are held without a lease, which are asked for under job 0."""
        self._leases, self._lock, self._look_up = Leases(lease_s), threading.Lock(), look_up
        self._pages: dict[bytes, tuple[bytes, bytes]] = {}

    def offer(self, job: int, pages: dict[bytes, bytes]) -> None:
        """Holds ``pages`` (name -> bytes) until they were fetched or their lease is over."""
        held = {name: (page, digest(page)) for name, page in pages.items()}
        with self._lock:
            self._pages |= held
            self._leases.offer(job, tuple(pages), time.monotonic())

    def offered(self, job: int, names: Sequence[bytes]) -> list[tuple[bytes, bytes, bytes]]:
        """(name, bytes, digest) of those of ``names``, from the first on, that the lease of ``job`` holds."""
        if job == UNLEASED and self._look_up is not None:
            return [(name, page, digest(page)) for name, page in self._look_up(names).items()]
        with self._lock:
            self._free(self._leases.expire(time.monotonic()))
            held = set(self._leases.offered(job, time.monotonic()))
            found = []
            for name in names:
                if name not in held:
                    break
                found.append((name, *self._pages[name]))
            return found

    def done(self, job: int) -> None:
        """Ends the lease of a job."""
        with self._lock:
            self._leases.done(job)
            self._free([job])

    def forget(self) -> None:
        """Ends all leases and drops all pages."""
        with self._lock:
            self._leases.end_all()
            self._pages.clear()

    def expire(self) -> int:
        """Ends leases that are over; returns how many have ended so since the start."""
        with self._lock:
            self._free(self._leases.expire(time.monotonic()))
            return self._leases.expired

    def count(self) -> int:
        """Pages that are held."""
        with self._lock:
            return len(self._pages)

    def _free(self, jobs: Sequence[object]) -> None:
        if jobs:
            held = self._leases.held()
            self._pages = {name: page for name, page in self._pages.items() if name in held}


class PageServer:
    """Serves ``OfferedPages`` from construction until ``close``."""

    def __init__(
        self,
        pages: OfferedPages,
        identity: Identity,
        token: str,
        host: str = "127.0.0.1",
        most_newcomers: int = 64,
    ) -> None:
        """Listens on any free port of ``host``. Raises OSError where it cannot be had."""
        self._pages, self._identity, self._token = pages, identity, token
        self._doorway = Doorway(most_newcomers)
        self._open: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self._thread = threading.Thread(target=self._accept, name="page-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Ends all connections and stops listening."""
        self._closed.set()
        with self._lock:
            for connection in self._open:
                shut(connection)
        self._doorway.close()
        shut(self._listener)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed, or out of descriptors for a moment
                self._closed.wait(0.2)
                continue
            newcomer = self._doorway.enter(connection, address[0])
            threading.Thread(target=self._serve, args=(newcomer,), daemon=True).start()

    def _serve(self, newcomer: Newcomer) -> None:
        connection = newcomer.connection
        with self._lock:
            self._open.add(connection)
        try:
            connection.settimeout(_HANDSHAKE_S)
            wire = Wire(secured_server(connection, None), newcomer.host)
            wire.set_deadline(_HANDSHAKE_S)
            sealed = SealedWire(wire, self._token, "server", PURPOSE)
            self._doorway.leave(newcomer, proven=True)
            wire.set_timeout(_SILENT_S)
            self._converse(sealed)
        except (CheckpointError, OSError) as error:
            if not self._closed.is_set():
                _log.warning("%s: no pages for it: %s", newcomer.host, error)
        finally:
            self._doorway.leave(newcomer, proven=False)
            with self._lock:
                self._open.discard(connection)
            with suppress(OSError):
                connection.close()

    def _converse(self, wire: SealedWire) -> None:
        asked = hear(wire)
        if not isinstance(asked, Open):
            raise WireError(f"{wire.peer}: begins with {type(asked).__name__}")
        if asked.identity != self._identity:
            why = f"these pages are of {self._identity}, and {asked.identity} would read them"
            say(wire, Refused(why))
            return
        found = self._pages.offered(asked.job, asked.names)
        nbytes = len(found[0][1]) if found else 0
        say(wire, Offer(tuple(name for name, _, _ in found), tuple(each for _, _, each in found), nbytes))
        while True:
            match hear(wire):
                case Fetch(pages):
                    for _, page, _ in found[:pages]:
                        wire.raw.send(page)
                case Done():
                    self._pages.done(asked.job)
                    return
                case other:
                    raise WireError(f"{wire.peer}: says {type(other).__name__} after an offer")
