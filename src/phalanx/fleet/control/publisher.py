"""The words of a coordinator to people: incidents in the run's event stream and its own log, and the state in ``fleet.json``.

None of it is of consequence for the run, so a disk that fails or is slow delays nothing else. The file is written often enough to be looked
at and takes no more than a small share of the coordinator's time, whatever the size of the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.fleet.control.fleet_file import FleetFile, path_in, write_fleet_file
from phalanx.fleet.core.messages import NO_EPOCH
from phalanx.fleet.core.state import FleetPhase, FleetState, Incident, node_called
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.observe.events import EpochLeft, Message
from phalanx.run.directory.paths import RunDirectory

_FILE_SHARE = 0.02
"""Largest share of one core's time that goes into writing fleet.json."""


class Publisher:
    """Publishes what happens to a fleet, for one life of its coordinator."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        content: Callable[[], FleetFile],
        log: Callable[[str], None],
        *,
        least_pause_s: float,
        published_s: float,
        leads: Callable[[], bool] = lambda: True,
        on_epoch_left: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            directory: The run's.
            attempt: Under which events are written.
            content: Returns what fleet.json is to say now.
            log: Takes lines for the coordinator's log.
            least_pause_s: Between two writes of fleet.json.
            published_s: Incidents up to this time were published by an earlier coordinator.
            leads: Asked, in a thread, just before fleet.json is replaced: that of a successor is left alone.
            on_epoch_left: Called when an epoch has ended.
        """
        self._leads, self._on_epoch_left = leads, on_epoch_left
        self._directory, self._attempt, self._content, self._log = directory, attempt, content, log
        self._least_pause_s, self._published_s = least_pause_s, published_s
        self._events: EventLog | None = None
        self._due_s, self._shown_epoch = 0.0, NO_EPOCH
        self._writing: asyncio.Task[None] | None = None
        self.newest: FleetFile | None = None
        """What fleet.json says, or is about to."""

    def publish(self, state: FleetState, now_s: float, *, over: bool) -> None:
        """Tells new incidents, and now and then (at once when an epoch trains) has fleet.json written, unless the run is over."""
        self._tell_new(state.incidents)
        formed = state.phase is FleetPhase.RUNNING and state.epoch != self._shown_epoch
        if (now_s >= self._due_s or formed) and self._writing is None and not over:
            self._shown_epoch = state.epoch if formed else self._shown_epoch
            self._writing = asyncio.create_task(self._write(now_s))

    def _tell_new(self, incidents: Sequence[Incident]) -> None:
        for incident in incidents:
            if incident.at_s > self._published_s:
                self.tell(incident)
        self._published_s = max((incident.at_s for incident in incidents), default=self._published_s)

    def tell(self, incident: Incident) -> None:
        """Writes an incident into the log and the run's event stream."""
        named = f"{node_called(incident.node)}: {incident.what}" if incident.node else incident.what
        self._write_event(
            EpochLeft(incident.epoch, named, incident.kind)
            if incident.ended_epoch
            else Message(incident.level, named, incident.kind, incident.node)
        )
        if incident.ended_epoch:
            self._on_epoch_left()

    def warn(self, text: str) -> None:
        """Writes a warning into the log and the run's event stream."""
        self._write_event(Message("warning", text))

    def _write_event(self, body: EpochLeft | Message) -> None:
        self._log(body.text)
        try:
            if self._events is None:
                self._events = EventLog(self._directory.events, self._attempt)
            self._events.append(body)
        except EventLogError as error:
            self._log(str(error))

    def _replace(self, run_dir: Path, content: FleetFile) -> float:
        return write_fleet_file(run_dir, content) if self._leads() else 0.0

    async def write_now(self, now_s: float) -> None:
        """Writes fleet.json, after a write that is under way."""
        if self._writing is not None:
            await self._writing
        await self._write(now_s)

    async def _write(self, now_s: float) -> None:
        """Replaces fleet.json, durably, by a thread: the event loop must not wait for a slow disk."""
        path, began_s = self._directory.path, time.thread_time()
        content = self.newest = self._content()
        took_s = time.thread_time() - began_s
        try:
            loop = asyncio.get_running_loop()
            took_s += await loop.run_in_executor(None, self._replace, path, content)
        except OSError as error:
            self._log(f"cannot write {path_in(path)}: {error.strerror}")
        self._due_s = now_s + max(self._least_pause_s, took_s / _FILE_SHARE)
        self._writing = None
