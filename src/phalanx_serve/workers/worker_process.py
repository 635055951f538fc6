"""Worker processes of a service on this machine: started, restarted when they end, and ended with it; and the program that each runs.

A worker connects to the router, opens the model, and works until it is dismissed. ``python -m phalanx_serve.workers.worker_process``
reads its task, with the token, as JSON from standard input, so that neither command line nor environment shows the token. The kernel
ends it if the process that started it dies. ``phalanx.process.restarts`` decides when to restart one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.process.child import Child, describe_exit, die_with_parent, end_all
from phalanx.process.restarts import RestartPolicy, Restarts
from phalanx.wire.connection import SealedConnection, sealed
from phalanx.wire.messages import WireError
from phalanx_serve.served.served_run import ServedRun
from phalanx_serve.traffic.events import PartLostError, Role, ServeError, WorkerIdentity
from phalanx_serve.workers import messages as m
from phalanx_serve.workers.page_transfer import PageServer, PageWay

if TYPE_CHECKING:
    from phalanx_serve.workers.serving_worker import ServingWorker


# The program.


_CONNECT_S = 20.0


class WorkerTask(Struct, frozen=True):
    """Model, role and router address of a worker process."""

    host: str
    port: int
    """Port of the router."""
    token: str
    number: int
    role: Role
    served: ServedRun
    page_host: str = "127.0.0.1"
    """Address at which other workers reach its page port."""
    pages: PageWay = "auto"
    """Transport of pages from other workers."""


def main() -> None:
    """Run the worker process by the task on standard input; exit with code 1 and a message if it ends for an error.

    Ignores SIGINT, and dies with its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that serves
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerTask)
    die_with_parent()
    try:
        reason = work(task)
    except (WireError, OSError) as error:
        reason = str(error) or type(error).__name__
    if reason:
        print(f"worker {task.number}: {reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1 if reason else 0)  # threads that read or pull need not be waited for


def work(task: WorkerTask) -> str:
    """Connect to the router and serve as one worker.

    Return the reason why it ended, empty if nothing is wrong. The router receives the reason too if the worker cannot
    serve. The traceback of a defect is printed on standard error. Raises OSError and WireError if there is no router.
    """
    with socket.create_connection((task.host, task.port), _CONNECT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link = sealed(connection, "the router", task.token, "client", m.PURPOSE, _CONNECT_S)
        link.send_message(m.Opening(task.number, os.getpid()))
        try:
            return _serve(task, link)
        except Exception as error:
            reason = _reason(error)
            link.send_message(m.WorkerUnable(reason[:8000]))
            return reason


def _reason(error: Exception) -> str:
    """Return an error's message; one that is not expected is called a defect, and its traceback is printed."""
    from phalanx.data.errors import TokenizerError
    from phalanx.run.directory.paths import RunDirectoryError

    expected_errors = (
        CheckpointError,
        TokenizerError,
        RunDirectoryError,
        ServeError,
        PartLostError,
        OSError,
    )
    if isinstance(error, expected_errors):
        return str(error)
    traceback.print_exception(error)
    return f"a defect: {error!r}"


def _serve(task: WorkerTask, link: SealedConnection) -> str:
    """Open the engine, measure its rate, offer its pages, and work until the end; return the reason, empty if nothing
    is wrong.

    SIGTERM makes it leave. Raises ServeError for a custom model, and the errors of opening.
    """
    from phalanx_serve.engine.engine import Engine
    from phalanx_serve.served.of_run import open_engine
    from phalanx_serve.served.opened import device_of
    from phalanx_serve.workers.nixl_client import AgentProcess
    from phalanx_serve.workers.serving_worker import ServingWorker, measured_rate

    nixl = AgentProcess() if task.pages == "nixl" else None  # before the model, which takes longer
    device = device_of(task.served, task.number)
    opened = open_engine(msgspec.structs.replace(task.served, device=str(device)))
    engine = opened.engine
    if not isinstance(engine, Engine):
        raise ServeError(
            "a model of your own (model.factory) keeps no keys and values, so workers have nothing to share: "
            "serve it without --workers"
        )
    _, pages = engine.pages()
    context = min(opened.identity.context, engine.context)
    rows = max(1, min(task.served.rows, 256, context - 1))
    rate = measured_rate(engine, rows)
    nbytes = engine.page_bytes
    identity = WorkerIdentity(
        opened.identity.weights_sha, opened.identity.numerics_id, f"{engine.root.hex()[:16]}-{nbytes}"
    )
    worker = ServingWorker(
        engine, identity, nbytes, task.token, link, opened.streaming, opened.trouble, task.pages, nixl
    )
    signal.signal(signal.SIGTERM, _Leaving(worker))
    server = PageServer(worker.offered, identity, task.token, task.page_host, nixl=nixl)
    try:
        door = m.PageDoor(task.page_host, server.port)
        bits = opened.identity.bits
        ready = m.WorkerReady(identity, task.role, engine.root, context, pages, nbytes, rate, door, bits)
        link.send_message(ready)
        return worker.run()
    finally:
        server.close()


class _Leaving:
    """SIGTERM handler: the first signal moves the worker's requests elsewhere, a second one ends it at once."""

    def __init__(self, worker: ServingWorker) -> None:
        self._worker, self._is_leaving = worker, False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        """Begin to leave on the first signal; exit at once with code 1 on the second."""
        if self._is_leaving:
            os._exit(1)
        self._is_leaving = True
        self._worker.leave()


# Supervision.


_COMMAND = (sys.executable, "-P", "-m", "phalanx_serve.workers.worker_process")
_RESTARTS = RestartPolicy(first_pause_s=0.25, longest_pause_s=30.0, most_deaths=5)
_STAYED_S = 5.0
"""Seconds of service after which a start counts as successful."""
_LEAVE_S = 3.0
_SLOW_S = 60.0
"""Seconds after which a start is reported as slow."""


@dataclass
class Seat:
    """A worker's slot in the service, and its current process."""

    task: WorkerTask
    restarts: Restarts
    child: Child | None = None
    ended: int = 0
    """Number of processes that have ended."""
    ready_s: float = 0.0
    """Time at which its current process became ready; 0 if it is not."""
    state: str = "starting"
    """starting, ready, waiting (for its next start), left (removed for good)."""
    reason: str = ""


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's process ended or could not start."""

    seat: Seat
    how: str
    again_s: float | None
    """Seconds until the restart, or None."""


class WorkerProcesses:
    """Supervisor of the worker processes, in one event loop."""

    def __init__(
        self,
        tasks: Sequence[WorkerTask],
        environment: Mapping[str, str],
        ended: Callable[[WorkerEnded], None],
        slow: Callable[[Seat, float], None],
        policy: RestartPolicy = _RESTARTS,
        *,
        command: Sequence[str] = _COMMAND,
        slow_start_s: float = _SLOW_S,
    ) -> None:
        """Prepare a seat for each worker; nothing is started before ``start``.

        Args:
            tasks: The tasks of the workers, one process for each.
            environment: Variables in addition to those of this process.
            ended: Called with each process that ends or cannot be started.
            slow: Called with each worker that does not serve ``slow_start_s`` after its start.
            policy: When a process is started again.
            command: The command of a worker, which reads its task from standard input.
            slow_start_s: Seconds after which a start is reported as slow.
        """
        self.seats = [Seat(task, Restarts(policy)) for task in tasks]
        self._environment, self._ended = environment, ended
        self._slow, self._command, self._slow_start_s = slow, tuple(command), slow_start_s
        self._watches: set[asyncio.Task[None]] = set()
        self.closing = False
        """True: a process that ends is not started again."""

    def start(self) -> None:
        """Start all workers."""
        for seat in self.seats:
            self._watches.add(asyncio.create_task(self._keep(seat)))

    def ready(self, number: int) -> None:
        """Record that a worker is ready."""
        if number < len(self.seats):
            seat = self.seats[number]
            seat.ready_s, seat.state, seat.reason = time.monotonic(), "ready", ""

    def set_aside(self, number: int, reason: str) -> None:
        """Kill a worker's process, which is not started again; nothing for an unknown number."""
        if number < len(self.seats):
            seat = self.seats[number]
            seat.state, seat.reason = "left", reason
            _kill(seat)

    def kill(self, number: int) -> None:
        """Kill a worker that may hang; it is restarted by the policy. Nothing for an unknown number."""
        if number < len(self.seats):
            seat = self.seats[number]
            if seat.state == "ready":
                seat.state = "waiting"
            _kill(seat)

    def lasting(self) -> bool:
        """True if any worker serves, or will be restarted."""
        return any(seat.state != "left" for seat in self.seats)

    async def end(self) -> None:
        """Wait up to ``_LEAVE_S`` for ready workers to leave, and kill those that do not; others are killed at once.

        The router must have sent the workers away before. Returns when no process is left.
        """
        self.closing = True
        for seat in self.seats:
            if seat.state != "ready":
                _kill(seat)
        running = [seat.child for seat in self.seats if seat.child]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(*(child.wait_in_loop() for child in running))
        end_all(running)
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _keep(self, seat: Seat) -> None:
        """Run a worker again and again, with the pauses of the policy, until it is given up or all are closed.

        Each end is reported. One that was ready and left with code 0 starts again at once; a long service resets the
        pauses.
        """
        while not self.closing and seat.state != "left":
            seat.state, seat.ready_s = "starting", 0.0
            look = asyncio.get_running_loop().call_later(self._slow_start_s, self._look, seat)
            try:
                code, how = await self._run(seat)
            finally:
                look.cancel()
            if self.closing:
                return
            seat.ended += 1
            served_s = time.monotonic() - seat.ready_s if seat.ready_s else 0.0
            again_s = seat.restarts.after_death(was_useful=served_s >= _STAYED_S)
            if code == 0 and seat.ready_s:
                again_s = 0.0  # It was sent away, which is no failure.
            if seat.state == "left":
                again_s = None
            seat.state, seat.reason = ("waiting", "") if again_s is not None else ("left", seat.reason or how)
            self._ended(WorkerEnded(seat, how, again_s))
            await asyncio.sleep(again_s or 0.0)

    def _look(self, seat: Seat) -> None:
        """Report a worker that is still starting."""
        if seat.state == "starting":
            self._slow(seat, self._slow_start_s)

    async def _run(self, seat: Seat) -> tuple[int, str]:
        """Run a worker's process; return its exit code, and a description of its end. 127 if it cannot be started."""
        task = msgspec.json.encode(seat.task)
        try:
            seat.child = Child.start(self._command, os.environ | self._environment, task=task)
        except OSError as error:
            return 127, f"cannot be started ({error})"
        code = await seat.child.wait_in_loop()
        seat.child.end()
        return code, describe_exit(code)


def _kill(seat: Seat) -> None:
    """Kill a seat's process, if it has one."""
    if seat.child is not None:
        seat.child.kill()


if __name__ == "__main__":
    main()
