"""A node's data port: buddies push snapshots to it, and whoever restores reads them.

Each connection is served by a thread of its own; one whose handshake (``wire.py``) fails is closed, and strangers who do not come to
its end take no place from others (``doorway.py``). As many requests as make sense are served at once; who asks for more waits a
moment, and is then told to ask again. What is pushed goes straight into a free segment, each block is checked as it comes, and only
then is the snapshot complete: a push that is torn leaves what was there before.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.manifest import checksum
from phalanx.checkpoint.snapshot.doorway import Doorway, Newcomer, shut
from phalanx.checkpoint.snapshot.segments import Snapshot, SnapshotMemory, decode_record
from phalanx.checkpoint.snapshot.wire import (
    LONGEST_READ_BYTES,
    Busy,
    Bytes,
    Describe,
    Missing,
    OfferSnapshot,
    PushAccepted,
    ReadImage,
    Refused,
    RefusedError,
    Request,
    Wire,
    WireError,
    authenticate,
    secured_server,
)
from phalanx.hardware.local.network import family_of

_log = logging.getLogger(__name__)
_HANDSHAKE_S = 5.0
"""For the handshake as a whole, TLS included."""
_IDLE_S = 600.0
_TRANSFER_S = 30.0
"""A client that takes or sends nothing for so long, in the middle of a request, is given up: others wait for its place."""
_QUEUE_S = 2.0
"""Time that a request waits for a place, before its client is told to ask again; shorter than clients' patience with silence."""
_PAUSE_S = 0.2
_BACKLOG = 1024


class SnapshotServer:
    """Serves a ``SnapshotMemory`` from construction until ``close``."""

    def __init__(
        self,
        memory: SnapshotMemory,
        token: str,
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        most_newcomers: int = 256,
        most_connections: int = 1024,
        most_requests: int = 64,
        handshake_timeout_s: float = _HANDSHAKE_S,
        queue_timeout_s: float = _QUEUE_S,
    ) -> None:
        """Listens on any free port of ``host`` (see ``port``). A connection that is silent for ten minutes is closed.

        Args:
            memory: What is served, and where pushed snapshots go.
            token: What both sides of a connection must know.
            host: The address to listen on.
            tls: For TLS.
            most_newcomers: Connections during their handshake.
            most_connections: Connections that have proven themselves; further ones are told to come again.
            most_requests: Requests that are served at once.
            handshake_timeout_s: Limit of a whole handshake, TLS included.
            queue_timeout_s: Time that a request waits for its turn before the server replies that it is busy.

        Raises OSError where the port cannot be had.
        """
        self._memory = memory
        self._token: str = token
        self._earlier: Callable[[], Sequence[str]] = tuple
        self._tls = tls
        self._handshake_timeout_s, self._queue_timeout_s = handshake_timeout_s, queue_timeout_s
        self._doorway = Doorway(most_newcomers)
        self._room = threading.BoundedSemaphore(most_connections)
        self._turns = threading.BoundedSemaphore(most_requests)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self._thread = threading.Thread(target=self._accept, name="snapshot-server", daemon=True)
        self._thread.start()

    def change_token(self, token: str, earlier: Callable[[], Sequence[str]]) -> None:
        """From now on connections prove that they know ``token``, or one of those that ``earlier`` returns then."""
        self._token, self._earlier = token, earlier

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Ends all connections and stops listening."""
        with self._lock:
            self._closed.set()
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
            except OSError as error:  # no descriptor is left, say: others may be closed in a moment
                if not self._closed.wait(_PAUSE_S):
                    _log.warning("cannot accept connections: %s", error)
                continue
            newcomer = self._doorway.enter(connection, address[0])
            try:
                threading.Thread(target=self._serve, args=(newcomer, address), daemon=True).start()
            except RuntimeError as error:
                _log.warning("%s:%s: no thread can be started for it: %s", *address[:2], error)
                self._doorway.leave(newcomer, proven=False)
                connection.close()
                self._closed.wait(_PAUSE_S)

    def _serve(self, newcomer: Newcomer, address: tuple[str, int]) -> None:
        peer = f"{address[0]}:{address[1]}"
        try:
            with self._secured(newcomer) as connection, self._listed(connection):
                wire = Wire(connection, peer)
                wire.set_deadline(newcomer.arrived_s + self._handshake_timeout_s - time.monotonic())
                authenticate(wire, self._token, "server", self._earlier())
                self._doorway.leave(newcomer, proven=True)
                self._converse(wire)
        except (CheckpointError, OSError) as error:
            newcomer.connection.close()
            if not self._closed.is_set():
                _log.warning("%s: connection closed: %s", peer, error)
        finally:
            self._doorway.leave(newcomer, proven=False)

    def _secured(self, newcomer: Newcomer) -> socket.socket:
        """The newcomer's connection, under TLS where there is a context."""
        newcomer.connection.settimeout(self._handshake_timeout_s)
        newcomer.connection = secured_server(newcomer.connection, self._tls)
        if isinstance(newcomer.connection, ssl.SSLSocket):
            newcomer.connection.do_handshake()  # its timeout is for the whole of it
        return newcomer.connection

    @contextmanager
    def _listed(self, connection: socket.socket) -> Iterator[None]:
        """Among those that ``close`` ends."""
        with self._lock:
            if self._closed.is_set():
                raise WireError("the server is closing")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def _converse(self, wire: Wire) -> None:
        wire.set_timeout(_IDLE_S)
        if not self._room.acquire(blocking=False):
            if wire.hear_request() is not None:
                wire.say(Busy(ends=True))
            return
        try:
            while (request := wire.hear_request()) is not None:
                if not self._turns.acquire(timeout=self._queue_timeout_s):
                    wire.say(Busy())
                    continue
                try:
                    wire.set_timeout(_TRANSFER_S)
                    self._answer(wire, request)
                finally:
                    self._turns.release()
                wire.set_timeout(_IDLE_S)
        finally:
            self._room.release()

    def _answer(self, wire: Wire, request: Request) -> None:
        try:
            match request:
                case Describe():
                    self._describe(wire, request)
                case ReadImage():
                    self._read(wire, request)
                case OfferSnapshot():
                    self._receive(wire, request)
        except NoSuchStepError as error:
            wire.say(Missing(str(error)))
        except WireError:
            raise
        except CheckpointError as error:
            _log.warning("%s: refused: %s", wire.peer, error)
            wire.say(Refused(str(error)[:8192]))

    def _describe(self, wire: Wire, request: Describe) -> None:
        with self._memory.reading(request.key.value()) as (segment, _):
            record = segment.record()
        if record is None:
            raise NoSuchStepError(f"{request.key.value()} was replaced meanwhile")
        wire.say(Bytes(len(record)), record)

    def _read(self, wire: Wire, request: ReadImage) -> None:
        start, stop = request.start, request.stop
        with self._memory.reading(request.key.value()) as (segment, snapshot):
            if not start < stop <= snapshot.nbytes or stop - start > LONGEST_READ_BYTES:
                raise RefusedError(
                    f"bytes {start:,} to {stop:,} of {snapshot.nbytes:,}: not a range that is read"
                )
            wire.say(Bytes(stop - start), segment.image(stop)[start:].data)

    def _receive(self, wire: Wire, offer: OfferSnapshot) -> None:
        key = offer.key.value()
        if offer.run != self._memory.run:
            raise RefusedError(f"this memory is of run {self._memory.run}, not {offer.run}")
        if self._memory.holds(key):
            wire.say(PushAccepted())
            return
        with self._memory.receiving(key, offer.previous, offer.image_bytes) as segment:
            image = segment.begin(offer.image_bytes)
            wire.say(Bytes(offer.record_bytes + offer.image_bytes))
            record = wire.receive(offer.record_bytes)
            _receive_image(wire, _offered(record, offer, wire.peer), image)
            segment.complete(offer.image_bytes, record)
        wire.say(PushAccepted())


def _offered(record: bytes, offer: OfferSnapshot, peer: str) -> Snapshot:
    """Decodes the record of a pushed snapshot. Raises WireError, which ends the connection, if it is not the one offered."""
    try:
        snapshot = decode_record(record, peer)
    except CorruptError as error:
        raise WireError(f"{peer}: pushed a damaged record") from error
    said = (snapshot.run, snapshot.key, snapshot.previous, snapshot.nbytes)
    if said != (offer.run, offer.key.value(), offer.previous, offer.image_bytes):
        raise WireError(f"{peer}: pushed the record of another snapshot than it had offered")
    return snapshot


def _receive_image(wire: Wire, snapshot: Snapshot, image: ByteArray) -> None:
    """Fills ``image``; raises CorruptError, after all of it has come, where a block is not what its checksum says."""
    manifest = snapshot.manifest
    damaged = []
    for index, start in enumerate(range(0, manifest.nbytes, manifest.block_bytes)):
        block = image[start : start + manifest.block_bytes]
        wire.receive_into(block.data)
        if checksum(block) != manifest.checksums[index]:
            damaged.append(index)
    if damaged:
        raise CorruptError(f"blocks {damaged[:8]} of {snapshot.key} came damaged; push it again")
