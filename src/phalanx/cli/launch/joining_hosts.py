"""Hosts that join the fleet of a run: those of ``phalanx fleet grow --hosts``, and agents started by hand.

They are checked as at the run's start, and the fleet with them has its price beside the fleet without them.
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


def members_of(seen: FleetFile) -> list[str]:
    """Names of the nodes of a fleet that are there."""
    return [member.name for member in seen.members if member.role not in _GONE]


def price_with(
    price: Callable[[RunSpec, Topology, Sequence[str]], T],
    spec: RunSpec,
    topology: Topology,
    seen: FleetFile,
    joining: Sequence[str],
) -> tuple[T | None, T]:
    """The prices of a fleet as it is (``None`` if that has no price) and with the nodes that join it, on as many ranks as it then can have.

    Members keep their seats when nodes join, so the price of the fleet with them, which is that of the best order, is the least it can be.

    Raises:
        TopologyError: A node is not in the network.
        PlannerError, HardwareError: The run has no price.
        ValueError: No layout is legal.
    """
    members, workers = members_of(seen), spec.fleet.workers_per_node
    seats = -(-seen.ranks // workers)
    before = None
    if seats:
        with suppress(TopologyError, PlannerError, HardwareError):
            before = price(_on(spec, seats), topology, members)
    nodes = list(dict.fromkeys([*members, *joining]))
    wanted = max(spec.fleet.nodes, seats, len(nodes) - spec.fleet.spares)
    formation = formation_of(_on(spec, wanted))
    ranks = formation.largest(min(wanted, len(nodes)) * workers)
    return before, price(_on(spec, formation.seats(ranks)), topology, nodes)


def _on(spec: RunSpec, nodes: int) -> RunSpec:
    return replace(spec, fleet=replace(spec.fleet, nodes=nodes))


def verified_hosts(run_dir: Path, made: Submitted, path: Path, by: int) -> tuple[LaunchOrder, list[Host]]:
    """The first ``by`` hosts of a file, all of which can take part and are near enough to the fleet, and the order of its run.

    Raises:
        EngineError: With everything that keeps them from it.
        RunDirectoryError, FleetFileError: There is no run, or no fleet.
    """
    spec = read_resolved(RunDirectory(run_dir))
    order = order_of(replace(spec, run_dir=str(run_dir.resolve())), Path(made.working_dir))
    started = [one.host for one in bare.started_on(run_dir)]
    seen = read_fleet_file(run_dir)
    members = members_of(seen)
    listed = hosts_in(order, str(path.resolve()))
    # Under another name a host would give its accelerators to two agents.
    taken = {host.machine for host in started if host.name in members}
    hosts = [host for host in listed if host.name not in members and host.machine not in taken][:by]
    if len(hosts) < by:
        raise EngineError(f"{path} names {len(hosts)} hosts that are not in the fleet, and {by} are to join")
    wrong = bare.preflight(replace(order, nodes=by, spares=0), hosts)
    if not wrong:
        known = {host.name: host for host in (*_whereabouts(run_dir, seen), *listed)}
        wrong = _too_far(spec, order, list(known.values()), seen, hosts)
    if wrong:
        raise EngineError("these hosts cannot join:\n  " + "\n  ".join(wrong))
    return order, hosts


def why_not_here(run_dir: Path, node: str, domain: tuple[str, ...]) -> str:
    """Why an agent that was started by hand is not to join a fleet from this place in the network; empty if it may.

    A fleet some of whose nodes do not say where they are takes everybody. Raises ``RunDirectoryError``.
    """
    spec = read_resolved(RunDirectory(run_dir))
    if not spec.launch.most_lost_ms:
        return ""
    own = Host(node, "", 0, "", domain)
    try:
        seen = read_fleet_file(run_dir)
        others = [host for host in _whereabouts(run_dir, seen) if host.name != node]
        before, after = _prices(spec, [*others, own], seen, [node])
    except (TopologyError, PlannerError, HardwareError, FleetFileError, ValueError):
        return ""
    return (
        too_slow(spec, after) if loses_more(None if before is None else before.lost_s, after.lost_s) else ""
    )


def _whereabouts(run_dir: Path, seen: FleetFile) -> list[Host]:
    """The nodes of a fleet with their places in the network: as they say themselves, else as the file of hosts said that they were started by."""
    listed = {one.host.name: one.host for one in bare.started_on(run_dir)}
    said = {one.name: Host(one.name, "", 0, "", one.domain) for one in seen.members if one.domain}
    silent = {name: Host(name, "", 0, "") for name in members_of(seen)}
    return list({**silent, **listed, **said}.values())


def _too_far(
    spec: RunSpec, order: LaunchOrder, known: list[Host], seen: FleetFile, hosts: list[Host]
) -> list[str]:
    """Why hosts are not to join for where they are in the network; empty if they may. Notes the verdict in the run's folder."""
    names = [host.name for host in hosts]
    try:
        before, after = _prices(spec, known, seen, names)
    except (TopologyError, PlannerError, HardwareError, ValueError) as error:
        told = f"not verified: {error}"
        wrong = unpriced(spec, str(error)) if spec.launch.most_lost_ms else ""
    else:
        told = after.sentence
        wrong = (
            too_slow(spec, after)
            if loses_more(None if before is None else before.lost_s, after.lost_s)
            else ""
        )
    if not wrong:
        write_atomically(order.folder / f"given-{names[0]}", f"{told}\n".encode())
    return [wrong] if wrong else []


def _prices(
    spec: RunSpec, hosts: Sequence[Host], seen: FleetFile, joining: Sequence[str]
) -> tuple[PricedNodes | None, PricedNodes]:
    return price_with(installed_planner().price_of, spec, network_of(hosts), seen, joining)
