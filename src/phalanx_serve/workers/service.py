"""Service of several worker processes on this machine, for a run directory or a pack: the text side runs here, the
weights in each worker.

The router and the process supervisor run in a thread with an event loop. The HTTP server's own loop writes to its
clients and must not wait for workers, whose outputs are passed to it in batches. The service is ready when every
worker is. If one cannot serve, the service fails with that worker's reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from msgspec import structs
from msgspec.structs import replace

from phalanx.checkpoint.pack.reader import is_pack
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx_serve.http.worker import ModelIdentity, Streaming, WorkerFacts, WorkerLoad
from phalanx_serve.prompt import ModelText, read_model_text
from phalanx_serve.served import opened
from phalanx_serve.served.of_run import require_drafts, served_folder
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Role, ServeError
from phalanx_serve.weights.open_model import free_to_use, packed
from phalanx_serve.workers.nixl_client import require_installed
from phalanx_serve.workers.page_transfer import PageWay
from phalanx_serve.workers.router import Peer, RequestRouter, RouterSettings, Watcher
from phalanx_serve.workers.worker_process import Seat, WorkerEnded, WorkerProcesses, WorkerTask

# Client of the router: the worker processes behind the HTTP server's ``WorkerPort``.


_BEGIN_S = 600.0
_END_S = 20.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Notice:
    """An event of the service, to be printed."""

    event: str
    text: str
    facts: Mapping[str, object]


@dataclass(frozen=True)
class WorkerDivision:
    """Number of processes among which a worker divides its model: by layers, or within each layer."""

    stages: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class ServiceConfig:
    """The workers of a service and their tasks."""

    roles: Sequence[Role]
    task: WorkerTask
    """The task of each worker, but for number, role, division, token and the router's address."""
    environment: Mapping[str, str]
    """Variables that each worker starts with, beside this process's."""
    settings: RouterSettings
    divisions: Mapping[Role, WorkerDivision] = field(default_factory=dict)
    """The division of workers that start in a role, which they keep when they change roles; by default the task's."""

    def task_of(self, role: Role) -> WorkerTask:
        """Return the task of a worker that starts in this role."""
        served, division = self.task.served, self.divisions.get(role)
        if division is not None:
            served = structs.replace(served, stages=division.stages, tensor=division.tensor)
        return structs.replace(self.task, role=role, served=served)


class RouterClient:
    """A ``WorkerPort`` of many workers."""

    def __init__(self, service: ServiceConfig, report: Callable[[Notice], None]) -> None:
        """Start router and workers, and wait until all are ready, for at most ``_BEGIN_S``.

        Raises ServeError with the reason if one cannot serve, or takes too long, and then closes. ``report`` is
        called with notices, in a thread.
        """
        self._service = service
        self._notices: queue.SimpleQueue[Notice | threading.Event | None] = queue.SimpleQueue()
        self._reporter = threading.Thread(
            target=self._report_all, args=(report,), name="notices", daemon=True
        )
        self._reporter.start()
        self._identity: Future[ModelIdentity] = Future()
        self._trouble = ""
        self._first: set[str] = set()
        self._running: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._thread.start()
        try:
            self._call(self._begin())
            self.identity = self._identity.result(_BEGIN_S)
            is_reported = threading.Event()
            self._notices.put(is_reported)
            is_reported.wait(1.0)  # the workers are reported before the address
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise ServeError(f"the workers are not ready after {_BEGIN_S:g} s") from error
            raise

    # ``WorkerPort``.

    async def submit(self, request: Request) -> AsyncGenerator[EngineOutput]:
        """Yield the outputs of a request; leaving earlier cancels it. Once the service has failed, yield its error only."""
        server_loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Sequence[EngineOutput]] = asyncio.Queue()

        def sink(new_outputs: Sequence[EngineOutput]) -> None:
            """Put outputs into the HTTP server's queue, from the router's thread; nothing once its loop has ended."""
            with suppress(RuntimeError):  # the HTTP server's loop has ended
                server_loop.call_soon_threadsafe(outputs.put_nowait, new_outputs)

        if self._trouble:
            yield Ended(request.id, "error", self._trouble)
            return
        self._first.add(request.id)
        self._running.add(request.id)
        self._loop.call_soon_threadsafe(self._router.submit, request, sink)
        ended = False
        try:
            while not ended:
                for output in await outputs.get():
                    self._first.discard(request.id)
                    ended = isinstance(output, Ended)
                    yield output
        finally:
            self._first.discard(request.id)
            self._running.discard(request.id)
            if not ended:
                await self.cancel(request.id)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; nothing once the router's loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._router.abandon, request_id)

    def load(self) -> WorkerLoad:
        """Return counts of texts, pages and workers, summed over all workers, and for counts also over those that left."""
        peers = list(self._router.peers.values())
        waiting, counted = len(self._first), self._counted(peers)
        counts = {name: int(counted.get(name, 0)) for name in ("pulled", "shared", "over_nixl", "not_pulled")}
        return WorkerLoad(
            len(self._running) - waiting,
            waiting,
            sum(peer.beat.pages_used for peer in peers if peer.beat is not None),
            sum(peer.ready.pages for peer in peers if peer.ready is not None),
            self._workers(),
            dict(self._router.traffic.counts) | counts,
            drafted=int(counted.get("drafted", 0)),
            accepted=int(counted.get("accepted", 0)),
            streaming=_streaming(counted) if self._service.task.served.stream else None,
        )

    def trouble(self) -> str:
        """Return the reason why nothing can be computed; empty if it can."""
        return self._trouble

    def close(self) -> None:
        """End the workers, the router and their threads, also if this was done before; errors are ignored."""
        if self._loop.is_closed():
            return
        with suppress(Exception):
            self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        self._notices.put(None)
        self._reporter.join(1.0)

    def _workers(self) -> tuple[WorkerFacts, ...]:
        """Return role, state, jobs and ends of each worker, also of those that are not connected.

        A connected one is late, draining or ready; others have the state of their process.
        """
        pool, peers = self._router.traffic.pool, dict(self._router.peers)
        facts = []
        for seat in self._processes.seats:
            number, state = seat.task.number, seat.state
            worker, peer = pool.workers.get(number), peers.get(number)
            if worker is not None:
                state = "late" if worker.late else "draining" if worker.draining else "ready"
            facts.append(
                WorkerFacts(
                    number,
                    worker.role if worker is not None else seat.task.role,
                    state,
                    peer.pid if peer is not None else 0,
                    len(worker.jobs) if worker is not None else 0,
                    seat.reason,
                    seat.ended,
                )
            )
        return tuple(facts)

    def _counted(self, peers: Sequence[Peer]) -> dict[str, float]:
        """Return the sums of all workers' counts, including workers that have left."""
        counted = dict(self._router.past)
        for peer in peers:
            for name, count in peer.beat.counts.items() if peer.beat is not None else ():
                counted[name] = counted.get(name, 0) + count
        return counted

    # The router's thread.

    def _run(self) -> None:
        """Run the router's event loop until it is stopped."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the router's loop and return its result, within ``_END_S``."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_END_S)

    async def _begin(self) -> None:
        """Listen for workers on this machine, and start their processes. Reports the address."""
        service, token = self._service, secrets.token_hex(32)
        watcher = Watcher(self._ready, self._unable, self._late, self._left)
        self._router = RequestRouter(token, service.settings, watcher)
        self._server = await self._router.listen("127.0.0.1")
        host, port = self._server.sockets[0].getsockname()[:2]
        tasks = [
            structs.replace(service.task_of(role), host=host, port=port, token=token, number=number)
            for number, role in enumerate(service.roles)
        ]
        self._processes = WorkerProcesses(tasks, service.environment, self._happened, self._slow)
        self._notice("router-listening", f"workers connect to {host}:{port}", address=f"{host}:{port}")
        self._processes.start()

    async def _end(self) -> None:
        """Send the workers away, and wait for their processes."""
        self._processes.closing = True
        await self._router.end()
        self._server.close()
        await self._processes.end()

    def _ready(self, peer: Peer) -> None:
        """Record and report a worker that serves; with the last of them the service is ready, with the least context of all."""
        ready = peer.ready
        assert ready is not None
        self._processes.ready(peer.number)
        pages = f"{ready.door.host}:{ready.door.port}"
        self._notice(
            "worker-ready",
            f"worker {peer.number} ({ready.role}), process {peer.pid}: pages at {pages}, {ready.rows_per_s:,.0f} rows/s",
            worker=peer.number,
            role=ready.role,
            pid=peer.pid,
            pages=pages,
            rows_per_s=round(ready.rows_per_s, 1),
        )
        if len(self._router.peers) >= len(self._service.roles) and not self._identity.done():
            identity = ready.identity
            # Workers that divide the model have room for longer texts, and a text may continue on any of them.
            context = min(other.ready.context for other in self._router.peers.values() if other.ready)
            self._identity.set_result(ModelIdentity(identity.weights, identity.numerics, context, ready.bits))

    def _unable(self, peer: Peer, reason: str) -> None:
        """Report a worker that cannot serve; before the service is ready, it fails with that."""
        if not self._identity.done():
            self._identity.set_exception(ServeError(reason))
        self._notice(
            "worker-unable", f"worker {peer.number} cannot serve: {reason}", worker=peer.number, why=reason
        )

    def _late(self, peer: Peer, reason: str) -> None:
        """Report a late worker."""
        text = f"worker {peer.number} is late: {reason}; its texts continue elsewhere, and it rejoins when it continues"
        self._notice("worker-late", text, worker=peer.number, why=reason)

    def _slow(self, seat: Seat, seconds: float) -> None:
        """Report a worker that takes long to start."""
        number, role = seat.task.number, seat.task.role
        text = f"worker {number} ({role}) does not serve yet, {seconds:g} s after its start; it is waited for"
        self._notice("worker-slow", text, worker=number, role=role, seconds=seconds)

    def _left(self, peer: Peer, reason: str) -> None:
        """Kill a worker whose connection ended, for good if it is quarantined, which is reported. Fails all requests if none remains."""
        if peer.number in self._router.traffic.pool.quarantined:
            self._processes.set_aside(peer.number, reason)
            self._notice(
                "worker-set-aside",
                f"worker {peer.number} is set aside: {reason}",
                worker=peer.number,
                why=reason,
            )
        self._processes.kill(peer.number)
        self._end_without_workers()

    def _happened(self, happened: WorkerEnded) -> None:
        """Report the end of a process, and when it starts again. Before the service is ready, the service fails with
        that.

        Fails all requests if no worker remains.
        """
        seat, again_s = happened.seat, happened.again_s
        number = seat.task.number
        if not self._identity.done():
            self._identity.set_exception(
                ServeError(f"worker {number} {happened.how} before it was ready; what it printed is above")
            )
        then = f"it is started again in {again_s:g} s" if again_s is not None else "it is not started again"
        self._notice(
            "worker-ended",
            f"worker {number} ({seat.task.role}) {happened.how}: {then}",
            worker=number,
            role=seat.task.role,
            how=happened.how,
            again_s=again_s,
        )
        self._end_without_workers()

    def _end_without_workers(self) -> None:
        """Fail all requests if no worker is left or will start. Link and process of the last one end in either order."""
        if not self._trouble and not self._processes.lasting() and not self._router.peers:
            failed = max(seat.restarts.in_vain for seat in self._processes.seats)
            self._trouble = (
                f"no worker is left: each ended {failed} times without serving for long, or was set aside; "
                "see the server's own output"
            )
            self._router.fail_all(self._trouble)

    def _notice(self, event: str, text: str, **facts: object) -> None:
        """Queue a notice with the present time for the reporting thread."""
        self._notices.put(Notice(event, text, {"at": round(time.time(), 3), **facts}))

    def _report_all(self, report: Callable[[Notice], None]) -> None:
        """Call ``report`` with each notice until the end, in a thread of its own. Its ``OSError`` are ignored.

        An event in the queue is set instead: all notices before it are reported then.
        """
        # In a thread of its own: the reader of the printed lines may be slow, or gone.
        while (notice := self._notices.get()) is not None:
            if isinstance(notice, threading.Event):
                notice.set()
                continue
            with suppress(OSError):
                report(notice)


def _streaming(counted: Mapping[str, float]) -> Streaming:
    """Return the counts of streaming, summed over workers."""
    read, needed, in_memory = (
        int(counted.get(n, 0)) for n in ("bytes_read", "experts_needed", "experts_held")
    )
    return Streaming(read, counted.get("wait_s", 0.0), needed, in_memory)


# A service opened.


def open_service(
    served: ServedRun,
    name: str | None,
    roles: Sequence[Role],
    *,
    divisions: Mapping[Role, WorkerDivision] | None = None,
    threads: int,
    audit_share: float,
    tell: Callable[[Notice], None],
    pages: PageWay = "auto",
) -> tuple[ModelText, RouterClient]:
    """Open a service of several workers: the text side of a run's model, and the client of its workers.

    ``divisions`` is the number of processes per worker of each role, by default that of ``served``. The memory limit
    is per worker. ``threads`` is per process; 0 divides this machine's processors among all processes. ``pages`` is
    the transport of pages between workers.

    Without a step, all workers serve the newest readable step, also after a restart; ``tell`` receives a notice for
    each skipped step. Raises ServeError if a worker cannot serve, RunDirectoryError for a run without a checkpoint,
    and the errors of ``load_run_tokenizer``.
    """
    if pages == "nixl":
        require_installed()
    called = served.text_name(name)
    served = _of_one_kind(served, divisions or {})
    opened.device_of(served)  # before packing, which takes long
    any_step = served.step is None
    served = _settled(served)
    if served.stream and not served.memory_bytes:
        served = replace(served, memory_bytes=free_to_use() * 4 // 5 // len(roles))
    with served_folder(served) as folder:
        spec = read_resolved(RunDirectory(folder))
        words = read_model_text(folder, called, spec.model.vocab_size, served.chat_template)
    while True:
        task = WorkerTask("", 0, "", 0, "both", served, pages=pages)
        service = ServiceConfig(roles, task, {}, RouterSettings(served.rows, audit_share), divisions or {})
        processes = 0
        for role in roles:  # refused here rather than by each worker
            role_run = service.task_of(role).served
            opened.device_of(role_run)
            opened.require_divisible(role_run)
            processes += role_run.stages * role_run.tensor
        environment = {"OMP_NUM_THREADS": str(threads or opened.threads_of_each(processes))}
        service = dataclasses.replace(service, environment=environment)
        try:
            return words, RouterClient(service, tell)
        except ServeError as error:
            older = _older_than_damaged(served) if any_step else None
            if older is None:
                raise
            text = f"step {served.step} cannot be read and is skipped: {error}"
            tell(Notice("step-passed-over", text, {"step": served.step}))
            served = replace(served, step=older)


def devices_of(
    served: ServedRun, workers: int, divisions: Mapping[Role, WorkerDivision] | None = None
) -> list[torch.device]:
    """Return the distinct devices of ``workers`` workers of ``open_service``, assigned round-robin.

    Raises ServeError for a device that is missing or cannot compute the run.
    """
    served = _of_one_kind(served, divisions or {})
    return list(dict.fromkeys(opened.device_of(served, number) for number in range(workers)))


def _older_than_damaged(served: ServedRun) -> int | None:
    """Return ``older_than_damaged`` for the step of ``served``; None for a pack."""
    if served.step is None or is_pack(served.path):
        return None
    return opened.older_than_damaged(served.path, served.step)


def _of_one_kind(served: ServedRun, divisions: Mapping[Role, WorkerDivision]) -> ServedRun:
    """Replace "auto" with the CPU if the workers of one role divide the model.

    Otherwise the workers of other roles would use GPUs, and the router would refuse one kind for its numerics.
    """
    divided = any(division != WorkerDivision() for division in divisions.values())
    return replace(served, device="cpu") if divided and served.device == "auto" else served


def _settled(served: ServedRun) -> ServedRun:
    """Resolve ``served`` for all workers and restarts: a fixed step of the run (the newest by default), or a pack.

    The pack of a streamed run is made here, once. Raises ServeError for drafts of a pack, and the errors of packing.
    """
    require_drafts(served)  # before packing, which takes long
    path = served.path.resolve()
    if served.stream and not is_pack(path):
        file = packed(path, served.step, getattr(torch, served.dtype))
        file.close()
        path = file.path.resolve()
    if is_pack(path):
        return replace(served, run_dir=str(path))
    return replace(
        served, run_dir=str(path), step=opened.newest_step(path) if served.step is None else served.step
    )
