"""``phalanx place``: which nodes a run should get, in which order its ranks lie on them, and what that costs a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.errors import explained, refuse_unused
from phalanx.cli.text_console import text_console

if TYPE_CHECKING:
    from phalanx.launch.placing.choose import Choice
    from phalanx.launch.placing.seats import Order
    from phalanx.launch.placing.topology import Topology
    from phalanx.launch.placing.verify import Verdict
    from phalanx.launch.run_traffic import RunTraffic
    from phalanx.run.spec import RunSpec

REFUSED = 3
"""Exit code for nodes that lose more of a step than they may."""
_LISTED, _ANY_WIDTH = 6, 10_000


@click.command("place")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.option(
    "--topology",
    "place_name",
    required=True,
    metavar="FILE|slurm|kubernetes",
    help="The network: TOML, topology.conf, Topograph's JSON; or the cluster that this machine uses.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a field of the run file."
)
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes that hold ranks; by default fleet.nodes.")
@click.option(
    "--spares", type=click.IntRange(min=0), help="Spare nodes beside them; by default fleet.spares."
)
@click.option(
    "--cluster",
    "cluster_name",
    help="The kind of its nodes, for rates and formats: a name of `phalanx hardware`, or a TOML file; by default launch.cluster.",
)
@click.option(
    "--share",
    "shares",
    multiple=True,
    metavar="LEVEL=FRACTION",
    help="The part of its nodes' rate that may leave a domain of a level at once; by default as the topology says, else 1.",
)
@click.option("--unit", type=click.IntRange(min=1), help="Only units of so many nodes; by default the best.")
@click.option(
    "--order", type=click.Choice(["data", "pipeline"]), help="Only this order of ranks; by default the best."
)
@click.option("--whole", is_flag=True, help="Refuse units that straddle the narrowest domains.")
@click.option("--partition", default="", help="With slurm: only nodes of this partition.")
@click.option("--free", "free_only", is_flag=True, help="With slurm: only nodes that nobody uses now.")
@click.option(
    "--allocation",
    metavar="HOSTS",
    help="Verify these nodes instead, such as n[1-8,12]: what they cost a step.",
)
@click.option(
    "--joining",
    "joins",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="RUN_DIR",
    help="With --allocation: these nodes are to join the fleet that trains there; verify it as it is with them.",
)
@click.option(
    "--most-lost-ms",
    type=click.FloatRange(min=0),
    help=f"With --allocation: exit code {REFUSED} if it loses more of a step than this.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run_file: Path,
    place_name: str,
    overrides: tuple[str, ...],
    nodes: int | None,
    spares: int | None,
    cluster_name: str | None,
    shares: tuple[str, ...],
    unit: int | None,
    order: str | None,
    whole: bool,
    partition: str,
    free_only: bool,
    allocation: str | None,
    joins: Path | None,
    most_lost_ms: float | None,
    as_json: bool,
) -> None:
    """Place the run of RUN_FILE in a network: units of nodes, spares, the order of ranks, and its price.

    Each line is a choice: the size of a unit (nodes that talk most, kept together), how ranks follow the network's tree, how many units
    straddle a domain, how many nodes units of this size can use, and how long the busiest link of each level needs in a step. The price
    assumes that every byte goes its own way: no collisions (ECMP), no other tenants.

    \b
      phalanx place run.toml --topology slurm --nodes 16 --spares 2
      phalanx place configs/llama3-405b.toml --topology fabric.toml --share pod=0.5
      phalanx place run.toml --topology topology.conf --allocation 'n[1-8,12]'
      phalanx place run.toml --topology slurm --allocation 'n[20-23]' --joining runs/big-1f3a9c04
    """
    from phalanx.hardware.tables import HardwareError
    from phalanx.launch.engines.live_topology import load_topology
    from phalanx.launch.engines.tools import EngineError
    from phalanx.launch.placing.host_list import expanded
    from phalanx.launch.placing.topology import TopologyError
    from phalanx.model.facts.presets import PRESETS
    from phalanx.plan.search.query import RequestError
    from phalanx.run.read import read_run

    wanted = _Wanted(
        unit or 0, None if order is None else "pipeline" if order == "pipeline" else "data", whole
    )
    if place_name != "slurm":
        refuse_unused({"--partition": partition, "--free": free_only}, "is for --topology slurm")
    if not allocation:
        about_given = {"--joining": joins, "--most-lost-ms": most_lost_ms}
        refuse_unused(about_given, "is about nodes that were given: --allocation HOSTS")
    if joins is not None:
        refuse_unused(
            {"--unit": unit, "--order": order, "--whole": whole},
            "members keep their seats when nodes join a fleet (--joining): leave it out",
        )
    with explained(TopologyError, EngineError, HardwareError, RequestError, ValueError):
        sized = _sized(nodes, spares, cluster_name, shares)
        spec = read_run(run_file, PRESETS, [*overrides, *sized])
        topology = load_topology(place_name, partition, free_only=free_only)
        if not allocation:
            _tell_choices(spec, topology, wanted, as_json)
        elif joins is not None:
            _tell_joining(spec, topology, joins, expanded(allocation), most_lost_ms, as_json)
        else:
            _tell_given(spec, topology, expanded(allocation), wanted, most_lost_ms, as_json)


@dataclass(frozen=True)
class _Wanted:
    """The limits that options set to a placement; by default there are none."""

    unit: int
    """Nodes of a unit; 0 for any number."""
    order: Order | None
    whole: bool
    """No unit may straddle the narrowest domains."""


def _sized(nodes: int | None, spares: int | None, cluster: str | None, shares: tuple[str, ...]) -> list[str]:
    """``--set`` for those fields that an option names."""
    return [
        *([f"fleet.nodes={nodes}"] if nodes else []),
        *([f"fleet.spares={spares}"] if spares is not None else []),
        *([f"launch.cluster={json.dumps(cluster)}"] if cluster else []),
        *([f"launch.shares={json.dumps(shares)}"] if shares else []),
    ]


def _tell_choices(spec: RunSpec, topology: Topology, wanted: _Wanted, as_json: bool) -> None:
    """Says which placements there are, the best first."""
    from phalanx.launch.given_nodes import with_rates_of
    from phalanx.launch.placing.choose import choices
    from phalanx.launch.run_traffic import traffic_of

    traffic = traffic_of(spec, spec.launch.cluster)
    topology = with_rates_of(topology, spec, traffic)
    found = choices(
        *(topology, traffic.shape, traffic.flows, spec.fleet.spares),
        unit=wanted.unit,
        order=wanted.order,
        whole=wanted.whole,
    )
    if as_json:
        click.echo(json.dumps(_as_json(topology, traffic, found)))
    else:
        _print(spec, topology, traffic, found)


def _tell_given(
    spec: RunSpec,
    topology: Topology,
    given: Sequence[str],
    wanted: _Wanted,
    most_lost_ms: float | None,
    as_json: bool,
) -> None:
    """Says what the run loses on the nodes that were given; exit code ``REFUSED`` if that is more than it may."""
    from phalanx.launch.given_nodes import with_rates_of
    from phalanx.launch.placing.verify import verify
    from phalanx.launch.run_traffic import traffic_of

    spec = _on_all(spec, len(given))
    traffic = traffic_of(spec, spec.launch.cluster)
    verdict = verify(
        *(with_rates_of(topology, spec, traffic), given, traffic.shape, traffic.flows),
        unit=wanted.unit,
        order=wanted.order,
        whole=wanted.whole,
    )
    _tell_verdict(verdict, as_json)
    if most_lost_ms is not None and 1e3 * verdict.lost_s > most_lost_ms:
        raise SystemExit(REFUSED)


def _on_all(spec: RunSpec, given: int) -> RunSpec:
    """The run on all ``given`` nodes but its spares, if nothing says on how many it is to run."""
    if spec.fleet.nodes or spec.parallel.ranks or given <= spec.fleet.spares:
        return spec
    return replace(spec, fleet=replace(spec.fleet, nodes=given - spec.fleet.spares))


def _choice_json(choice: Choice) -> dict[str, object]:
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


def _as_json(topology: Topology, traffic: RunTraffic, found: list[Choice]) -> dict[str, object]:
    best = found[0]
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
        "choices": [_choice_json(choice) for choice in found],
        "seats": list(best.seats),
        "spares": list(best.placement.spares),
    }


def _tell_joining(
    spec: RunSpec,
    topology: Topology,
    run_dir: Path,
    joining: Sequence[str],
    most_lost_ms: float | None,
    as_json: bool,
) -> None:
    """Says what the fleet of a run loses with nodes that are to join it; exit code ``REFUSED`` if they make it lose more than it may."""
    from phalanx.cli.fleet.joining import verdict_with
    from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
    from phalanx.launch.given_nodes import loses_more

    with explained(FleetFileError):
        seen = read_fleet_file(run_dir)
    before, after = verdict_with(spec, topology, seen, joining)
    _tell_verdict(after, as_json)
    if most_lost_ms is not None and 1e3 * after.lost_s > most_lost_ms and loses_more(before, after):
        raise SystemExit(REFUSED)


def _tell_verdict(verdict: Verdict, as_json: bool) -> None:
    if as_json:
        told = _choice_json(verdict.best) | {
            "lost_s": verdict.lost_s,
            "good": verdict.good,
            "sentence": verdict.sentence,
        }
        click.echo(json.dumps(told))
    else:
        click.echo(verdict.sentence)


def _print(spec: RunSpec, topology: Topology, traffic: RunTraffic, found: list[Choice]) -> None:
    from rich.table import Table
    from rich.text import Text

    from phalanx.launch.placing.host_list import folded
    from phalanx.observe.throughput import format_bytes

    console = text_console()
    if not console.is_terminal:
        console.width = _ANY_WIDTH  # what is piped is searched and cut by other programs
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
    for choice in found[:_LISTED]:
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
    best = found[0]
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
    if best.price.certified:
        return "its slowest link is a node's own, so no placement is faster"
    slowest, bound = _ms(best.price.slowest_s), _ms(best.price.bound_s)
    return f"its slowest link needs {slowest} ms of a step, where no placement needs less than {bound} ms"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"
