"""Client of a node's data port: pushes a snapshot to a buddy, and reads one, or a part of it, from any holder.

The agent pushes, from its own segments, what its workers have taken; a worker that restores reads. Calls block: an event
loop makes them in a thread.
"""

import socket
import ssl
from types import TracebackType

from phalanx.checkpoint.format.errors import NoSuchStepError
from phalanx.checkpoint.snapshot.messages import (
    ANSWERS,
    LONGEST_RECORD_BYTES,
    PURPOSE,
    Answer,
    Busy,
    BusyError,
    BytesFollow,
    Describe,
    HolderEndedError,
    HolderLostError,
    Missing,
    OfferSnapshot,
    PushAccepted,
    ReadImage,
    SnapshotRefused,
    SnapshotRefusedError,
    WireKey,
    holder_errors,
)
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.hardware.local.network import split_address
from phalanx.wire.connection import FramedConnection, authenticate, secured_client


class SnapshotClient:
    """A connection to the data port of a node's agent; for one thread at a time.

    Every method raises HolderLostError if the connection fails, SnapshotRefusedError if the other side refuses, BusyError
    if it serves too many others now, and NoSuchStepError if it does not hold the snapshot. After a HolderLostError the connection is of no
    more use.
    """

    def __init__(
        self, address: str, token: str, *, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
    ) -> None:
        """Connect to ``address`` ("host:port"). ``timeout_s`` limits the time in which the other side sends nothing.

        Raises HolderEndedError if the other side ends the connection before the proof: it may have had no place.
        """
        self._wire = _connect(address, tls, timeout_s)
        try:
            with holder_errors():
                authenticate(self._wire, token, "client", PURPOSE)
        except BaseException:
            self._wire.close()
            raise

    def record(self, key: SnapshotKey) -> bytes:
        """Return the record of a snapshot, as ``decode_record`` takes it."""
        with holder_errors():
            nbytes = self._announced(Describe(WireKey.of(key)))
            if nbytes > LONGEST_RECORD_BYTES:
                raise HolderLostError(f"{self._wire.peer}: announces a record of {nbytes:,} bytes")
            return self._wire.receive(nbytes)

    def read_into(self, key: SnapshotKey, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of a snapshot's image from byte ``start`` on. Not checked: see ``verified``."""
        with holder_errors():
            nbytes = self._announced(ReadImage(WireKey.of(key), start, start + len(view)))
            if nbytes != len(view):
                raise HolderLostError(f"{self._wire.peer}: answers {nbytes:,} bytes, not {len(view):,}")
            self._wire.receive_into(view)

    def push(self, memory: SnapshotMemory, key: SnapshotKey) -> None:
        """Copy a snapshot that ``memory`` holds to the other side; on return it is there, complete and checked.

        SnapshotRefusedError also if the bytes were damaged on the way, or the snapshot was replaced meanwhile.
        """
        with memory.reading(key) as (segment, snapshot), holder_errors():
            record = segment.record()
            if record is None:
                raise NoSuchStepError(f"{key} was replaced meanwhile")
            offer = OfferSnapshot(
                snapshot.run, WireKey.of(key), snapshot.previous, snapshot.nbytes, len(record)
            )
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
        """Return the number of bytes that the answer to ``request`` announces."""
        self._wire.send_message(request)
        answer = self._wire.receive_message(ANSWERS)
        if not isinstance(answer, BytesFollow):
            raise _failure(answer, self._wire.peer)
        return answer.nbytes


def _connect(address: str, tls: ssl.SSLContext | None, timeout_s: float) -> FramedConnection:
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host, int(port)), timeout_s)
    except (OSError, ValueError) as error:
        raise HolderLostError(f"{address}: cannot be reached ({error})") from error
    try:
        return FramedConnection(secured_client(connection, tls, host), address)
    except OSError as error:
        connection.close()
        kind = HolderEndedError if isinstance(error, ConnectionError | ssl.SSLEOFError) else HolderLostError
        raise kind(f"{address}: no secure connection ({error})") from error


def _failure(answer: Answer, peer: str) -> Exception:
    match answer:
        case Missing(text):
            return NoSuchStepError(f"{peer}: {text}")
        case SnapshotRefused(text):
            return SnapshotRefusedError(f"{peer}: {text}")
        case Busy(ends):
            return BusyError(f"{peer}: serves as many requests as it can; ask again later", ended=ends)
        case _:
            return HolderLostError(f"{peer}: answers {type(answer).__name__} to another question")


def push(
    address: str,
    token: str,
    memory: SnapshotMemory,
    key: SnapshotKey,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
) -> None:
    """Push over a connection of its own (``SnapshotClient.push``)."""
    with SnapshotClient(address, token, tls=tls, timeout_s=timeout_s) as client:
        client.push(memory, key)
