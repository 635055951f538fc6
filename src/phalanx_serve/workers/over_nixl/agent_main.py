"""The process of a worker's NIXL agent: reads out of other agents' memory what its worker asks for, and lets others read what is staged.

A process of its own, since native code that ends it by a signal must not end the engine. What NIXL's UCX backend does when an interpreter ends has been seen to
segfault (not with 1.5.1), so the process leaves by ``os._exit``, past all that. It imports no torch. NIXL's own thread for what others read would take a processor for itself, always: the one thread here looks at
all that goes on, often while something does, and seldom else.

    python -m phalanx_serve.workers.over_nixl.agent_main LINK STAGING BYTES

LINK is the descriptor of a socket to the worker, STAGING that of the memory of so many bytes that both share. It ends when the worker does.
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
from typing import TYPE_CHECKING

from phalanx.process.child import die_with_parent
from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import WireError
from phalanx_serve.workers.over_nixl.agent import TO_AGENT, Begun, NixlAgent, Over, Read, Serving, Unable

if TYPE_CHECKING:
    from nixl._api import nixl_agent, nixl_xfer_handle

_LOOK_S, _IDLE_LOOK_S = 0.00005, 0.25
"""Between two looks at what goes on, and where nothing does: others' connections may end."""
_MOST_SOURCES = 256
"""Agents whose connection is kept; the one that was asked longest ago makes room."""


@dataclass(frozen=True)
class _Transfer:
    asked: Read
    handle: nixl_xfer_handle
    until_s: float


class _Readings:
    """An agent, and what it reads just now."""

    def __init__(self, link: FramedConnection, staging: mmap.mmap) -> None:
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

    def begin(self, asked: Read) -> None:
        """Begins to read."""
        try:
            self._meet(asked.source)
            size = asked.piece_bytes
            here, there = (
                self._agent.get_xfer_descs([(at + size * n, size, 0) for n in range(asked.pieces)], "DRAM")
                for at in (self._address + asked.start, asked.address)
            )
            handle = self._agent.initialize_xfer("READ", here, there, asked.source.name, backends=["UCX"])
            self._agent.transfer(handle)
        except Exception as error:  # NIXL's own are of many kinds
            self._end(asked, f"{type(error).__name__}: {error}")
            return
        self.going_on.append(_Transfer(asked, handle, time.monotonic() + asked.within_s))

    def look(self) -> None:
        """Tells of all that has come to its end."""
        self._agent.get_new_notifs()  # nobody sends any; it is what moves all that others read
        for one in list(self.going_on):
            try:
                state = self._agent.check_xfer_state(one.handle)
                why = "" if state == "DONE" else "the transfer failed"
            except Exception as error:
                state, why = "ERR", f"{type(error).__name__}: {error}"
            if state == "PROC":
                if time.monotonic() < one.until_s:
                    continue
                why = f"nothing came for {one.asked.within_s:.1f} s"
            self.going_on.remove(one)
            try:
                self._agent.release_xfer_handle(one.handle)
            except Exception:
                # It goes on and cannot be taken back: the memory of this process is not to be used again.
                _leave(1)
            self._end(one.asked, why)

    def _meet(self, source: NixlAgent) -> None:
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

    def _end(self, asked: Read, why: str) -> None:
        name = asked.source.name
        if why and not any(other.asked.source.name == name for other in self.going_on):
            self._part(name)  # its process may be gone; if not, it is connected to anew
        self._link.send_message(Over(asked.number, why))

    def _part(self, name: str) -> None:
        if name in self._sources:
            del self._sources[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                print(f"NIXL does not part from {name}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    link = FramedConnection(connection, "the worker")
    staging = mmap.mmap(int(sys.argv[2]), int(sys.argv[3]))
    try:
        readings = _Readings(link, staging)
    except Exception as error:  # also what its libraries lack
        link.send_message(Unable(f"{type(error).__name__}: {error}"))
        _leave(1)
    try:
        while True:
            busy = readings.going_on or readings.readers
            ready, _, _ = select.select([connection], [], [], _LOOK_S if busy else _IDLE_LOOK_S)
            if ready:
                match link.receive_message(TO_AGENT):
                    case Read() as asked:
                        readings.begin(asked)
                    case Serving(readers):
                        readings.readers = readers
            readings.look()
    except WireError:  # the worker has ended
        _leave(0)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
