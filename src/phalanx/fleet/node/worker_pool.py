"""The workers of a node: child processes with a link to their agent, restarted if they die.

A worker is in the agent's process group, so killing the group kills the node, and the kernel kills it when
the agent dies. After its exit its remaining messages are read first. Then its exit is reported, once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from phalanx.checkpoint.snapshot.segments import SnapshotMemory
from phalanx.fleet.control.security import TOKEN_VARIABLES
from phalanx.fleet.node.launcher import AgentArgs
from phalanx.fleet.node.worker_link import TO_AGENT, ToAgent, ToWorker, WorkerArgs
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import LogOrder, last_text, order_for
from phalanx.process.arguments import words_of
from phalanx.process.child import Child
from phalanx.process.restarts import RestartPolicy
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec, RuntimeSpec
from phalanx.wire.messages import EndedError, FrameStream, MessageError, encode

_RESTARTS = RestartPolicy(first_pause_s=0.2, longest_pause_s=10.0, most_deaths=None)
_LAST_READ_S = 0.5
_TAIL_LINES, _TAIL_CHARACTERS = 5, 4096
RECORDED_COLLECTIVES = "2000"
"""Entries of PyTorch's flight recorder; it allocates them as they come, some hundred bytes each."""


class WorkerProcess:
    """A running worker. Make it in an event loop, by ``start``."""

    def __init__(
        self,
        child: Child,
        log: Path,
        frames: FrameStream,
        on_message: Callable[[ToAgent], None],
        on_exit: Callable[[int, str], None],
    ) -> None:
        """Follow a started child; ``start`` explains the arguments."""
        self.child, self._log, self._frames = child, log, frames
        self._watch = asyncio.create_task(self._follow(on_message, on_exit))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        descriptors: Sequence[int],
        runtime: RuntimeSpec,
        log: LogOrder,
        on_message: Callable[[ToAgent], None],
        on_exit: Callable[[int, str], None],
    ) -> WorkerProcess:
        """Start ``command`` with ``--link FD`` appended.

        Args:
            command: The worker's program and arguments.
            descriptors: This process's descriptors that it inherits.
            runtime: Its threads and arithmetic; some of these settings are variables of its environment.
            log: Its log.
            on_message: Called with each of its messages.
            on_exit: Called once, with its exit code (below 0: the signal) and the end of its log.

        Raises:
            OSError: It cannot be started.
        """
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(runtime.threads),
            # PyTorch reads this when the first process group is made: the record shows which collective a run
            # hangs in.
            "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES),
        }
        # A worker runs the user's code, which does not need this token.
        environment.pop(TOKEN_VARIABLES["operate"], None)
        try:
            with theirs:
                output = ChildOutput(log, os.environ, lambda words: print(f"warning: {words}", flush=True))
                child = Child.start(
                    [*command, "--link", str(theirs.fileno())],
                    environment,
                    output=output,
                    keep_open=[theirs.fileno(), *descriptors],
                    own_session=False,
                    parent="its agent",
                )
        except OSError:
            ours.close()
            raise
        frames = FrameStream(*await asyncio.open_connection(sock=ours))
        return cls(child, log.path, frames, on_message, on_exit)

    def send(self, message: ToWorker) -> None:
        """Send a message; it is lost if the worker dies before it reads it."""
        self._frames.write(encode(message))

    def kill(self) -> None:
        """Send SIGKILL, which works on a suspended or hanging process too."""
        self.child.kill()

    async def wait_closed(self) -> None:
        """Wait until its exit has been reported."""
        await self._watch

    async def _follow(
        self, on_message: Callable[[ToAgent], None], on_exit: Callable[[int, str], None]
    ) -> None:
        """Pass on the worker's messages until its process has ended, then reap it, and call ``on_exit`` with its
        exit code and the end of its log.
        """
        reading = asyncio.create_task(self._read(on_message))
        await self.child.wait_in_loop()
        await asyncio.wait((reading,), timeout=_LAST_READ_S)
        reading.cancel()
        self._frames.close()
        # In a thread: its remaining output may be long, and the disk slow.
        code = await asyncio.to_thread(self.child.end)
        on_exit(code, await asyncio.to_thread(self._last_words))

    async def _read(self, on_message: Callable[[ToAgent], None]) -> None:
        """Decode messages and call ``on_message`` until the link ends; after a malformed one, kill the worker and
        return.
        """
        try:
            while True:
                on_message(TO_AGENT.decode(await self._frames.receive()))
        except MessageError:
            self.kill()  # Its memory is damaged, or it is of another version.
        except EndedError:
            return

    def _last_words(self) -> str:
        """Return the end of the process's log."""
        return "\n".join(last_text(self._log, _TAIL_LINES))[-_TAIL_CHARACTERS:]


class WorkersListener(Protocol):
    """Callbacks for events of a node's workers."""

    def on_started(self, index: int) -> None:
        """Called before the process of a worker is started."""

    def on_worker_message(self, index: int, message: ToAgent) -> None:
        """Called with each message of a worker."""

    def on_exit(self, index: int, code: int, text: str) -> None:
        """Called when the process of a worker has ended, or could not be started, with its exit code and the
        end of its log.
        """


class WorkerPool:
    """The processes of one node's workers."""

    def __init__(
        self,
        args: AgentArgs,
        spec: RunSpec,
        memory: SnapshotMemory,
        run_file_sha256: str,
        listener: WorkersListener,
    ) -> None:
        """Set up the pool. Nothing is started.

        Args:
            args: The agent's.
            spec: The run.
            memory: Memory into which they write their snapshots.
            run_file_sha256: Digest of the run file that they are to read.
            listener: Receives their events.
        """
        self._args, self._spec, self._memory, self._listener = args, spec, memory, listener
        self._run_file_sha256 = run_file_sha256
        self._running: dict[int, WorkerProcess] = {}
        self._deaths = [0] * spec.fleet.workers_per_node
        """By worker, its deaths since it was last warm."""
        self.ended = 0
        """Processes that have ended."""

    async def start(self, index: int) -> None:
        """Start a new process for worker ``index``. For each death before it was warm the pause doubles, from 0.2
        s to 10 s.

        The first start has no pause. A failure to start is reported as its exit with code 1.
        """
        deaths = self._deaths[index]
        await asyncio.sleep((deaths and _RESTARTS.pause_s(deaths)) or 0.0)
        self._deaths[index] += 1
        segments = tuple(segment.descriptor for segment in self._memory.worker_segments(index))
        own, name = self._args, f"{self._args.node}-{index}"
        path = RunDirectory(own.run_dir).named_log(own.attempt, name)
        log = order_for(path, name, own.attempt, self._spec.observe, own.node)
        args = WorkerArgs(
            own.run_dir,
            segments,
            self._run_file_sha256,
            index,
            own.node,
            own.host,
            own.attempt,
            own.certificates,
        )
        self._listener.on_started(index)
        try:
            self._running[index] = await WorkerProcess.start(
                [*own.worker_program, *words_of(args)],
                segments,
                self._spec.runtime,
                log,
                lambda message: self._listener.on_worker_message(index, message),
                lambda code, text: self._on_exit(index, code, text),
            )
        except (
            OSError
        ) as error:  # No memory, no processes or no disk now: retried like a process that has died.
            self._on_exit(index, 1, f"it could not be started: {error}")

    def _on_exit(self, index: int, code: int, text: str) -> None:
        """Remove and count an ended process, and report it."""
        self._running.pop(index, None)
        self.ended += 1
        self._listener.on_exit(index, code, text)

    def is_warm(self, index: int) -> None:
        """Note that a worker is warm: if it dies, the next one is started without a pause."""
        self._deaths[index] = 0

    def send(self, index: int, message: ToWorker) -> None:
        """Send a message to a worker, if its process runs."""
        if index in self._running:
            self._running[index].send(message)

    def kill(self, index: int) -> None:
        """Kill a worker, if its process runs."""
        if index in self._running:
            self._running[index].kill()

    def working(self, silent: Iterable[int]) -> set[int]:
        """Return the ``silent`` workers that the kernel shows at work."""
        return {i for i in silent if i in self._running and self._running[i].child.is_working()}

    def kill_all(self) -> None:
        """Kill all workers."""
        for worker in self._running.values():
            worker.kill()

    async def wait_closed(self) -> None:
        """Wait until no process is left."""
        await asyncio.gather(
            *(worker.wait_closed() for worker in self._running.values()), return_exceptions=True
        )
