"""Hosts that join the fleet of a run: those of ``phalanx fleet grow --hosts``, and agents started by hand.

They are checked as at the run's start. The cost of the fleet with them is compared with that without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, read_fleet_file
from phalanx.fleet.core.settings import formation_of
from phalanx.hardware.cluster import HardwareError
from phalanx.launch.engines import bare
from phalanx.launch.engines.hosts import Host, network_of
from phalanx.launch.engines.hosts_engine import hosts_in, unpriced
from phalanx.launch.engines.order import EngineError, LaunchOrder
from phalanx.launch.engines.submission import (
    Submitted,
    order_of,
)
from phalanx.launch.placing import Topology, TopologyError
from phalanx.launch.planner import PlannerError, PricedNodes, installed_planner, loses_more, too_slow
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import RunSpec

T = TypeVar("T")
_GONE = ("lost", "given back")


def members_of(fleet: FleetFile) -> list[str]:
    """Return the names of the present nodes of a fleet."""
    return [member.name for member in fleet.members if member.role not in _GONE]


def price_with(
    price: Callable[[RunSpec, Topology, Sequence[str]], T],
    spec: RunSpec,
    topology: Topology,
    fleet: FleetFile,
    joining: Sequence[str],
) -> tuple[T | None, T]:
    """Return the costs of a fleet as it is (``None`` if that has no cost) and with the joining nodes, on the ranks
    then possible.

    Members keep their seats when nodes join, so the cost with them, of the best order, is a lower bound. Raises
    ``TopologyError`` if a node is not in the network, ``PlannerError`` or ``HardwareError`` without a cost
    estimate, and ``ValueError`` if no layout is legal.
    """
    members, workers = members_of(fleet), spec.fleet.workers_per_node
    seats = -(-fleet.ranks // workers)
    before = None
    if seats:
        with suppress(TopologyError, PlannerError, HardwareError):
            before = price(_on(spec, seats), topology, members)
    nodes = list(dict.fromkeys([*members, *joining]))
    target_nodes = max(spec.fleet.nodes, seats, len(nodes) - spec.fleet.spares)
    formation = formation_of(_on(spec, target_nodes))
    ranks = formation.largest(min(target_nodes, len(nodes)) * workers)
    return before, price(_on(spec, formation.seats(ranks)), topology, nodes)


def _on(spec: RunSpec, nodes: int) -> RunSpec:
    return replace(spec, fleet=replace(spec.fleet, nodes=nodes))


def verified_hosts(run_dir: Path, made: Submitted, path: Path, by: int) -> tuple[LaunchOrder, list[Host]]:
    """Return the order of a run, and the first ``by`` hosts of a file that are not in its fleet, if all can take
    part.

    Other names of members' machines are passed over. Checks the hosts as at a start, and their cost in the network (see ``_too_far``).
    Raises ``EngineError`` with all reasons against them, or if there are fewer than ``by``. Raises ``RunDirectoryError`` or
    ``FleetFileError`` without a run or fleet.
    """
    spec = read_resolved(RunDirectory(run_dir))
    order = order_of(replace(spec, run_dir=str(run_dir.resolve())), Path(made.working_dir))
    started = [entry.host for entry in bare.started_on(run_dir)]
    fleet = read_fleet_file(run_dir)
    members = members_of(fleet)
    listed = hosts_in(order, str(path.resolve()))
    # A host under two names would give its accelerators to two agents.
    used_machines = {host.machine for host in started if host.name in members}
    hosts = [host for host in listed if host.name not in members and host.machine not in used_machines][:by]
    if len(hosts) < by:
        raise EngineError(f"{path} names {len(hosts)} hosts that are not in the fleet, and {by} are to join")
    wrong = bare.preflight(replace(order, nodes=by, spares=0), hosts)
    if not wrong:
        hosts_by_name = {host.name: host for host in (*_whereabouts(run_dir, fleet), *listed)}
        wrong = _too_far(spec, order, list(hosts_by_name.values()), fleet, hosts)
    if wrong:
        raise EngineError("these hosts cannot join:\n  " + "\n  ".join(wrong))
    return order, hosts


def join_refusal(run_dir: Path, node: str, domain: tuple[str, ...]) -> str:
    """Return why an agent started by hand must not join a fleet from this place in the network; empty if it may.

    It must not if the fleet would lose more of a step with it than before, and more than
    ``launch.most_lost_ms``. Without that limit, known places or prices every node may join. Raises
    ``RunDirectoryError``.
    """
    spec = read_resolved(RunDirectory(run_dir))
    if not spec.launch.most_lost_ms:
        return ""
    own_host = Host(node, "", 0, "", domain)
    try:
        fleet = read_fleet_file(run_dir)
        others = [host for host in _whereabouts(run_dir, fleet) if host.name != node]
        before, after = _prices(spec, [*others, own_host], fleet, [node])
    except (TopologyError, PlannerError, HardwareError, FleetFileError, ValueError):
        return ""
    return (
        too_slow(spec, after) if loses_more(None if before is None else before.lost_s, after.lost_s) else ""
    )


def _whereabouts(run_dir: Path, fleet: FleetFile) -> list[Host]:
    """Return the nodes of a fleet with their places in the network: from fleet.json, else from the record of hosts.

    Nodes of unknown place have none.
    """
    listed = {member.host.name: member.host for member in bare.started_on(run_dir)}
    reported = {
        member.name: Host(member.name, "", 0, "", member.domain) for member in fleet.members if member.domain
    }
    silent = {name: Host(name, "", 0, "") for name in members_of(fleet)}
    return list({**silent, **listed, **reported}.values())


def _too_far(
    spec: RunSpec, order: LaunchOrder, placed: list[Host], fleet: FleetFile, hosts: list[Host]
) -> list[str]:
    """Return why hosts must not join for their place in the network, as a list of one; empty if they may.

    If they may, the verdict on their price is written into the run's folder. Hosts without a price may join,
    unless a limit is set. Raises ``OSError``.
    """
    names = [host.name for host in hosts]
    try:
        before, after = _prices(spec, placed, fleet, names)
    except (TopologyError, PlannerError, HardwareError, ValueError) as error:
        verdict = f"not verified: {error}"
        wrong = unpriced(spec, str(error)) if spec.launch.most_lost_ms else ""
    else:
        verdict = after.sentence
        wrong = (
            too_slow(spec, after)
            if loses_more(None if before is None else before.lost_s, after.lost_s)
            else ""
        )
    if not wrong:
        write_atomically(order.folder / f"given-{names[0]}", f"{verdict}\n".encode())
    return [wrong] if wrong else []


def _prices(
    spec: RunSpec, hosts: Sequence[Host], fleet: FleetFile, joining: Sequence[str]
) -> tuple[PricedNodes | None, PricedNodes]:
    return price_with(installed_planner().price_of, spec, network_of(hosts), fleet, joining)
