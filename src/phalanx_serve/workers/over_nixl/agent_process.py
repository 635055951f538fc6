"""A worker's NIXL agent, as the worker sees it: a process that reads pages and is restarted when it ends, shared memory, and pages that pass through it.

Requests while the process is absent, and requests that it has not finished when it ends, raise NixlError, and the pages come another way. One
thread starts the process and receives from it, for as long as it lives: the kernel ends the process with the thread that started it (prctl(2), PR_SET_PDEATHSIG).

Pages are copied into the shared memory (staging) for others to read, and read into it.
It is registered with the agent once, for as long as that lives: registering it for each job would pin and unpin memory each time, and leave others with
keys of memory that is gone. Stretches of it are dealt out to conversations and taken back at their end. Whoever reads copies a page out of it before it is
hashed, so that nothing that is written there too late or too early is believed.

Two stretches of the staging take turns: while one is read the next pages are laid in the other. They are taken back when the reader's conversation ends, so
that a reader that dies holds nothing. The sealed conversation goes on meanwhile: its source is requested to lay the next pages, and sends their
places and the SHA-256 of each, exactly as before pages that come through the socket. While one run is read, the one before is copied out of the
staging and hashed, and the next one is laid.
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
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

from phalanx.process.child import Child, describe_exit
from phalanx.wire.connection import FramedConnection, SealedConnection
from phalanx.wire.messages import WireError
from phalanx_serve.traffic.events import EngineError
from phalanx_serve.workers.over_nixl.agent import TO_WORKER, Begun, NixlAgent, Over, Read, Serving, Unable
from phalanx_serve.workers.page_wire import MESSAGES, Laid, Lay, NotLaid, Offer, digest


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


# Pages over NIXL, a run of them at a time.


# The source.


class Laying:
    """See the module; of one conversation."""

    def __init__(self, process: AgentProcess | None) -> None:
        self._process = process
        self._turns: list[Stretch] = []

    def lay(self, pages: Sequence[tuple[bytes | memoryview, bytes]]) -> Laid | NotLaid:
        """Lays pages, each with its digest, where those before the last ones lay."""
        if self._process is None:
            return NotLaid("it offers nothing over NIXL")
        try:
            agent = self._process.agent()
            stretch = self._turn(sum(len(page) for page, _ in pages))
        except NixlError as error:
            return NotLaid(str(error))
        view = self._process.staging.view(stretch)
        start = 0
        for page, _ in pages:
            view[start : start + len(page)] = page
            start += len(page)
        return Laid(agent, agent.address + stretch.start, tuple(digest for _, digest in pages))

    def close(self) -> None:
        """Takes the stretches back."""
        if self._turns and self._process is not None:
            self._process.serve(-1)
            for one in self._turns:
                self._process.staging.give_back(one)
            self._turns.clear()

    def _turn(self, nbytes: int) -> Stretch:
        """The stretch that is not being read now, large enough."""
        assert self._process is not None
        if len(self._turns) == 2 and self._turns[0].nbytes >= nbytes:
            self._turns.reverse()
            return self._turns[1]
        if len(self._turns) == 2:
            self._process.staging.give_back(self._turns.pop(0))
        taken = self._process.staging.take(nbytes)
        if not self._turns:
            self._process.serve(1)
        self._turns.append(taken)
        return taken


# The reader.


_RUN_BYTES = 8 << 20
"""The bytes that are read at a time, but one page at least."""
_RUN_S = 2.0
"""What a run may take: a tenth of a second is what it does take, by the slowest rate seen."""


@dataclass(frozen=True)
class Came:
    """A page that was read, in memory of its own, and the digest that it must have."""

    page: bytearray
    right: bytes
    found: bytes


def read_pages(
    wire: SealedConnection, process: AgentProcess, offer: Offer, until_s: float
) -> Generator[Came]:
    """The pages of an offer, in their order. Raises NixlError where those that are left must come another way, and WireError where none will."""
    most = max(1, _RUN_BYTES // offer.page_bytes)
    runs = [range(first, min(first + most, len(offer.names))) for first in range(0, len(offer.names), most)]
    with (
        process.staging.stretches(2, len(runs[0]) * offer.page_bytes) as turns,
        ThreadPoolExecutor(1) as hashing,
    ):
        unhashed: deque[Future[list[Came]]] = deque()
        trouble: NixlError | WireError | None = None
        try:
            for number, digests in enumerate(
                _read_runs(wire, process, offer.page_bytes, runs, turns, until_s)
            ):
                memory = process.staging.view(turns[number % 2])
                unhashed.append(hashing.submit(_copied, memory, offer.page_bytes, digests))
                if len(unhashed) > 1:  # so that the turn after this one is free
                    yield from unhashed.popleft().result()
        except (NixlError, WireError) as error:
            trouble = error
        while unhashed:  # what came before the trouble is whole
            yield from unhashed.popleft().result()
        if trouble is not None:
            raise trouble


def _read_runs(
    wire: SealedConnection,
    process: AgentProcess,
    page_bytes: int,
    runs: Sequence[range],
    turns: Sequence[Stretch],
    until_s: float,
) -> Iterator[tuple[bytes, ...]]:
    """Reads each run into its turn, and yields its digests."""
    wire.send_message(Lay(runs[0].start, len(runs[0])))
    for number, run in enumerate(runs):
        laid = _heard(wire, len(run))
        if isinstance(laid, NotLaid):
            raise NixlError(f"{wire.peer}: {laid.why}")
        after = runs[number + 1] if number + 1 < len(runs) else None
        if after is not None:
            wire.send_message(Lay(after.start, len(after)))
        within_s = min(_RUN_S, until_s - time.monotonic())
        try:
            process.read(laid.agent, laid.address, turns[number % 2], len(run), page_bytes, within_s)
        except NixlError:
            if after is not None:
                _heard(wire, len(after))  # what it has begun to lay is not to be read
            raise
        yield laid.digests


def _heard(wire: SealedConnection, pages: int) -> Laid | NotLaid:
    laid = wire.receive_message(MESSAGES)
    if isinstance(laid, NotLaid) or (isinstance(laid, Laid) and len(laid.digests) == pages):
        return laid
    raise WireError(f"{wire.peer}: lays other pages than were asked for")


def _copied(memory: memoryview, page_bytes: int, digests: Sequence[bytes]) -> list[Came]:
    """Pages out of the staging. The copy is hashed, not what was copied: that can still be written to by a reading that came too late."""
    came = []
    for number, right in enumerate(digests):
        page = bytearray(memory[number * page_bytes : (number + 1) * page_bytes])
        came.append(Came(page, right, digest(page)))
    return came
