"""A node's data port: its messages, the server of snapshots, and the client that pushes and reads them.

Each request and each answer is a short message (``phalanx.wire.messages``), followed by the announced number of raw bytes, sent from and
received into memory without a copy. Both ends prove that they have the run's token. This excludes strangers, but does not protect against
modified traffic: use TLS on such a network.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Annotated

from msgspec import Meta, Struct

from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.manifest import checksum
from phalanx.checkpoint.snapshot.segments import (
    Snapshot,
    SnapshotKey,
    SnapshotMemory,
    WireCount,
    decode_record,
)
from phalanx.hardware.local.network import dial, split_address
from phalanx.wire.connection import FramedConnection, SealedConnection, authenticate, secured_client
from phalanx.wire.messages import EndedError, MessageDecoder, UnprovenError, WireError
from phalanx.wire.port import HANDSHAKE_S, ProvenPort

PURPOSE = "phalanx data port, version 3"
LONGEST_READ_BYTES = 64 << 20
LONGEST_RECORD_BYTES = 256 << 20

WireStep = Annotated[int, Meta(ge=-1, lt=2**53)]
WireText = Annotated[str, Meta(max_length=8192)]


class HolderLostError(CheckpointError):
    """The connection to a holder failed, or the holder violated the protocol; another holder may work."""


class HolderEndedError(HolderLostError):
    """The holder ended the connection."""


class BusyError(CheckpointError):
    """The node serves its maximum number of requests; retry after a pause."""

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended
        """True if the connection was closed after this answer."""


class SnapshotRefusedError(CheckpointError):
    """The other side belongs to another run, or does not accept the snapshot."""


@contextmanager
def holder_errors() -> Iterator[None]:
    """Convert a WireError: UnprovenError to SnapshotRefusedError, EndedError to HolderEndedError, any other to HolderLostError."""
    try:
        yield
    except UnprovenError as error:
        raise SnapshotRefusedError(str(error)) from error
    except EndedError as error:
        raise HolderEndedError(str(error)) from error
    except WireError as error:
        raise HolderLostError(str(error)) from error


class _Message(Struct, frozen=True, tag=True):
    pass


class Describe(_Message, frozen=True):
    """Request for the record of a snapshot. The answer is ``BytesFollow``."""

    key: SnapshotKey


class ReadImage(_Message, frozen=True):
    """Request for bytes ``start:stop`` of a snapshot's image. The answer is ``BytesFollow``."""

    key: SnapshotKey
    start: WireCount
    stop: WireCount


class OfferSnapshot(_Message, frozen=True):
    """Offer of a snapshot. After the answer ``BytesFollow`` the record and the image are sent; the last answer is ``PushAccepted``."""

    run: WireText
    key: SnapshotKey
    previous: WireStep
    image_bytes: WireCount
    record_bytes: Annotated[int, Meta(ge=0, le=LONGEST_RECORD_BYTES)]


class BytesFollow(_Message, frozen=True):
    """Announcement of raw bytes: from the sender of this message; in the answer to ``OfferSnapshot``, from its receiver."""

    nbytes: WireCount


class PushAccepted(_Message, frozen=True):
    """The offered snapshot is in memory, complete and verified."""


class Missing(_Message, frozen=True):
    """The requested snapshot is not in memory."""

    text: WireText


class SnapshotRefused(_Message, frozen=True):
    """The request is refused; ``text`` is the reason."""

    text: WireText


class Busy(_Message, frozen=True):
    """The node serves its maximum number of requests."""

    ends: bool = False
    """True if the connection ends with this answer, because there are too many."""


Request = Describe | ReadImage | OfferSnapshot
DataPortReply = BytesFollow | PushAccepted | Missing | SnapshotRefused | Busy
REQUESTS: MessageDecoder[Request] = MessageDecoder(Request)
ANSWERS: MessageDecoder[DataPortReply] = MessageDecoder(DataPortReply)


# The server: buddies push snapshots to it, and restoring ranks read them.
#
# The port is a ``ProvenPort``: strangers cannot exhaust its connections. A limited number of requests is served at once; a
# further one waits briefly, and then gets the answer that the node is busy. Pushed bytes are received into a free segment, and
# each block is verified as it arrives. Only then is the snapshot complete, so a torn push leaves the earlier one.


_log = logging.getLogger(__name__)
_IDLE_S = 600.0
_TRANSFER_S = 30.0
"""Timeout of a client that takes or sends nothing in the middle of a request: others wait for its turn."""
_QUEUE_S = 2.0
"""Time for which a request waits for its turn before the answer "busy"; shorter than the clients' timeout."""


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
            memory: The snapshots to serve, and the destination of pushed ones.
            token: The token that both ends of a connection must have.
            host: The address to listen at.
            tls: For TLS.
            most_newcomers: Maximum number of connections during their handshake.
            most_connections: Maximum number of authenticated connections; further ones get the answer "busy".
            most_requests: Maximum number of concurrent requests.
            handshake_timeout_s: Limit of a full handshake, including TLS.
            queue_timeout_s: Time for which a request waits for its turn before the answer "busy".

        Raises OSError if the port cannot be opened.
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
        """Answer a peer's requests until it closes the connection, each in its turn. Beyond the limits of connections
        or requests, the answer is "busy".
        """
        wire = peer.raw  # blocks have checksums, so frames need none
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
        """Answer one request: describe, send or receive a snapshot. A step that is not there becomes the answer
        "missing"; another CheckpointError "refused", which is logged.
        """
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
        """Send a snapshot's record. Raises NoSuchStepError if it is not here, or was replaced meanwhile."""
        with self._memory.reading(request.key) as (segment, _):
            record = segment.record()
        if record is None:
            raise NoSuchStepError(f"{request.key} was replaced meanwhile")
        wire.send_message(BytesFollow(len(record)), record)

    def _read(self, wire: FramedConnection, request: ReadImage) -> None:
        """Send a range of a snapshot's image; raises SnapshotRefusedError for a bad range, NoSuchStepError if it is not here."""
        start, stop = request.start, request.stop
        with self._memory.reading(request.key) as (segment, snapshot):
            if not start < stop <= snapshot.nbytes or stop - start > LONGEST_READ_BYTES:
                raise SnapshotRefusedError(
                    f"bytes {start:,} to {stop:,} of {snapshot.nbytes:,}: not a range that is read"
                )
            wire.send_message(BytesFollow(stop - start), segment.image(stop)[start:].data)

    def _receive(self, wire: FramedConnection, offer: OfferSnapshot) -> None:
        """Receive an offered snapshot into a free segment, verified. Accept at once if it is already here.

        Raises SnapshotRefusedError for another run, StorageFullError without room, CorruptError for damaged blocks,
        and WireError, which ends the connection, for a wrong record.
        """
        key = offer.key
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
    if announced != (offer.run, offer.key, offer.previous, offer.image_bytes):
        raise WireError(f"{peer}: pushed the record of another snapshot than it had offered")
    return snapshot


def _receive_image(wire: FramedConnection, snapshot: Snapshot, image: ByteArray) -> None:
    """Fill ``image``. Raises CorruptError, after all of it has arrived, if a block does not match its checksum."""
    manifest = snapshot.manifest
    damaged = []
    for index, start in enumerate(range(0, manifest.nbytes, manifest.block_bytes)):
        block = image[start : start + manifest.block_bytes]
        wire.receive_into(block.data)
        if checksum(block) != manifest.checksums[index]:
            damaged.append(index)
    if damaged:
        raise CorruptError(f"blocks {damaged[:8]} of {snapshot.key} came damaged; push it again")


# The client: pushes a snapshot to a buddy, and reads one, or a part of it, from any holder.
#
# The agent pushes its workers' snapshots from its own segments; a restoring worker reads. Calls block: an event loop makes them in a
# thread.


class SnapshotClient:
    """A connection to the data port of a node's agent; for one thread at a time.

    Every method raises HolderLostError if the connection fails, SnapshotRefusedError if the other side refuses, BusyError if it serves too
    many others now, and NoSuchStepError if it does not have the snapshot. After a HolderLostError the connection cannot be used.
    """

    def __init__(
        self, address: str, token: str, *, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
    ) -> None:
        """Connect to ``address`` ("host:port"). ``timeout_s`` limits the time for which the other side may be silent.

        Raises HolderLostError if it cannot be reached, SnapshotRefusedError for another token, HolderEndedError if the
        other side closes the connection before authentication: it may have too many.
        """
        self._wire = _connect(address, tls, timeout_s)
        try:
            with holder_errors():
                authenticate(self._wire, token, "client", PURPOSE)
        except BaseException:
            self._wire.close()
            raise

    def record(self, key: SnapshotKey) -> bytes:
        """Return the record of a snapshot, encoded for ``decode_record``.

        Raises NoSuchStepError, BusyError, and the errors of ``holder_errors``.
        """
        with holder_errors():
            nbytes = self._announced(Describe(key))
            if nbytes > LONGEST_RECORD_BYTES:
                raise HolderLostError(f"{self._wire.peer}: announces a record of {nbytes:,} bytes")
            return self._wire.receive(nbytes)

    def read_into(self, key: SnapshotKey, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of a snapshot's image from byte ``start`` on.

        They are not verified: see ``verified``. Raises as ``record``.
        """
        with holder_errors():
            nbytes = self._announced(ReadImage(key, start, start + len(view)))
            if nbytes != len(view):
                raise HolderLostError(f"{self._wire.peer}: answers {nbytes:,} bytes, not {len(view):,}")
            self._wire.receive_into(view)

    def push(self, memory: SnapshotMemory, key: SnapshotKey) -> None:
        """Copy a snapshot of ``memory`` to the other side; on return it is there, complete and verified.

        Raises NoSuchStepError if ``memory`` lacks it, BusyError, and the errors of ``holder_errors``.
        SnapshotRefusedError: the other side is of another run or lacks memory, or bytes were damaged in transit or
        replaced meanwhile.
        """
        with memory.reading(key) as (segment, snapshot), holder_errors():
            record = segment.record()
            if record is None:
                raise NoSuchStepError(f"{key} was replaced meanwhile")
            offer = OfferSnapshot(snapshot.run, key, snapshot.previous, snapshot.nbytes, len(record))
            self._wire.send_message(offer)
            answer = self._wire.receive_message(ANSWERS)
            if isinstance(answer, BytesFollow):
                self._wire.send(record)
                self._wire.send(segment.image(snapshot.nbytes).data)
                answer = self._wire.receive_message(ANSWERS)
        if not isinstance(answer, PushAccepted):
            raise _failure(answer, self._wire.peer)

    def close(self) -> None:
        """End the connection."""
        self._wire.close()

    def __enter__(self) -> "SnapshotClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _announced(self, request: Describe | ReadImage) -> int:
        """Return the number of bytes that the answer to ``request`` announces. Raises the error that another answer means."""
        self._wire.send_message(request)
        answer = self._wire.receive_message(ANSWERS)
        if not isinstance(answer, BytesFollow):
            raise _failure(answer, self._wire.peer)
        return answer.nbytes


def _connect(address: str, tls: ssl.SSLContext | None, timeout_s: float) -> FramedConnection:
    """Connect, with TLS if given; the other side may be silent for ``timeout_s``. Raises HolderLostError, or
    HolderEndedError if the other side closes during the handshake.
    """
    host, port = split_address(address)
    try:
        connection = dial(host, int(port), timeout_s)
    except (OSError, ValueError) as error:
        raise HolderLostError(f"{address}: cannot be reached ({error})") from error
    try:
        return FramedConnection(secured_client(connection, tls, host), address)
    except OSError as error:
        connection.close()
        kind = HolderEndedError if isinstance(error, ConnectionError | ssl.SSLEOFError) else HolderLostError
        raise kind(f"{address}: no secure connection ({error})") from error


def _failure(answer: DataPortReply, peer: str) -> Exception:
    """Return the error that a negative answer of ``peer`` means; HolderLostError for an answer that does not fit."""
    match answer:
        case Missing(text):
            return NoSuchStepError(f"{peer}: {text}")
        case SnapshotRefused(text):
            return SnapshotRefusedError(f"{peer}: {text}")
        case Busy(ends):
            return BusyError(f"{peer}: serves its maximum number of requests; retry later", ended=ends)
        case _:
            return HolderLostError(f"{peer}: sent {type(answer).__name__}, which does not answer the request")


def push(
    address: str,
    token: str,
    memory: SnapshotMemory,
    key: SnapshotKey,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
) -> None:
    """Push snapshot ``key`` of ``memory`` to ``address`` over a new connection. Nothing is sent if it is already
    there. Raises as ``SnapshotClient`` and its ``push``.
    """
    with SnapshotClient(address, token, tls=tls, timeout_s=timeout_s) as client:
        client.push(memory, key)
