"""``phalanx place``: the nodes of a run, the order of its ranks on them, and their cost in a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from phalanx.cli.errors import explained, refuse_unused
from phalanx.cli.output import text_console
from phalanx.command import (
    Argument,
    AsJson,
    ExistingFolder,
    Heading,
    Option,
    Overrides,
    Sets,
    command_options,
    set_fields,
    written_options,
)
from phalanx.command_help import Command
from phalanx.process.exit_codes import EXIT_REFUSED
from phalanx.run.fields import NOT_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from phalanx.launch.placing import Topology
    from phalanx.run.spec import RunSpec
    from phalanx_plan.placing import Choice, PlacementAssessment
    from phalanx_plan.planner import RunTraffic

_LISTED, _ANY_WIDTH = 6, 10_000


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    run_file: Annotated[Path, Argument()]
    place_name: Annotated[str, Option("--topology", metavar="FILE|slurm|kubernetes"), Heading("Network")]
    """The network: TOML, topology.conf, Topograph's JSON; or the cluster that this machine uses."""
    overrides: Annotated[Overrides, Heading("Run")] = ()
    """Override a field of the run file."""
    nodes: Annotated[int | None, POSITIVE, Sets("fleet.nodes")] = None
    """Nodes that hold ranks; by default fleet.nodes."""
    spares: Annotated[int | None, NOT_NEGATIVE, Sets("fleet.spares")] = None
    """Spare nodes beside them; by default fleet.spares."""
    cluster_name: Annotated[str | None, Option("--cluster"), Sets("launch.cluster"), Heading("Network")] = (
        None
    )
    """The kind of its nodes, for rates and formats: a name of `phalanx hardware`, or a TOML file; by default launch.cluster."""
    shares: Annotated[
        tuple[str, ...], Option("--share", metavar="LEVEL=FRACTION"), Sets("launch.shares")
    ] = ()
    """The part of its nodes' rate that may leave a domain of a level at once; by default that of the topology, else 1."""
    unit: Annotated[int | None, POSITIVE, Heading("Search")] = None
    """Only units of so many nodes; by default the best."""
    order: Literal["data", "pipeline"] | None = None
    """Only this order of ranks; by default the best."""
    no_straddling: Annotated[bool, Option("--whole")] = False
    """Refuse units that straddle the narrowest domains."""
    partition: Annotated[str, Heading("Network")] = ""
    """With slurm: only nodes of this partition."""
    free_only: Annotated[bool, Option("--free")] = False
    """With slurm: only nodes that nobody uses now."""
    allocation: Annotated[str | None, Option(metavar="HOSTS"), Heading("Verify an allocation")] = None
    """Verify these nodes instead, such as n[1-8,12]: what they cost a step."""
    joins: Annotated[ExistingFolder | None, Option("--joining", metavar="RUN_DIR")] = None
    """With --allocation: these nodes are to join the fleet that trains there; verify it as it is with them."""
    most_lost_ms: Annotated[
        float | None,
        NOT_NEGATIVE,
        Option(text=f"With --allocation: exit code {EXIT_REFUSED} if it loses more of a step than this."),
    ] = None
    as_json: AsJson = False


@click.command("place", cls=Command)
@command_options(PlaceOptions)
def command(options: PlaceOptions) -> None:
    """Place the run of RUN_FILE in a network: units of nodes, spares, the order of ranks, and its price.

    Each line is a choice: the size of a unit (nodes that talk most, kept together) and how ranks follow the network's tree. It shows
    how many units straddle a domain, how many nodes units of this size can use, and how long the busiest link of each level needs in a
    step. The price assumes that every byte goes its own way: no collisions (ECMP), no other tenants.

    \b
      phalanx place run.toml --topology slurm
      phalanx place run.toml --topology slurm --nodes 16 --spares 2
      phalanx place configs/llama3-405b.toml --topology fabric.toml --share pod=0.5
      phalanx place run.toml --topology topology.conf --allocation 'n[1-8,12]'
      phalanx place run.toml --topology slurm --allocation 'n[20-23]' --joining runs/big-1f3a9c04
    """
    from phalanx.hardware.cluster import HardwareError
    from phalanx.launch.engines.order import EngineError
    from phalanx.launch.placing import TopologyError, expanded
    from phalanx.launch.topology_files import load_topology
    from phalanx.model.facts.presets import PRESETS
    from phalanx.run.read import read_run, run_file_at
    from phalanx_plan.search.query import PlanRequestError

    if options.place_name != "slurm":
        refuse_unused(written_options(options, "partition", "free_only"), "is for --topology slurm")
    if not options.allocation:
        unused = written_options(options, "joins", "most_lost_ms")
        refuse_unused(unused, "is about nodes that were given: --allocation HOSTS")
    if options.joins is not None:
        refuse_unused(
            written_options(options, "unit", "order", "no_straddling"),
            "members keep their seats when nodes join a fleet (--joining): leave it out",
        )
    with explained(TopologyError, EngineError, HardwareError, PlanRequestError, ValueError):
        spec = read_run(run_file_at(options.run_file), PRESETS, [*options.overrides, *set_fields(options)])
        topology = load_topology(options.place_name, options.partition, free_only=options.free_only)
        if not options.allocation:
            _print_choices(spec, topology, options)
        elif options.joins is not None:
            _print_joining(spec, topology, options.joins, expanded(options.allocation), options)
        else:
            _print_allocation(spec, topology, expanded(options.allocation), options)


def _print_choices(spec: RunSpec, topology: Topology, options: PlaceOptions) -> None:
    """Print the possible placements of the run and its spares, best first, as a table or JSON."""
    from phalanx_plan.placing import choices
    from phalanx_plan.planner import traffic_of, with_rates_of

    traffic = traffic_of(spec, spec.launch.cluster)
    topology = with_rates_of(topology, spec, traffic)
    ranked = choices(
        *(topology, traffic.shape, traffic.flows, spec.fleet.spares),
        unit=options.unit or 0,
        order=options.order,
        no_straddling=options.no_straddling,
    )
    if options.as_json:
        click.echo(json.dumps(_as_json(topology, traffic, ranked)))
    else:
        _print(spec, topology, traffic, ranked)


def _print_allocation(spec: RunSpec, topology: Topology, hosts: Sequence[str], options: PlaceOptions) -> None:
    """Print the run's loss on the allocated nodes; exit with ``EXIT_REFUSED`` if it is over ``most_lost_ms``.

    A run file without a number of nodes or ranks gets all nodes but its spares. Raises ``TopologyError`` if the run
    cannot be placed there.
    """
    from phalanx_plan.placing import verify
    from phalanx_plan.planner import traffic_of, with_rates_of

    spec = _on_all(spec, len(hosts))
    traffic = traffic_of(spec, spec.launch.cluster)
    verdict = verify(
        *(with_rates_of(topology, spec, traffic), hosts, traffic.shape, traffic.flows),
        unit=options.unit or 0,
        order=options.order,
        no_straddling=options.no_straddling,
    )
    _print_verdict(verdict, options)


def _on_all(spec: RunSpec, hosts: int) -> RunSpec:
    """Return the run on all ``hosts`` but its spares if its file sets no number of nodes or ranks.

    Return it unchanged otherwise, or if there are no more hosts than spares.
    """
    if spec.fleet.nodes or spec.parallel.ranks or hosts <= spec.fleet.spares:
        return spec
    return replace(spec, fleet=replace(spec.fleet, nodes=hosts - spec.fleet.spares))


def _choice_json(choice: Choice) -> dict[str, object]:
    """Return one placement for JSON: its units, and the seconds a step spends at the NIC and at each uplink."""
    return {
        "unit_nodes": choice.unit,
        "order": choice.order,
        "units": len(choice.placement.units),
        "straddling": choice.placement.straddling,
        "usable_nodes": choice.usable_nodes,
        "nic_s": choice.price.nic_s,
        "bound_s": choice.price.bound_s,
        "uplink_s": dict(choice.price.uplink_s),
        "slowest_s": choice.price.slowest_s,
        "certified": choice.price.certified,
    }


def _as_json(topology: Topology, traffic: RunTraffic, ranked: list[Choice]) -> dict[str, object]:
    """Return the topology, the run's flows, its predicted step time and all placements, best first, for JSON."""
    best = ranked[0]
    return {
        "topology": {
            "source": topology.source,
            "nodes": len(topology.nodes),
            "free": len(topology.free),
            "levels": [level.name for level in topology.levels],
            "node_bytes_per_s": topology.node_bytes_per_s,
        },
        "flows": [
            {"axis": flow.axis, "pattern": flow.pattern, "ranks": flow.size, "sent_bytes": flow.sent_bytes}
            for flow in traffic.flows
        ],
        "step_s": traffic.step_s,
        "choices": [_choice_json(choice) for choice in ranked],
        "seats": list(best.seats),
        "spares": list(best.placement.spares),
    }


def _print_joining(
    spec: RunSpec, topology: Topology, run_dir: Path, joining: Sequence[str], options: PlaceOptions
) -> None:
    """Print a fleet's loss with the joining nodes. Reads the fleet file in ``run_dir``; raises ClickException if it
    cannot.

    Exits with ``EXIT_REFUSED`` if the loss is over ``most_lost_ms`` and more than without these nodes.
    """
    from phalanx.cli.launch.joining_hosts import price_with
    from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
    from phalanx.launch.planner import loses_more
    from phalanx_plan.planner import verdict_on

    with explained(FleetFileError):
        fleet_file = read_fleet_file(run_dir)
    before, after = price_with(verdict_on, spec, topology, fleet_file, joining)
    is_worse = loses_more(None if before is None else before.lost_s, after.lost_s)
    _print_verdict(after, options, is_worse=is_worse)


def _print_verdict(verdict: PlacementAssessment, options: PlaceOptions, *, is_worse: bool = True) -> None:
    """Print an assessment as a sentence or JSON. Exit with ``EXIT_REFUSED`` if ``is_worse`` and the loss is over ``most_lost_ms``."""
    if options.as_json:
        facts = {"lost_s": verdict.lost_s, "good": verdict.good, "sentence": verdict.sentence}
        click.echo(json.dumps(_choice_json(verdict.best) | facts))
    else:
        click.echo(verdict.sentence)
    if options.most_lost_ms is not None and 1e3 * verdict.lost_s > options.most_lost_ms and is_worse:
        raise SystemExit(EXIT_REFUSED)


def _print(spec: RunSpec, topology: Topology, traffic: RunTraffic, ranked: list[Choice]) -> None:
    """Print the run's traffic, a table of the first ``_LISTED`` placements, and the nodes and spares of the best one in rank order."""
    from rich.table import Table
    from rich.text import Text

    from phalanx.launch.placing import folded
    from phalanx.observe.throughput import format_bytes

    console = text_console()
    if not console.is_terminal:
        console.width = _ANY_WIDTH  # other programs search and cut piped output
    shape, levels = traffic.shape, [level.name for level in topology.levels]
    console.print(
        f"{spec.name}: {shape.layout.ranks:,} ranks on {shape.seats:,} nodes of {shape.ranks_per_node}, {spec.fleet.spares} spares; "
        f"{len(topology.free):,} of {len(topology.nodes):,} nodes free ({topology.source}), "
        f"{topology.node_bytes_per_s / 1e9:.4g} GB/s a node"
    )
    sums = ", ".join(
        f"{flow.axis} ({flow.size}, {flow.pattern.replace('_', ' ')}) {format_bytes(int(flow.sent_bytes))}"
        for flow in traffic.flows
    )
    console.print(Text.assemble(("each rank sends in a step:", "dim"), f" {sums or 'nothing'}"))
    table = Table("unit", "order", "units", "straddling", "usable nodes", "NIC ms", box=None, pad_edge=False)
    for name in levels:
        table.add_column(f"{name} ms")
    table.add_column("")
    for choice in ranked[:_LISTED]:
        cost = choice.price
        seconds = [_ms(cost.uplink_s[name]) for name in levels]
        verdict = "no placement is faster" if cost.certified else f"+{_ms(cost.slowest_s - cost.bound_s)} ms"
        table.add_row(
            *(
                str(choice.unit),
                choice.order,
                str(len(choice.placement.units)),
                str(choice.placement.straddling),
            ),
            *(f"{choice.usable_nodes:,}", _ms(cost.nic_s), *seconds, verdict),
        )
    console.print(table)
    best = ranked[0]
    console.print(
        Text.assemble(
            "the first is taken: ",
            (_ratio(best), "bold"),
            f"; the planner expects {traffic.step_s:.3g} s a step where all is near",
        )
    )
    console.print(f"ranks, in order: {folded(best.seats)}", soft_wrap=True)
    if best.placement.spares:
        console.print(f"spares: {folded(best.placement.spares)}", soft_wrap=True)


def _ratio(best: Choice) -> str:
    """Return how the best placement's slowest link compares with the lower bound, in words."""
    if best.price.certified:
        return "its slowest link is a node's own, so no placement is faster"
    slowest, bound = _ms(best.price.slowest_s), _ms(best.price.bound_s)
    return f"its slowest link needs {slowest} ms of a step, where no placement needs less than {bound} ms"


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds, with four digits below a second."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"
