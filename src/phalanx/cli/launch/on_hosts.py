"""Runs on machines without a scheduler, hosts through ssh or this one: their submission, and hosts that join a running fleet."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import click

from phalanx.fleet.control.fleet_file import FleetFile, FleetFileError, read_fleet_file
from phalanx.fleet.core.settings import formation_of
from phalanx.hardware.cluster import HardwareError
from phalanx.launch.engines import bare
from phalanx.launch.engines.hosts import HERE, Host, network_of, read_hosts, start_script
from phalanx.launch.engines.order import EngineError, LaunchOrder
from phalanx.launch.engines.standing import refuse_second
from phalanx.launch.engines.submission import (
    Submitted,
    forget_stopped,
    how_to_follow,
    only_submission,
    order_of,
    read_record,
    recorded,
    refuse_finished,
    write_files,
)
from phalanx.launch.placing import Topology, TopologyError
from phalanx.launch.planner import PlannerError, PricedNodes, installed_planner, loses_more, too_slow
from phalanx.run.directory.files import read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.spec import RunSpec

_THIS_MACHINE = Host("this-machine", HERE, 0, "127.0.0.1")


def submit_to_hosts(spec: RunSpec, working_dir: Path, *, dry_run: bool, as_json: bool) -> None:
    """Starts a run on its hosts, and leaves it to itself. Raises ``EngineError`` with everything that keeps it from starting."""
    order, engine = order_of(spec, working_dir), spec.launch.engine
    listed = [_THIS_MACHINE] if engine == "local" else hosts_in(order, order.launch.hosts)
    # As many as the run needs, spares included; all if there are fewer, which the checks then say.
    hosts = listed[: order.all_nodes] if engine == "ssh" else listed
    scripts = {host.name: start_script(order, host, hosts[0], "WORD") for host in hosts}
    if dry_run:
        _demand(bare.problems(order, hosts))
        shown = "\n".join(f"# on {name}\n{script}" for name, script in scripts.items())
        click.echo(
            json.dumps({"scripts": scripts, "run_dir": spec.run_dir}) if as_json else shown, nl=as_json
        )
        return
    where = "this machine" if engine == "local" else f"{len(hosts)} hosts"
    refuse_finished(order)
    with only_submission(order):
        spec, verdict = _verified(order, spec, engine, listed, hosts)
        write_files(order, spec, scripts[hosts[0].name])
        with recorded(order, engine, where, hosts[0].name) as made:
            bare.start(order, hosts)
    if as_json:
        lost = {} if verdict is None else {"lost_s": verdict.lost_s, "good": verdict.certified}
        click.echo(json.dumps({**asdict(made), "run_dir": str(order.run_dir), **lost}))
        return
    click.echo(f"started on {where}, and needs this terminal no more; run directory {order.run_dir}")
    if verdict is not None:
        click.echo(f"  placement: {verdict.sentence}")
    click.echo(how_to_follow(order.run_dir))


def _verified(
    order: LaunchOrder, spec: RunSpec, engine: str, listed: list[Host], hosts: list[Host]
) -> tuple[RunSpec, PricedNodes | None]:
    """A run that can start on the first ``hosts`` of those that are ``listed``, with what they are worth to it, where that is known.

    Raises ``EngineError`` with everything that keeps it from starting.
    """
    refuse_second(order.run_dir, read_record(order.run_dir))
    forget_stopped(order)
    wrong = bare.preflight(order, hosts)
    verdict, why_not = _verdict(spec, listed, hosts) if engine == "ssh" and not wrong else (None, "")
    if spec.launch.most_lost_ms and not wrong and engine == "ssh":
        wrong += filter(None, [too_slow(spec, verdict) if verdict else unpriced(spec, why_not)])
    _demand(wrong)
    if verdict is not None and not spec.launch.unit:
        launch = replace(spec.launch, unit=verdict.unit, order=verdict.order)
        spec = replace(spec, launch=launch)
    if engine == "ssh":
        told = verdict.sentence if verdict else f"not verified: {why_not}"
        try:
            write_atomically(order.given, f"{told}\n".encode())
        except OSError as error:
            raise EngineError(
                f"cannot write {order.given}: {error.strerror}; give another run_dir"
            ) from error
    return spec, verdict


def _demand(wrong: list[str]) -> None:
    if wrong:
        raise EngineError("this run cannot start:\n  " + "\n  ".join(wrong))


def _verdict(spec: RunSpec, listed: list[Host], hosts: list[Host]) -> tuple[PricedNodes | None, str]:
    """What the hosts are worth to the run in the network of all that are listed; or why that has no price."""
    try:
        return installed_planner().price_of(spec, network_of(listed), [host.name for host in hosts]), ""
    except (TopologyError, PlannerError, HardwareError) as error:
        return None, str(error)


def unpriced(spec: RunSpec, why_not: str) -> str:
    """Why hosts without a price are not used where a limit was set."""
    return f"launch.most_lost_ms = {spec.launch.most_lost_ms:g} cannot be verified: {why_not}. Or take the limit out"


def hosts_in(order: LaunchOrder, path: str) -> list[Host]:
    """The hosts in a file. Raises ``EngineError``."""
    if not path:
        raise EngineError("which hosts? --hosts FILE, or launch.hosts in the run file")
    try:
        hosts = read_hosts(read_small(order.working_dir / path, follow=True).decode("utf-8-sig"))
    except OSError as error:
        raise EngineError(f"launch.hosts: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EngineError(f"launch.hosts: {path} is no text: write one host a line") from error
    if not hosts:
        raise EngineError(f"launch.hosts: {path} names no host")
    return hosts


# Hosts that are to join the fleet of a run: those of ``phalanx fleet grow --hosts``, and agents started by hand.
#
# They are verified, and the fleet with them has its price beside the fleet without them.

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
