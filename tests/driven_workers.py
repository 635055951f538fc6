"""Real workers with real snapshot memory, driven by a test in the place of their agents."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import forked_python
from phalanx.checkpoint.snapshot.data_port import HolderLostError, SnapshotServer, push
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.data.reading.sources import index_of_places, open_places, tokenizer_folder
from phalanx.fleet.control.security import make_token
from phalanx.fleet.core.commands import Fresh, FromMemory, Resume
from phalanx.fleet.core.messages import Holder
from phalanx.fleet.node.worker_link import (
    TO_AGENT,
    Alive,
    InjectFault,
    JoinedEpoch,
    JoinEpoch,
    LeaveEpoch,
    LeftEpoch,
    SnapshotSafe,
    SnapshotTaken,
    StepEnded,
    TrainingFinished,
    Warm,
)
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.identity import fencing_token, identity
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import open_run
from phalanx.wire.connection import FramedConnection
from phalanx.wire.messages import EndedError

PATIENCE_S = 180.0


PROGRAM = (str(Path(__file__).with_name("worker_without_pickle.py")),)
"""The real worker. Whatever these tests make it do, it must unpickle nothing."""


class Node:
    """One worker, the memory for its snapshots, and what it has said."""

    def __init__(self, spec: RunSpec, number: int, program: tuple[str, ...] = PROGRAM) -> None:
        self.number, self.spec, self.program = number, spec, program
        self.run_dir = Path(spec.run_dir)
        self.token = make_token(self.run_dir)
        self.memory = SnapshotMemory(identity(spec), 1)
        self.server = SnapshotServer(self.memory, self.token)
        self.address = f"127.0.0.1:{self.server.port}"
        self.buddy: Node | None = None
        self.said: queue.Queue[Any] = queue.Queue()
        self.pids: list[int] = []
        self.waiting_s = 0.0
        """Seconds that it waits, by its newest heartbeat."""
        self.safe_step = -1
        """The newest step whose snapshot its buddy has."""
        self.start()

    def start(self) -> None:
        """A fresh worker."""
        ours, theirs = socket.socketpair()
        segments = [segment.descriptor for segment in self.memory.worker_segments(0)]
        digest = fencing_token(read_resolved(RunDirectory(self.run_dir)), 0).run_file_sha256
        arguments = ["--run-dir", str(self.run_dir), "--worker", "0", "--node", f"node-{self.number}"]
        arguments += ["--run-file-sha256", digest]
        with (self.run_dir / "logs" / f"worker-{self.number}.log").open("ab") as log, theirs:
            self.process = forked_python.Popen(
                [
                    *(sys.executable, *self.program, "--link", str(theirs.fileno())),
                    *("--segments", *map(str, segments), *arguments),
                ],
                pass_fds=[theirs.fileno(), *segments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.pids.append(self.process.pid)
        self._link = FramedConnection(ours, "the worker")
        threading.Thread(target=self._read, args=(self._link,), daemon=True).start()

    def tell(self, message: Any) -> None:
        self._link.send_message(message)

    def _read(self, link: FramedConnection) -> None:
        with suppress(EndedError):  # a worker that was killed with words unread
            self._read_until_it_ends(link)

    def _read_until_it_ends(self, link: FramedConnection) -> None:
        while (message := link.receive_message_or_end(TO_AGENT)) is not None:
            if isinstance(message, SnapshotTaken):
                threading.Thread(target=self._secure, args=(message,), daemon=True).start()
            if isinstance(message, Alive):
                self.waiting_s = message.waiting_s
            else:
                self.said.put(message)

    def _secure(self, taken: SnapshotTaken) -> None:
        if self.buddy is not None:
            key = SnapshotKey(taken.ranks, taken.rank, taken.step)
            try:
                push(self.buddy.address, self.token, self.memory, key)
            except HolderLostError:  # the buddy is lost
                return
        self.safe_step = max(self.safe_step, taken.step)
        self.tell(SnapshotSafe(taken.epoch, taken.step))

    def hear(self, kind: type, patience_s: float = PATIENCE_S) -> Any:
        """The next word of ``kind``; others before it are dropped."""
        deadline_s = time.monotonic() + patience_s
        while True:
            message = self.said.get(timeout=max(0.01, deadline_s - time.monotonic()))
            if isinstance(message, kind):
                return message

    def kill(self) -> None:
        """SIGKILL to the worker; its memory stays."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def lose(self) -> None:
        """The whole node: worker and memory."""
        self.kill()
        self.server.close()
        self.memory.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.server.close()


class Driver:
    """The least that a coordinator does: binds, parks, and finds the step to go back to."""

    def __init__(self, spec: RunSpec, nodes: int, program: tuple[str, ...] = PROGRAM) -> None:
        self.spec = spec
        places = open_places(spec.data)
        run = open_run(spec, index_of_places(places).fingerprint, tokenizer_folder(places))
        os.close(run.lock_fd)
        (Path(spec.run_dir) / "logs").mkdir(exist_ok=True)
        self.nodes = [Node(spec, number, program) for number in range(nodes)]
        self.meeting = {node.number: node.hear(Warm).meeting_point for node in self.nodes}
        self.epoch = 0

    def bind(self, members: list[Node], resume: Resume | None = None, *, wait: bool = True) -> None:
        """A new epoch on ``members``; each is the buddy of the one before it. Until all train, unless told not to wait."""
        self.epoch += 1
        self.members = members
        for rank, node in enumerate(members):
            source = resume or Fresh()
            if isinstance(source, FromMemory) and source.ranks != len(members):
                share = source.holders[rank :: len(members)]
                source = msgspec.structs.replace(source, holders=share, shared=True)
            node.buddy = members[(rank + 1) % len(members)] if len(members) > 1 else None
            node.tell(
                JoinEpoch(
                    epoch=self.epoch,
                    attempt=self.epoch,
                    rank=rank,
                    ranks=len(members),
                    meeting_point=self.meeting[members[0].number],
                    resume=source,
                    detected_unix_s=time.time() if self.epoch > 1 else 0.0,
                )
            )
        for node in members if wait else ():
            node.hear(JoinedEpoch)

    def stop_after(self, step: int) -> None:
        """Stop rank 0 of the next epoch (SIGSTOP) after ``step``: the run waits there for ``go_on``, however slow the test is."""
        for node in self.nodes:
            if node.process.poll() is None:
                node.tell(InjectFault(f"stop rank 0 at step {step + 1}"))

    def wait_until_stopped(self) -> None:
        """Wait until rank 0 has stopped."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not _is_stopped(self.members[0].process.pid):
            assert time.monotonic() < deadline_s, "rank 0 has not stopped"
            time.sleep(0.01)

    def safe_step(self) -> int:
        """Wait until all members have a snapshot that is safe; return the newest step of which all snapshots are."""
        deadline_s = time.monotonic() + PATIENCE_S
        while min(node.safe_step for node in self.members) < 1:
            assert time.monotonic() < deadline_s, "no snapshot has become safe"
            time.sleep(0.01)
        return min(node.safe_step for node in self.members)

    def go_on(self) -> None:
        """Continue rank 0 after ``stop_after``."""
        self.members[0].process.send_signal(signal.SIGCONT)

    def wait_for_step(self, step: int) -> None:
        """Until rank 0 has ended ``step``."""
        while self.members[0].hear(StepEnded).step < step:
            pass

    def order_out(self, nodes: list[Node], *, planned: bool = False) -> None:
        """Order ``nodes`` out of the epoch."""
        for node in nodes:
            node.tell(LeaveEpoch(self.epoch, planned))

    def park(self, nodes: list[Node], *, planned: bool = False) -> None:
        """Ends the epoch on ``nodes``."""
        self.order_out(nodes, planned=planned)
        for node in nodes:
            self.meeting[node.number] = node.hear(LeftEpoch).meeting_point

    def resume(self, alive: list[Node]) -> FromMemory:
        """The newest step that nodes alive hold in full, and where."""
        nodes_by_snapshot: dict[tuple[int, int], dict[int, list[Node]]] = {}
        for node in alive:
            for holding in node.memory.holdings():
                ranks, step = holding.key.ranks, holding.key.step
                nodes_by_snapshot.setdefault((step, ranks), {}).setdefault(holding.key.rank, []).append(node)
        complete_keys = [key for key, holders in nodes_by_snapshot.items() if len(holders) == key[1]]
        step, ranks = max(complete_keys)
        holders = nodes_by_snapshot[step, ranks]
        named = tuple(
            Holder((rank,), f"node-{node.number}", "127.0.0.1", node.server.port)
            for rank, places in holders.items()
            for node in places
        )
        return FromMemory(step, ranks, named)

    def finish(self) -> str:
        """The hash at the end."""

        results = [node.hear(TrainingFinished).result for node in self.members]
        return str(json.loads(results[0])["weights_sha256"])

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP has reached a process."""
    state, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state == "T"
