"""Speed and quality of the placement of nodes: time beside one sort of the same nodes, and cost beside the best placement.

python -m bench.plan.placing

Placing must at least bring the nodes into the order of the tree, so one ``sorted`` of them in the same process is the limit that its time is
compared with. Its cost to a run is compared with the best placement, which a mixed-integer program (HiGHS) finds on small trees.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import mean, median

from bench.running import run_bench
from launch.placing.small_trees import small_case
from phalanx.launch.placing import Level, Shape, Topology, place_units
from phalanx.run.layout import Layout
from phalanx_plan.placing import choices, price
from phalanx_plan.step_cost.traffic import Flow

_TIMES, _SMALL = 21, 100


def network(pods: int, leaves: int, nodes: int, *, scale_up: bool, dead: float = 0.03) -> Topology:
    """Return a tree of ``pods`` x ``leaves`` x ``nodes``; a random share ``dead`` of the nodes is taken."""
    names = {
        f"n{(pod * leaves + leaf) * nodes + node}": (f"pod{pod}", f"leaf{leaf}")
        for pod in range(pods)
        for leaf in range(leaves)
        for node in range(nodes)
    }
    taken = frozenset(Random(0).sample(sorted(names), round(dead * len(names))))
    levels = Level("pod", 0.5), Level("rack" if scale_up else "leaf", 1.0, scale_up)
    return Topology(levels, names, 400e9, taken)


def median_ms(topology: Topology, action: Callable[[Topology], object]) -> float:
    """Return the median time of ``action`` on a fresh copy of the network without cached results, after one call that warms up."""
    times = []
    for _ in range(_TIMES + 1):
        fresh = replace(topology)
        start = time.perf_counter()
        action(fresh)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[1:])


def print_speed(name: str, topology: Topology, per_node: int) -> None:
    """Print the times of one placement, of its price, and of the choice among all units and orders."""
    units = len(topology.free) // 16 - 4
    shape = Shape(Layout(shard=units, tensor=per_node, context=16), per_node)
    flows = [
        Flow("tensor", "ring", per_node, 1, 1e9),
        Flow("context", "ring", 16, per_node, 1e9),
        Flow("shard", "all_to_all", units, 16 * per_node, 1e9),
    ]
    placed = place_units(topology, 16, units)
    paths = topology.nodes
    sort_ms = median_ms(topology, lambda _: sorted(paths, key=lambda node: (paths[node], len(node), node)))
    place_ms = median_ms(topology, lambda fresh: place_units(fresh, 16, units))
    price_ms = median_ms(topology, lambda fresh: price(fresh, placed.nodes, flows, per_node))
    choose_ms = median_ms(topology, lambda fresh: choices(fresh, shape, flows, spares=8))
    print(
        f"{name:24} {len(paths):7,} {shape.layout.ranks:7,} {units:6,} {placed.straddling:8,} {sort_ms:8.2f} {place_ms:8.2f} "
        f"{place_ms / sort_ms:6.2f} {price_ms:8.2f} {choose_ms:9.1f}"
    )


def print_quality(cases: int) -> None:
    """Print the cost over that of the best placement, on small hard trees, for ours, for the order of names, and for a random one."""
    ratios: dict[str, list[float]] = {"phalanx": [], "by name": [], "random": []}
    certified = 0
    for seed in range(cases):
        case = small_case(seed)
        best_s = case.least_slowest_s()
        seats, per_node = case.shape.seats, case.shape.ranks_per_node
        free = list(case.topology.free)
        ours = choices(case.topology, case.shape, case.flows)[0].price
        certified += ours.certified
        slowest = {
            "phalanx": ours.slowest_s,
            "by name": price(case.topology, free[:seats], case.flows, per_node).slowest_s,
            "random": price(case.topology, Random(seed).sample(free, seats), case.flows, per_node).slowest_s,
        }
        for name, seconds in slowest.items():
            ratios[name].append(seconds / best_s if best_s else 1.0)
    print(
        f"\n{cases} small trees, slowest link over that of the best placement; {certified} placements are certified"
    )
    for name, ratios_of in ratios.items():
        equal = sum(ratio < 1 + 1e-6 for ratio in ratios_of)
        print(f"{name:8} equal in {equal:3}, mean {mean(ratios_of):.3f}, worst {max(ratios_of):.2f}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=_SMALL, help="small trees")
    parser.add_argument("--without-large", action="store_true", help="leave the table of large networks out")
    arguments = parser.parse_args()
    if arguments.without_large:
        print_quality(arguments.cases)
        return
    print(
        f"{'network':24} {'nodes':>7} {'ranks':>7} {'units':>6} {'straddle':>8} {'sort ms':>8} {'place ms':>8} {'x sort':>6} {'price ms':>8} "
        f"{'choose ms':>9}"
    )
    print_speed("fat tree 17 x 23 x 32", network(17, 23, 32, scale_up=False), 8)
    print_speed("NVL72 58 x 24 x 18", network(58, 24, 18, scale_up=True), 4)
    print_quality(arguments.cases)


if __name__ == "__main__":
    run_bench(main)
