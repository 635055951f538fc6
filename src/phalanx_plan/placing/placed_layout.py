"""Places any layout of a run on one network, so that the planner can rank layouts by what they cost where they would really run."""

from __future__ import annotations

from phalanx.launch.placing import Order, Shape, Topology, TopologyError
from phalanx.run.spec import RunSpec
from phalanx_plan.placing.choose import choices
from phalanx_plan.search.alternatives import NetworkCost, Placer
from phalanx_plan.search.query import OWN
from phalanx_plan.step_cost.traffic import flows
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import Job


def placer_on(topology: Topology, spec: RunSpec) -> Placer:
    """The placer of a network.

    Spares, unit and order are as the run file says them; ``launch.order`` counts only with a ``launch.unit``, since it has a default.
    A topology that does not say the rate of its nodes gets that of the planned cluster.
    """
    unit = spec.launch.unit
    order: Order | None = spec.launch.order if unit else None

    def place(job: Job, layout: PlannedLayout) -> NetworkCost:
        per_node = job.cluster.per_node
        if layout.ranks > per_node and layout.ranks % per_node:
            raise TopologyError(
                f"{layout.ranks:,} accelerators are not whole nodes of {per_node}: take a multiple, with --cluster NAME:N"
            )
        shape = Shape(layout.mesh, min(per_node, layout.ranks))
        if shape.seats + spec.fleet.spares > len(topology.free):
            raise TopologyError(
                f"{layout.ranks:,} accelerators and fleet.spares = {spec.fleet.spares} are {shape.seats + spec.fleet.spares:,} nodes of {per_node}, "
                f"and {len(topology.free):,} of the {len(topology.nodes):,} nodes of {topology.source or 'the topology'} are free: take fewer "
                "(--cluster NAME:N), or wait"
            )
        rate = topology.node_bytes_per_s or job.cluster.fabric.bytes_per_s.value * per_node
        sent = flows(
            job, layout, spread_sums=job.stack.name == OWN and spec.train.reduction == "reproducible"
        )
        network = topology.with_rates(rate, {})
        best = choices(network, shape, sent, spec.fleet.spares, unit=unit, order=order)[0]
        cost, added_s = best.price, max(0.0, best.price.slowest_s - best.price.bound_s)
        level = max(cost.uplink_s, key=lambda name: cost.uplink_s[name], default="")
        busy = added_s > 0 and level and cost.uplink_s[level] > cost.nic_s
        return NetworkCost(
            added_s=added_s,
            units=len(best.placement.units),
            unit_nodes=best.unit,
            order=best.order,
            straddling=best.placement.straddling,
            busiest=f"{level} {cost.busiest[level]}" if busy else "",
        )

    return place
