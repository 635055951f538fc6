"""Serving worker: an engine in one thread, fed by the router's commands and by pages from other workers.

Only the engine's thread touches the engine. One thread reads the router's connection, one thread per pull receives
pages, and the page server's threads receive page requests. All put messages into one queue, which is emptied between
two steps. Heartbeats have a thread of their own, so a long step does not look like a crash. The worker decides
nothing: when the connection ends, it ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec import structs

from phalanx.wire.connection import SealedConnection
from phalanx.wire.messages import WireError
from phalanx_serve.engine.engine import Engine
from phalanx_serve.http.worker import Streaming, explained
from phalanx_serve.traffic import events
from phalanx_serve.traffic.scheduler import page_names
from phalanx_serve.workers import messages as m
from phalanx_serve.workers.nixl_client import AgentProcess
from phalanx_serve.workers.page_transfer import OfferedPages, PageWay, Pulled, Way, pull

_log = logging.getLogger(__name__)
BEAT_S = 0.5
PULL_S = 5.0
_LOOK_UP_S = 2.0


@dataclass(frozen=True)
class _Came:
    """Pages that were pulled for a job."""

    job: int
    pulled: Pulled
    requested: int


@dataclass(frozen=True)
class _Asked:
    """Request of another worker for pages without a lease."""

    names: Sequence[bytes]
    answer: queue.SimpleQueue[dict[bytes, bytes]]


@dataclass(frozen=True)
class _Over:
    """The worker must end."""

    reason: str


class _OverError(Exception):
    pass


class ServingWorker:
    """Serving worker; ``run`` returns when the worker is dismissed or its connection ends."""

    def __init__(
        self,
        engine: Engine,
        identity: events.WorkerIdentity,
        page_bytes: int,
        token: str,
        link: SealedConnection,
        streaming: Callable[[], Streaming] | None = None,
        trouble: Callable[[], str] | None = None,
        pages: PageWay = "auto",
        nixl: AgentProcess | None = None,
    ) -> None:
        """Prepare a worker without starting its threads (``run``).

        ``pages`` limits the transports: "socket" only, or shared memory too with "auto"; ``nixl`` reads over NIXL.
        ``streaming`` returns counts of streamed weights, ``trouble`` the reason why the engine can no longer compute.
        """
        self._engine, self._identity, self._page_bytes = engine, identity, page_bytes
        self._token, self._link, self._streaming = token, link, streaming
        self._trouble = trouble
        self._only: Way | None = "socket" if pages == "socket" else None
        self._nixl = nixl
        self.offered = OfferedPages(look_up=self._look_up, share=pages == "auto")
        self._inbox: queue.SimpleQueue[m.ToWorker | m.Leaving | _Came | _Asked | _Over] = queue.SimpleQueue()
        self._orders: dict[int, m.RunJob] = {}
        self._steps = self._pulled = self._not_pulled = self._shared = self._over_nixl = 0
        self._is_unreached_reported = False
        self._over = threading.Event()

    def leave(self) -> None:
        """Request to leave the service; a signal handler may call it."""
        self._inbox.put(m.Leaving())

    def run(self) -> str:
        """Compute jobs until the router sends the worker away, or the link or a part of the engine is lost.

        Return the reason, empty if nothing is wrong. Two threads receive messages and send heartbeats. The link stays open.
        """
        for target in (self._listen, self._beat):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()
        try:
            while True:
                self._take_all()
                self._step()
        except _OverError as over:
            return str(over)
        except (WireError, events.PartLostError) as error:  # texts continue elsewhere
            return str(error)
        finally:
            self._over.set()

    # The engine's thread.

    def _take_all(self) -> None:
        """Take all messages that are there; wait for one if the engine has nothing to do.

        Raises _OverError, with the reason, when the router sends the worker away or the link has ended.
        """
        block = not self._engine.busy
        while True:
            try:
                message = self._inbox.get(block)
            except queue.Empty:
                return
            match message:
                case m.RunJob():
                    self._begin(message)
                case m.StopJob(job):
                    if self._orders.pop(job, None):
                        self._engine.cancel(str(job))
                case m.ForgetPages():
                    self._engine.forget_pages()
                    self.offered.forget()
                case _Came():
                    self._keep(message)
                case _Asked(names, answer):
                    answer.put(self._read_pages(names))
                case m.Leaving():
                    self._link.send_message(message)
                case m.Go(reason) | _Over(reason):
                    raise _OverError(reason)
            block = block and not self._engine.busy

    def _begin(self, order: m.RunJob) -> None:
        """Record a job, and submit it once its missing pages are pulled in a thread; at once if none is missing or offered."""
        self._orders[order.job] = order
        cached = set(self._engine.held_pages(order.pages))
        missing = [name for name in order.pages if name not in cached]
        if order.door is None or not missing:
            self._submit(order)
            return
        thread = threading.Thread(
            target=self._pull, args=(order, order.door, missing), name="pull", daemon=True
        )
        thread.start()

    def _pull(self, order: m.RunJob, door: m.PageDoor, names: list[bytes]) -> None:
        """Pull the pages of a job, and put the result into the inbox."""
        pulled = pull(
            door.host,
            door.port,
            self._token,
            self._identity,
            order.source_job,
            names,
            within_s=PULL_S,
            page_bytes=self._page_bytes,
            only=self._only,
            nixl=self._nixl,
        )
        self._inbox.put(_Came(order.job, pulled, len(names)))

    def _keep(self, arrived: _Came) -> None:
        """Cache and count pulled pages, and submit their job, which computes the missing ones. Does nothing for a
        canceled job.

        Stops at the first page that is unknown or finds no room.
        """
        order = self._orders.get(arrived.job)
        if order is None:
            return
        names = page_names(order.request.prompt + order.request.generated, self._engine.root)
        before = dict(zip(names, [self._engine.root, *names], strict=False))
        kept = 0
        with suppress(events.DeviceMemoryError):  # the rest is computed
            for name, page in arrived.pulled.pages.items():
                if name not in before or not self._engine.write_page(name, page, before[name]):
                    break
                kept += 1
        self._pulled += kept
        self._shared += kept if arrived.pulled.way == "memory" else 0
        self._over_nixl += min(kept, arrived.pulled.over_nixl)
        self._not_pulled += arrived.requested - kept
        if arrived.pulled.failure:
            _log.info("job %d: %s; the rest is computed", arrived.job, arrived.pulled.failure)
        self._report_unreached(arrived.pulled.unreached)
        self._submit(order)

    def _report_unreached(self, reason: str) -> None:
        """Log once in a life that pages come through sockets instead of NIXL or shared memory; nothing if ``reason`` is empty."""
        if not reason or self._is_unreached_reported:
            return
        self._is_unreached_reported = True
        if self._nixl is not None:
            _log.warning("pages come through sockets, not over NIXL: %s", reason)
            return
        _log.warning(
            "pages come through sockets, which is slower: the memory of a worker of this machine cannot be read (%s)",
            reason,
        )

    def _submit(self, order: m.RunJob) -> None:
        """Submit a job to the engine; one that it refuses ends with an error."""
        try:
            self._engine.submit(structs.replace(order.request, id=str(order.job)))
        except ValueError as error:
            self._send_outputs([events.Ended(str(order.job), "error", str(error))])

    def _step(self) -> None:
        """Compute a step and send its outputs; after an error all jobs are canceled and end with it. Raises PartLostError."""
        try:
            outputs = self._engine.step()
        except events.PartLostError:
            raise
        except Exception as error:  # the worker must survive a defect, and report it to the clients
            _log.exception("a step of the engine has failed")
            outputs = [events.Ended(str(job), "error", explained(error)) for job in self._orders]
            for output in outputs:
                self._engine.cancel(output.request)
        self._steps += 1
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: Sequence[events.EngineOutput]) -> None:
        """Send the outputs of known jobs in one message; an end removes its job.

        The prompt's pages of a prefill job are offered before its end is sent.
        """
        messages = []
        for output in outputs:
            job = int(output.request)
            order = self._orders.get(job)
            if order is None:  # it was stopped
                continue
            if isinstance(output, events.Ended):
                if order.offer and output.outcome == "length":
                    names = page_names(order.request.prompt + order.request.generated, self._engine.root)
                    self.offered.offer(job, self._read_pages(names))
                del self._orders[job]
            messages.append((job, output))
        if messages:
            self._link.send_message(m.OutputBatch(tuple(messages)))

    def _read_pages(self, names: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the pages of ``names`` that are here, from the first one up to a gap, or up to what device memory allows."""
        cached = set(self._engine.held_pages(names))
        pages = {}
        with suppress(events.DeviceMemoryError):  # the other worker computes the rest
            for name in names:
                if name not in cached:
                    break
                pages[name] = self._engine.read_page(name)
        return pages

    # Other threads.

    def _look_up(self, names: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return pages by name from another thread; empty if the engine's thread does not answer within ``_LOOK_UP_S``."""
        answer: queue.SimpleQueue[dict[bytes, bytes]] = queue.SimpleQueue()
        self._inbox.put(_Asked(names, answer))
        try:
            return answer.get(timeout=_LOOK_UP_S)
        except queue.Empty:  # a long step: the other worker computes them
            return {}

    def _listen(self) -> None:
        """Put the router's messages into the inbox until the link ends, then ``_Over`` with the reason."""
        try:
            while True:
                self._inbox.put(self._link.receive_message(m.TO_WORKER))
        except WireError as error:
            self._inbox.put(_Over(str(error)))

    def _beat(self) -> None:
        """Send a heartbeat and expire leases every ``BEAT_S``, until the worker ends.

        A lost part of the engine or a broken link ends the worker, with that reason.
        """
        while not self._over.wait(BEAT_S):
            self.offered.expire()
            if self._trouble is not None and (reason := self._trouble()):
                self._inbox.put(_Over(reason))
                return
            used, _ = self._engine.pages()
            beat = m.WorkerBeat(
                self._steps,
                tuple(self._orders),
                used,
                self._pulled,
                self._not_pulled,
                *self._engine.drafts(),
                self._streaming() if self._streaming is not None else None,
                self._shared,
                self._over_nixl,
            )
            try:
                self._link.send_message(beat)
            except WireError as error:
                self._inbox.put(_Over(str(error)))
                return


def measured_rate(engine: Engine, rows: int) -> float:
    """Return the prefill rate in rows per second for a prompt of ``rows`` tokens, after one warmup.

    Computes two different prompts, times the second, and drops all cached pages.
    """
    seconds = 1.0
    for token in range(2):
        engine.submit(events.Request("rate", (token,) * rows, 1))
        began_s = time.perf_counter()
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - began_s
    engine.forget_pages()
    return rows / max(seconds, 1e-6)
