"""What a worker and the process of its NIXL agent say to each other, and what an agent tells others of itself: msgpack of tagged structs.

The pair of sockets between the two belongs to them alone, so nothing is sealed. What an agent tells others travels by the sealed connection of the
page port (``page_wire``).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from phalanx.wire.messages import MessageDecoder

_Count = Annotated[int, Meta(ge=0, le=2**62)]
Address = Annotated[int, Meta(ge=0, le=2**62)]


class NixlAgent(Struct, frozen=True):
    """A NIXL agent, as others need it to read what is staged there."""

    name: Annotated[str, Meta(max_length=128)]
    metadata: Annotated[bytes, Meta(max_length=1 << 18)]
    """What ``nixlAgent::getLocalMD`` tells: how to connect, and the keys of the registered memory."""
    address: Address
    """Where its staging begins, in its own process."""


class _Message(Struct, frozen=True, tag=True):
    pass


class Begun(_Message, frozen=True):
    """The agent is there, and the staging is registered with it."""

    agent: NixlAgent


class Unable(_Message, frozen=True):
    """There will be no agent."""

    why: str


class Read(_Message, frozen=True):
    """Read so many pieces, one behind the other, out of the memory of ``source``, into the staging. Answered by ``Over``."""

    number: _Count
    """The number of this question."""
    source: NixlAgent
    address: Address
    """In the memory of ``source``."""
    start: _Count
    """In the staging here."""
    pieces: Annotated[int, Meta(ge=1, le=1 << 20)]
    piece_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    within_s: float


class Serving(_Message, frozen=True):
    """So many conversations have pages laid here for others to read."""

    readers: _Count


class Over(_Message, frozen=True):
    """The reading has come to its end; ``why`` is empty where all has come."""

    number: _Count
    why: str = ""


ToWorker = Begun | Unable | Over
ToAgent = Read | Serving
TO_WORKER: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
TO_AGENT: MessageDecoder[ToAgent] = MessageDecoder(ToAgent)
