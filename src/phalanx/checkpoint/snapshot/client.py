"""Talking to a node's data port: pushing a snapshot to a buddy, and reading one, or a part of it, from whoever holds it.

The agent pushes, from its own segments, what its workers have taken; a worker that restores reads. Calls block: an event
loop makes them in a thread.
"""

import socket
import ssl
from types import TracebackType

from phalanx.checkpoint.format.errors import NoSuchStepError
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.checkpoint.snapshot.wire import (
    LONGEST_RECORD_BYTES,
    Answer,
    Busy,
    BusyError,
    Bytes,
    Describe,
    EndedError,
    Key,
    Missing,
    OfferSnapshot,
    PushAccepted,
    ReadImage,
    Refused,
    RefusedError,
    Wire,
    WireError,
    authenticate,
    secured_client,
)
from phalanx.hardware.local.network import split_address


class SnapshotClient:
    """A connection to the data port of a node's agent; for one thread at a time.

    Every method raises WireError where the connection fails, RefusedError where the other side does not want, BusyError
    where it serves too many others now, and NoSuchStepError where it does not hold the snapshot. After a WireError the connection is of no
    more use.
    """

    def __init__(
        self, address: str, token: str, *, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
    ) -> None:
        """Connects to ``address`` ("host:port"). ``timeout_s`` is for how long the other side may be silent.

        Raises EndedError where the other side answers, but ends the connection before it knows who we are: it may have had no place.
        """
        self._wire = _connect(address, tls, timeout_s)
        try:
            authenticate(self._wire, token, "client")
        except BaseException:
            self._wire.close()
            raise

    def record(self, key: SnapshotKey) -> bytes:
        """The record of a snapshot, as ``decode_record`` takes it."""
        nbytes = self._ask(Describe(Key.of(key)))
        if nbytes > LONGEST_RECORD_BYTES:
            raise WireError(f"{self._wire.peer}: announces a record of {nbytes:,} bytes")
        return self._wire.receive(nbytes)

    def read_into(self, key: SnapshotKey, start: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes of a snapshot's image from byte ``start`` on. Not checked: see ``verified``."""
        nbytes = self._ask(ReadImage(Key.of(key), start, start + len(view)))
        if nbytes != len(view):
            raise WireError(f"{self._wire.peer}: answers {nbytes:,} bytes where {len(view):,} were asked for")
        self._wire.receive_into(view)

    def push(self, memory: SnapshotMemory, key: SnapshotKey) -> None:
        """Gives the other side a copy of a snapshot that ``memory`` holds; when this returns it has it, complete and checked.

        RefusedError also where the bytes were damaged on the way, or the snapshot was replaced meanwhile.
        """
        with memory.reading(key) as (segment, snapshot):
            record = segment.record()
            if record is None:
                raise NoSuchStepError(f"{key} was replaced meanwhile")
            offer = OfferSnapshot(snapshot.run, Key.of(key), snapshot.previous, snapshot.nbytes, len(record))
            self._wire.say(offer)
            answer = self._wire.hear_answer()
            if isinstance(answer, Bytes):
                self._wire.send(record)
                self._wire.send(segment.image(snapshot.nbytes).data)
                answer = self._wire.hear_answer()
        if not isinstance(answer, PushAccepted):
            raise _failure(answer, self._wire.peer)

    def close(self) -> None:
        """Ends the connection."""
        self._wire.close()

    def __enter__(self) -> "SnapshotClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, question: Describe | ReadImage) -> int:
        self._wire.say(question)
        answer = self._wire.hear_answer()
        if not isinstance(answer, Bytes):
            raise _failure(answer, self._wire.peer)
        return answer.nbytes


def _connect(address: str, tls: ssl.SSLContext | None, timeout_s: float) -> Wire:
    host, port = split_address(address)
    try:
        connection = socket.create_connection((host, int(port)), timeout_s)
    except (OSError, ValueError) as error:
        raise WireError(f"{address}: cannot be reached ({error})") from error
    try:
        return Wire(secured_client(connection, tls, host), address)
    except OSError as error:
        connection.close()
        kind = EndedError if isinstance(error, ConnectionError | ssl.SSLEOFError) else WireError
        raise kind(f"{address}: no secure connection ({error})") from error


def _failure(answer: Answer, peer: str) -> Exception:
    match answer:
        case Missing(text):
            return NoSuchStepError(f"{peer}: {text}")
        case Refused(text):
            return RefusedError(f"{peer}: {text}")
        case Busy(ends):
            return BusyError(f"{peer}: serves as many requests as it can; ask again later", ended=ends)
        case _:
            return WireError(f"{peer}: answers {type(answer).__name__} to another question")


def push(
    address: str,
    token: str,
    memory: SnapshotMemory,
    key: SnapshotKey,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
) -> None:
    """``SnapshotClient.push`` over a connection of its own."""
    with SnapshotClient(address, token, tls=tls, timeout_s=timeout_s) as client:
        client.push(memory, key)
