"""A node's data port: buddies push snapshots to it, and restoring ranks read them.

The port is a ``ProvenPort``: strangers take no place from others. As many requests as make sense are served at once; a further one waits a
moment for its turn, and is then answered that the node is busy. Pushed bytes go straight into a free segment, each block is checked as it arrives, and only
then is the snapshot complete: a torn push leaves what was there before.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Sequence

from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.manifest import checksum
from phalanx.checkpoint.snapshot.messages import (
    LONGEST_READ_BYTES,
    PURPOSE,
    REQUESTS,
    Busy,
    BytesFollow,
    Describe,
    Missing,
    OfferSnapshot,
    PushAccepted,
    ReadImage,
    Request,
    SnapshotRefused,
    SnapshotRefusedError,
)
from phalanx.checkpoint.snapshot.segments import Snapshot, SnapshotMemory, decode_record
from phalanx.wire.connection import FramedConnection, SealedConnection
from phalanx.wire.messages import WireError
from phalanx.wire.port import HANDSHAKE_S, ProvenPort

_log = logging.getLogger(__name__)
_IDLE_S = 600.0
_TRANSFER_S = 30.0
"""A client that takes or sends nothing for so long, in the middle of a request, is given up: others wait for its place."""
_QUEUE_S = 2.0
"""Time that a request waits for a place, before its client is told to ask again; shorter than clients' patience with silence."""


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
        handshake_timeout_s: float = HANDSHAKE_S,
        queue_timeout_s: float = _QUEUE_S,
    ) -> None:
        """Listen on any free port of ``host`` (see ``port``). A connection that is silent for ten minutes is closed.

        Args:
            memory: The snapshots to serve, and the place of pushed ones.
            token: The token that both ends of a connection must know.
            host: The address to listen at.
            tls: For TLS.
            most_newcomers: Connections during their handshake.
            most_connections: Connections that have proven themselves; further ones are answered that the node is busy.
            most_requests: Requests that are served at once.
            handshake_timeout_s: Limit of a whole handshake, TLS included.
            queue_timeout_s: Time that a request waits for its turn before the server replies that it is busy.

        Raises OSError if the port cannot be had.
        """
        self._memory, self._queue_timeout_s = memory, queue_timeout_s
        self._room = threading.BoundedSemaphore(most_connections)
        self._turns = threading.BoundedSemaphore(most_requests)
        self._port = ProvenPort(
            self._converse,
            "snapshot-server",
            PURPOSE,
            token,
            host=host,
            tls=tls,
            most_newcomers=most_newcomers,
            handshake_timeout_s=handshake_timeout_s,
        )

    def change_token(self, token: str, earlier: Callable[[], Sequence[str]]) -> None:
        """Require ``token`` of connections from now on, or one of those that ``earlier`` returns at the time."""
        self._port.change_token(token, earlier)

    @property
    def port(self) -> int:
        """The port number."""
        return self._port.port

    def close(self) -> None:
        """End all connections and stop listening."""
        self._port.close()

    def _converse(self, peer: SealedConnection) -> None:
        wire = peer.raw  # each block has a checksum of its own
        wire.set_timeout(_IDLE_S)
        if not self._room.acquire(blocking=False):
            if wire.receive_message_or_end(REQUESTS) is not None:
                wire.send_message(Busy(ends=True))
            return
        try:
            while (request := wire.receive_message_or_end(REQUESTS)) is not None:
                if not self._turns.acquire(timeout=self._queue_timeout_s):
                    wire.send_message(Busy())
                    continue
                try:
                    wire.set_timeout(_TRANSFER_S)
                    self._answer(wire, request)
                finally:
                    self._turns.release()
                wire.set_timeout(_IDLE_S)
        finally:
            self._room.release()

    def _answer(self, wire: FramedConnection, request: Request) -> None:
        try:
            match request:
                case Describe():
                    self._describe(wire, request)
                case ReadImage():
                    self._read(wire, request)
                case OfferSnapshot():
                    self._receive(wire, request)
        except NoSuchStepError as error:
            wire.send_message(Missing(str(error)))
        except CheckpointError as error:
            _log.warning("%s: refused: %s", wire.peer, error)
            wire.send_message(SnapshotRefused(str(error)[:8192]))

    def _describe(self, wire: FramedConnection, request: Describe) -> None:
        with self._memory.reading(request.key.value()) as (segment, _):
            record = segment.record()
        if record is None:
            raise NoSuchStepError(f"{request.key.value()} was replaced meanwhile")
        wire.send_message(BytesFollow(len(record)), record)

    def _read(self, wire: FramedConnection, request: ReadImage) -> None:
        start, stop = request.start, request.stop
        with self._memory.reading(request.key.value()) as (segment, snapshot):
            if not start < stop <= snapshot.nbytes or stop - start > LONGEST_READ_BYTES:
                raise SnapshotRefusedError(
                    f"bytes {start:,} to {stop:,} of {snapshot.nbytes:,}: not a range that is read"
                )
            wire.send_message(BytesFollow(stop - start), segment.image(stop)[start:].data)

    def _receive(self, wire: FramedConnection, offer: OfferSnapshot) -> None:
        key = offer.key.value()
        if offer.run != self._memory.run:
            raise SnapshotRefusedError(f"this memory is of run {self._memory.run}, not {offer.run}")
        if self._memory.holds(key):
            wire.send_message(PushAccepted())
            return
        with self._memory.receiving(key, offer.previous, offer.image_bytes) as segment:
            image = segment.begin(offer.image_bytes)
            wire.send_message(BytesFollow(offer.record_bytes + offer.image_bytes))
            record = wire.receive(offer.record_bytes)
            _receive_image(wire, _offered(record, offer, wire.peer), image)
            segment.complete(offer.image_bytes, record)
        wire.send_message(PushAccepted())


def _offered(record: bytes, offer: OfferSnapshot, peer: str) -> Snapshot:
    """Decode the record of a pushed snapshot. Raises WireError, which ends the connection, if it is not the offered one."""
    try:
        snapshot = decode_record(record, peer)
    except CorruptError as error:
        raise WireError(f"{peer}: pushed a damaged record") from error
    announced = (snapshot.run, snapshot.key, snapshot.previous, snapshot.nbytes)
    if announced != (offer.run, offer.key.value(), offer.previous, offer.image_bytes):
        raise WireError(f"{peer}: pushed the record of another snapshot than it had offered")
    return snapshot


def _receive_image(wire: FramedConnection, snapshot: Snapshot, image: ByteArray) -> None:
    """Fill ``image``. Raises CorruptError, after all of it has arrived, if a block does not have its checksum."""
    manifest = snapshot.manifest
    damaged = []
    for index, start in enumerate(range(0, manifest.nbytes, manifest.block_bytes)):
        block = image[start : start + manifest.block_bytes]
        wire.receive_into(block.data)
        if checksum(block) != manifest.checksums[index]:
            damaged.append(index)
    if damaged:
        raise CorruptError(f"blocks {damaged[:8]} of {snapshot.key} came damaged; push it again")
