"""Streams between the processes of a fleet: frames over TCP, under mutual TLS if there are certificates, and the messages of their handshake.

A client greets with facts about itself, none of them secret. The server turns it away with a reason, or both prove that they know the run's token
(``phalanx.wire.messages``). Every frame after that is sealed; after an empty one its sender sends nothing more.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.fleet.control.security import Certificates
from phalanx.hardware.local.network import split_address
from phalanx.wire.messages import EndedError, MessageDecoder, WireError, encode
from phalanx.wire.stream import FrameStream

Method = Literal["Attach", "Operate"]
"""Purpose of a stream: that of an agent, or one request of an operator."""
RefusalCode = Literal["unauthenticated", "another start", "malformed"]
Facts = tuple[tuple[str, str], ...]
END = b""
_LONGEST_HANDSHAKE_BYTES = 1 << 16
_CONNECT_S, _TLS_HANDSHAKE_S = 20.0, 30.0
_KEEP_ALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000))
"""A half-open connection is noticed within these times; a busy machine must not be taken for one."""


class Greeting(Struct, frozen=True, tag=True):
    """The first message of a client."""

    method: Method
    facts: Annotated[Facts, Meta(max_length=16)]


class Proof(Struct, frozen=True, tag=True):
    """A step of the handshake."""

    body: Annotated[bytes, Meta(max_length=64)]


class TurnedAway(Struct, frozen=True, tag=True):
    """The server's refusal; it ends the stream."""

    code: RefusalCode
    reason: str


HandshakeMessage = Greeting | Proof | TurnedAway
_HANDSHAKE: MessageDecoder[HandshakeMessage] = MessageDecoder(HandshakeMessage)


class TurnedAwayError(WireError):
    """The server has refused the stream."""

    def __init__(self, refusal: TurnedAway) -> None:
        super().__init__(f"{refusal.code}: {refusal.reason}")
        self.code = refusal.code


class HandshakeStream:
    """The messages of a stream until both ends have proven themselves. Methods raise WireError."""

    def __init__(self, frames: FrameStream) -> None:
        self.frames = frames

    async def send(self, message: HandshakeMessage) -> None:
        """Send a message."""
        await self.frames.send(encode(message), _LONGEST_HANDSHAKE_BYTES)

    async def receive(self) -> HandshakeMessage:
        """Return the next message. Raises TurnedAwayError if it is a refusal."""
        message = _HANDSHAKE.decode(await self.frames.receive(_LONGEST_HANDSHAKE_BYTES))
        if isinstance(message, TurnedAway):
            raise TurnedAwayError(message)
        return message

    async def write(self, body: bytes) -> None:
        """Send a step of the proof."""
        await self.send(Proof(body))

    async def read(self) -> bytes:
        """Return the next step of the proof; empty if the peer sent something else."""
        message = await self.receive()
        return message.body if isinstance(message, Proof) else b""


async def connect(address: str, certificates: Certificates | None) -> FrameStream:
    """Connect to "host:port". Raises EndedError if it cannot be reached."""
    host, port = split_address(address)
    tls = None if certificates is None else certificates.client_context(names_host=True)
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    except TimeoutError:
        raise EndedError(f"unavailable: no connection within {_CONNECT_S:g} s") from None
    except (OSError, ValueError) as error:
        raise EndedError(f"unavailable: {error or type(error).__name__}") from error
    _notice_half_open(writer.get_extra_info("socket"))
    return FrameStream(reader, writer)


async def accepted(connection: socket.socket, tls: ssl.SSLContext | None) -> FrameStream:
    """Return the stream of an accepted connection, after its TLS handshake. Raises OSError."""
    _notice_half_open(connection)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else _TLS_HANDSHAKE_S
    )
    return FrameStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def _notice_half_open(connection: socket.socket) -> None:
    """Let the kernel end the connection if the peer's machine is gone, and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
