"""This package's planner behind the interface that the core needs (``phalanx.launch.planner``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from phalanx.hardware.catalog import cluster as cluster_named
from phalanx.hardware.cluster import Cluster
from phalanx.launch.placing import Topology
from phalanx.launch.planner import FirstHalved, Planner, PricedNodes
from phalanx.run.spec import RunSpec
from phalanx_plan.fewer_ranks import first_halved
from phalanx_plan.placing.choose import choices
from phalanx_plan.placing.given_nodes import verdict_on, with_rates_of
from phalanx_plan.placing.run_traffic import traffic_of
from phalanx_plan.search.layout_text import written_layout
from phalanx_plan.search.query import job_of
from phalanx_plan.step_cost.estimate import estimate


class OwnPlanner:
    """Prices by this package's models of links and steps."""

    def price_of(self, spec: RunSpec, topology: Topology, nodes: Sequence[str]) -> PricedNodes:
        """Prices a run on given nodes."""
        verdict = verdict_on(spec, topology, nodes)
        best = verdict.best
        return PricedNodes(
            best.unit, best.order, best.price.slowest_s, verdict.lost_s, verdict.good, verdict.sentence
        )

    def best_placement(self, spec: RunSpec, read_topology: Callable[[], Topology]) -> PricedNodes:
        """Returns the best placement on the free nodes of a network."""
        traffic = traffic_of(spec, spec.launch.cluster)
        network = with_rates_of(read_topology(), spec, traffic)
        best = choices(network, traffic.shape, traffic.flows, spec.fleet.spares)[0]
        cost = best.price
        lost_s = max(0.0, cost.slowest_s - cost.bound_s)
        units = f"{len(best.placement.units)} units of {best.unit}, by {best.order}"
        price = (
            "no placement is faster"
            if cost.certified
            else f"up to {1e3 * (cost.slowest_s - cost.bound_s):.3g} ms of a step lost on uplinks"
        )
        return PricedNodes(best.unit, best.order, cost.slowest_s, lost_s, cost.certified, f"{units}: {price}")

    def first_halved(self, spec: RunSpec, cluster: Cluster) -> FirstHalved | None:
        """Returns the degree to halve first."""
        return first_halved(spec, cluster)

    def step_terms(self, spec: RunSpec, ranks: int, cluster: str) -> tuple[float, Mapping[str, float]]:
        """Returns the seconds of a step, and of each of its terms."""
        job = job_of(spec, cluster_named(f"{cluster}:{ranks}"))
        step = estimate(job, written_layout(spec, job, ranks))
        return step.step_s, step.time


PLANNER: Planner = OwnPlanner()
