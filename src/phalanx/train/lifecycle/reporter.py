"""Reports a rank's events to the event stream and the sinks, without ever stopping training.

Rank 0 writes the event stream; the others report nothing. A disk that is too full for an event leads to a warning, not to the
loss of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.checkpoint.save.saver import SaveOutcome
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    IncidentKind,
    Known,
    Message,
)
from phalanx.observe.rank_file.recorder import RankRecorder
from phalanx.observe.rank_stream import RankFrame
from phalanx.observe.sinks.background import CLOSE_TIMEOUT_S, END_TIMEOUT_S, Background, close_sinks


@dataclass
class Reporter:
    """Appends events to the run's stream and passes them on to the sinks; without a log, does nothing."""

    log: EventLog | None
    ranks: RankRecorder | None = None
    """Writes the ranks' own numbers, on rank 0 if they are kept."""
    sinks: Sequence[Background] = ()
    _complained: bool = field(default=False, init=False)

    @property
    def speaks(self) -> bool:
        """True if events are recorded; callers ask it before they gather what is costly."""
        return self.log is not None

    def emit(self, body: Known) -> None:
        """Records that something happened."""
        if self.log is None:
            return
        try:
            event = self.log.append(body)
        except EventLogError as error:
            if not self._complained:
                self._complained = True
                print(f"phalanx: warning: {error}; training goes on", file=sys.stderr, flush=True)
            return
        for sink in self.sinks:
            sink.offer(event)

    def warn(self, text: str, incident: IncidentKind = IncidentKind.NOTE) -> None:
        """Records a warning for people; programs match on ``incident``."""
        self.emit(Message("warning", text, incident))

    def saved(self, outcomes: Sequence[SaveOutcome], stalls_s: dict[int, float], root: str) -> None:
        """Records how saves ended. ``stalls_s``: for how long each step's save held training up."""
        for outcome in outcomes:
            if outcome.status == "failed":
                self.emit(CheckpointFailed(outcome.step, root, str(outcome.error)))
            elif outcome.status == "committed":
                stall_s = stalls_s.get(outcome.step, 0.0)
                self.emit(CheckpointSaved(outcome.step, root, outcome.nbytes, outcome.seconds, stall_s))

    def measured(self, frame: RankFrame) -> None:
        """Records what all ranks measured of themselves in a window of steps."""
        if self.ranks is not None and (trouble := self.ranks.record(frame)):
            self.warn(trouble)

    def close(self, *, ended: bool = False) -> None:
        """Flushes the sinks, within a bounded time, and closes the stream.

        ``ended``: The run has come to its end or was asked to stop, so that nobody waits for the next attempt. It may take longer then.
        """
        sinks, self.sinks = self.sinks, ()  # what is told from here on is no news for them
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
