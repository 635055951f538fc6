"""Worth of the choice of spares to a step: a month of two large fleets, with the price of the places of their units.

python -m bench.plan.spares [--days 30]

Llama 3 405B on 12,288 nodes. *halls*: 8 H100 a node, units of four nodes, halls of 3,200 with uplinks of a seventh of their nodes' rate, as between the
pods of the Llama 3 cluster (arXiv:2407.21783, section 3.3.1). *racks*: GB200 NVL72, trays of four, 18 a rack, units of 16 trays, so two are left over
in each. The traffic is the planner's, the price is that of ``phalanx place``, failures and decisions are those of ``phalanx simulate fleet``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.running import run_bench
from phalanx.hardware.catalog import cluster
from phalanx.launch.placing import Level, Topology
from phalanx_plan.placing import price
from phalanx_plan.search.query import job_of, run_of_model
from phalanx_plan.simulate.large import Scenario, simulate
from phalanx_plan.simulate.spares import NetworkUse
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.step_cost.traffic import flows
from phalanx_plan.workload.candidates import PlannedLayout

_TOKENS = 131_072
NODES = 12_288


@dataclass(frozen=True)
class Site:
    """A fleet, the layout of the run on it, and the levels of its network."""

    name: str
    kind: str
    per_node: int
    layout: PlannedLayout
    scenario: Scenario
    levels: tuple[Level, ...]
    together: int
    """Spares in one group if they are spread."""


SITES = (
    Site(
        "halls",
        "h100",
        8,
        PlannedLayout(tensor=8, context=4, pipeline=16, shard=192, zero=2),
        Scenario(nodes=NODES, spares=124, unit=4),
        (Level("hall", 1 / 7), Level("switch"), Level("rack")),
        4,
    ),
    Site(
        "racks",
        "gb200-nvl72",
        4,
        PlannedLayout(tensor=8, context=8, pipeline=16, shard=48, zero=2),
        Scenario(nodes=NODES, spares=1536, unit=16, rack_nodes=18, switch_nodes=288, hall_nodes=2880),
        (Level("hall", 0.5), Level("switch"), Level("rack", scale_up=True)),
        2,
    ),
)


def print_site(site: Site, days: float, seed: int) -> None:
    """Print a line for each way to place spares and to choose among them."""
    kind = cluster(f"{site.kind}:{NODES * site.per_node}")
    job = job_of(run_of_model("llama3-405b", _TOKENS, 16 * site.layout.data), kind)
    sent, step_s = flows(job, site.layout), estimate(job, site.layout).step_s
    scenario = replace(site.scenario, days=days, seed=seed, step_s=step_s)
    domains = {str(node): scenario.domain(node) for node in range(scenario.nodes + scenario.spares)}
    network = Topology(site.levels, domains, kind.fabric.bytes_per_s.value * site.per_node)
    last = [NetworkUse(math.nan, (math.nan,) * len(site.levels))]

    def step_cost(seats: Sequence[str]) -> NetworkUse:
        # While a fleet is too small for the layout, the price of the last full one applies.
        if len(seats) == NODES:
            cost = price(network, seats, sent, site.per_node)
            last[0] = NetworkUse(cost.slowest_s, tuple(cost.left_bytes[level.name] for level in site.levels))
        return last[0]

    least_s = price(network, list(domains)[:NODES], sent, site.per_node).bound_s
    print(
        f"\n{site.name}: {site.layout} on {kind.key}, {step_s:.2f} s a step; no placement needs less than {least_s:.3f} s of the network"
    )
    levels = [f"{level.name} torn" for level in site.levels] + [
        f"TB from {level.name}" for level in site.levels
    ]
    print(
        f"{'spares':16} {'chosen':14} {''.join(f'{name:>15}' for name in levels)} {'network s':>10} {'goodput':>8} {'with it':>8}"
    )
    for together in (0, site.together):
        report = simulate(replace(scenario, spares_together=together), step_cost=step_cost)
        for name, kept in report.units_kept.items():
            torn = "".join(f"{units:15.1f}" for units in kept.torn_units)
            left = "".join(f"{size / 1e12:15.1f}" for size in kept.network.left_bytes)
            # At worst, none of the network time beyond the least is hidden behind computing.
            longer = 1 + max(0.0, kept.network.step_s - least_s) / step_s
            print(
                f"{'spread' if together else 'the last nodes':16} {name:14} {torn}{left} {kept.network.step_s:10.3f} {report.goodput:8.2%} "
                f"{report.goodput / longer:8.2%}"
            )
        print(f"{'':16} {report.recoveries:,} recoveries, at least {report.fewest_spares} spares ready")


def main() -> None:
    """Print a table for each site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    for site in SITES:
        print_site(site, options.days, options.seed)


if __name__ == "__main__":
    run_bench(main)
