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

from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.first_failure import first_failure
from phalanx.observe.logs.line import Level
from phalanx.observe.logs.order import order_for
from phalanx.observe.logs.tail import last_lines
from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import Ending, last_words, read_failure, remove_failure
from phalanx.train.lifecycle.interrupt import StopOrders, on_stop_signals
from phalanx.train.lifecycle.worker import EXIT_STOPPED
from phalanx.train.start.open_run import OpenRun

TRAIN_RANK = "phalanx.train.lifecycle.worker"
_POLL_S = 0.1
_LAST_SAID = 200
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
    outputs: list[ChildOutput] = []
    orders = StopOrders(tell)
    request = _StopSignal(processes, orders)
    watcher = _Watcher(processes, request)
    try:
        with on_stop_signals(request.send):
            for rank in range(ranks):
                process, output = _start(
                    run, rank, ranks, meeting_point.as_uri(), program, orders.troubles.append
                )
                processes.append(process)
                outputs.append(output)
                if request.sent:  # while the ranks were being started: this one has not got the signal
                    processes[-1].send_signal(signal.SIGTERM)
            try:
                while_running(watcher.ended)
            except BaseException:
                if not request.sent:
                    request.send()
                watcher.wait()
                raise
            watcher.wait()
    finally:
        watcher.end()
        for rank, output in enumerate(outputs):
            output.ended(*watcher.how_it_ended(rank))
        meeting_point.unlink(missing_ok=True)
        orders.tell_new()
    return _ending(run, processes, _first_to_fail(run, watcher), unsaved=orders.made > 1)


def _fresh_meeting_point(run: OpenRun) -> Path:
    """The file through which the ranks of this attempt meet; those of attempts that were killed are removed."""
    for stale in run.directory.path.glob(".meeting-point-*"):
        stale.unlink(missing_ok=True)
    return (run.directory.path / f".meeting-point-{run.attempt}").resolve()


def _start(
    run: OpenRun, rank: int, ranks: int, meeting_point: str, program: str, complain: Callable[[str], None]
) -> tuple[subprocess.Popen[bytes], ChildOutput]:
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
    output = ChildOutput(
        order_for(log, f"rank-{rank:05d}", run.attempt, run.spec.observe), environment, complain
    )
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                program,
                str(run.directory.path),
                "--attempt",
                str(run.attempt),
            ],
            env={**environment, **output.environment},
            stdin=subprocess.DEVNULL,
            stdout=output.descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The directory stays taken until the last rank has ended.
            pass_fds=[run.lock_fd, *output.inherited],
        )
    except BaseException:
        output.failed()
        raise
    output.place.rank = rank
    output.started()
    return process, output


class _Watcher:
    """Polls the ranks; ends the others when one has failed."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], request: _StopSignal) -> None:
        self._processes, self._request = processes, request
        self._deadline_s: float | None = None
        self._ended_here: set[int] = set()
        self.first_failure: int | None = None
        self.failed: list[int] = []
        """The ranks that had failed when the first failure was seen, or did in the time that they were given then."""

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
            self.end()
        elif self.first_failure is not None:
            self.failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, EXIT_STOPPED)]
        return None not in codes

    def end(self) -> None:
        """Kills the ranks that are left, and reaps all."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._ended_here.add(rank)
                process.kill()
        for process in self._processes:
            process.wait()

    def how_it_ended(self, rank: int) -> tuple[str, Level]:
        """The line about the end of a rank that has ended, for its log, and its level; nothing if it ended as it should."""
        code = self._processes[rank].returncode
        if code in (0, EXIT_STOPPED):
            return "", "info"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if rank in self._ended_here or (self._request.sent and code in (-signal.SIGTERM, -signal.SIGKILL)):
            return f"{how} by its launcher", "info"
        return how, "error"

    def wait(self) -> None:
        """Waits until all ranks have exited."""
        while not self.ended():
            time.sleep(_POLL_S)


def _culprit(failed: list[int], codes: list[int | None]) -> int:
    """The rank that most likely failed first: one killed by a signal, before one that may only have lost its peer."""
    return min(failed, key=lambda rank: (codes[rank] or 0) > 0)


def _first_to_fail(run: OpenRun, watcher: _Watcher) -> int | None:
    """The rank that failed first, by what the ranks said; if they do not tell, by when they ended."""
    if watcher.first_failure is None:
        return None
    said = (
        line
        for rank in watcher.failed
        for line in last_lines(run.directory.log(run.attempt, rank), _LAST_SAID)
    )
    found = first_failure(said)
    rank = found.line.rank if found is not None else None
    return rank if rank in watcher.failed else watcher.first_failure


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
