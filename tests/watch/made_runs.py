"""Run directories for tests of what reads them, written through the event log that runs write through."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from observe.recorded import crashed_run
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import Event


def write_events(run_dir: Path, events: Iterable[Event]) -> Path:
    """Append the events to those of the run in ``run_dir``, each in its attempt and at its time; return the file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "record.json").write_text('{"attempts": 1}\n')
    for attempt, own in groupby(events, lambda event: event.attempt):
        now = [0.0]
        with EventLog(run_dir / "events.jsonl", attempt, clock=lambda now=now: now[0]) as log:  # type: ignore[misc]
            for event in own:
                now[0] = event.t
                log.append(event.body)
    return run_dir / "events.jsonl"


def crashed(run_dir: Path) -> Path:
    """The directory of a run of 40 steps that was killed once: see ``crashed_run``."""
    write_events(run_dir, crashed_run())
    return run_dir
