"""Real ranks for tests: a few processes that are started once and form a new process group for each job.

Forming a gloo group takes milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 180.0
"""How long a rank may be waited for while no rank of its job computes: on a busy machine a job takes longer, but computes now and then."""
COMPUTES_S = 1.0
"""Processor time, of all ranks of a job together, that counts as computing; the threads of ranks that wait for each other use less in ``TIMEOUT_S``."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["phalanx.train.lifecycle.loop", "phalanx.data.chat.encode"])
"""What ranks are forked from: Python's own server, not the template of programs (``forked_python``), whose forks the C library does not know of."""


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave

    torch.set_num_threads(1)
    # All that was imported stays: a collection that looks at it takes 0.2 s, and copies the pages that ranks share.
    gc.freeze()
    # A job ends with a collection; on the way, one for every 700 objects takes a twentieth of its time.
    gc.set_threshold(50_000, 10, 1_000)
    # Nobody begins before all have connected: a function without a collective would leave while others still connect.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    while True:
        try:
            rank, ranks, meeting_point, function, args = connection.recv()
        except EOFError:
            return
        try:
            try:
                join(RankEnvironment(rank, ranks, rank, meeting_point, "phalanx"), torch.device("cpu"), 60.0)
                answer = True, function(*args)
            finally:
                leave()
        except BaseException:
            answer = False, traceback.format_exc()
        # The next function computes natively, unless it says otherwise.
        if (operations := sys.modules.get("phalanx.hardware.portable.operations")) is not None:
            operations.end()
        gc.collect()  # process groups in reference cycles keep their threads and their store
        # Only now: the answer lets the store's folder be removed, and a FileStore whose file goes while it closes
        # waits for it to come back, for its 300 s (c10d/FileStore.cpp: access, then open with retries).
        connection.send(answer)


def processor_s(pids: Iterable[int]) -> float:
    """Processor time that processes have used, in seconds; 0 for one that is dead."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            # After the name in parentheses: state, then 10 fields, then user and system time (proc(5)).
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Ranks:
    """A pool of processes; ``run`` lets the first few of them be the ranks of a process group."""

    def __init__(
        self, timeout_s: float = TIMEOUT_S, processor_s: Callable[[list[int]], float] = processor_s
    ) -> None:
        """``processor_s`` returns the processor time that the ranks with these process numbers have used."""
        self._workers: list[tuple[Any, Connection]] = []
        self._timeout_s, self._processor_s = timeout_s, processor_s

    @property
    def pids(self) -> list[int]:
        """The process numbers of the ranks."""
        return [process.pid for process, _ in self._workers]

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The values that ``function(*args)`` returns on each of ``ranks`` ranks; raises if it fails on any."""
        while len(self._workers) < ranks:
            self._start_one()
        with tempfile.TemporaryDirectory() as folder:
            meeting_point = (Path(folder) / "store").as_uri()
            try:
                for rank in range(ranks):
                    self._workers[rank][1].send((rank, ranks, meeting_point, function, args))
                results = [self._receive(rank) for rank in range(ranks)]
            except BaseException:  # also a test's time limit
                self.close()  # what still comes would be taken for the next test's answer
                raise
        failures = [f"rank {rank}:\n{value}" for rank, (good, value) in enumerate(results) if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._workers[rank]
        used_s, since_s = self._processor_s(self.pids), time.monotonic()
        while not connection.poll(min(1.0, self._timeout_s)):
            if (now_s := self._processor_s(self.pids)) > used_s + COMPUTES_S:
                used_s, since_s = now_s, time.monotonic()
            elif time.monotonic() - since_s > self._timeout_s:
                for worker, _ in self._workers:
                    os.kill(worker.pid, signal.SIGUSR1)  # prints where it is
                    time.sleep(0.5)
                raise TimeoutError(
                    f"rank {rank} did not answer, and no rank computed, for {self._timeout_s} s"
                )
        try:
            good, value = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join(1.0)
            raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
        return bool(good), value

    def _start_one(self) -> None:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        """Ends all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()
