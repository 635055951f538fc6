"""Messages between processes: framing, encoding, errors of a connection, the mutual proof of a token, and seals.

A message is four bytes of length (little endian), then msgpack of a tagged struct (https://jcristharif.com/msgspec).

Each protocol declares its messages as a union of ``msgspec.Struct`` and bounds their fields; a decoder accepts nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

LENGTH_BYTES = 4
LONGEST_MESSAGE_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """All failures of a connection: it broke, or the peer broke the protocol. The connection cannot be used any more."""


class EndedError(WireError):
    """The peer closed or reset the connection."""


class SilentError(WireError):
    """The peer sent nothing for the whole timeout."""


class MessageError(WireError):
    """Bytes that are no message of this protocol, or too many of them."""


class UnprovenError(WireError):
    """The peer does not know the token, or does not speak this version of the handshake."""


class ForgedError(WireError):
    """A message is not the next one that the peer sealed: it was altered, added, repeated or dropped on the way."""


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as msgpack."""
    return _encoder.encode(message)


class MessageDecoder(Generic[_T]):
    """Decoder of one protocol's messages, ``MessageDecoder(First | Second)``."""

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kinds)

    def decode(self, body: bytes | bytearray) -> _T:
        """Return the message in ``body``. Raises MessageError if it is none of this protocol."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"sent a message that is not of this protocol: {error}") from error


def frame(body: bytes, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> bytes:
    """Return ``body`` with its length in front. Raises MessageError if it is too long to be accepted."""
    _require_short(len(body), longest_bytes)
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> int:
    """Return the length in the ``LENGTH_BYTES`` bytes before a message. Raises MessageError if it is too long."""
    length: int = _LENGTH.unpack(head)[0]
    _require_short(length, longest_bytes)
    return length


def _require_short(nbytes: int, longest_bytes: int) -> None:
    """Raise ``MessageError`` for a message longer than allowed."""
    if nbytes > longest_bytes:
        raise MessageError(f"a message of {nbytes:,} bytes, more than the {longest_bytes:,} allowed")


# Mutual proof that both ends of a connection have a run's token, and seals on later messages.
#
# Challenge and response (ISO/IEC 9798-4, mutual authentication with a keyed hash): each side sends random bytes. It proves
# itself by the HMAC-SHA256 (RFC 2104), keyed with the token, of both sides' random bytes, its role and the connection's
# purpose. The token is never sent, and a proof is worthless on another connection. Both sides derive a key for each direction
# from the same random bytes. Every later message of a control connection has a seal, the HMAC of its number and content. An
# attacker in between can cut or read the connection, but cannot change, add, repeat or reorder a message.
#
# No I/O here: ``handshake`` yields the bytes to send and the number of bytes to receive, and the owner of the connection does
# the I/O.


Role = Literal["client", "server"]
_MAGIC = b"PHXPROV1"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES
SEAL_BYTES = 16


class Seal:
    """One direction of a connection: one end seals messages, the other opens them in the same order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def close(self, body: bytes) -> bytes:
        """Return the next message, with its seal before it."""
        return self._next(body) + body

    def open(self, sealed: bytes) -> bytes:
        """Return the content of the next message, without its seal.

        Raises ``ForgedError`` if it was altered or is not the next one; the connection must not be used any more.
        """
        seal, body = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._next(body)):
            raise ForgedError(f"message {self._number} of this connection was altered on its way, or added")
        return body

    def _next(self, body: bytes) -> bytes:
        """Return the seal of the next message, by its number."""
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + body, "sha256")[:SEAL_BYTES]


@dataclass(frozen=True)
class Seals:
    """The seals of a connection whose ends have proven themselves."""

    outgoing: Seal
    incoming: Seal
    token_name: str = ""
    """The name of the token that both ends have proven (``token_name``)."""


def handshake(
    token: str, purpose: str, role: Role, earlier: Sequence[str] = ()
) -> Generator[bytes | int, bytes, Seals]:
    """Yield the steps of a handshake: bytes to send (answer with anything), or the number of bytes to receive
    (answer with them). Return the seals of the messages that follow.

    ``purpose`` of the connection is the same at both ends. ``earlier`` are tokens before a rotation, which only a
    server accepts. The client proves itself first, so that a server gives nothing to strangers. Raises
    UnprovenError if the peer does not know the token or speaks another protocol.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    yield _MAGIC + own
    hello = yield HELLO_BYTES
    if len(hello) != HELLO_BYTES or not hello.startswith(_MAGIC):
        raise UnprovenError("does not speak this version of the handshake")
    other = hello[len(_MAGIC) :]
    nonces = (own, other) if role == "client" else (other, own)

    def mac(token: str, label: str) -> bytes:
        return token_mac(token, label.encode(), purpose.encode(), *nonces)

    if role == "client":
        yield mac(token, "client")
    proof = yield _PROOF_BYTES
    prover, accepted = ("server", [token]) if role == "client" else ("client", [token, *earlier])
    proven = [candidate for candidate in accepted if hmac.compare_digest(proof, mac(candidate, prover))]
    if not proven:
        raise UnprovenError("does not know this run's token")
    token = proven[0]
    if role == "server":
        yield mac(token, "server")
    to_server, to_client = Seal(mac(token, "seals to the server")), Seal(mac(token, "seals to the client"))
    outgoing, incoming = (to_server, to_client) if role == "client" else (to_client, to_server)
    return Seals(outgoing, incoming, token_name(token))


def token_name(token: str) -> str:
    """Return a name that distinguishes one token from another, and reveals nothing else of it."""
    return token_mac(token, b"the name of the token").hex()[:16]


def token_mac(token: str, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of ``parts`` under a token, each part with its length, so that no two sequences of parts are alike."""
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(token.encode(), framed, "sha256")


# The handshake over any asynchronous stream of messages, and sealed messages over asyncio's streams.


async def authenticate(
    send: Callable[[bytes], Awaitable[None]],
    receive: Callable[[int], Awaitable[bytes]],
    token: str,
    role: Role,
    purpose: str,
    within_s: float,
    earlier: Sequence[str] = (),
) -> Seals:
    """Run the handshake over ``send`` and ``receive``, and return its seals. A server accepts ``earlier`` tokens
    too.

    ``receive(n)`` returns n bytes, or the next message of a stream of messages. Raises UnprovenError if the peer
    does not prove within ``within_s`` seconds that it knows ``token``, and the errors of ``send`` and ``receive``.
    """
    steps = handshake(token, purpose, role, earlier)
    try:
        async with asyncio.timeout(within_s):
            step = next(steps)
            while True:
                if isinstance(step, bytes):
                    await send(step)
                    step = next(steps)
                else:
                    step = steps.send(await receive(step))
    except StopIteration as end:
        seals: Seals = end.value
        return seals
    except TimeoutError:
        raise UnprovenError(f"did not prove within {within_s:g} s that it knows this run's token") from None


class FrameStream:
    """Frames in both directions over asyncio's streams. One task receives; ``send`` waits for its turn, ``write`` does not.

    ``receive`` and ``send`` raise WireError: EndedError if the connection ended, MessageError for a frame that is too long.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> bytes:
        """Return the bytes of the next frame.

        Raises EndedError if the connection ends, MessageError for a frame longer than ``longest_bytes``.
        """
        try:
            head = await self._reader.readexactly(LENGTH_BYTES)
            return await self._reader.readexactly(body_length(head, longest_bytes))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EndedError("ended the connection") from error

    async def send(self, body: bytes, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> None:
        """Send a frame, and wait while the peer reads more slowly than this end sends.

        Raises EndedError, and MessageError for a body that is too long.
        """
        self.write(body, longest_bytes)
        try:
            await self._writer.drain()
        except OSError as error:
            raise EndedError("ended the connection") from error

    def write(self, body: bytes, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> None:
        """Queue a frame; it is lost if the peer dies before it reads it. Does nothing once the connection is
        closing.

        Raises MessageError for a body that is too long.
        """
        if not self._writer.is_closing():
            self._writer.write(frame(body, longest_bytes))

    def close(self) -> None:
        """End the connection after what is queued."""
        self._writer.close()

    async def closed(self, within_s: float) -> None:
        """End the connection after what is queued was sent, or after ``within_s`` seconds; errors are ignored."""
        self._writer.close()
        try:
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            pass
        finally:
            self._writer.transport.abort()


class SealedStream:
    """A connection in an event loop whose ends have proven themselves, and seal each message."""

    def __init__(self, frames: FrameStream, seals: Seals) -> None:
        self._frames, self._seals = frames, seals

    async def receive_message(self, decoder: MessageDecoder[_T]) -> _T:
        """Return the next message. Raises WireError."""
        return decoder.decode(self._seals.incoming.open(await self._frames.receive()))

    def send_message(self, message: msgspec.Struct) -> None:
        """Queue a message; it is lost if the peer dies before it reads it. Raises MessageError if it is too long."""
        self._frames.write(self._seals.outgoing.close(encode(message)))

    def close(self) -> None:
        """End the connection after what is queued."""
        self._frames.close()


async def sealed_stream(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    purpose: str,
    within_s: float,
) -> SealedStream:
    """Return an accepted connection as a sealed stream, once its client has proven within ``within_s`` seconds that
    it knows ``token``.

    Raises UnprovenError, or EndedError if it ends first; the caller then closes ``writer``.
    """

    async def send(body: bytes) -> None:
        writer.write(body)

    try:
        seals = await authenticate(send, reader.readexactly, token, "server", purpose, within_s)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EndedError("its connection ended before it had proven that it knows the token") from error
    return SealedStream(FrameStream(reader, writer), seals)
