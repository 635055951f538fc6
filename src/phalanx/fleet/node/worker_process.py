"""A worker as its agent sees it: a child process, the link to it, and one notification of its exit.

The worker is in the agent's process group, so killing the group kills the node, and it asks the kernel to be killed when the agent
dies. After its exit the messages that it still sent are read first; then its exit is reported, once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.fleet.control.security import TOKEN_VARIABLES
from phalanx.fleet.node.worker_link import LinkError, ToAgent, ToWorker, decode_for_agent, frame, length_of
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.order import LogOrder
from phalanx.observe.logs.tail import last_text
from phalanx.process.child import Child
from phalanx.run.spec import RuntimeSpec

_HEAD_BYTES = 4
_LAST_READ_S = 0.5
_TAIL_LINES, _TAIL_CHARACTERS = 5, 4096
RECORDED_COLLECTIVES = "2000"
"""Entries of PyTorch's flight recorder; it allocates them as they come, some hundred bytes each."""


class WorkerProcess:
    """A running worker. Make it in an event loop, by ``start``."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._log: Path | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._processor_ticks = 0
        self._watch: asyncio.Task[None] | None = None

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
        """Starts ``command`` with ``--link FD`` appended.

        Args:
            command: The worker's program and arguments.
            descriptors: This process's descriptors that it inherits.
            runtime: Its threads and arithmetic, some of whose settings are variables of its environment.
            log: Its log.
            on_message: Called with each of its messages.
            on_exit: Called once, with its exit code (below 0: the signal) and the end of its log.

        Raises:
            OSError: It cannot be started.
        """
        output = ChildOutput(log, os.environ, lambda words: print(f"warning: {words}", flush=True))
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(runtime.threads),
            # PyTorch reads this when the first process group is made: the record shows which collective a run hangs in.
            "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES),
        }
        # A worker runs the user's code, which has no need of this token.
        environment.pop(TOKEN_VARIABLES["operate"], None)
        try:
            with theirs:
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
        worker = cls(child)
        worker._log = log.path
        reader, worker._writer = await asyncio.open_connection(sock=ours)
        worker._watch = asyncio.create_task(worker._follow(reader, on_message, on_exit))
        return worker

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def working(self) -> bool:
        """True if the process computes, waits for a processor or for a disk; False if it sleeps, is stopped, or has ended.

        A thread that is in native code without letting go of Python's lock (a large sort, an import, a page fault in swapped memory)
        silences the thread that sends the heartbeats; to the kernel it is at work all the same. A process that is stopped or deadlocked
        is not.
        """
        tasks = Path(f"/proc/{self.pid}/task")
        ticks, states = 0, set[str]()
        with suppress(OSError):
            for task in tasks.iterdir():
                with suppress(OSError):  # a thread that has ended meanwhile
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                    states.add(fields[0])
                    ticks += int(fields[11]) + int(fields[12])
        grown, self._processor_ticks = ticks > self._processor_ticks, ticks
        return bool(states & {"R", "D"}) or (grown and not states & {"T", "t"})

    def tell(self, message: ToWorker) -> None:
        """Sends a message; it is lost if the worker dies before it reads it."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def kill(self) -> None:
        """SIGKILL: works on a stopped or hanging process too."""
        self._child.kill()

    async def gone(self) -> None:
        """Waits until its exit has been reported."""
        if self._watch is not None:
            await self._watch

    async def _follow(
        self,
        reader: asyncio.StreamReader,
        on_message: Callable[[ToAgent], None],
        on_exit: Callable[[int, str], None],
    ) -> None:
        reading = asyncio.create_task(self._read(reader, on_message))
        await self._child.wait_in_loop()
        await asyncio.wait((reading,), timeout=_LAST_READ_S)
        reading.cancel()
        if self._writer is not None:
            self._writer.close()
        # In a thread: what it left may be much, and the disk slow.
        code = await asyncio.to_thread(self._child.end)
        on_exit(code, await asyncio.to_thread(self._last_words))

    async def _read(self, reader: asyncio.StreamReader, on_message: Callable[[ToAgent], None]) -> None:
        try:
            while True:
                body = await reader.readexactly(length_of(await reader.readexactly(_HEAD_BYTES)))
                on_message(decode_for_agent(body))
        except LinkError:
            self.kill()  # not a message: its memory is damaged, or it is of another version
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _last_words(self) -> str:
        lines = last_text(self._log, _TAIL_LINES) if self._log is not None else []
        return "\n".join(lines)[-_TAIL_CHARACTERS:]
