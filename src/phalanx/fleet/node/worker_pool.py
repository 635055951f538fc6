"""The workers of a node: starts their processes, again and again if they die, and reaches those that run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from phalanx.checkpoint.snapshot.segments import SnapshotMemory
from phalanx.fleet.node.agent_args import AgentArgs
from phalanx.fleet.node.worker_link import ToAgent, ToWorker
from phalanx.fleet.node.worker_process import WorkerProcess
from phalanx.observe.logs.order import order_for
from phalanx.process.restarts import RestartPolicy
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec

_RESTARTS = RestartPolicy(first_pause_s=0.2, longest_pause_s=10.0, most_deaths=None)


class WorkersListener(Protocol):
    """What happens to the workers of a node."""

    def on_started(self, index: int) -> None:
        """The process of a worker is about to be started."""

    def on_worker_message(self, index: int, said: ToAgent) -> None:
        """A worker has said something."""

    def on_exit(self, index: int, code: int, text: str) -> None:
        """The process of a worker has ended, or could not be started: with this code, and this end of its log."""


class WorkerPool:
    """The processes of one node's workers."""

    def __init__(
        self,
        args: AgentArgs,
        spec: RunSpec,
        memory: SnapshotMemory,
        run_file_sha256: str,
        certificates: Path | None,
        listener: WorkersListener,
    ) -> None:
        """
        Args:
            args: The agent's.
            spec: The run.
            memory: Into which they write their snapshots.
            run_file_sha256: Digest of the run file that they are to read.
            certificates: Folder of the node's certificates, if the fleet has any.
            listener: Told what happens to them.
        """
        self._args, self._spec, self._memory, self._listener = args, spec, memory, listener
        self._run_file_sha256, self._certificates = run_file_sha256, certificates
        self._running: dict[int, WorkerProcess] = {}
        self._deaths = [0] * spec.fleet.workers_per_node
        """By worker, its deaths since it was warm last."""
        self.ended = 0
        """Processes that have ended."""

    async def start(self, index: int) -> None:
        """Starts a fresh process, after a pause that doubles with each death before the worker was warm."""
        deaths = self._deaths[index]
        await asyncio.sleep((deaths and _RESTARTS.pause_s(deaths)) or 0.0)
        self._deaths[index] += 1
        segments = [segment.descriptor for segment in self._memory.worker_segments(index)]
        attempt, name = self._args.attempt, f"{self._args.node}-{index}"
        path = RunDirectory(self._args.run_dir).named_log(attempt, name)
        log = order_for(path, name, attempt, self._spec.observe, self._args.node)
        self._listener.on_started(index)
        try:
            self._running[index] = await WorkerProcess.start(
                self._command(index, segments),
                segments,
                self._spec.runtime,
                log,
                lambda said: self._listener.on_worker_message(index, said),
                lambda code, text: self._on_exit(index, code, text),
            )
        except OSError as error:  # no memory, no processes or no disk now: tried again like one that has died
            self._on_exit(index, 1, f"it could not be started: {error}")

    def _command(self, index: int, segments: Iterable[int]) -> list[str]:
        return [
            *self._args.worker_program,
            "--run-dir",
            str(self._args.run_dir),
            "--worker",
            str(index),
            "--run-file",
            self._run_file_sha256,
            "--host",
            self._args.host,
            "--node",
            self._args.node,
            "--attempt",
            str(self._args.attempt),
            *(["--certificates", str(self._certificates)] if self._certificates else []),
            "--segments",
            *map(str, segments),
        ]

    def _on_exit(self, index: int, code: int, text: str) -> None:
        self._running.pop(index, None)
        self.ended += 1
        self._listener.on_exit(index, code, text)

    def is_warm(self, index: int) -> None:
        """Notes that a worker is warm: should it die, the next is started without a pause."""
        self._deaths[index] = 0

    def tell(self, index: int, message: ToWorker) -> None:
        """Sends a message to a worker, if its process runs."""
        if index in self._running:
            self._running[index].tell(message)

    def kill(self, index: int) -> None:
        """Kills a worker, if its process runs."""
        if index in self._running:
            self._running[index].kill()

    def working(self, silent: Iterable[int]) -> set[int]:
        """Those of the ``silent`` workers that the kernel sees at work."""
        return {i for i in silent if i in self._running and self._running[i].working()}

    def kill_all(self) -> None:
        """Kills all workers."""
        for worker in self._running.values():
            worker.kill()

    async def gone(self) -> None:
        """Waits until no process is left."""
        await asyncio.gather(*(worker.gone() for worker in self._running.values()), return_exceptions=True)
