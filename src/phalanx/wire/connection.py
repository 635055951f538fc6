"""Blocking connections for threads: framed messages, raw bytes without a copy, and the same behind a mutual proof, sealed.

Sockets block, in threads: bulk bytes never pass through an event loop, which has heartbeats to keep. A ``FramedConnection`` by itself is for two processes that
share a socket pair, or for a protocol that proves the peer and then needs no seals; a ``SealedConnection`` is for all that
crosses a network. Seals keep messages from being altered; they do not encrypt. Where others can listen, add TLS.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import msgspec

from phalanx.wire import messages

_PIECE_BYTES = 8 << 20
_T = TypeVar("_T")


class FramedConnection:
    """One end of a connected socket. ``send*`` may be called from any thread, ``receive*`` from one.

    Every method raises WireError if the connection fails: EndedError if the peer ended it, SilentError after the timeout.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket, self._sending = connection, Lock()
        self._deadline_s: float | None = None
        self.peer = peer
        """The other end, for people: an address, or a name such as "the router"."""

    def send_message(self, message: msgspec.Struct, body: memoryview | bytes = b"") -> None:
        """Send a message, and the raw bytes that it announces right behind it. Raises WireError."""
        framed = messages.frame(messages.encode(message))
        with self._sending:
            self._send(framed)
            self._send(body)

    def send_frame(self, body: bytes) -> None:
        """Send bytes as one frame. Raises WireError."""
        with self._sending:
            self._send(messages.frame(body))

    def send(self, body: memoryview | bytes) -> None:
        """Send raw bytes, straight from their memory. Raises WireError."""
        with self._sending:
            self._send(body)

    def receive_message(self, decoder: messages.MessageDecoder[_T]) -> _T:
        """Return the next message. Raises WireError, also MessageError if it is none of the decoder's."""
        body = self.receive_frame()
        with _naming(self.peer):
            return decoder.decode(body)

    def receive_message_or_end(self, decoder: messages.MessageDecoder[_T]) -> _T | None:
        """Return the next message; None if the peer closed the connection between two messages.

        Raises WireError for a malformed one or a broken connection.
        """
        try:
            first = self._socket.recv(1)
        except OSError as error:
            raise self._failure(error) from error
        if not first:
            return None
        body = self._body(first + self.receive(messages.LENGTH_BYTES - 1))
        with _naming(self.peer):
            return decoder.decode(body)

    def receive_frame(self) -> bytes:
        """Return the bytes of the next frame. Raises WireError, also MessageError if it is too long."""
        return self._body(self.receive(messages.LENGTH_BYTES))

    def receive(self, nbytes: int) -> bytes:
        """Return that many raw bytes. Raises WireError."""
        body = bytearray(nbytes)
        self.receive_into(memoryview(body))
        return bytes(body)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with raw bytes, straight into its memory.

        Raises EndedError if the connection ends before, SilentError after the timeout or deadline.
        """
        done = 0
        while done < len(view):
            try:
                self._observe_deadline()
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise self._failure(error) from error
            if not count:
                raise messages.EndedError(
                    f"{self.peer}: the connection ended {len(view) - done:,} bytes too early"
                )
            done += count

    def set_timeout(self, silence_s: float | None) -> None:
        """Limit the time in which the peer sends or takes nothing, None for no limit. Ends a deadline."""
        self._deadline_s = None
        self._socket.settimeout(silence_s)

    def set_deadline(self, within_s: float) -> None:
        """Limit the time in which everything that is received from now on must arrive, in however many pieces."""
        self._deadline_s = time.monotonic() + within_s

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, body: memoryview | bytes) -> None:
        """Send all bytes, piece by piece, so that the timeout applies to each piece. Raises WireError."""
        view = memoryview(body)
        try:
            for start in range(0, len(view), _PIECE_BYTES):  # the timeout is for each piece, not for all
                self._socket.sendall(view[start : start + _PIECE_BYTES])
        except OSError as error:
            raise self._failure(error) from error

    def _body(self, head: bytes) -> bytes:
        """Receive the body of a message whose head was received. Raises WireError."""
        with _naming(self.peer):
            length = messages.body_length(head)
        return self.receive(length)

    def _observe_deadline(self) -> None:
        """Limit the next read to the time until the deadline; raises SilentError if it has passed."""
        if self._deadline_s is not None:
            remaining_s = self._deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise messages.SilentError(f"{self.peer}: did not send everything in time")
            self._socket.settimeout(remaining_s)

    def _failure(self, error: OSError) -> messages.WireError:
        """Return the error for a failure of the socket, naming the peer: EndedError for a reset or broken pipe,
        SilentError for a timeout, else WireError.
        """
        kind: type[messages.WireError] = messages.WireError
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            kind = messages.EndedError
        elif isinstance(error, TimeoutError):
            kind = messages.SilentError
        return kind(f"{self.peer}: {error or type(error).__name__}")


@contextmanager
def _naming(peer: str) -> Iterator[None]:
    """Context that puts the peer before the text of a MessageError or ForgedError and raises it again."""
    try:
        yield
    except (messages.MessageError, messages.ForgedError) as error:
        raise type(error)(f"{peer}: {error}") from error


def authenticate(
    connection: FramedConnection, token: str, role: messages.Role, purpose: str, earlier: Sequence[str] = ()
) -> messages.Seals:
    """Run the handshake: both ends prove that they know ``token``, for ``purpose``. A server accepts ``earlier``
    tokens too.

    Returns the seals of later messages. Raises UnprovenError if the peer has another token or most likely refused
    this one, and WireError if the connection fails.
    """
    steps = messages.handshake(token, purpose, role, earlier)
    sent = 0
    try:
        step = next(steps)
        while True:
            if isinstance(step, bytes):
                connection.send(step)
                sent += 1
                step = next(steps)
            else:
                step = steps.send(connection.receive(step))
    except StopIteration as end:
        seals: messages.Seals = end.value
        return seals
    except messages.UnprovenError as error:
        raise messages.UnprovenError(f"{connection.peer}: {error}; give every node the same one") from error
    except messages.WireError as error:
        was_turned_away = role == "client" and sent == 2  # it has sent its hello and its proof
        if not was_turned_away:
            raise
        raise messages.UnprovenError(
            f"{connection.peer}: ended the connection, most likely because it has another run's token; give every node the same one"
        ) from error


class SealedConnection:
    """A connection whose ends have proven themselves, and seal each message. ``send*`` may be called from any thread, ``receive*`` from one."""

    def __init__(self, raw: FramedConnection, seals: messages.Seals) -> None:
        self.raw = raw
        """For raw bytes, which carry no seal: a sealed message has to hold their digest."""
        self._seals, self._sending = seals, Lock()

    @property
    def peer(self) -> str:
        """The other end, for people."""
        return self.raw.peer

    def send_message(self, message: msgspec.Struct, body: memoryview | bytes = b"") -> None:
        """Send a message, and the bytes that it announces right behind it, in sealed pieces. Raises WireError."""
        view = memoryview(body)
        with self._sending:  # seals are numbered in the order on the wire
            self._send(messages.encode(message))
            for start in range(0, len(view), _PIECE_BYTES):
                self._send(bytes(view[start : start + _PIECE_BYTES]))

    def receive_message(self, decoder: messages.MessageDecoder[_T]) -> _T:
        """Return the next message. Raises WireError, ForgedError if it was altered, MessageError if it is none of the decoder's."""
        body = self.receive()
        with _naming(self.peer):
            return decoder.decode(body)

    def receive_body(self, nbytes: int) -> bytearray:
        """Return the bytes that the last message announced, in as many sealed pieces as it takes. Raises WireError."""
        body = bytearray()
        while len(body) < nbytes:
            body += self.receive()
        return body

    def receive(self) -> bytes:
        """Return the content of the next sealed frame. Raises WireError."""
        sealed = self.raw.receive_frame()
        with _naming(self.peer):
            return self._seals.incoming.open(sealed)

    def _send(self, content: bytes) -> None:
        self.raw.send_frame(self._seals.outgoing.close(content))


def sealed(
    connection: socket.socket, peer: str, token: str, role: messages.Role, purpose: str, within_s: float
) -> SealedConnection:
    """Return a connected socket as a sealed connection, after the mutual proof of ``token`` within ``within_s``
    seconds.

    Afterwards the peer may be silent for any time. Messages are not delayed (TCP_NODELAY). Raises UnprovenError and
    WireError; the caller then closes ``connection``.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw = FramedConnection(connection, peer)
    raw.set_deadline(within_s)
    seals = authenticate(raw, token, role, purpose)
    raw.set_timeout(None)
    return SealedConnection(raw, seals)


def secured_client(connection: socket.socket, tls: ssl.SSLContext | None, host: str) -> socket.socket:
    """Return a connection that was made to ``host``, under TLS if there is a context. Small messages are sent at
    once. Raises ``OSError``.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if tls is None else tls.wrap_socket(connection, server_hostname=host)
