"""A worker's connection as the router has it: the proof, then sealed messages, in an event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from phalanx.run.peers.token_proof import SEAL_BYTES, ForgedError, Seals, UnprovenError, handshake
from phalanx.serve.workers import messages as m
from phalanx.serve.workers.sealed_wire import LENGTH, LONGEST_MESSAGE_BYTES


class PeerError(RuntimeError):
    """The connection has ended, or the other side is no worker of this service."""


@dataclass
class Peer:
    """A worker that has proven itself; ``life`` tells its connection from earlier ones."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    seals: Seals
    life: int
    number: int = -1
    pid: int = 0
    ready: m.Ready | None = None
    beat: m.WorkerBeat | None = None
    ready_s: float = 0.0

    async def hear(self) -> m.ToRouter:
        """The next message. Raises PeerError."""
        try:
            (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            if not SEAL_BYTES <= length <= LONGEST_MESSAGE_BYTES:
                raise PeerError(f"it announces a message of {length:,} bytes")
            return m.for_router.decode(self.seals.incoming.open(await self.reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise PeerError("its connection ended") from error
        except (ForgedError, msgspec.MsgspecError) as error:
            raise PeerError(f"it says what nobody understands: {error}") from error

    def say(self, message: m.ToWorker) -> None:
        """Sends a message; it is lost if the worker dies before it reads it."""
        if not self.writer.is_closing():
            sealed = self.seals.outgoing.close(m.encode(message))
            self.writer.write(LENGTH.pack(len(sealed)) + sealed)


async def proven(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, life: int, within_s: float
) -> Peer:
    """The worker at the other end. Raises PeerError where it does not prove in time that it knows the token."""
    steps = handshake(token, m.PURPOSE, "server")
    try:
        async with asyncio.timeout(within_s):
            step = next(steps)
            while True:
                if isinstance(step, bytes):
                    writer.write(step)
                    step = next(steps)
                else:
                    step = steps.send(await reader.readexactly(step))
    except StopIteration as end:
        return Peer(reader, writer, end.value, life)
    except (UnprovenError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise PeerError(f"it does not prove that it knows this service's token: {error}") from error
