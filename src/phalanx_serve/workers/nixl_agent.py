"""Process of a worker's NIXL agent: reads other agents' memory for its worker, and lets other agents read the staging
memory.

It is a separate process, because a crash of native code must not end the engine. NIXL's UCX backend may segfault when
the interpreter ends, so the process exits with ``os._exit``. It imports no torch. NIXL's own progress thread would
occupy a processor; the one thread here polls often while transfers run, and seldom otherwise.

    python -m phalanx_serve.workers.nixl_agent LINK STAGING BYTES

LINK is the descriptor of a socket to the worker, STAGING that of the shared memory of BYTES bytes. The process ends
with the worker.

Worker and process exchange msgpack of tagged structs. The socket pair between the two is private, so nothing is sealed.
The agent's address is sent to other workers over the sealed connection of the page port (``page_wire``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, field

from phalanx.process.child import die_with_parent
from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import MessageDecoder, WireError

if TYPE_CHECKING:
    from nixl._api import nixl_agent, nixl_xfer_handle


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


_LOOK_S, _IDLE_LOOK_S = 0.00005, 0.25
"""Seconds between polls during transfers, and without any: connections of other agents may close."""
_MOST_SOURCES = 256
"""Most agents whose connection is kept; the least recently used one is closed."""


@dataclass(frozen=True)
class _Transfer:
    request: Read
    handle: nixl_xfer_handle
    until_s: float


class _Readings:
    """A NIXL agent and its running reads."""

    def __init__(self, link: FramedConnection, staging: mmap.mmap) -> None:
        """Start NIXL with UCX, register the staging memory, and report the agent to the worker. Raises RuntimeError without UCX."""
        # https://github.com/ai-dynamo/nixl/blob/main/src/api/python/_api.py (1.5.1): the names below are those of its ``nixl_agent``.
        from nixl._api import nixl_agent, nixl_agent_config

        self._link = link
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        name = f"phalanx-{uuid.uuid4()}"
        self._agent: nixl_agent = nixl_agent(
            name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        if "UCX" not in self._agent.backends:
            raise RuntimeError("NIXL has no UCX backend here")
        self._agent.register_memory([(self._address, len(staging), 0, "")], "DRAM", ["UCX"])
        self._sources: OrderedDict[str, None] = OrderedDict()
        self.going_on: list[_Transfer] = []
        self.readers = 0
        """Conversations of others that may read here."""
        self._link.send_message(Begun(NixlAgent(name, self._agent.get_agent_metadata(), self._address)))

    def begin(self, request: Read) -> None:
        """Begin a read of another agent's memory into the staging memory; a failure is reported to the worker at once."""
        try:
            self._meet(request.source)
            size = request.piece_bytes
            local, remote = (
                self._agent.get_xfer_descs([(at + size * n, size, 0) for n in range(request.pieces)], "DRAM")
                for at in (self._address + request.start, request.address)
            )
            handle = self._agent.initialize_xfer("READ", local, remote, request.source.name, backends=["UCX"])
            self._agent.transfer(handle)
        except Exception as error:  # NIXL's own are of many kinds
            self._end(request, f"{type(error).__name__}: {error}")
            return
        self.going_on.append(_Transfer(request, handle, time.monotonic() + request.within_s))

    def look(self) -> None:
        """Report all reads that have ended, without waiting; one that has taken longer than it may is a failure.

        Ends the process if NIXL cannot release such a read, whose memory it could still write.
        """
        self._agent.get_new_notifs()  # there are none, but the call makes progress on other agents' reads
        for transfer in list(self.going_on):
            try:
                state = self._agent.check_xfer_state(transfer.handle)
                failure = "" if state == "DONE" else "the transfer failed"
            except Exception as error:
                state, failure = "ERR", f"{type(error).__name__}: {error}"
            if state == "PROC":
                if time.monotonic() < transfer.until_s:
                    continue
                failure = f"nothing came for {transfer.request.within_s:.1f} s"
            self.going_on.remove(transfer)
            try:
                self._agent.release_xfer_handle(transfer.handle)
            except Exception:
                # The transfer still runs and cannot be cancelled, so the memory of this process must not be used again.
                _leave(1)
            self._end(transfer.request, failure)

    def _meet(self, source: NixlAgent) -> None:
        """Register a source with the agent, and forget the least recently used beyond ``_MOST_SOURCES``.

        Raises RuntimeError for metadata of another agent.
        """
        if source.name not in self._sources:
            name = self._agent.add_remote_agent(source.metadata)
            if isinstance(name, bytes):
                name = name.decode()
            if name != source.name:
                raise RuntimeError(f"the metadata of {source.name} are those of {name}")
        self._sources[source.name] = None
        self._sources.move_to_end(source.name)
        while len(self._sources) > _MOST_SOURCES:
            self._part(next(iter(self._sources)))

    def _end(self, request: Read, failure: str) -> None:
        """Report the end of a read; a source whose read failed is forgotten if no other read of it is running."""
        name = request.source.name
        if failure and not any(other.request.source.name == name for other in self.going_on):
            self._part(name)  # its process may have ended; if not, the next read connects again
        self._link.send_message(Over(request.number, failure))

    def _part(self, name: str) -> None:
        """Forget a source; NIXL's failure to do so is printed."""
        if name in self._sources:
            del self._sources[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                print(f"NIXL does not part from {name}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the agent process on the descriptors in its arguments, until the worker ends or closes the link.

    Exits with code 1 after reporting why NIXL cannot begin. Polls often only while reads run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    link = FramedConnection(connection, "the worker")
    staging = mmap.mmap(int(sys.argv[2]), int(sys.argv[3]))
    try:
        readings = _Readings(link, staging)
    except Exception as error:  # also what its libraries lack
        link.send_message(AgentUnable(f"{type(error).__name__}: {error}"))
        _leave(1)
    try:
        while True:
            busy = readings.going_on or readings.readers
            ready, _, _ = select.select([connection], [], [], _LOOK_S if busy else _IDLE_LOOK_S)
            if ready:
                match link.receive_message(TO_AGENT):
                    case Read() as request:
                        readings.begin(request)
                    case ServingReaders(readers):
                        readings.readers = readers
            readings.look()
    except WireError:  # the worker has ended
        _leave(0)


def _leave(code: int) -> None:
    """End the process at once with ``code``, after flushing its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
