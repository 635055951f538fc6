"""The wire protocol of a node's snapshot memory: mutual authentication, small requests, and raw bytes.

Both sides first prove that they know the run's token without saying it (``phalanx.run.peers.token_proof``). Then each request and each
answer is a short message (length, then msgpack of a tagged struct, https://jcristharif.com/msgspec), followed by as many raw bytes as
it announces, sent from and received into memory without a copy. This keeps strangers out, not those who can rewrite traffic on its
way: over such a network give TLS.

Sockets block, in threads: bulk bytes then never pass through an event loop, which has heartbeats to keep.
"""

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.segments import SnapshotKey
from phalanx.run.peers.token_proof import Role, Seals, UnprovenError, handshake

LONGEST_READ_BYTES = 64 << 20
LONGEST_RECORD_BYTES = 256 << 20
_LONGEST_MESSAGE_BYTES = 1 << 20
_PURPOSE = "phalanx data port, version 2"
_LENGTH = struct.Struct("<I")
_SEND_BYTES = 8 << 20

WireCount = Annotated[int, Meta(ge=0, lt=2**53)]
WireStep = Annotated[int, Meta(ge=-1, lt=2**53)]
WireText = Annotated[str, Meta(max_length=8192)]


class WireError(CheckpointError):
    """The connection failed, or the other side breaks the protocol; another holder may do better."""


class EndedError(WireError):
    """The other side ended the connection."""


class BusyError(CheckpointError):
    """The node serves as many requests as it can; worth asking again after a pause."""

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended
        """The connection has ended with this answer."""


class RefusedError(CheckpointError):
    """The other side is not of this run, or does not take what was sent."""


class _WireMessage(Struct, frozen=True, tag=True):
    pass


class Key(Struct, frozen=True):
    """A ``SnapshotKey`` on the wire."""

    ranks: WireCount
    rank: WireCount
    step: WireCount

    @classmethod
    def of(cls, key: SnapshotKey) -> "Key":
        return cls(key.ranks, key.rank, key.step)

    def value(self) -> SnapshotKey:
        return SnapshotKey(self.ranks, self.rank, self.step)


class Describe(_WireMessage, frozen=True):
    """Asks for the record of a snapshot. Answered by ``Bytes``."""

    key: Key


class ReadImage(_WireMessage, frozen=True):
    """Asks for bytes ``start:stop`` of a snapshot's image. Answered by ``Bytes``."""

    key: Key
    start: WireCount
    stop: WireCount


class OfferSnapshot(_WireMessage, frozen=True):
    """Offers a snapshot. After ``Bytes`` for an answer its record follows, then its image, then ``PushAccepted`` is the answer."""

    run: WireText
    key: Key
    previous: WireStep
    image_bytes: WireCount
    record_bytes: Annotated[int, Meta(ge=0, le=LONGEST_RECORD_BYTES)]


class Bytes(_WireMessage, frozen=True):
    """As many raw bytes follow: from whoever says it, or, in the answer to ``OfferSnapshot``, from the other."""

    nbytes: WireCount


class PushAccepted(_WireMessage, frozen=True):
    """The snapshot that was offered is held, complete and checked."""


class Missing(_WireMessage, frozen=True):
    """The snapshot asked for is not held."""

    text: WireText


class Refused(_WireMessage, frozen=True):
    """The request is refused; ``text`` says why."""

    text: WireText


class Busy(_WireMessage, frozen=True):
    """As many requests as the node serves at once are being served."""

    ends: bool = False
    """The connection ends with this answer: there are too many."""


Request = Describe | ReadImage | OfferSnapshot
Answer = Bytes | PushAccepted | Missing | Refused | Busy
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_requests: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
_answers: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)


class Wire:
    """One authenticated connection. Every method raises WireError where it breaks or is silent for the timeout."""

    def __init__(
        self, connection: socket.socket, peer: str, then: str = "; the other holders are asked instead"
    ) -> None:
        """``then`` says what comes of it when the connection breaks."""
        self._connection, self._then = connection, then
        self._deadline_s: float | None = None
        self.peer = peer

    def say(self, message: Request | Answer, body: memoryview | bytes = b"") -> None:
        """Sends a message and the raw bytes that it announces."""
        text = _encoder.encode(message)
        self.send(_LENGTH.pack(len(text)) + text)
        self.send(body)

    def hear_request(self) -> Request | None:
        """The next request; None where the other side has ended the connection in between."""
        head = self._receive_or_end()
        return None if head is None else self._decoded(_requests, head)

    def hear_answer(self) -> Answer:
        """The answer to a request."""
        return self._decoded(_answers, self.receive(_LENGTH.size))

    def send(self, body: memoryview | bytes) -> None:
        """Sends raw bytes, straight from their memory."""
        view = memoryview(body)
        try:
            for start in range(0, len(view), _SEND_BYTES):  # the timeout is for each piece, not for all
                self._connection.sendall(view[start : start + _SEND_BYTES])
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, nbytes: int) -> bytes:
        """That many raw bytes."""
        body = bytearray(nbytes)
        self.receive_into(memoryview(body))
        return bytes(body)

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view`` with raw bytes, straight into its memory."""
        done = 0
        try:
            while done < len(view):
                self._observe_deadline()
                count = self._connection.recv_into(view[done:])
                if not count:
                    raise EndedError(
                        f"{self.peer}: the connection ended {len(view) - done:,} bytes too early"
                    )
                done += count
        except OSError as error:
            raise self._broken(error) from error

    def set_timeout(self, silent_s: float | None) -> None:
        """For how long the other side may be silent from now on, None for ever; ends a deadline."""
        self._deadline_s = None
        self._connection.settimeout(silent_s)

    def set_deadline(self, within_s: float) -> None:
        """Until when all that is received from now on must have come, in however many pieces."""
        self._deadline_s = time.monotonic() + within_s

    def _observe_deadline(self) -> None:
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise WireError(f"{self.peer}: took too long to prove that it knows this run's token")
            self._connection.settimeout(left_s)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _receive_or_end(self) -> bytes | None:
        try:
            first = self._connection.recv(1)
        except OSError as error:
            raise self._broken(error) from error
        return first + self.receive(_LENGTH.size - 1) if first else None

    def _decoded(self, decoder: "msgspec.msgpack.Decoder[_T]", head: bytes) -> _T:
        (length,) = _LENGTH.unpack(head)
        if length > _LONGEST_MESSAGE_BYTES:
            raise WireError(
                f"{self.peer}: announces a message of {length:,} bytes; at most {_LONGEST_MESSAGE_BYTES:,}"
            )
        try:
            return decoder.decode(self.receive(length))
        except msgspec.MsgspecError as error:
            raise WireError(f"{self.peer}: says what nobody understands: {error}") from error

    def _broken(self, error: OSError) -> WireError:
        kind = EndedError if isinstance(error, ConnectionResetError | BrokenPipeError) else WireError
        return kind(f"{self.peer}: {error or type(error).__name__}{self._then}")


def authenticate(
    wire: Wire, token: str, role: Role, earlier: Sequence[str] = (), purpose: str = _PURPOSE
) -> Seals:
    """Proves to each other that both know ``token``, for ``purpose``; a server accepts ``earlier`` ones too.

    Returns the seals that later messages may carry. Raises RefusedError, or WireError where the other side is no peer.
    """
    steps = handshake(token, purpose, role, earlier)
    sent = 0
    try:
        step = next(steps)
        while True:
            if isinstance(step, bytes):
                wire.send(step)
                sent += 1
                step = next(steps)
            else:
                step = steps.send(wire.receive(step))
    except StopIteration as end:
        seals: Seals = end.value
        return seals
    except UnprovenError as error:
        raise RefusedError(f"{wire.peer}: {error}; give every node the same one") from error
    except WireError as error:
        turned_away = role == "client" and sent == 2  # it has said its hello and its proof
        if not turned_away:
            raise
        raise RefusedError(
            f"{wire.peer}: ended the connection, most likely because it has another run's token; give every node the same one"
        ) from error


def secured_server(connection: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    """An accepted connection, under TLS where there is a context (its handshake is still to be made); small messages go at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return connection
    return tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def secured_client(connection: socket.socket, tls: ssl.SSLContext | None, host: str) -> socket.socket:
    """The same for a connection that was made to ``host``."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if tls is None else tls.wrap_socket(connection, server_hostname=host)
