"""The asyncio side of a connection: the handshake over any stream of messages, and sealed messages over asyncio's own streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from phalanx.wire.messages import (
    LENGTH_BYTES,
    LONGEST_MESSAGE_BYTES,
    EndedError,
    MessageDecoder,
    Role,
    Seals,
    UnprovenError,
    body_length,
    encode,
    frame,
    handshake,
)

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

    The seals are returned. Raises the errors of ``send`` and ``receive``.

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
        """Queue a frame; it is lost if the peer dies before it reads it."""
        if not self._writer.is_closing():
            self._writer.write(frame(body, longest_bytes))

    def close(self) -> None:
        """End the connection after what is queued."""
        self._writer.close()

    async def closed(self, within_s: float) -> None:
        """End the connection after what is queued, or after ``within_s``, whatever is left then."""
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
        """Queue a message; it is lost if the peer dies before it reads it."""
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
    """Return an accepted connection once its client has proven itself. Raises WireError."""

    async def send(body: bytes) -> None:
        writer.write(body)

    try:
        seals = await authenticate(send, reader.readexactly, token, "server", purpose, within_s)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EndedError("its connection ended before it had proven that it knows the token") from error
    return SealedStream(FrameStream(reader, writer), seals)
