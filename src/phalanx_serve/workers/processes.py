"""Worker processes of a service on this machine: started, restarted when they end, and ended with it.

``phalanx.process.restarts`` decides when to restart one. Each reads its task, with the token, from standard input,
and the kernel ends it if this process dies.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from phalanx.process.child import Child, describe_exit, end_all
from phalanx.process.restarts import RestartPolicy, Restarts
from phalanx_serve.workers.worker_main import WorkerTask

_COMMAND = (sys.executable, "-P", "-m", "phalanx_serve.workers.worker_main")
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
        """
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
        """Kill a worker that may hang; it is restarted."""
        if number < len(self.seats):
            seat = self.seats[number]
            if seat.state == "ready":
                seat.state = "waiting"
            _kill(seat)

    def lasting(self) -> bool:
        """True if any worker serves, or will be restarted."""
        return any(seat.state != "left" for seat in self.seats)

    async def end(self) -> None:
        """Wait a few seconds for ready workers to leave.

        Kill those that do not, and those that are not ready. Returns when no process is left.
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

        Each end is reported.
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
    if seat.child is not None:
        seat.child.kill()
