"""Events of a rank, sent to the event stream and the sinks without ever stopping training, and the record of a start.

Rank 0 writes the event stream; the others report nothing. A disk that is too full for an event leads to a warning, not to the
loss of a run.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.checkpoint.format.errors import SavesHeldError
from phalanx.checkpoint.save.saver import SaveOutcome
from phalanx.data.origin import provenance
from phalanx.data.reading.sources import DataIndex
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    IncidentKind,
    Known,
    Message,
)
from phalanx.observe.rank_stream import RankFrame
from phalanx.observe.rank_writer import RankRecorder
from phalanx.observe.record.notes import leave_machine, machine_differences, newest_machines
from phalanx.observe.record.records import GIT_TIMEOUT_S, CodePatch, code_patch, environment_record
from phalanx.observe.sinks import CLOSE_TIMEOUT_S, END_TIMEOUT_S, Background, close_sinks
from phalanx.run.directory.files import create_once, read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.read import addresses
from phalanx.run.spec import RunSpec


@dataclass
class Reporter:
    """Writer of events to the run's stream and the sinks; without a log it does nothing."""

    log: EventLog | None
    ranks: RankRecorder | None = None
    """Writes the ranks' own numbers, on rank 0 if they are kept."""
    sinks: Sequence[Background] = ()
    _complained: bool = field(default=False, init=False)

    @property
    def speaks(self) -> bool:
        """True if events are recorded; callers check it before they gather costly figures."""
        return self.log is not None

    def emit(self, body: Known) -> None:
        """Record that something happened."""
        self.record(body)

    def record(self, body: Known) -> bool:
        """Append an event to the stream, and then offer it to the sinks. If the stream is missing or closed, or its disk
        is full, offer nothing and return False.

        The first failed append is printed on stderr.
        """
        log = self.log  # another thread may close it from here on: then the append fails
        if log is None:
            return False
        try:
            event = log.append(body)
        except EventLogError as error:
            if not self._complained:
                self._complained = True
                print(f"phalanx: warning: {error}; training continues", file=sys.stderr, flush=True)
            return False
        for sink in self.sinks:
            sink.offer(event)
        return True

    def warn(self, text: str, incident: IncidentKind = IncidentKind.NOTE) -> None:
        """Record a warning for people. Programs match on ``incident``."""
        self.emit(Message("warning", text, incident))

    def saved(self, outcomes: Sequence[SaveOutcome], stalls_s: dict[int, float], root: str) -> None:
        """Emit an event for each save that failed or committed, and none for others. ``stalls_s``: by step, the
        seconds for which the save delayed training.
        """
        for outcome in outcomes:
            if outcome.status == "failed":
                is_held = isinstance(outcome.error, SavesHeldError)
                self.emit(CheckpointFailed(outcome.step, root, str(outcome.error), is_held))
            elif outcome.status == "committed":
                stall_s = stalls_s.get(outcome.step, 0.0)
                self.emit(CheckpointSaved(outcome.step, root, outcome.nbytes, outcome.seconds, stall_s))

    def measured(self, frame: RankFrame) -> None:
        """Record what all ranks measured of themselves in a window of steps, and warn if it cannot be written."""
        if self.ranks is not None and (trouble := self.ranks.record(frame)):
            self.warn(trouble)

    def close(self, *, ended: bool = False) -> None:
        """Flush the sinks within a bounded time, then close the rank file and the stream. Warn of sinks that missed
        events, with the command that sends them again.

        ``ended``: The run has ended or was stopped, so that no next attempt waits. The time limit is longer then.
        """
        sinks, self.sinks = self.sinks, ()  # messages from here on are not sent to the closing sinks
        timeout_s = END_TIMEOUT_S if ended else CLOSE_TIMEOUT_S
        for health in close_sinks(sinks, timeout_s, lambda text: self.emit(Message("info", text))):
            missed = health.dropped + health.failed
            if missed and self.log is not None:
                self.warn(
                    f"sink {health.name} missed {missed} events: {health.last_error}; to send them again when the run is over: "
                    f"phalanx sinks fill {self.log.path.parent} --sink {health.name}"
                )
        if self.ranks is not None and (trouble := self.ranks.close()):
            self.warn(trouble)
        if self.log is not None:
            self.log.close()
            self.log = None


# The record of a start: code with its changes, packages, machine, command, data, and the differences between machines.
#
# Rank 0 writes it into the first event of each attempt, and parts that are too long for an event into files of the run
# directory. Each node records its own machine (``observe.record.notes``). A thread compares the machines, so that no step waits
# for it.

_LATE_S = 60.0
"""By then a network file system shows what other machines have written into a folder."""


@functools.cache
def _own_patch() -> CodePatch | None:
    return code_patch()


def start_record(
    spec: RunSpec, directory: RunDirectory, index: DataIndex, numerics: Mapping[str, str]
) -> dict[str, object]:
    """Return the ``environment`` of ``RunStarted``: versions, code, data and numerics. Writes the patch of changed
    code into the run directory, if there is one.
    """
    record = environment_record()
    patch = _own_patch()
    if patch is not None:
        _keep(directory, patch)
        record["code"] = {**own, **patch.facts()} if isinstance(own := record["code"], dict) else own
    return {
        **record,
        "data_fingerprint": index.fingerprint,
        "held_out_sequences": spec.evaluation.sequences,
        "data": provenance(index, addresses(spec.data)),
        "numerics": dict(numerics),
    }


def _keep(directory: RunDirectory, patch: CodePatch) -> None:
    """Write the patch into the run directory, unless it is empty or there already. Failures are printed."""
    if patch.failed:
        _complain(
            f"git failed or took longer than {GIT_TIMEOUT_S:.0f} s, so changes of the code are missing in the run's record; try git diff HEAD"
        )
    if not patch.patch:
        return
    try:
        directory.code.mkdir(exist_ok=True)
        create_once(directory.code / f"{patch.sha256[:12]}.patch", patch.patch)
    except OSError as error:
        _complain(f"the changes of the code are not kept in {directory.code}: {error.strerror}")


def leave_own_machine(directory: RunDirectory, node: str = "") -> None:
    """Record this node, in one of its processes. If it cannot be written, print a warning and continue."""
    try:
        leave_machine(directory, node, directory.newest_attempt())
    except (OSError, RunDirectoryError) as error:
        _complain(f"this machine is not recorded in {directory.machines}: {error}")


def first_of_node() -> bool:
    """True in one of the processes that hold a node's ranks, as far as their launcher numbers them."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def watch_machines(directory: RunDirectory, reporter: Reporter, late_s: float = _LATE_S) -> threading.Thread:
    """Compare the machines of this start on a daemon thread, at once and after ``late_s`` seconds, and report new
    differences as warnings. Return the thread. Failures are printed.
    """

    def look_twice() -> None:
        """Record differences between the machines of the run as warnings, now and again after ``late_s`` seconds.
        Errors of the disk are printed.
        """
        for wait_s in (0.0, late_s):
            time.sleep(wait_s)
            try:
                report_differences(directory, lambda text: reporter.record(Message("warning", text)))
            except OSError as error:
                _complain(f"the machines in {directory.machines} are not compared: {error.strerror}")

    thread = threading.Thread(target=look_twice, name="machines", daemon=True)
    thread.start()
    return thread


def report_differences(directory: RunDirectory, warn: Callable[[str], bool]) -> None:
    """Report the differences between the machines of the newest start that were not yet reported, in one warning.
    Record all of them, so that each is reported once. Raises ``OSError``.

    ``warn`` returns False if it could not record the report. Then nothing is written down: the next epoch reports the
    differences. If the file of those reported is damaged, all are reported again.
    """
    file = directory.machines / "differences"
    differences = [difference.sentence for difference in machine_differences(newest_machines(directory))]
    try:
        before = msgspec.json.decode(read_small(file), type=list[str])
    except (OSError, ValueError):
        before = []
    if differences == before:
        return
    new = [line for line in differences if line not in before]
    text = "machines of this run differ, which may change the bits of the weights or the speed: " + "; ".join(
        new
    )
    if not new or warn(text):
        write_atomically(file, (json.dumps(differences, indent=1) + "\n").encode(), durable=False)


def _complain(text: str) -> None:
    print(f"phalanx: warning: {text}", file=sys.stderr, flush=True)
