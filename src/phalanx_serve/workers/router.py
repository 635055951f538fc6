"""Live I/O shell of the router: turns connections and requests into events, and commands into messages.

Every decision is ``phalanx_serve.traffic.dispatch.step``, the function that ``phalanx simulate traffic`` runs. All of
this runs in one event loop in a thread of its own (``RouterClient``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx.wire.messages import SealedStream, WireError, sealed_stream
from phalanx_serve.traffic import dispatch, events
from phalanx_serve.traffic.events import Ended, EngineOutput, Request
from phalanx_serve.traffic.pools import Pool, PoolSettings
from phalanx_serve.traffic.routing import Link
from phalanx_serve.traffic.scheduler import page_names
from phalanx_serve.workers import messages as m

_log = logging.getLogger(__name__)
_PROOF_S = 5.0
_NEWCOMERS = 64
"""Most connections that authenticate at once; a further one closes the oldest."""

Sink = Callable[[Sequence[EngineOutput]], None]
"""Callback for the outputs of a request, in order."""


@dataclass
class Peer:
    """A worker that has proven itself; ``life`` distinguishes its connection from earlier ones."""

    stream: SealedStream
    life: int
    number: int = -1
    pid: int = 0
    ready: m.WorkerReady | None = None
    beat: m.WorkerBeat | None = None
    ready_s: float = 0.0


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a service of several workers."""

    rows: int = 256
    audit_share: float = 0.0
    late_s: float = 3.0
    page_bytes_per_s: float = 5e8
    tick_s: float = 0.25
    """Seconds between two checks of the workers' heartbeats."""


@dataclass(frozen=True)
class Watcher:
    """Callbacks for worker events, for the process supervisor and the start of the service."""

    ready: Callable[[Peer], None]
    unable: Callable[[Peer, str], None]
    late: Callable[[Peer, str], None]
    """Called once per life if a worker is late, with the reason; its requests continue elsewhere."""
    left: Callable[[Peer, str], None]
    """Called when a connection has ended, with the reason."""


@dataclass
class RequestRouter:
    """Router of a service, in one event loop."""

    token: str
    settings: RouterSettings
    watcher: Watcher
    peers: dict[int, Peer] = field(default_factory=dict)
    """Ready workers, by number."""
    past: dict[str, float] = field(default_factory=dict)
    """Sums of the counts of workers that have left (``WorkerBeat.counts``)."""

    def __post_init__(self) -> None:
        """Begin without workers and requests; the first worker sets the service's identity and page names."""
        self._root, self._failed, self._ending = b"", "", False
        self._lives = 0
        self._newcomers: dict[asyncio.StreamWriter, None] = {}
        self._sinks: dict[str, Sink] = {}
        self._refusals: dict[int, str] = {}  # life -> reason
        self._late: set[int] = set()  # lives that were reported as late
        self._joined = -1  # the highest number of a worker
        self._tasks: set[asyncio.Task[None]] = set()
        pool = PoolSettings(late_s=self.settings.late_s, step_rows=self.settings.rows)
        core = dispatch.DispatchSettings(audit_share=self.settings.audit_share)
        self.traffic = dispatch.RouterState(self._names, core, Pool(pool))

    async def listen(self, host: str) -> asyncio.Server:
        """Listen for workers at a free port of ``host``."""
        self._tasks.add(asyncio.create_task(self._tick()))
        return await asyncio.start_server(self._welcome, host, 0, backlog=128)

    # Clients.

    def submit(self, request: Request, sink: Sink) -> None:
        """Submit a request; its outputs go to ``sink``. It ends at once if the service has failed."""
        if self._failed:
            sink([Ended(request.id, "error", self._failed)])
            return
        self._sinks[request.id] = sink
        self._hear(events.RequestSubmitted(request))

    def abandon(self, request_id: str) -> None:
        """Cancel a request."""
        if self._sinks.pop(request_id, None):
            self._hear(events.Abandoned(request_id))

    def fail_all(self, reason: str) -> None:
        """End all requests with an error, and let every later one end with it: another thread may be about to submit one."""
        self._failed = reason
        for name, sink in list(self._sinks.items()):
            sink([Ended(name, "error", reason)])
            self.abandon(name)

    def drain(self, number: int) -> None:
        """Continue a worker's requests elsewhere, and dismiss it."""
        self._hear(events.DrainWorker(number))

    # Workers.

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection from its proof to its end, and close it. A cancelled task ends without an error."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Cancelled by ``end``; asyncio's streams report a cancelled task as a defect.
            with suppress(asyncio.CancelledError):
                await self._meet(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check a newcomer's proof and converse with it until its connection ends; a stranger is dropped silently.

        Beyond ``_NEWCOMERS`` unproven connections the oldest is dropped.
        """
        if len(self._newcomers) >= _NEWCOMERS:
            oldest = next(iter(self._newcomers))
            del self._newcomers[oldest]
            oldest.transport.abort()
        self._newcomers[writer] = None
        self._lives += 1
        life = self._lives
        try:
            stream = await sealed_stream(reader, writer, self.token, m.PURPOSE, _PROOF_S)
        except WireError:
            return
        finally:
            self._newcomers.pop(writer, None)
        peer, reason = Peer(stream, life), "its connection ended"
        try:
            await self._converse(peer)
        except WireError as error:
            reason = str(error)
        finally:
            self._disconnect(peer, reason)

    def _disconnect(self, peer: Peer, reason: str) -> None:
        """Remove a peer, add its counts to the past ones, and report why to the traffic and the watcher; nothing
        while the service ends.

        A refusal's reason is reported in place of ``reason``. A peer that was replaced leaves the traffic as it is.
        """
        if self._ending:
            return  # it was dismissed, and is no loss: a reported loss kills the process at once
        reason = self._refusals.pop(peer.life, reason)
        self._late.discard(peer.life)
        if self.peers.get(peer.number) is peer:
            del self.peers[peer.number]
            self._count_past(peer)
            self._hear(events.Left(peer.number, peer.life, reason))
        self.watcher.left(peer, reason)

    async def _converse(self, peer: Peer) -> None:
        """Pass a worker's messages on until its connection ends, and raise WireError then.

        A worker without a number gets the next one.
        """
        while True:
            match await peer.stream.receive_message(m.TO_ROUTER):
                case m.Opening(number, pid):
                    self._joined = max(self._joined, number)
                    peer.number, peer.pid = number, pid
                    if number < 0:
                        self._joined += 1
                        peer.number = self._joined
                case m.WorkerReady() as ready:
                    self._admit(peer, ready)
                case m.WorkerUnable(reason):
                    self.watcher.unable(peer, reason)
                case m.OutputBatch(outputs):
                    for job, output in outputs:
                        self._hear(events.OutputReceived(peer.number, peer.life, job, output))
                case m.WorkerBeat() as beat:
                    peer.beat = beat
                    self._hear(events.Beat(peer.number, peer.life, beat.steps, beat.jobs))
                case m.Leaving():
                    self.drain(peer.number)

    def _admit(self, peer: Peer, ready: m.WorkerReady) -> None:
        """Add a ready worker, in place of an earlier one of its number, which is closed; the first one sets page
        names and size.

        Raises WireError if it has not sent its number. The watcher is not called for one that the traffic refuses.
        """
        if peer.number < 0:
            raise WireError("it is ready before it has sent its number")
        old = self.peers.get(peer.number)
        if old is not None:
            self._count_past(old)
            old.stream.close()
        if not self._root:
            self._root = ready.root
            link = Link(ready.page_bytes, self.settings.page_bytes_per_s)
            self.traffic.settings = dispatch.DispatchSettings(link, audit_share=self.settings.audit_share)
        peer.ready, peer.ready_s = ready, time.monotonic()
        self.peers[peer.number] = peer
        self._hear(
            events.WorkerJoined(
                peer.number, peer.life, ready.identity, ready.role, ready.pages, ready.rows_per_s
            )
        )
        if self.traffic.pool.current(peer.number, peer.life):
            self.watcher.ready(peer)

    def _count_past(self, peer: Peer) -> None:
        """Add a peer's counts to those of workers that have left."""
        if peer.beat is not None:
            for name, count in peer.beat.counts.items():
                self.past[name] = self.past.get(name, 0) + count

    def _names(self, text: Sequence[int]) -> Sequence[bytes]:
        return page_names(text, self._root)

    # The core.

    async def _tick(self) -> None:
        """Check the workers every ``tick_s``, until the task is canceled.

        An error is a defect, which must not end the checks. It is logged, the same one in a row once.
        """
        logged = ""
        while True:
            await asyncio.sleep(self.settings.tick_s)
            try:
                self._check_workers()
            except Exception as error:
                if repr(error) != logged:
                    logged = repr(error)
                    _log.exception(
                        "a defect in a check of the workers; they are checked again in %g s",
                        self.settings.tick_s,
                    )

    def _check_workers(self) -> None:
        """Send a tick to the traffic.

        Reports a worker once in each of its lives if it sends nothing, or its engine makes no step, for too long.
        """
        self._hear(events.ClockTick())
        now_s = time.monotonic()
        for number, worker in self.traffic.pool.workers.items():
            peer = self.peers.get(number)
            if not worker.late or worker.life in self._late or peer is None:
                continue
            self._late.add(worker.life)
            silent_s, still_s = now_s - worker.last_heartbeat_s, now_s - worker.stepped_s
            reason = (
                f"it has given no sign of life for {silent_s:.0f} s"
                if silent_s > self.settings.late_s
                else f"its engine has made no step for {still_s:.0f} s"
            )
            self.watcher.late(peer, reason)

    def _hear(self, event: events.Event) -> None:
        """Pass an event to the traffic's decisions, and carry out their commands: outputs to sinks, jobs to workers.

        A refused worker gets the reason, and its connection is closed.
        """
        self.traffic, commands = dispatch.step(self.traffic, event, time.monotonic())
        for command in commands:
            match command:
                case events.DeliverOutput(output):
                    sink = self._sinks.get(output.request)
                    if sink is not None:
                        sink([output])
                    if isinstance(output, Ended):
                        self._sinks.pop(output.request, None)
                case events.ComputeJob():
                    self._send(command.worker, self._job(command))
                case events.CancelJob(worker, job):
                    self._send(worker, m.StopJob(job))
                case events.Forget(worker):
                    self._send(worker, m.ForgetPages())
                case events.Dismiss(worker):
                    self._send(worker, m.Go())
                case events.Refuse(worker, life, reason):
                    peer = self.peers.get(worker)
                    if peer is not None and peer.life == life:
                        self._refusals[life] = reason
                        peer.stream.send_message(m.Go(reason))
                        peer.stream.close()

    def _job(self, run: events.ComputeJob) -> m.RunJob:
        """Return the message of a job, with the source's door for pages, if it is connected."""
        source = self.peers.get(run.source)
        door = source.ready.door if source is not None and source.ready is not None else None
        return m.RunJob(run.job, run.request, run.source_job, door, run.pages, run.offer)

    def _send(self, worker: int, message: m.ToWorker) -> None:
        """Send a message to a worker, if it is connected."""
        peer = self.peers.get(worker)
        if peer is not None:
            peer.stream.send_message(message)

    async def end(self) -> None:
        """Send all workers away, and end their connections. Each ends after its step; ``Watcher.left`` is not called."""
        self._ending = True
        for peer in self.peers.values():
            peer.stream.send_message(m.Go())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
