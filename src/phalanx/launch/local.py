"""Launcher of a run's ranks on this machine: starts and watches them, leaves nothing behind; also replays steps of a run.

Each rank is a process in a session of its own, so that Ctrl-C reaches only the launcher, which passes on one SIGTERM and lets the ranks
save. If a rank dies the others are ended too (they hang in a collective). If the launcher itself is killed, the kernel kills the ranks with
it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import tomli_w

from phalanx.hardware.local.detect import gpu_count
from phalanx.observe.event_log import EventLog, EventLogError, newest_event
from phalanx.observe.events import Finished, Restored, RunStarted, Step, Stopped
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.line import first_failure
from phalanx.observe.logs.log_file import last_lines, order_for
from phalanx.observe.record.records import usable_cores
from phalanx.process.child import Child, describe_exit, end_all
from phalanx.process.exit_codes import EXIT_STOPPED
from phalanx.process.this_process import StopOrders, on_stop_signals
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.factory import rank_environment
from phalanx.run.fields import RunFileError, listing
from phalanx.run.identity import read_unchanged
from phalanx.run.layout import layout_problems, replica_ranks
from phalanx.run.read import found_again, to_table
from phalanx.run.smaller_degrees import divided_over
from phalanx.run.spec import RunSpec
from phalanx.train.compare.observation import RankReplay, Replay, ReplayOrder, order_file, seen_file
from phalanx.train.compare.runs import Logged
from phalanx.train.lifecycle.ending import STOP_WORDS, Ending, last_words, read_failure, remove_failure
from phalanx.train.start.open_run import OpenRun, take_lock

TRAIN_RANK = "phalanx.train.lifecycle.worker"
_LAST_SAID = 200
_PROGRESS = RunStarted | Restored | Step
"""Events after which an attempt has not ended."""
_FINE = (0, EXIT_STOPPED)
_GRACE_S = 10.0
"""Time that the other ranks are given to notice that one has died."""


def run_locally(
    run: OpenRun,
    ranks: int,
    while_running: Callable[[Callable[[], bool]], None],
    notify: Callable[[str], None] = lambda _words: None,
    *,
    program: str = TRAIN_RANK,
) -> Ending:
    """Start ``ranks`` ranks of an opened run as processes, wait for their end, and return how the run ended.

    ``while_running`` is called once with a function that returns True once all have ended, and returns after
    that. If it raises, the ranks save and stop before the error is raised. ``notify`` gets lines about requests
    to stop. ``program`` is the module that each rank runs. All processes have ended on return. Raises
    ``OSError`` if a rank cannot be started.
    """
    # The ranks of this attempt meet through a file; those of attempts that were killed are removed.
    for stale in run.directory.path.glob(".meeting-point-*"):
        stale.unlink(missing_ok=True)
    meeting_point = (run.directory.path / f".meeting-point-{run.attempt}").resolve()
    orders = StopOrders(notify, STOP_WORDS)
    processes = _Ranks(orders, run.spec.launch.grace_s)
    try:
        with on_stop_signals(processes.request_stop):
            for rank in range(ranks):
                processes.add(
                    _start(run, rank, ranks, meeting_point.as_uri(), program, orders.troubles.append)
                )
            orders.supervise(while_running, processes.ended, processes.request_stop)
    finally:
        end_all(processes.children, fine=_FINE)
        meeting_point.unlink(missing_ok=True)
        orders.tell_new()
    ending = _ending(run, processes)
    if ending.status == "stopped":
        _record_stop(run, ending, notify)
    return ending


def _start(
    run: OpenRun, rank: int, ranks: int, meeting_point: str, program: str, complain: Callable[[str], None]
) -> Child:
    """Start the process of a rank, with its log captured and the run's lock inherited. The record of an earlier
    failure is deleted.

    ``complain`` gets problems of the log. Raises ``OSError``.
    """
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
    """The ranks' processes: stopped by signals, watched, and ended when one has failed."""

    def __init__(self, orders: StopOrders, save_s: float) -> None:
        """``orders`` counts requests to stop; ``save_s`` is the time that ranks have to save after the first has
        stopped.
        """
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
        if self.orders.made:  # requested while ranks were being started, so this one has no signal yet
            child.signal(signal.SIGTERM)

    def request_stop(self) -> None:
        """Count a request to stop, and send every rank SIGTERM, to save and stop; from the second request on
        SIGKILL.
        """
        number = signal.SIGKILL if self.orders.made else signal.SIGTERM
        self.orders.made += 1
        for child in self.children:
            child.signal(number)

    def codes(self) -> list[int | None]:
        """Return the exit codes by rank, None for those that run."""
        return [child.exit_code() for child in self.children]

    def ended(self) -> bool:
        """Return True once all ranks have exited; call it repeatedly. Shows messages about requests to stop.

        If one has failed, the others are killed 10 s later. After a request to stop, so are those that still
        run 10 s after SIGTERM itself has ended one, or ``save_s`` after one has stopped on request.
        """
        self.orders.tell_new()
        codes = self.codes()
        if self.first_failure is None:
            # After a request to stop, a rank without its handler yet is ended by the signal itself, which is no failure.
            is_stopping = self.orders.made > 0
            fine = {None, *_FINE} | ({-signal.SIGTERM, -signal.SIGKILL} if is_stopping else set())
            if is_stopping and self._deadline_s is None:
                if -signal.SIGTERM in codes:
                    self._deadline_s = time.monotonic() + _GRACE_S  # the others hang in a collective with it
                elif EXIT_STOPPED in codes:  # after a save the others stop too; before a step they may hang
                    self._deadline_s = time.monotonic() + self._save_s
            failed = [rank for rank, code in enumerate(codes) if code not in fine]
            if failed:
                # The rank that most likely failed first: one killed by a signal, before one that may only have lost its peer.
                self.first_failure = min(failed, key=lambda rank: (codes[rank] or 0) > 0)
                self._deadline_s = time.monotonic() + _GRACE_S
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            end_all(self.children, fine=_FINE)
        elif self.first_failure is not None:
            self.failed = [rank for rank, code in enumerate(codes) if code not in (None, *_FINE)]
        return None not in codes


def _first_to_fail(run: OpenRun, processes: _Ranks) -> int | None:
    """Return the rank that failed first, by the times of errors in their logs, else by when they ended; ``None`` if
    none failed.
    """
    if processes.first_failure is None:
        return None
    lines = (
        line
        for rank in processes.failed
        for line in last_lines(run.directory.log(run.attempt, rank), _LAST_SAID)
    )
    failure = first_failure(lines)
    rank = failure.line.rank if failure is not None else None
    return rank if rank in processes.failed else processes.first_failure


def _ending(run: OpenRun, processes: _Ranks) -> Ending:
    """Return how the run ended: finished, stopped, or failed with the first failed rank's own error, or its last
    output.

    It is finished too if the result is complete and no rank failed.
    """
    codes, culprit = processes.codes(), _first_to_fail(run, processes)
    if (codes and all(code == 0 for code in codes)) or (
        culprit is None and run.directory.finished_result() is not None
    ):
        return Ending("finished")
    if culprit is None:  # stopped on request, perhaps before all had started
        return Ending("stopped", exit_code=EXIT_STOPPED, unsaved=processes.orders.made > 1)
    log, code = run.directory.log(run.attempt, culprit), codes[culprit]
    assert code is not None
    if code < 0:
        return Ending("failed", culprit, code, describe_exit(code))
    failure = read_failure(log)
    words = last_words(log, f"ended with exit code {code}")
    return Ending("failed", culprit, code, words, failure.kind if failure else "")


def _record_stop(run: OpenRun, ending: Ending, notify: Callable[[str], None]) -> None:
    """Append the event of a stop for the ranks, if they were ended before rank 0 could: at once on a second request, or as not all of them
    ended in time.

    Does nothing if this attempt has no event. ``notify`` gets a line if the event cannot be written.
    """
    events = run.directory.events
    if not events.exists():
        return
    try:
        last = newest_event(events, lambda event: isinstance(event.body, _PROGRESS | Stopped | Finished))
        if last is None or last.attempt != run.attempt or not isinstance(last.body, _PROGRESS):
            return
        step = 0 if isinstance(last.body, RunStarted) else last.body.step
        how = "at once, on a second request" if ending.unsaved else "as not all ranks ended in time"
        reason = f"stopped on request; ended {how}: {run.directory.newest_checkpoint()}"
        with EventLog(events, run.attempt) as log:
            log.append(Stopped(step, reason))
    except (EventLogError, OSError) as error:
        notify(f"the stop is not recorded: {error}")


# The number of ranks on this machine for a run file without one.


def ranks_on_this_machine(spec: RunSpec, run_file: Path) -> int:
    """Return the run's own number of ranks, or else as many as the machine has room for: one for each GPU, or by
    cores.

    It is lowered to a number on which the run can be laid out, but not below a replica. Raises ``RunFileError``,
    which names ``run_file``, if there is none.
    """
    if spec.parallel.ranks:
        return spec.parallel.ranks
    room = gpu_count() if spec.runtime.device != "cpu" else 0
    replica = replica_ranks(spec.parallel)
    most = spec.train.slots * spec.parallel.pipeline * spec.parallel.context * spec.parallel.tensor
    ranks = max(min(room or max(1, usable_cores() // spec.runtime.threads), most), replica)
    while ranks > replica and layout_problems(spec, ranks):
        ranks -= 1
    problems = layout_problems(spec, ranks)
    if problems:
        raise RunFileError(run_file, problems)
    return ranks


# Replay steps of a run on this machine's ranks, in a separate directory.
#
# Ranks are started as for training. The run itself is only read.

_PROGRAM = "phalanx.train.compare.replay_worker"


class ReplayError(RuntimeError):
    """A replay could not be done; the message has the reason."""


def replay_run(
    path: Path,
    log: Logged,
    steps: tuple[int, int],
    ranks: int,
    folder: Path,
    *,
    is_measured: bool = False,
    in_fp32: bool = False,
    on_wait: Callable[[], None] = lambda: None,
) -> Replay:
    """Replay the run in ``path`` from the state of the first of ``steps`` to the second, in the new directory
    ``folder``.

    ``ranks`` 0 means as many as the run had at the last step. ``is_measured`` is as in ``ReplayOrder``.
    ``in_fp32`` computes in fp32 instead of the run's format. ``on_wait`` is called every 50 ms. Raises
    ``ReplayError``, and the errors of reading the run and finding its data.
    """
    directory = RunDirectory(path)
    spec, record = read_unchanged(directory), directory.read_record()
    spec = dataclasses.replace(spec, data=found_again(spec.data, record, same_end=False))
    if in_fp32:
        wide = dataclasses.replace(spec.precision, compute="fp32", matmul="compute")
        # A replay trains no children, and the candidate "wide" is refused without narrow products.
        children = dataclasses.replace(spec.spike, candidates=("continue",))
        spec = dataclasses.replace(spec, precision=wide, spike=children)
    started = log.started.ranks if log.started is not None else spec.parallel.ranks
    order = ReplayOrder(steps[1], steps[0], str(directory.checkpoints.resolve()), is_measured)
    fingerprint = str(record.get("data_fingerprint", ""))
    count = ranks or log.ranks.get(steps[1], started) or 1
    # A fleet that lost nodes may have computed these steps under a smaller degree.
    return replay_locally(divided_over(spec, count), order, count, folder, fingerprint, on_wait)


def replay_locally(
    spec: RunSpec,
    order: ReplayOrder,
    ranks: int,
    folder: Path,
    fingerprint: str = "",
    on_wait: Callable[[], None] = lambda: None,
) -> Replay:
    """Replay a resolved run on ``ranks`` processes of this machine, wait for them, and return what they observed.

    ``folder`` is created. ``fingerprint`` is of the data that the run was trained on; empty if any will do.
    ``on_wait`` is called every 50 ms. Raises ``ReplayError`` if the run cannot be laid out on these ranks,
    there are too few GPUs, or a rank failed.
    """
    problems = layout_problems(spec, ranks)
    if problems:
        raise ReplayError(listing(f"{spec.name} cannot be replayed on {ranks} ranks", problems))
    if spec.runtime.device == "cuda" and gpu_count() < ranks:
        raise ReplayError(f"{spec.name} needs {ranks} GPUs to be replayed; this machine has {gpu_count()}")
    directory = RunDirectory(folder)
    directory.logs.mkdir(parents=True)
    table = to_table(dataclasses.replace(spec, run_dir=str(folder)))
    write_atomically(directory.run_file, tomli_w.dumps(table).encode())
    fingerprint_entry = {"data_fingerprint": fingerprint} if fingerprint else {}
    write_atomically(directory.record, json.dumps({"attempts": 1, **fingerprint_entry}).encode())
    write_atomically(order_file(folder), msgspec.json.encode(order))
    lock = take_lock(directory.lock)

    def wait(ended: Callable[[], bool]) -> None:
        while not ended():
            on_wait()
            time.sleep(0.05)

    try:
        ending = run_locally(OpenRun(directory, spec, 0, lock), ranks, wait, program=_PROGRAM)
    finally:
        os.close(lock)
    if ending.status != "finished":
        who = "" if ending.failed_rank is None else f"rank {ending.failed_rank}: "
        raise ReplayError(f"the replay on {ranks} ranks {ending.status}: {who}{ending.message}")
    seen = [
        msgspec.msgpack.decode(seen_file(folder, rank).read_bytes(), type=RankReplay) for rank in range(ranks)
    ]
    first = seen[0]
    return Replay(
        first.layout, [replay.observed for replay in seen], first.numbers, first.measures, first.scores
    )
