"""Interface of the HTTP server to workers, and its implementation by an engine in this process.

A step of an engine takes milliseconds to seconds and must not block the event loop, so the engine has a thread of its own. The outputs of one
step cross over to the loop at once, not token by token: with many streams, waking the loop is the cost.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx_serve.traffic.events import Bits, DeviceMemoryError, Ended, EngineOutput, PartLostError, Request

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerFacts:
    """State of one of several workers, for observers."""

    number: int
    role: str
    state: str
    """starting, ready, late, draining, waiting (for its next start), or left (for good)."""
    pid: int = 0
    jobs: int = 0
    reason: str = ""
    ended: int = 0
    """How often its process has ended."""


@dataclass(frozen=True)
class Streaming:
    """Counts of streamed weights since the start."""

    bytes_read: int
    wait_s: float
    """Seconds that passes have waited for weights."""
    experts_needed: int
    experts_held: int
    """Needed experts that were in memory already, or on their way."""


@dataclass(frozen=True)
class WorkerLoad:
    """Load of a worker."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    """Pages there are in all; 0 where memory is not counted in pages."""
    workers: tuple[WorkerFacts, ...] = ()
    """Set if there are several workers."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of their events: ``phalanx_serve.traffic.dispatch.RouterState.counts``, and pages pulled or not."""
    weights_step: int | None = None
    """Step of the current weights, if they can be swapped."""
    swaps: int = 0
    """Number of weight swaps."""
    drafted: int = 0
    """Drafted tokens that were computed."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    streaming: Streaming | None = None
    """Set if one process streams weights."""


@dataclass(frozen=True)
class ModelIdentity:
    """Facts besides its request on which a token's bits depend."""

    weights_sha: str
    numerics_id: str
    context: int
    """The most tokens, prompt included, that a request may hold."""
    bits: Bits = "unspecified"
    """The origin of the bits of tokens and log-probabilities."""


class WorkerPort(Protocol):
    """Interface of workers, one or many, to the HTTP server."""

    identity: ModelIdentity

    def submit(self, request: Request) -> AsyncGenerator[EngineOutput]:
        """Yield the outputs of the request, up to ``Ended``."""
        ...

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; its pages are free after the current step."""
        ...

    def load(self) -> WorkerLoad:
        """Return the current load."""
        ...

    def trouble(self) -> str:
        """Return the reason why nothing can be computed; empty if it can."""
        ...

    def close(self) -> None:
        """End the worker; running requests are not finished."""
        ...


class EngineInterface(Protocol):
    """Engine that one thread calls."""

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> Sequence[EngineOutput]: ...

    @property
    def busy(self) -> bool: ...

    def pages(self) -> tuple[int, int]:
        """Return the number of KV-cache pages in use, and of all; (0, 0) if memory is not counted in pages."""
        ...

    def drafts(self) -> tuple[int, int]:
        """Return the number of drafted tokens that were computed, and of those that were accepted."""
        ...


@dataclass(frozen=True)
class Swap:
    """Other weights for an engine, which take over between two steps."""

    step: int
    weights_sha: str
    take_over: Callable[[], None]
    """Called by the engine's thread. Raises ValueError if the engine refuses the weights; the old ones stay."""


class EngineWorker:
    """An engine in a thread of this process."""

    def __init__(
        self,
        engine: EngineInterface,
        identity: ModelIdentity,
        streaming: Callable[[], Streaming] | None = None,
        step: int | None = None,
        trouble: Callable[[], str] | None = None,
    ) -> None:
        """Start the engine's thread.

        ``step`` is that of the weights, if others may take over, else None. ``streaming`` returns counts of streamed
        weights. ``trouble`` returns why the engine can no longer compute, else an empty text.
        """
        self.identity, self._streaming = identity, streaming
        self._engine = engine
        self._inbox: queue.SimpleQueue[Request | str | Swap | None] = queue.SimpleQueue()
        self._step = step
        self._swaps = 0
        self._lost, self._trouble = "", trouble
        self._readers: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[EngineOutput]]] = {}
        self._first: set[str] = set()
        self._with_engine: set[str] = set()
        """Ids of the requests that the engine computes; of the engine's thread."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> AsyncGenerator[EngineOutput]:
        """Queue a request and yield its outputs, the last of which is ``Ended``; leaving earlier cancels it."""
        outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._readers[request.id] = asyncio.get_running_loop(), outputs
        self._first.add(request.id)
        self._inbox.put(request)
        ended = False
        try:
            while not ended:
                output = await outputs.get()
                self._first.discard(request.id)
                ended = isinstance(output, Ended)
                yield output
        finally:
            self._readers.pop(request.id, None)
            self._first.discard(request.id)
            if not ended:
                self._inbox.put(request.id)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request before the engine's next step."""
        self._inbox.put(request_id)

    def load(self) -> WorkerLoad:
        """Return counts of texts, pages and drafts; a text waits until its first output."""
        waiting = len(self._first)
        used, pages = self._engine.pages()
        drafted, accepted = self._engine.drafts()
        return WorkerLoad(
            len(self._readers) - waiting,
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
        """Swap the weights before the engine's next step; any thread may call it."""
        self._inbox.put(swap)

    def trouble(self) -> str:
        """Return the reason why nothing can be computed; empty if it can."""
        if not self._thread.is_alive():
            return self._lost or "the engine has ended"
        return self._lost or (self._trouble() if self._trouble is not None else "")

    def close(self) -> None:
        """End the thread after its step; wait for at most 30 seconds."""
        self._inbox.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        """Take messages and compute steps until None arrives. Runs in the engine's thread.

        A failed step, or a message that fails, is logged and ends the engine's requests with its error. After a lost part, all later
        requests fail too.
        """
        while True:
            try:
                block = bool(self._lost) or not self._engine.busy
                while True:
                    try:
                        message = self._inbox.get(block)
                    except queue.Empty:
                        break
                    if message is None:
                        return
                    self._take(message)
                    block = bool(self._lost)
                self._deliver(self._engine.step())
            except PartLostError as error:  # It can no longer compute: all requests fail.
                self._lost = str(error)
                self._fail(error)
            except Exception as error:  # The thread must outlive a defect, and the clients get the error.
                _log.exception("a call of the engine has failed")
                self._fail(error)

    def _take(self, message: Request | str | Swap) -> None:
        """Submit a request, cancel one by its id, or exchange the weights.

        A refused request ends with its error. Weights that fail to take over are logged, and the old ones stay. After
        a lost part, requests end with its reason, and other messages are ignored. Raises what else the engine raises.
        """
        if self._lost:
            if isinstance(message, Request):
                self._deliver([Ended(message.id, "error", self._lost)])
            return None
        if isinstance(message, str):
            self._with_engine.discard(message)
            return self._engine.cancel(message)
        if isinstance(message, Swap):
            try:
                message.take_over()
            except Exception:  # Requests continue with the current weights.
                return _log.exception("the weights of step %d have not taken over", message.step)
            self.identity = replace(self.identity, weights_sha=message.weights_sha)
            self._step, self._swaps = message.step, self._swaps + 1
            return None
        self._with_engine.add(message.id)
        try:
            self._engine.submit(message)
        except ValueError as error:
            self._deliver([Ended(message.id, "error", str(error))])

    def _fail(self, error: Exception) -> None:
        """End the engine's requests with an error; those that wait in the inbox are computed later. A request that the engine
        cannot cancel is logged.
        """
        for name in list(self._with_engine):
            self._deliver([Ended(name, "error", explained(error))])
            try:
                self._engine.cancel(name)
            except Exception:  # Its client has got the error in any case.
                _log.exception("the engine has not canceled the request %s", name)

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """Put outputs into the queues of their requests, on their event loops; those of requests that have left are dropped."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[EngineOutput], EngineOutput]]] = {}
        for output in outputs:
            if isinstance(output, Ended):
                self._with_engine.discard(output.request)
            if (reader := self._readers.get(output.request)) is not None:
                by_loop.setdefault(reader[0], []).append((reader[1], output))
        for loop, pairs in by_loop.items():
            with suppress(RuntimeError):  # the HTTP server's loop has ended
                loop.call_soon_threadsafe(_put_all, pairs)


def _put_all(pairs: Sequence[tuple[asyncio.Queue[EngineOutput], EngineOutput]]) -> None:
    """Put each output into its reader's queue."""
    for reader, output in pairs:
        reader.put_nowait(output)


def explained(error: Exception) -> str:
    """Return the message of a failed step: a known error's own text, with its remedy, else that of a defect, cut at 500 characters."""
    return (
        str(error)
        if isinstance(error, CheckpointError | PartLostError | DeviceMemoryError)
        else f"a defect of the engine: {error!r}"[:500]
    )
