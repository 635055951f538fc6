"""Messages between a worker and the process of its NIXL agent, and the agent's address for other workers: msgpack of
tagged structs.

The socket pair between the two is private, so nothing is sealed. The agent's address is sent to other workers over
the sealed connection of the page port (``page_wire``).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from phalanx.wire.messages import MessageDecoder

_Count = Annotated[int, Meta(ge=0, le=2**62)]
Address = Annotated[int, Meta(ge=0, le=2**62)]


class NixlAgent(Struct, frozen=True):
    """Address of a NIXL agent, for reading its staging memory."""

    name: Annotated[str, Meta(max_length=128)]
    metadata: Annotated[bytes, Meta(max_length=1 << 18)]
    """Result of ``nixlAgent::getLocalMD``: how to connect, and the keys of the registered memory."""
    address: Address
    """Start of its staging memory, in its own process."""


class _Message(Struct, frozen=True, tag=True):
    pass


class Begun(_Message, frozen=True):
    """The agent has started, and its staging memory is registered."""

    agent: NixlAgent


class AgentUnable(_Message, frozen=True, tag="Unable"):
    """The agent cannot start."""

    reason: str = field(name="why")


class Read(_Message, frozen=True):
    """Read consecutive pieces from the memory of ``source`` into the staging memory. Answered by ``Over``."""

    number: _Count
    """Number of the request."""
    source: NixlAgent
    address: Address
    """Address in the memory of ``source``."""
    start: _Count
    """Offset in the local staging memory."""
    pieces: Annotated[int, Meta(ge=1, le=1 << 20)]
    piece_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    within_s: float


class ServingReaders(_Message, frozen=True, tag="Serving"):
    """Number of conversations whose pages other workers may read here."""

    readers: _Count


class Over(_Message, frozen=True):
    """The read has ended; ``reason`` is empty if it succeeded."""

    number: _Count
    reason: str = field(default="", name="why")


ToWorker = Begun | AgentUnable | Over
ToAgent = Read | ServingReaders
TO_WORKER: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
TO_AGENT: MessageDecoder[ToAgent] = MessageDecoder(ToAgent)
