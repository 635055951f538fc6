"""Starts a run's ranks on this machine, watches them, and leaves nothing behind.

Each rank is a process in a session of its own, so that Ctrl-C reaches only the launcher, which passes on one SIGTERM
and lets the ranks save. If a rank dies the others are ended too (they hang in a collective). If the launcher itself
is killed, the kernel kills the ranks with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import Ending, last_words, read_failure, remove_failure
from phalanx.train.lifecycle.interrupt import StopOrders, on_stop_signals
from phalanx.train.lifecycle.worker import EXIT_STOPPED
from phalanx.train.start.open_run import OpenRun

TRAIN_RANK = "phalanx.train.lifecycle.worker"
_POLL_S = 0.1
_GRACE_S = 10.0
"""Time that the other ranks are given to notice that one has died."""


def run_locally(
    run: OpenRun,
    ranks: int,
    while_running: Callable[[Callable[[], bool]], None],
    tell: Callable[[str], None] = lambda _words: None,
    *,
    program: str = TRAIN_RANK,
) -> Ending:
    """Runs all ranks to their end.

    Args:
        run: The opened run directory.
        ranks: How many to start.
        while_running: Called once with a function that tells whether the ranks have ended; returns after they have
            (it shows the run's progress meanwhile). Whatever it raises asks the ranks to save and stop, and is raised
            when they have.
        tell: Tells the user that a request to stop was heard, and what comes of it.
        program: The module that each rank's process runs.
    """
    meeting_point = _fresh_meeting_point(run)
    processes: list[subprocess.Popen[bytes]] = []
    orders = StopOrders(tell)
    request = _StopSignal(processes, orders)
    try:
        with on_stop_signals(request.send):
            for rank in range(ranks):
                processes.append(_start(run, rank, ranks, meeting_point.as_uri(), program))
                if request.sent:  # while the ranks were being started: this one has not got the signal
                    processes[-1].send_signal(signal.SIGTERM)
            watcher = _Watcher(processes, request)
            try:
                while_running(watcher.ended)
            except BaseException:
                if not request.sent:
                    request.send()
                watcher.wait()
                raise
            watcher.wait()
    finally:
        _end(processes)
        meeting_point.unlink(missing_ok=True)
    return _ending(run, processes, watcher.first_failure, unsaved=orders.made > 1)


def _fresh_meeting_point(run: OpenRun) -> Path:
    """The file through which the ranks of this attempt meet; those of attempts that were killed are removed."""
    for stale in run.directory.path.glob(".meeting-point-*"):
        stale.unlink(missing_ok=True)
    return (run.directory.path / f".meeting-point-{run.attempt}").resolve()


def _start(run: OpenRun, rank: int, ranks: int, meeting_point: str, program: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PHALANX_RANK": str(rank),
        "PHALANX_RANKS": str(ranks),
        "PHALANX_MEETING_POINT": meeting_point,
        "PHALANX_LAUNCHER": str(os.getpid()),
        "OMP_NUM_THREADS": str(run.spec.runtime.threads),
        **rank_environment(run.spec.model.factory),
    }
    log = run.directory.log(run.attempt, rank)
    remove_failure(log)
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                program,
                str(run.directory.path),
                "--attempt",
                str(run.attempt),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[run.lock_fd],  # the directory stays taken until the last rank has ended
        )


class _Watcher:
    """Polls the ranks; ends the others when one has failed."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], request: _StopSignal) -> None:
        self._processes, self._request = processes, request
        self._deadline_s: float | None = None
        self.first_failure: int | None = None

    def ended(self) -> bool:
        """True once all ranks have exited; ends the others when one has failed."""
        self._request.orders.tell_new()
        codes = [process.poll() for process in self._processes]
        if self.first_failure is None:
            # A rank that had not yet set up its handler ends by the signal itself: it was asked to.
            asked = self._request.sent
            fine = {None, 0, EXIT_STOPPED} | ({-signal.SIGTERM, -signal.SIGKILL} if asked else set())
            if asked and -signal.SIGTERM in codes and self._deadline_s is None:
                self._deadline_s = time.monotonic() + _GRACE_S  # the others hang in a collective with it
            failed = [rank for rank, code in enumerate(codes) if code not in fine]
            if failed:
                self.first_failure = _culprit(failed, codes)
                self._deadline_s = time.monotonic() + _GRACE_S
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            _end(self._processes)
        return None not in codes

    def wait(self) -> None:
        """Waits until all ranks have exited."""
        while not self.ended():
            time.sleep(_POLL_S)


def _culprit(failed: list[int], codes: list[int | None]) -> int:
    """The rank that most likely failed first: one killed by a signal, before one that may only have lost its peer."""
    return min(failed, key=lambda rank: (codes[rank] or 0) > 0)


class _StopSignal:
    """The signal to all ranks: the first asks them to save and stop, the second kills them."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], orders: StopOrders) -> None:
        self._processes = processes
        self.orders = orders

    @property
    def sent(self) -> bool:
        """True if the ranks were asked to stop."""
        return self.orders.made > 0

    def send(self) -> None:
        """Sends one SIGTERM to every rank; at the second call SIGKILL."""
        number = signal.SIGKILL if self.sent else signal.SIGTERM
        self.orders.made += 1
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _ending(
    run: OpenRun, processes: list[subprocess.Popen[bytes]], culprit: int | None, *, unsaved: bool
) -> Ending:
    codes = [process.returncode for process in processes]
    if (codes and all(code == 0 for code in codes)) or (
        culprit is None and run.directory.finished_result() is not None
    ):
        return Ending("finished")
    if culprit is None:  # asked to stop, perhaps before all were started
        return Ending("stopped", exit_code=EXIT_STOPPED, unsaved=unsaved)
    log, code = run.directory.log(run.attempt, culprit), codes[culprit]
    if code < 0:
        return Ending("failed", culprit, code, f"was killed by {signal.Signals(-code).name}")
    failure = read_failure(log)
    words = last_words(log, f"ended with exit code {code}")
    return Ending("failed", culprit, code, words, failure.kind if failure else "")
