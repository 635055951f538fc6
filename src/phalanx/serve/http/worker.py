"""The port through which the gateway talks to whatever computes, and the engine of its own process behind it.

An engine takes turns of milliseconds to seconds and must not hold up the event loop, so it has a thread of its own. What it tells in one
turn crosses over to the loop at once, not token by token: with many streams, waking the loop is what costs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.serve.engine.errors import DeviceMemoryError, PartLostError
from phalanx.traffic.requests import Ended, Request, Told

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerFacts:
    """One of several workers, for those who watch."""

    number: int
    role: str
    state: str
    """starting, ready, late, draining, waiting (for its next start), or left (for good)."""
    pid: int = 0
    jobs: int = 0
    why: str = ""
    ended: int = 0
    """How often its process has ended."""


@dataclass(frozen=True)
class Streaming:
    """What reading weights while they are computed with has done since the start."""

    bytes_read: int
    wait_s: float
    """Seconds that passes have stood still for it."""
    experts_needed: int
    experts_held: int
    """Needed experts that were in memory already, or on their way."""


@dataclass(frozen=True)
class WorkerLoad:
    """How much a worker has to do."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    """Pages there are in all; 0 where memory is not counted in pages."""
    workers: tuple[WorkerFacts, ...] = ()
    """Where there are several."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What happened so often among them: ``phalanx.traffic.dispatch.Traffic.counts``, and pages pulled or not."""
    weights_step: int | None = None
    """The step whose weights compute, where other steps take over."""
    swaps: int = 0
    """How often they did."""
    drafted: int = 0
    """Tokens that predictions ahead have guessed and the model has computed."""
    accepted: int = 0
    """Guessed tokens that the model drew."""
    streaming: Streaming | None = None
    """Where weights are streamed by one process."""


@dataclass(frozen=True)
class Identity:
    """What the bits of a token depend on besides its request."""

    weights_sha: str
    numerics_id: str
    context: int
    """The most tokens, prompt included, that a request may hold."""


class WorkerPort(Protocol):
    """What the gateway asks of workers, one or many."""

    identity: Identity

    def submit(self, request: Request) -> AsyncGenerator[Told]:
        """What is told of the request, up to ``Ended``."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Gives a request up; what it held is free after the step that goes on."""
        ...

    def load(self) -> WorkerLoad:
        """How much there is to do at this moment."""
        ...

    def trouble(self) -> str:
        """Why nothing can be computed; empty if it can."""
        ...

    def close(self) -> None:
        """Ends the worker; requests that go on are not finished."""
        ...


class Engine(Protocol):
    """What computes: called by one thread alone."""

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> Sequence[Told]: ...

    @property
    def busy(self) -> bool: ...

    def pages(self) -> tuple[int, int]:
        """Pages in use, and pages in all; 0 of 0 where memory is not counted in pages."""
        ...

    def drafts(self) -> tuple[int, int]:
        """Tokens that were guessed and computed, and those of them that the model drew."""
        ...


@dataclass(frozen=True)
class Swap:
    """Other weights for an engine, which take over between two steps."""

    step: int
    weights_sha: str
    take_over: Callable[[], None]
    """Called by the engine's thread. Raises ValueError if the engine refuses them, and those of before go on."""


class EngineWorker:
    """An engine in a thread of this process."""

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        streaming: Callable[[], Streaming] | None = None,
        step: int | None = None,
        trouble: Callable[[], str] | None = None,
    ) -> None:
        """``step`` is told where those of other steps may take over; ``trouble`` tells why the engine can compute nothing any more."""
        self.identity, self._streaming = identity, streaming
        self._engine = engine
        self._asked: queue.SimpleQueue[Request | str | Swap | None] = queue.SimpleQueue()
        self._step = step
        self._swaps = 0
        self._lost, self._trouble = "", trouble
        self._told: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Told]]] = {}
        self._first: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> AsyncGenerator[Told]:
        told: asyncio.Queue[Told] = asyncio.Queue()
        self._told[request.id] = asyncio.get_running_loop(), told
        self._first.add(request.id)
        self._asked.put(request)
        ended = False
        try:
            while not ended:
                one = await told.get()
                self._first.discard(request.id)
                ended = isinstance(one, Ended)
                yield one
        finally:
            self._told.pop(request.id, None)
            self._first.discard(request.id)
            if not ended:
                self._asked.put(request.id)

    async def cancel(self, request_id: str) -> None:
        self._asked.put(request_id)

    def load(self) -> WorkerLoad:
        waiting = len(self._first)
        used, pages = self._engine.pages()
        drafted, accepted = self._engine.drafts()
        return WorkerLoad(
            len(self._told) - waiting,
            waiting,
            used,
            pages,
            weights_step=self._step,
            swaps=self._swaps,
            drafted=drafted,
            accepted=accepted,
            streaming=self._streaming() if self._streaming else None,
        )

    def swap(self, swap: Swap) -> None:
        """Has other weights take over before the engine's next step; from any thread."""
        self._asked.put(swap)

    def trouble(self) -> str:
        """See ``WorkerPort``."""
        if not self._thread.is_alive():
            return self._lost or "the engine has ended"
        return self._lost or (self._trouble() if self._trouble is not None else "")

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            block = bool(self._lost) or not self._engine.busy
            while True:
                try:
                    asked = self._asked.get(block)
                except queue.Empty:
                    break
                if asked is None:
                    return
                self._take(asked)
                block = bool(self._lost)
            try:
                self._tell(self._engine.step())
            except PartLostError as error:  # It computes nothing any more, and says so to all.
                self._lost = str(error)
                self._fail(error)
            except Exception as error:  # The thread must outlive a defect, and the clients must hear of it.
                self._fail(error)

    def _take(self, asked: Request | str | Swap) -> None:
        if self._lost:
            if isinstance(asked, Request):
                self._tell([Ended(asked.id, "error", self._lost)])
            return None
        if isinstance(asked, str):
            return self._engine.cancel(asked)
        if isinstance(asked, Swap):
            try:
                asked.take_over()
            except Exception:  # Requests go on by the weights that are there.
                return _log.exception("the weights of step %d have not taken over", asked.step)
            self.identity = replace(self.identity, weights_sha=asked.weights_sha)
            self._step, self._swaps = asked.step, self._swaps + 1
            return None
        try:
            self._engine.submit(asked)
        except ValueError as error:
            self._tell([Ended(asked.id, "error", str(error))])

    def _fail(self, error: Exception) -> None:
        for name in list(self._told):
            self._engine.cancel(name)
            self._tell([Ended(name, "error", explained(error))])

    def _tell(self, all_told: Sequence[Told]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Told], Told]]] = {}
        for told in all_told:
            if (reader := self._told.get(told.request)) is not None:
                by_loop.setdefault(reader[0], []).append((reader[1], told))
        for loop, pairs in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, pairs)


def _deliver(pairs: Sequence[tuple[asyncio.Queue[Told], Told]]) -> None:
    for reader, told in pairs:
        reader.put_nowait(told)


def explained(error: Exception) -> str:
    """Why a step has failed: what is wrong with the weights' file, which says what to do, or a defect."""
    return (
        str(error)
        if isinstance(error, CheckpointError | PartLostError | DeviceMemoryError)
        else f"a defect of the engine: {error!r}"[:500]
    )
