"""Publications of a coordinator: incidents in the run's event stream and its own log, its state in
``fleet.json``, and metrics.

The run does not depend on them, so a slow or failing disk delays nothing else. The file is written often
enough to be watched, and takes a small share of the coordinator's time, whatever the size of the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from phalanx.fleet.control.fleet_file import FleetFile, path_in, write_fleet_file
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP
from phalanx.fleet.core.requests import GIVEN_BACK
from phalanx.fleet.core.state import FleetPhase, FleetState, Incident, node_called
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.observe.events import EpochLeft, IncidentKind, Message
from phalanx.observe.metrics.samples import Derived, Kind, Labels, Metric, MetricValues, Sample, collect
from phalanx.run.directory.paths import RunDirectory

_FILE_SHARE = 0.02
"""Largest share of one core's time that goes into writing fleet.json."""


class Publisher:
    """Publishes incidents, state and metrics of a fleet, for one life of its coordinator."""

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
        """Set up publication.

        Args:
            directory: The run's.
            attempt: Attempt under which events are written.
            content: Returns the present content of fleet.json.
            log: Takes lines for the coordinator's log.
            least_pause_s: Least time between two writes of fleet.json.
            published_s: Incidents up to this time were published by an earlier coordinator.
            leads: Called in a thread just before fleet.json is replaced. If it returns False, the file of the
                successor is left alone.
            on_epoch_left: Called when an epoch has ended.
        """
        self._leads, self._on_epoch_left = leads, on_epoch_left
        self._directory, self._attempt, self._content, self._log = directory, attempt, content, log
        self._least_pause_s, self._published_s = least_pause_s, published_s
        self._events: EventLog | None = None
        self._due_s, self._shown_epoch = 0.0, NO_EPOCH
        self._writing: asyncio.Task[None] | None = None
        self.newest: FleetFile | None = None
        """The content of fleet.json that was written last, or is being written."""

    def publish(self, state: FleetState, now_s: float, *, over: bool) -> None:
        """Publish the incidents since the last call, and start a write of fleet.json if one is due.

        It is due ``least_pause_s`` after the last write, later if that was slow, and at once when an epoch
        begins to train. None is started while one is in progress or if ``over``.
        """
        # The incidents since the last call.
        for incident in state.incidents:
            if incident.at_s > self._published_s:
                self.publish_incident(incident)
        self._published_s = max((incident.at_s for incident in state.incidents), default=self._published_s)
        formed = state.phase is FleetPhase.RUNNING and state.epoch != self._shown_epoch
        if (now_s >= self._due_s or formed) and self._writing is None and not over:
            self._shown_epoch = state.epoch if formed else self._shown_epoch
            self._writing = asyncio.create_task(self._write(now_s))

    def publish_incident(self, incident: Incident) -> None:
        """Write an incident into the log and the run's event stream. The end of an epoch also calls ``on_epoch_left``."""
        text = f"{node_called(incident.node)}: {incident.text}" if incident.node else incident.text
        self._write_event(
            EpochLeft(incident.epoch, text, incident.kind)
            if incident.ended_epoch
            else Message(incident.level, text, incident.kind, incident.node)
        )
        if incident.ended_epoch:
            self._on_epoch_left()

    def warn(self, text: str) -> None:
        """Write a warning into the log and the run's event stream."""
        self._write_event(Message("warning", text))

    def _write_event(self, body: EpochLeft | Message) -> None:
        """Log the text and append the event to the run's stream; a failure is only logged."""
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
        """Write fleet.json, after a write that is in progress."""
        if self._writing is not None:
            await self._writing
        await self._write(now_s)

    async def _write(self, now_s: float) -> None:
        """Replace fleet.json, durably, in a thread: the event loop must not wait for a slow disk.

        An ``OSError`` is logged, any other is raised. After either, the next write is due after the least pause, or
        later if this one was slow.
        """
        path, began_s, took_s = self._directory.path, time.thread_time(), 0.0
        try:
            content = self.newest = self._content()
            took_s = time.thread_time() - began_s
            loop = asyncio.get_running_loop()
            took_s += await loop.run_in_executor(None, self._replace, path, content)
        except OSError as error:
            self._log(f"cannot write {path_in(path)}: {error.strerror}")
        finally:
            self._due_s = now_s + max(self._least_pause_s, took_s / _FILE_SHARE)
            self._writing = None


# Metrics of a fleet, from the state that its coordinator publishes in ``fleet.json``. The published value is
# frozen, so a thread can read it while the coordinator continues to decide. It is as old as the file: a
# second or two.

_SOURCE = "fleet.json"
ROLES = ("member", "spare", "warming", "lost", "quarantined", "drained", "leaving", GIVEN_BACK)


def _derived(
    name: str, kind: Kind, text: str, compute: Callable[[FleetFile], MetricValues], *labels: str
) -> Derived[FleetFile]:
    return Derived(Metric(f"phalanx_fleet_{name}", kind, text, _SOURCE, labels), compute)


def _roles(fleet: FleetFile) -> MetricValues:
    """Return the number of members by role."""
    counts = Counter(member.role for member in fleet.members)
    return [({"role": role}, counts[role]) for role in ROLES]


def _phases(fleet: FleetFile) -> MetricValues:
    return [({"phase": phase.value}, float(phase is fleet.phase)) for phase in FleetPhase]


FLEET_METRICS: tuple[Derived[FleetFile], ...] = (
    _derived("nodes", "gauge", "Nodes by their role in the fleet.", _roles, "role"),
    _derived("expected_nodes", "gauge", "Target number of nodes, spares included.", lambda f: f.expected_nodes),
    _derived("ranks", "gauge", "Ranks of the present epoch.", lambda f: f.ranks),
    _derived("phase", "gauge", "1 for the present phase of the fleet.", _phases, "phase"),
    _derived("epoch", "gauge", "Number of the present epoch.", lambda f: f.epoch),
    _derived("step", "gauge", "Last step completed in this epoch, by heartbeats.", lambda f: f.step if f.step != NO_STEP else None),
    _derived("usual_step_seconds", "gauge", "Seconds that a step usually takes, by heartbeats.", lambda f: f.step_s or None),
    _derived("recoveries_total", "counter", "Epochs that a fault has ended.", lambda f: f.recoveries),
    _derived("regroups_total", "counter", "Epochs that were ended as planned, to grow or shrink.", lambda f: f.regroups),
    _derived("durable_step", "gauge", "Newest step that is on disk.", lambda f: max(f.durable_steps, default=None)),
    _derived("unsaved_steps", "gauge", "Completed steps that are on no disk.", lambda f: f.unsaved_steps),
    _derived("coordinator_reign", "gauge", "Number of the present reign: 1, and one more for each succession.", lambda f: f.reign),
    _derived("coordinator_restarts_total", "counter", "Restarts of the coordinator.", lambda f: f.restarts),
    _derived("stale_messages_total", "counter", "Messages ignored: late, repeated, or from a fenced node.", lambda f: f.stale),
    _derived("refused_total", "counter", "Connections and messages that the coordinator refused.", lambda f: sum(f.refused.values())),
    _derived("state_timestamp_seconds", "gauge", "Unix time of the state that these numbers are of.", lambda f: f.written_unix_s),
    _derived("stopping", "gauge", "1 if the run has a request to save and stop.", lambda f: float(f.stopping)),
)  # fmt: skip


def _of_node(name: str, text: str) -> Metric:
    return Metric(f"phalanx_fleet_node_{name}", "gauge", text, _SOURCE)


ATTACHED = _of_node("attached", "1 if the node's agent is connected to the coordinator.")
SILENT = _of_node("silent_seconds", "Seconds since the node's last heartbeat.")
RANKS = _of_node("ranks", "Ranks that the node holds.")
BARRED = _of_node("quarantined", "1 if the node is quarantined and holds no rank.")
STRAGGLER = _of_node("straggler", "1 if the node is slow: quarantined, or kept for lack of a spare.")
NODE_METRICS = (ATTACHED, SILENT, RANKS, BARRED, STRAGGLER)
_SLOW = (IncidentKind.STRAGGLER, IncidentKind.SLOW_WITHOUT_SPARE)
_SLOW_FOR_S = 900.0
"""A node stays reported as slow for this long. It is named again at each window of steps while it is slow."""


class FleetSampler:
    """Samples of one fleet: the coordinator's own.

    Node labels are cached, since formatting them is most of the work.
    """

    def __init__(self, newest: Callable[[], FleetFile | None], run: str) -> None:
        """``newest`` returns the state that was published last, ``run`` is a label."""
        self._newest, self._run = newest, Labels(run=run)
        self._nodes: dict[str, Labels] = {}

    def samples(self) -> list[Sample]:
        """Return metrics of the last published state: those of the fleet, and of each node that was not given back.

        Empty before the first.
        """
        fleet = self._newest()
        if fleet is None:
            return []
        slow = _stragglers(fleet)
        present = [(self._node(member.name), member) for member in fleet.members if member.role != GIVEN_BACK]
        return [
            *collect(FLEET_METRICS, fleet, self._run),
            *(Sample(ATTACHED, labels, int(member.attached)) for labels, member in present),
            *(Sample(SILENT, labels, member.silent_s) for labels, member in present),
            *(Sample(RANKS, labels, len(member.ranks)) for labels, member in present),
            *(Sample(BARRED, labels, int(member.role == "quarantined")) for labels, member in present),
            *(Sample(STRAGGLER, labels, int(member.name in slow)) for labels, member in present),
        ]

    def _node(self, name: str) -> Labels:
        """Return the labels of a node's samples, which are made once."""
        if name not in self._nodes:
            self._nodes[name] = self._run | {"node": name}
        return self._nodes[name]


def _stragglers(fleet: FleetFile) -> set[str]:
    """Return the nodes that were reported slow in the 15 minutes before the file was written, or are quarantined
    for it.
    """
    since_s = fleet.written_unix_s - _SLOW_FOR_S
    reported = {item.node for item in fleet.happenings if item.unix_s >= since_s and item.kind in _SLOW}
    barred = {item.name for item in fleet.members if item.role == "quarantined" and item.fault in _SLOW}
    return {name for name in reported | barred if name}
