"""A worker's NIXL agent, as the worker sees it: a process that reads pages on request and is started again when it ends, and shared memory.

What it is asked while it is not there, or what it has not brought when it ends, is a NixlError, and the pages come another way. One thread starts the process and
hears it, for as long as it lives: the kernel ends the process with the thread that started it (prctl(2), PR_SET_PDEATHSIG).

Pages are copied into the shared memory (staging) for others to read, and read into it.
It is registered with the agent once, for as long as that lives: registering anew for each job would pin and unpin memory each time, and leave others with
keys of memory that is gone. Stretches of it are dealt out to conversations and taken back at their end. Whoever reads copies a page out of it before it is
hashed, so that nothing that is written there too late or too early is believed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

from phalanx.process.child import Child, describe_exit
from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import WireError
from phalanx_serve.engine.errors import EngineError
from phalanx_serve.workers.over_nixl.agent import TO_WORKER, Begun, NixlAgent, Over, Read, Serving, Unable


class NixlError(EngineError):
    """NIXL is not there, does not begin, or did not bring what it was asked for; the message says which. What was to come can come another way."""


# Staging.


_GRAIN_BYTES = 4096


@dataclass(frozen=True)
class Stretch:
    """A part of a staging."""

    start: int
    nbytes: int


class Staging:
    """See the module; for all threads of a worker. The system gives memory for what is written to, as it is."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where the system gives no such memory."""
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("phalanx-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        self._memory = memoryview(mmap.mmap(self.descriptor, nbytes))
        self._lock = threading.Lock()
        self._taken: list[Stretch] = []
        """In their order in memory."""

    @contextmanager
    def stretches(self, count: int, nbytes: int) -> Iterator[list[Stretch]]:
        """So many stretches of so many bytes each, until the block ends. Raises NixlError where there is no room."""
        taken: list[Stretch] = []
        try:
            for _ in range(count):
                taken.append(self.take(nbytes))
            yield taken
        finally:
            for one in taken:
                self.give_back(one)

    def take(self, nbytes: int) -> Stretch:
        """The first stretch of so many bytes that is free. Raises NixlError where there is none."""
        with self._lock:
            start = 0
            for place, taken in enumerate([*self._taken, Stretch(self.nbytes, 0)]):
                if taken.start - start >= nbytes:
                    found = Stretch(start, nbytes)
                    self._taken.insert(place, found)
                    return found
                start = -(-(taken.start + taken.nbytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        raise NixlError(
            f"{nbytes:,} bytes are not free among the {self.nbytes:,} that are registered with NIXL"
        )

    def give_back(self, stretch: Stretch) -> None:
        """Frees a stretch."""
        with self._lock:
            self._taken.remove(stretch)

    def view(self, stretch: Stretch) -> memoryview:
        """The bytes of a stretch."""
        return self._memory[stretch.start : stretch.start + stretch.nbytes]


# The process.


STAGING_BYTES = 256 << 20
"""The memory that a worker shares with its agent: for pieces that are being read, and those that are laid for others."""
_BEGIN_S = 60.0
_AGAIN_S = 2.0
_LATE_S = 1.0
"""What the process may take to say that a reading has taken too long."""
_ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "WARN"}
"""Unless these are set: workers are on one machine, and UCX's ports ask nobody who he is."""


def require_installed() -> None:
    """Raises NixlError with the remedy where NIXL is not installed."""
    if find_spec("nixl") is None:
        raise NixlError(
            "--pages nixl needs the package nixl, which is not installed: pip install 'phalanx-train[nixl]', or, beside a PyTorch that is there, "
            "pip install --no-deps nixl nixl-cu13"
        )


class AgentProcess:
    """See the module; for all threads of a worker."""

    def __init__(self, staging_bytes: int = STAGING_BYTES) -> None:
        """Starts the process and waits until its agent is there. Raises NixlError with the reason where it cannot be."""
        try:
            self.staging = Staging(staging_bytes)
        except OSError as error:
            raise NixlError(f"the system gives no memory for pages over NIXL: {error}") from error
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._numbers = itertools.count()
        self._agent: NixlAgent | None = None
        self._why = "it has not begun"
        self._asked: dict[int, Future[str]] = {}
        self._readers = 0
        self._link: FramedConnection | None = None
        self._process: Child | None = None
        begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=self._keep, args=(begun,), name="nixl", daemon=True)
        self._keeper.start()
        try:
            why = begun.get(timeout=_BEGIN_S)
        except queue.Empty:
            why = f"its agent has not begun after {_BEGIN_S:g} s"
        if why:
            self.close()
            raise NixlError(f"NIXL cannot be used here: {why}")

    @property
    def pid(self) -> int:
        """The process that has the agent at present; 0 without one."""
        process = self._process
        return process.pid if process is not None else 0

    def agent(self) -> NixlAgent:
        """The agent, as others are told of it. Raises NixlError while there is none."""
        agent = self._agent
        if agent is None:
            raise NixlError(f"NIXL is not there: {self._why}")
        return agent

    def read(
        self, source: NixlAgent, address: int, into: Stretch, pieces: int, piece_bytes: int, within_s: float
    ) -> None:
        """Reads pieces that lie one behind the other at ``address`` of ``source``. Raises NixlError where they do not come in time."""
        asked = Read(
            next(self._numbers), source, address, into.start, pieces, piece_bytes, max(0.0, within_s)
        )
        over: Future[str] = Future()
        with self._lock:
            self.agent()
            assert self._link is not None
            self._asked[asked.number] = over
            try:
                self._link.send_message(asked)
            except WireError as error:
                del self._asked[asked.number]
                raise NixlError(f"NIXL's process has ended: {error}") from error
        try:
            why = over.result(asked.within_s + _LATE_S)
        except TimeoutError:
            why = "its process does not answer"
            self._kill()  # its memory may be written to at any time
        if why:
            raise NixlError(f"NIXL did not bring them: {why}")

    def serve(self, readers: int) -> None:
        """Notes that so many more conversations have pages laid for them, or fewer."""
        with self._lock:
            self._readers += readers
            self._say_readers()

    def _say_readers(self) -> None:
        if self._link is not None:
            with suppress(WireError):  # it has ended: the next one gets it
                self._link.send_message(Serving(self._readers))

    def close(self) -> None:
        """Ends the process."""
        self._closed.set()
        self._kill()
        self._keeper.join(_BEGIN_S)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    # The keeper's thread.

    def _keep(self, begun: queue.SimpleQueue[str]) -> None:
        while not self._closed.is_set():
            started_s = time.monotonic()
            try:
                self._live(begun)
            except OSError as error:
                self._why = str(error)
            begun.put(self._why)  # whoever waits for the first one; nobody hears the others
            self._closed.wait(max(0.0, started_s + _AGAIN_S - time.monotonic()))

    def _live(self, begun: queue.SimpleQueue[str]) -> None:
        """One life of the process, from its start to its end."""
        near, far = socket.socketpair()
        with near:
            with far:
                process = self._start(far)
            link = FramedConnection(near, "the NIXL agent")
            with self._lock:
                self._process, self._link = process, link
            if self._closed.is_set():  # closed in between
                process.kill()
            why = ""
            with suppress(WireError):
                while True:
                    match link.receive_message(TO_WORKER):
                        case Begun(agent):
                            with self._lock:
                                self._agent = agent
                                self._say_readers()
                            begun.put("")
                        case Unable(why):
                            pass
                        case Over(number, reason):
                            self._tell(number, reason)
            code = process.end()
            self._why = why or f"its process {describe_exit(code)}"
            with self._lock:
                self._agent = self._link = self._process = None
                left = list(self._asked)
            for number in left:
                self._tell(number, self._why)

    def _tell(self, number: int, why: str) -> None:
        with self._lock:
            over = self._asked.pop(number, None)
        if over is not None:
            over.set_result(why)

    def _start(self, far: socket.socket) -> Child:
        link, staging = far.fileno(), self.staging.descriptor
        words = [str(link), str(staging), str(self.staging.nbytes)]
        command = [sys.executable, "-P", "-m", "phalanx_serve.workers.over_nixl.agent_main", *words]
        return Child.start(command, _ENVIRONMENT | os.environ, keep_open=(link, staging))
