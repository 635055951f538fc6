"""Starts a run's ranks on this machine, watches them, and leaves nothing behind.

Each rank is a process in a session of its own, so that Ctrl-C reaches only the launcher, which passes on one SIGTERM
and lets the ranks save. If a rank dies the others are ended too (they hang in a collective). If the launcher itself
is killed, the kernel kills the ranks with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.line import first_failure
from phalanx.observe.logs.log_file import last_lines, order_for
from phalanx.process.child import Child, describe_exit, end_all
from phalanx.process.stop_signals import StopOrders, on_stop_signals
from phalanx.run.factory import rank_environment
from phalanx.train.lifecycle.ending import STOP_WORDS, Ending, last_words, read_failure, remove_failure
from phalanx.train.lifecycle.worker import EXIT_STOPPED
from phalanx.train.start.open_run import OpenRun

TRAIN_RANK = "phalanx.train.lifecycle.worker"
_POLL_S = 0.1
_LAST_SAID = 200
_FINE = (0, EXIT_STOPPED)
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
    orders = StopOrders(tell, STOP_WORDS)
    processes = _Ranks(orders, run.spec.launch.grace_s)
    try:
        with on_stop_signals(processes.ask_to_stop):
            for rank in range(ranks):
                processes.add(
                    _start(run, rank, ranks, meeting_point.as_uri(), program, orders.troubles.append)
                )
            try:
                while_running(processes.ended)
            except BaseException:
                if not orders.made:
                    processes.ask_to_stop()
                processes.wait()
                raise
            processes.wait()
    finally:
        end_all(processes.children, fine=_FINE)
        meeting_point.unlink(missing_ok=True)
        orders.tell_new()
    return _ending(run, processes)


def _fresh_meeting_point(run: OpenRun) -> Path:
    """The file through which the ranks of this attempt meet; those of attempts that were killed are removed."""
    for stale in run.directory.path.glob(".meeting-point-*"):
        stale.unlink(missing_ok=True)
    return (run.directory.path / f".meeting-point-{run.attempt}").resolve()


def _start(
    run: OpenRun, rank: int, ranks: int, meeting_point: str, program: str, complain: Callable[[str], None]
) -> Child:
    environment = {
        **os.environ,
        "PHALANX_RANK": str(rank),
        "PHALANX_RANKS": str(ranks),
        "PHALANX_MEETING_POINT": meeting_point,
        "OMP_NUM_THREADS": str(run.spec.runtime.threads),
        **rank_environment(run.spec.model.factory),
    }
    log = run.directory.log(run.attempt, rank)
    remove_failure(log)
    output = ChildOutput(
        order_for(log, f"rank-{rank:05d}", run.attempt, run.spec.observe), environment, complain
    )
    output.place.rank = rank
    return Child.start(
        [sys.executable, "-m", program, str(run.directory.path), "--attempt", str(run.attempt)],
        environment,
        output=output,
        keep_open=[run.lock_fd],  # the directory stays taken until the last rank has ended
    )


class _Ranks:
    """The ranks' processes: asked to stop by signals, watched, and ended when one has failed."""

    def __init__(self, orders: StopOrders, save_s: float) -> None:
        self.children: list[Child] = []
        self.orders = orders
        self._save_s = save_s
        self._deadline_s: float | None = None
        self.first_failure: int | None = None
        self.failed: list[int] = []
        """The ranks that had failed when the first failure was seen, or did in the time that they were given then."""

    def add(self, child: Child) -> None:
        """Take in a rank that has been started."""
        self.children.append(child)
        if self.orders.made:  # while the ranks were being started: this one has not got the signal
            child.signal(signal.SIGTERM)

    def ask_to_stop(self) -> None:
        """Send one SIGTERM to every rank, to save and stop; at the second call SIGKILL."""
        number = signal.SIGKILL if self.orders.made else signal.SIGTERM
        self.orders.made += 1
        for child in self.children:
            child.signal(number)

    def codes(self) -> list[int | None]:
        """Return the exit codes by rank, None for those that run."""
        return [child.exit_code() for child in self.children]

    def ended(self) -> bool:
        """True once all ranks have exited; ends the others when one has failed."""
        self.orders.tell_new()
        codes = self.codes()
        if self.first_failure is None:
            # A rank that had not yet set up its handler ends by the signal itself: it was asked to.
            asked = self.orders.made > 0
            fine = {None, *_FINE} | ({-signal.SIGTERM, -signal.SIGKILL} if asked else set())
            if asked and self._deadline_s is None:
                if -signal.SIGTERM in codes:
                    self._deadline_s = time.monotonic() + _GRACE_S  # the others hang in a collective with it
                elif (
                    EXIT_STOPPED in codes
                ):  # after a save the others follow; before a step they may hang likewise
                    self._deadline_s = time.monotonic() + self._save_s
            failed = [rank for rank, code in enumerate(codes) if code not in fine]
            if failed:
                self.first_failure = _culprit(failed, codes)
                self._deadline_s = time.monotonic() + _GRACE_S
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            end_all(self.children, fine=_FINE)
        elif self.first_failure is not None:
            self.failed = [rank for rank, code in enumerate(codes) if code not in (None, *_FINE)]
        return None not in codes

    def wait(self) -> None:
        """Waits until all ranks have exited."""
        while not self.ended():
            time.sleep(_POLL_S)


def _culprit(failed: list[int], codes: list[int | None]) -> int:
    """The rank that most likely failed first: one killed by a signal, before one that may only have lost its peer."""
    return min(failed, key=lambda rank: (codes[rank] or 0) > 0)


def _first_to_fail(run: OpenRun, processes: _Ranks) -> int | None:
    """The rank that failed first, by what the ranks said; if they do not tell, by when they ended."""
    if processes.first_failure is None:
        return None
    said = (
        line
        for rank in processes.failed
        for line in last_lines(run.directory.log(run.attempt, rank), _LAST_SAID)
    )
    found = first_failure(said)
    rank = found.line.rank if found is not None else None
    return rank if rank in processes.failed else processes.first_failure


def _ending(run: OpenRun, processes: _Ranks) -> Ending:
    codes, culprit = processes.codes(), _first_to_fail(run, processes)
    if (codes and all(code == 0 for code in codes)) or (
        culprit is None and run.directory.finished_result() is not None
    ):
        return Ending("finished")
    if culprit is None:  # asked to stop, perhaps before all were started
        return Ending("stopped", exit_code=EXIT_STOPPED, unsaved=processes.orders.made > 1)
    log, code = run.directory.log(run.attempt, culprit), codes[culprit]
    assert code is not None
    if code < 0:
        return Ending("failed", culprit, code, describe_exit(code))
    failure = read_failure(log)
    words = last_words(log, f"ended with exit code {code}")
    return Ending("failed", culprit, code, words, failure.kind if failure else "")
