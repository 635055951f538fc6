"""The asyncio side of a connection: the handshake over any stream of messages, and sealed messages over asyncio's own streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from phalanx.wire.messages import (
    LENGTH_BYTES,
    EndedError,
    MessageDecoder,
    SilentError,
    UnprovenError,
    body_length,
    encode,
    frame,
)
from phalanx.wire.token_proof import Role, Seals, handshake

_T = TypeVar("_T")


async def authenticate(
    send: Callable[[bytes], Awaitable[None]],
    receive: Callable[[int], Awaitable[bytes]],
    token: str,
    role: Role,
    purpose: str,
    within_s: float,
    earlier: Sequence[str] = (),
) -> Seals:
    """Prove to each other that both ends know ``token``, for ``purpose``; a server accepts ``earlier`` tokens too.

    Args:
        send: Sends bytes.
        receive: Returns that many bytes; a stream of whole messages may return the next message instead.
        within_s: Limit of the whole handshake.

    Raises:
        UnprovenError: The peer does not know the token, or did not prove it in time.
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


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next frame. Raises EndedError, and MessageError if it is too long."""
    try:
        return await reader.readexactly(body_length(await reader.readexactly(LENGTH_BYTES)))
    except TimeoutError as error:
        raise SilentError("is silent") from error
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EndedError("its connection ended") from error


class SealedStream:
    """A connection in an event loop whose ends have proven themselves, and seal each message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals) -> None:
        self._reader, self._writer, self._seals = reader, writer, seals

    async def receive_message(self, decoder: MessageDecoder[_T]) -> _T:
        """Return the next message. Raises WireError."""
        return decoder.decode(self._seals.incoming.open(await receive_frame(self._reader)))

    def send_message(self, message: msgspec.Struct) -> None:
        """Queue a message; it is lost if the peer dies before it reads it."""
        if not self._writer.is_closing():
            self._writer.write(frame(self._seals.outgoing.close(encode(message))))

    def close(self) -> None:
        """End the connection after what is queued."""
        self._writer.close()


async def sealed_stream(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    purpose: str,
    within_s: float,
) -> SealedStream:
    """Return an accepted connection once its client has proven itself. Raises WireError."""

    async def send(body: bytes) -> None:
        writer.write(body)

    try:
        seals = await authenticate(send, reader.readexactly, token, "server", purpose, within_s)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EndedError("its connection ended before it had proven that it knows the token") from error
    return SealedStream(reader, writer, seals)
