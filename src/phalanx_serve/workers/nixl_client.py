"""Client of a worker's NIXL agent process: restarts it, shares memory with it, and moves pages through it.

While the process is down, requests raise NixlError, as do unfinished ones when it ends; the pages then use another
transport. One thread starts the process and receives from it, for its whole life: the kernel ends the process with
the thread that started it (prctl(2), PR_SET_PDEATHSIG).

Pages are copied into the shared memory (staging) for others to read, and read into it. The memory is registered with
the agent once, for the agent's life: a registration per job would pin memory each time and leave others with stale
keys. Ranges of it are lent to conversations until they end. A reader copies a page out of it before hashing, so a
late or early write cannot corrupt a checked page.

Two ranges of the staging alternate: while one is read, the next pages are written to the other. They are freed with
the reader's conversation, so a reader that dies leaks nothing. Over the sealed conversation, the source is requested
to write the next pages, and sends their addresses and SHA-256, as for pages over the socket. While one run is read,
the one before is copied and hashed, and the next one is written.
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
from phalanx_serve.traffic.events import ServeError
from phalanx_serve.workers import nixl_agent
from phalanx_serve.workers.page_wire import MESSAGES, Laid, Lay, NotLaid, Offer, digest


class NixlError(ServeError):
    """NIXL is missing, did not start, or failed to read pages. The message has the reason. The pages can use
    another transport.
    """


# Staging.


_GRAIN_BYTES = 4096


@dataclass(frozen=True)
class StagingRange:
    """A range of the staging memory."""

    start: int
    nbytes: int


class Staging:
    """Shared staging memory, for all threads of a worker. The system allocates its pages on the first write."""

    def __init__(self, nbytes: int) -> None:
        """Allocate ``nbytes`` of memory that another process can map. Raises OSError if the system has no such memory."""
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("phalanx-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        self._memory = memoryview(mmap.mmap(self.descriptor, nbytes))
        self._lock = threading.Lock()
        self._taken: list[StagingRange] = []
        """In their order in memory."""

    @contextmanager
    def stretches(self, count: int, nbytes: int) -> Iterator[list[StagingRange]]:
        """Yield ``count`` ranges of ``nbytes`` bytes, until the block ends. Raises NixlError if there is no room."""
        taken: list[StagingRange] = []
        try:
            for _ in range(count):
                taken.append(self.take(nbytes))
            yield taken
        finally:
            for stretch in taken:
                self.give_back(stretch)

    def take(self, nbytes: int) -> StagingRange:
        """Return the first free range of ``nbytes`` bytes. Raises NixlError if there is none."""
        with self._lock:
            start = 0
            for place, taken in enumerate([*self._taken, StagingRange(self.nbytes, 0)]):
                if taken.start - start >= nbytes:
                    stretch = StagingRange(start, nbytes)
                    self._taken.insert(place, stretch)
                    return stretch
                start = -(-(taken.start + taken.nbytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        raise NixlError(
            f"{nbytes:,} bytes are not free among the {self.nbytes:,} that are registered with NIXL"
        )

    def give_back(self, stretch: StagingRange) -> None:
        """Free a range."""
        with self._lock:
            self._taken.remove(stretch)

    def view(self, stretch: StagingRange) -> memoryview:
        """Return the bytes of a range."""
        return self._memory[stretch.start : stretch.start + stretch.nbytes]


# The process.


STAGING_BYTES = 256 << 20
"""Bytes that a worker shares with its agent, for pages being read and pages offered to others."""
_BEGIN_S = 60.0
_AGAIN_S = 2.0
_LATE_S = 1.0
"""Seconds that the process may need to report a timeout."""
_ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "WARN"}
"""Defaults for unset variables: workers are on one machine, and UCX's ports have no authentication."""


def require_installed() -> None:
    """Raise NixlError with the remedy if NIXL is not installed."""
    if find_spec("nixl") is None:
        raise NixlError(
            "--pages nixl needs the package nixl, which is not installed: pip install 'phalanx-train[nixl]', or, beside a PyTorch that is there, "
            "pip install --no-deps nixl nixl-cu13"
        )


class AgentProcess:
    """Client of the NIXL agent process, for all threads of a worker."""

    def __init__(self, staging_bytes: int = STAGING_BYTES) -> None:
        """Start the thread that keeps the process running, and wait up to ``_BEGIN_S`` until its agent is ready.

        Raises NixlError with the reason if it cannot start, and then closes.
        """
        try:
            self.staging = Staging(staging_bytes)
        except OSError as error:
            raise NixlError(f"the system gives no memory for pages over NIXL: {error}") from error
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._numbers = itertools.count()
        self._agent: nixl_agent.NixlAgent | None = None
        self._trouble = "it has not begun"
        self._pending: dict[int, Future[str]] = {}
        self._readers = 0
        self._link: FramedConnection | None = None
        self._process: Child | None = None
        first_outcome: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=self._keep, args=(first_outcome,), name="nixl", daemon=True)
        self._keeper.start()
        try:
            failure = first_outcome.get(timeout=_BEGIN_S)
        except queue.Empty:
            failure = f"its agent has not begun after {_BEGIN_S:g} s"
        if failure:
            self.close()
            raise NixlError(f"NIXL cannot be used here: {failure}")

    @property
    def pid(self) -> int:
        """Process id of the agent; 0 without one."""
        process = self._process
        return process.pid if process is not None else 0

    def agent(self) -> nixl_agent.NixlAgent:
        """Return the agent's address for other workers. Raises NixlError while there is no agent."""
        agent = self._agent
        if agent is None:
            raise NixlError(f"NIXL is not there: {self._trouble}")
        return agent

    def read(
        self,
        source: nixl_agent.NixlAgent,
        address: int,
        into: StagingRange,
        pieces: int,
        piece_bytes: int,
        within_s: float,
    ) -> None:
        """Read ``pieces`` consecutive pieces at ``address`` of ``source`` into a range, and wait until that is done.

        Raises NixlError if they do not arrive within ``within_s`` seconds, or there is no agent. Kills a process that
        does not answer.
        """
        request = nixl_agent.Read(
            next(self._numbers), source, address, into.start, pieces, piece_bytes, max(0.0, within_s)
        )
        over: Future[str] = Future()
        with self._lock:
            self.agent()
            assert self._link is not None
            self._pending[request.number] = over
            try:
                self._link.send_message(request)
            except WireError as error:
                del self._pending[request.number]
                raise NixlError(f"NIXL's process has ended: {error}") from error
        try:
            failure = over.result(request.within_s + _LATE_S)
        except TimeoutError:
            failure = "its process does not answer"
            self._kill()  # its memory may be written to at any time
        if failure:
            raise NixlError(f"NIXL did not bring them: {failure}")

    def serve(self, readers: int) -> None:
        """Add ``readers`` to the number of conversations whose pages others may read; negative if they ended."""
        with self._lock:
            self._readers += readers
            self._say_readers()

    def _say_readers(self) -> None:
        """Send the number of readers to the process, if it runs."""
        if self._link is not None:
            with suppress(WireError):  # it has ended; its successor gets the number
                self._link.send_message(nixl_agent.ServingReaders(self._readers))

    def close(self) -> None:
        """End the process."""
        self._closed.set()
        self._kill()
        self._keeper.join(_BEGIN_S)

    def _kill(self) -> None:
        """Kill the process, if it runs."""
        process = self._process
        if process is not None:
            process.kill()

    # The keeper's thread.

    def _keep(self, outcomes: queue.SimpleQueue[str]) -> None:
        """Run the process again and again until closed, at most once per ``_AGAIN_S``; put each outcome into ``outcomes``."""
        while not self._closed.is_set():
            started_s = time.monotonic()
            try:
                self._live(outcomes)
            except OSError as error:
                self._trouble = str(error)
            outcomes.put(self._trouble)  # only the first one is read
            self._closed.wait(max(0.0, started_s + _AGAIN_S - time.monotonic()))

    def _live(self, outcomes: queue.SimpleQueue[str]) -> None:
        """Run the process once, from its start to its end; put an empty outcome when its agent is ready.

        Passes results to the waiting reads; at its end, records the reason and fails the others.
        """
        near, far = socket.socketpair()
        with near:
            with far:
                process = self._start(far)
            link = FramedConnection(near, "the NIXL agent")
            with self._lock:
                self._process, self._link = process, link
            if self._closed.is_set():  # closed in between
                process.kill()
            reason = ""
            with suppress(WireError):
                while True:
                    match link.receive_message(nixl_agent.TO_WORKER):
                        case nixl_agent.Begun(agent):
                            with self._lock:
                                self._agent = agent
                                self._say_readers()
                            outcomes.put("")
                        case nixl_agent.AgentUnable(reason):
                            pass
                        case nixl_agent.Over(number, failure):
                            self._tell(number, failure)
            code = process.end()
            self._trouble = reason or f"its process {describe_exit(code)}"
            with self._lock:
                self._agent = self._link = self._process = None
                numbers = list(self._pending)
            for number in numbers:
                self._tell(number, self._trouble)

    def _tell(self, number: int, failure: str) -> None:
        """Give a pending read its outcome (empty for success), if it is still waiting."""
        with self._lock:
            over = self._pending.pop(number, None)
        if over is not None:
            over.set_result(failure)

    def _start(self, far: socket.socket) -> Child:
        """Start the agent's process with its end of the link and the staging memory."""
        link, staging = far.fileno(), self.staging.descriptor
        words = [str(link), str(staging), str(self.staging.nbytes)]
        command = [sys.executable, "-P", "-m", "phalanx_serve.workers.nixl_agent", *words]
        return Child.start(command, _ENVIRONMENT | os.environ, keep_open=(link, staging))


# Source of pages over NIXL, a run of them at a time.


class Laying:
    """Pages of one conversation in the staging memory, for another agent to read."""

    def __init__(self, process: AgentProcess | None) -> None:
        self._process = process
        self._turns: list[StagingRange] = []

    def lay(self, pages: Sequence[tuple[bytes | memoryview, bytes]]) -> Laid | NotLaid:
        """Write pages, each with its digest, into the range that is not being read.

        Returns their place and digests, or the reason why they cannot be laid.
        """
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
        """Free the ranges, and count this reader as gone in the agent's process."""
        if self._turns and self._process is not None:
            self._process.serve(-1)
            for stretch in self._turns:
                self._process.staging.give_back(stretch)
            self._turns.clear()

    def _turn(self, nbytes: int) -> StagingRange:
        """Return the range that is not being read, large enough for ``nbytes``; a new one replaces it if it is too
        small.

        The first one counts this reader in the agent's process. Raises NixlError if there is no room.
        """
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


# Reader of pages over NIXL.


_RUN_BYTES = 8 << 20
"""Bytes per run of pages; a run has at least one page."""
_RUN_S = 2.0
"""Timeout of a run, about twenty times its longest duration."""


CopiedPage = tuple[bytearray, bytes, bytes]
"""A page that was read, in memory of its own, with its expected and actual digest."""


def read_pages(
    wire: SealedConnection, process: AgentProcess, offer: Offer, until_s: float
) -> Generator[CopiedPage]:
    """Yield the pages of an offer, in order, with the expected and the computed digest, which are not compared here.

    Reading, hashing and yielding overlap. Raises, after the pages that came, NixlError if the remaining ones need
    another transport, and WireError if the connection fails.
    """
    most = max(1, _RUN_BYTES // offer.page_bytes)
    runs = [range(first, min(first + most, len(offer.names))) for first in range(0, len(offer.names), most)]
    with (
        process.staging.stretches(2, len(runs[0]) * offer.page_bytes) as turns,
        ThreadPoolExecutor(1) as hashing,
    ):
        unhashed: deque[Future[list[CopiedPage]]] = deque()
        trouble: NixlError | WireError | None = None
        try:
            for number, digests in enumerate(
                _read_runs(wire, process, offer.page_bytes, runs, turns, until_s)
            ):
                memory = process.staging.view(turns[number % 2])
                unhashed.append(hashing.submit(_copied, memory, offer.page_bytes, digests))
                if len(unhashed) > 1:  # so that the next range is free
                    yield from unhashed.popleft().result()
        except (NixlError, WireError) as error:
            trouble = error
        while unhashed:  # pages that arrived before the error are complete
            yield from unhashed.popleft().result()
        if trouble is not None:
            raise trouble


def _read_runs(
    wire: SealedConnection,
    process: AgentProcess,
    page_bytes: int,
    runs: Sequence[range],
    turns: Sequence[StagingRange],
    until_s: float,
) -> Iterator[tuple[bytes, ...]]:
    """Read each run of pages into its range, in turn, and yield its digests; the sender lays the next run meanwhile.

    Raises NixlError if pages cannot be laid or read, and leaves no reply unread on the connection.
    """
    wire.send_message(Lay(runs[0].start, len(runs[0])))
    for number, run in enumerate(runs):
        laid = _receive_pages_reply(wire, len(run))
        if isinstance(laid, NotLaid):
            raise NixlError(f"{wire.peer}: {laid.reason}")
        after = runs[number + 1] if number + 1 < len(runs) else None
        if after is not None:
            wire.send_message(Lay(after.start, len(after)))
        within_s = min(_RUN_S, until_s - time.monotonic())
        try:
            process.read(laid.agent, laid.address, turns[number % 2], len(run), page_bytes, within_s)
        except NixlError:
            if after is not None:
                _receive_pages_reply(wire, len(after))  # the pending reply; its run is not read
            raise
        yield laid.digests


def _receive_pages_reply(wire: SealedConnection, pages: int) -> Laid | NotLaid:
    """Receive the reply to a request of ``pages`` pages. Raises WireError for another message or number of pages."""
    laid = wire.receive_message(MESSAGES)
    if isinstance(laid, NotLaid) or (isinstance(laid, Laid) and len(laid.digests) == pages):
        return laid
    raise WireError(f"{wire.peer}: offers other pages than requested")


def _copied(memory: memoryview, page_bytes: int, digests: Sequence[bytes]) -> list[CopiedPage]:
    """Return each page copied out of the staging memory, its expected and its computed digest.

    The copy is hashed, because a late read can still change the original.
    """
    pages = []
    for number, right in enumerate(digests):
        page = bytearray(memory[number * page_bytes : (number + 1) * page_bytes])
        pages.append((page, right, digest(page)))
    return pages
