"""What nodes are worth that are about to join a fleet: the price of the whole fleet with them, beside the fleet without."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from phalanx.fleet.control.fleet_file import FleetFile
from phalanx.fleet.core.settings import formation_of
from phalanx.hardware.tables import HardwareError
from phalanx.launch.given_nodes import verdict_on
from phalanx.launch.placing.topology import Topology, TopologyError
from phalanx.launch.placing.verify import Verdict
from phalanx.plan.search.query import RequestError
from phalanx.run.spec import RunSpec

_GONE = ("lost", "given back")


def members_of(seen: FleetFile) -> list[str]:
    """Names of the nodes of a fleet that are there."""
    return [member.name for member in seen.members if member.role not in _GONE]


def verdict_with(
    spec: RunSpec, topology: Topology, seen: FleetFile, joining: Sequence[str]
) -> tuple[Verdict | None, Verdict]:
    """The verdicts on a fleet as it is (``None`` if that has no price) and with the nodes that join it, on as many ranks as it then can have.

    Members keep their seats when nodes join, so the price of the fleet with them, which is that of the best order, is the least it can be.

    Raises:
        TopologyError: A node is not in the network.
        RequestError, HardwareError: The run has no price.
        ValueError: No layout is legal.
    """
    members, workers = members_of(seen), spec.fleet.workers_per_node
    seats = -(-seen.ranks // workers)
    before = None
    if seats:
        with suppress(TopologyError, RequestError, HardwareError):
            before = verdict_on(_on(spec, seats), topology, members)
    nodes = list(dict.fromkeys([*members, *joining]))
    wanted = max(spec.fleet.nodes, seats, len(nodes) - spec.fleet.spares)
    formation = formation_of(_on(spec, wanted))
    ranks = formation.largest(min(wanted, len(nodes)) * workers)
    return before, verdict_on(_on(spec, formation.seats(ranks)), topology, nodes)


def _on(spec: RunSpec, nodes: int) -> RunSpec:
    return replace(spec, fleet=replace(spec.fleet, nodes=nodes))
