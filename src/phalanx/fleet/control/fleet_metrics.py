"""The metrics of a fleet as a whole, from the state that its coordinator publishes in ``fleet.json``.

The published value is frozen, so that a thread can read it while the coordinator goes on deciding; it is as old as the file, a second or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from phalanx.fleet.control.fleet_file import FleetFile
from phalanx.fleet.core.messages import NO_STEP
from phalanx.fleet.core.resize import GIVEN_BACK
from phalanx.fleet.core.state import FleetPhase
from phalanx.observe.events import IncidentKind
from phalanx.observe.metrics.samples import Derived, Found, Kind, Labels, Metric, Sample, collect

_SOURCE = "fleet.json"
ROLES = ("member", "spare", "warming", "lost", "quarantined", "drained", "leaving", GIVEN_BACK)


def _derived(
    name: str, kind: Kind, text: str, compute: Callable[[FleetFile], Found], *labels: str
) -> Derived[FleetFile]:
    return Derived(Metric(f"phalanx_fleet_{name}", kind, text, _SOURCE, labels), compute)


def _roles(fleet: FleetFile) -> Found:
    counts = Counter(member.role for member in fleet.members)
    return [({"role": role}, counts[role]) for role in ROLES]


def _phases(fleet: FleetFile) -> Found:
    return [({"phase": phase.value}, float(phase is fleet.phase)) for phase in FleetPhase]


FLEET_METRICS: tuple[Derived[FleetFile], ...] = (
    _derived("nodes", "gauge", "Nodes by what they are to the fleet.", _roles, "role"),
    _derived("expected_nodes", "gauge", "Nodes that there should be, spares included.", lambda f: f.expected_nodes),
    _derived("ranks", "gauge", "Ranks of the present epoch.", lambda f: f.ranks),
    _derived("phase", "gauge", "1 for the phase that the fleet is in.", _phases, "phase"),
    _derived("epoch", "gauge", "Number of the present epoch.", lambda f: f.epoch),
    _derived("step", "gauge", "Last step completed in this epoch, by heartbeats.", lambda f: f.step if f.step != NO_STEP else None),
    _derived("usual_step_seconds", "gauge", "Seconds that a step usually takes, by heartbeats.", lambda f: f.step_s or None),
    _derived("recoveries_total", "counter", "Epochs that a fault has ended.", lambda f: f.recoveries),
    _derived("regroups_total", "counter", "Epochs that were ended as planned, to grow or shrink.", lambda f: f.regroups),
    _derived("durable_step", "gauge", "Newest step that is on disk.", lambda f: max(f.durable_steps, default=None)),
    _derived("unsaved_steps", "gauge", "Completed steps that are on no disk.", lambda f: f.unsaved_steps),
    _derived("coordinator_reign", "gauge", "1, and one more with each node that has succeeded a lost coordinator.", lambda f: f.reign),
    _derived("coordinator_restarts_total", "counter", "Times that the coordinator was started again.", lambda f: f.restarts),
    _derived("stale_messages_total", "counter", "Messages ignored: late, repeated, or from a fenced node.", lambda f: f.stale),
    _derived("refused_total", "counter", "Connections and messages that the coordinator has refused.", lambda f: sum(f.refused.values())),
    _derived("state_timestamp_seconds", "gauge", "Unix time of the state that these numbers are of.", lambda f: f.written_unix_s),
    _derived("stopping", "gauge", "1 if the run was asked to save and stop.", lambda f: float(f.stopping)),
)  # fmt: skip


def _of_node(name: str, text: str) -> Metric:
    return Metric(f"phalanx_fleet_node_{name}", "gauge", text, _SOURCE)


ATTACHED = _of_node("attached", "1 if the node's agent is connected to the coordinator.")
SILENT = _of_node("silent_seconds", "Seconds since the coordinator has heard from the node.")
RANKS = _of_node("ranks", "Ranks that the node holds.")
BARRED = _of_node("quarantined", "1 if the node was found unfit, and holds no rank for that.")
STRAGGLER = _of_node(
    "straggler", "1 if the node computes slowly: taken out for it, or kept for want of a spare."
)
NODE_METRICS = (ATTACHED, SILENT, RANKS, BARRED, STRAGGLER)
_SLOW = (IncidentKind.STRAGGLER, IncidentKind.SLOW_WITHOUT_SPARE)
_SLOW_FOR_S = 900.0
"""A node that is kept is named again at each window of steps for as long as it is slow."""


class FleetSampler:
    """The samples of one fleet, which is the coordinator's own. The labels of its nodes are kept: writing them is most of the work."""

    def __init__(
        self,
        newest: Callable[[], FleetFile | None],
        run: str,
        failed: Callable[[Metric, Exception], None] = lambda _metric, _error: None,
    ) -> None:
        self._newest, self._run, self._failed = newest, Labels(run=run), failed
        self._nodes: dict[str, Labels] = {}

    def samples(self) -> list[Sample]:
        """Samples of the state that was published last; none before the first."""
        fleet = self._newest()
        if fleet is None:
            return []
        slow = _stragglers(fleet)
        there = [(self._node(member.name), member) for member in fleet.members if member.role != GIVEN_BACK]
        return [
            *collect(FLEET_METRICS, fleet, self._run, self._failed),
            *(Sample(ATTACHED, labels, int(member.attached)) for labels, member in there),
            *(Sample(SILENT, labels, member.silent_s) for labels, member in there),
            *(Sample(RANKS, labels, len(member.ranks)) for labels, member in there),
            *(Sample(BARRED, labels, int(member.role == "quarantined")) for labels, member in there),
            *(Sample(STRAGGLER, labels, int(member.name in slow)) for labels, member in there),
        ]

    def _node(self, name: str) -> Labels:
        if name not in self._nodes:
            self._nodes[name] = self._run | {"node": name}
        return self._nodes[name]


def _stragglers(fleet: FleetFile) -> set[str]:
    """The nodes that are known to be slow now."""
    since_s = fleet.written_unix_s - _SLOW_FOR_S
    named = {one.node for one in fleet.happenings if one.unix_s >= since_s and one.kind in _SLOW}
    barred = {one.name for one in fleet.members if one.role == "quarantined" and one.fault in _SLOW}
    return {name for name in named | barred if name}
