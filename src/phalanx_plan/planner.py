"""Implementation of the core's planner interface (``phalanx.launch.planner``): runs on allocated nodes, and fleets with fewer ranks.

Nodes of a network are priced by the traffic of the run file's own layout, with the rates of the nodes (``phalanx_plan.placing``).

A run in lanes and context tiles may continue with a smaller tensor degree or with a smaller context degree, with the same bits
(``phalanx.run.smaller_degrees``). Which of them gives the shorter step depends on the model, its sequences and the network. Tensor ranks
gather and add hidden states in every layer. Context ranks exchange keys, values and every weight's gradient.

Slots are indivisible. The sum inside a slot has an order, so one rank computes its micro-batches one after the other.
Idle ranks cannot take some of them without changing bits. On ``d`` data-parallel ranks a rank computes up to ``ceil(slots / d)``
slots. If ``l`` ranks leave, the step takes ``ceil(slots / (d - l)) / ceil(slots / d)`` times as long: twice with as many slots as
ranks. More slots come closer to ``d / (d - l)``; each costs an exchange of gradients.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.hardware.catalog import cluster as cluster_named
from phalanx.hardware.cluster import Cluster
from phalanx.launch.placing import Order, Shape, Topology, TopologyError
from phalanx.launch.planner import FirstHalved, Planner, PricedNodes
from phalanx.parallel.divisions import Deal
from phalanx.run.fields import listing
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.layout import Layout, layout_of, layout_problems, replica_ranks
from phalanx.run.smaller_degrees import halves
from phalanx.run.spec import RunSpec
from phalanx_plan.placing import PlacementAssessment, choices, verify
from phalanx_plan.search.alternatives import NetworkCost, Placer
from phalanx_plan.search.layout_text import estimate_written, written_layout
from phalanx_plan.search.query import OWN, PlanRequestError, job_of
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.step_cost.traffic import Flow, flows
from phalanx_plan.workload.candidates import PlannedLayout, divisors
from phalanx_plan.workload.stacks import TrainingJob


class OwnPlanner:
    """Planner that prices runs by this package's models of links and steps."""

    def price_of(self, spec: RunSpec, topology: Topology, nodes: Sequence[str]) -> PricedNodes:
        """Price a run on the nodes: seconds of the slowest link, and of the loss. Raises the errors of ``verdict_on``."""
        verdict = verdict_on(spec, topology, nodes)
        best = verdict.best
        return PricedNodes(
            best.unit, best.order, best.price.slowest_s, verdict.lost_s, verdict.good, verdict.sentence
        )

    def best_placement(self, spec: RunSpec, read_topology: Callable[[], Topology]) -> PricedNodes:
        """Return the best placement on the free nodes of a network, with its loss in seconds of a step and a sentence
        on it.

        ``read_topology`` is called after the run is priced. Raises the errors of ``traffic_of`` and ``choices``.
        """
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
        """Return the degree to halve first; None if at most one may fall."""
        return first_halved(spec, cluster)

    def step_terms(self, spec: RunSpec, ranks: int, cluster: str) -> tuple[float, Mapping[str, float]]:
        """Return the seconds of a step, and of each of its terms."""
        job = job_of(spec, cluster_named(f"{cluster}:{ranks}"))
        step = estimate(job, written_layout(spec, job, ranks))
        return step.step_s, step.time


PLANNER: Planner = OwnPlanner()


# Allocated nodes: their rates, and their assessment. They come from a scheduler, a list of hosts, or as they join later.


def fractions(shares: Iterable[str]) -> dict[str, float]:
    """Parse texts such as leaf=0.5: by level, the share of its nodes' rate that may leave a domain.

    Raises ``TopologyError`` for another form, or a share that is not above 0 and at most 1.
    """
    share_of_level: dict[str, float] = {}
    for text in shares:
        level, sign, value = text.partition("=")
        try:
            share_of_level[level] = float(value)
        except ValueError as error:
            raise TopologyError(f"{text!r} is not LEVEL=FRACTION, as in leaf=0.5 (launch.shares)") from error
        if not sign or not 0 < share_of_level[level] <= 1:
            raise TopologyError(f"{text!r}: a fraction is above 0 and at most 1 (launch.shares)")
    return share_of_level


def with_rates_of(topology: Topology, spec: RunSpec, traffic: RunTraffic) -> Topology:
    """Return the network with the rates of its nodes and uplinks; the run file fills in missing ones. Raises ``TopologyError``."""
    rate = topology.node_bytes_per_s or traffic.node_bytes_per_s
    return topology.with_rates(rate, fractions(spec.launch.shares))


def verdict_on(spec: RunSpec, topology: Topology, nodes: Sequence[str]) -> PlacementAssessment:
    """Assess ``nodes`` for a run of ``fleet.nodes`` nodes; those beyond are spares.

    ``launch.order`` counts only with a ``launch.unit``, since it has a default.

    Raises:
        TopologyError: There are too few nodes, or one is not in the network.
        PlanRequestError, HardwareError: The run has no price.
    """
    traffic, unit = traffic_of(spec, spec.launch.cluster), spec.launch.unit
    order: Order | None = spec.launch.order if unit else None
    return verify(
        with_rates_of(topology, spec, traffic), nodes, traffic.shape, traffic.flows, unit=unit, order=order
    )


# Traffic of a run file's own layout, to place its nodes and to verify them.


@dataclass(frozen=True)
class RunTraffic:
    """Traffic between the ranks of a run in one step."""

    shape: Shape
    flows: tuple[Flow, ...]
    node_bytes_per_s: float
    """Network rate of one node of the planned cluster, in one direction."""
    step_s: float
    """Estimated time of a step if no uplink is too slow."""


def traffic_of(spec: RunSpec, cluster_name: str) -> RunTraffic:
    """Return the flows, seats, node rate and predicted step time of ``spec`` on its fleet.

    The fleet is ``fleet.nodes`` x ``fleet.workers_per_node``, else ``parallel.ranks`` on the cluster's own nodes. A
    cluster name without a count gets that number of ranks.

    Raises:
        PlanRequestError: The run sets no number of ranks, or its layout is impossible or has no price on them.
        HardwareError: There is no such cluster.
    """
    kind = cluster_named(cluster_name)
    per_node = spec.fleet.workers_per_node if spec.fleet.nodes else kind.per_node
    ranks = spec.fleet.nodes * per_node or spec.parallel.ranks
    if not ranks:
        raise PlanRequestError("the run file sets no number of nodes: give --nodes N, or set fleet.nodes")
    if not re.search(r"[:x ]\s*[\d_,]+$", cluster_name):
        kind = cluster_named(f"{cluster_name}:{ranks}")
    spec = dataclasses.replace(spec, model=resolve(spec.model, spec.data.vocab_size))
    problems = layout_problems(spec, ranks)
    if problems:
        raise PlanRequestError(listing(f"{spec.name} cannot be laid out on {ranks} ranks", problems))
    job = job_of(spec, kind)
    layout = written_layout(spec, job, ranks)
    try:
        step_s = estimate(job, layout).step_s
    except (
        ValueError
    ) as error:  # the trainer supports uneven shares of slots; the planner has no price for them
        raise PlanRequestError(f"{spec.name} on {ranks} ranks has no price: {error}") from error
    return RunTraffic(
        Shape(layout_of(spec.parallel, ranks), per_node),
        flows(job, layout, spread_sums=spec.train.reduction == "reproducible"),
        kind.fabric.bytes_per_s.value * per_node,
        step_s,
    )


# Placement of any layout on one network: the search ranks layouts by their cost on the network's real nodes.


def placer_on(topology: Topology, spec: RunSpec) -> Placer:
    """Return a function from a job and its layout to the ``NetworkCost`` of their best placement on the free nodes of a network.
    Spares, unit and order come from the run file; ``launch.order`` counts only with a ``launch.unit``, since it has a
    default. A topology without the rate of its nodes gets that of the planned cluster. The function raises
    ``TopologyError`` for incomplete nodes or too few of them.
    """
    unit = spec.launch.unit
    order: Order | None = spec.launch.order if unit else None

    def place(job: TrainingJob, layout: PlannedLayout) -> NetworkCost:
        """Return the network's cost of a layout in its best placement.

        Raises ``TopologyError`` if it is not whole nodes, or too few are free.
        """
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


# Fewer ranks: the degree that is halved first. Two estimates give it in milliseconds. It becomes a field of the run
# (``fleet.halve_first``) before its fleet starts, so that coordinator and workers agree without a planner.


def first_halved(spec: RunSpec, cluster: Cluster) -> FirstHalved | None:
    """Estimate which degree of a run to halve first, on half of its ranks of ``cluster``'s accelerators: layouts that fit in memory come
    first, then those of a shorter step. Return ``None`` if at most one degree may fall.

    ``spec`` has its model resolved. Raises ``ValueError`` if no estimate is possible: the planner does not know the model's kind, or the
    accelerator lacks the number format.
    """
    ways = halves(spec)
    if len(ways) < 2:
        return None
    ranks = {replica_ranks(parallel) for parallel in ways.values()}
    (half,) = ranks
    half_cluster = replace(cluster, accelerators=half)
    estimates = {
        axis: estimate_written(replace(spec, parallel=parallel), half_cluster, half)
        for axis, parallel in ways.items()
    }
    # Layouts that fit in memory come first, then the shorter step; tensor among equals.
    best = min(estimates, key=lambda axis: (not estimates[axis].fits, estimates[axis].step_s))
    return FirstHalved(best, half, {axis: estimate.step_s for axis, estimate in estimates.items()})


# Loss of a node.


MUCH = 1.5
"""Slowdown of a step after a loss from which it is worth a note."""


@dataclass(frozen=True)
class LostNode:
    """The fleet after the loss of a node."""

    data_ranks: int
    """Remaining data-parallel ranks."""
    slowdown: float
    """Time of a step over its time on the full fleet."""


def lost_node(layout: Layout, ranks_per_node: int, slots: int) -> LostNode | None:
    """Return the data-parallel ranks and the slowdown of ``layout`` without one node; ``None`` if no ranks remain.

    Ranks leave by complete replicas, or by teams if there is one replica. The slowdown is the ratio of rounds of
    slots.
    """
    unit = layout.shard if layout.replicate > 1 else layout.team
    each = layout.pipeline * layout.model_ranks * unit
    remaining = (layout.data_ranks * layout.pipeline * layout.model_ranks - ranks_per_node) // each
    if remaining <= 0:
        return None
    before = Deal(slots, layout.replicate, layout.shard, layout.team)
    shard = layout.shard if layout.replicate > 1 else remaining * unit
    after = Deal(slots, remaining if layout.replicate > 1 else 1, shard, layout.team)
    return LostNode(remaining * unit, after.most_rounds / before.most_rounds)


def better_slots(layout: Layout, ranks_per_node: int, slots: int, most: int) -> int | None:
    """Return the least divisor of ``most`` above ``slots``, divisible by the data ranks, with which a lost node costs
    at most ``MUCH``.

    ``None`` if there is none. ``most`` is the number of micro-batches of a step: a slot has at least one.
    """
    for number in divisors(most):
        if number <= slots or number % layout.data_ranks:
            continue
        after_loss = lost_node(layout, ranks_per_node, number)
        if after_loss is not None and after_loss.slowdown <= MUCH:
            return number
    return None


def lost_node_notes(layout: Layout, ranks_per_node: int, slots: int, most: int) -> tuple[str, ...]:
    """Return a note for the user if a lost node costs more than ``MUCH`` and more slots would reduce that; arguments of
    ``better_slots``. Empty otherwise.
    """
    after_loss = lost_node(layout, ranks_per_node, slots)
    if after_loss is None or after_loss.slowdown <= MUCH:
        return ()
    better = better_slots(layout, ranks_per_node, slots, most)
    if better is None:
        return ()
    improved = lost_node(layout, ranks_per_node, better)
    assert improved is not None
    return (
        f"without a spare, a lost node leaves {after_loss.data_ranks:,} of {layout.data_ranks:,} data-parallel ranks, and a step takes "
        f"{after_loss.slowdown:.3g} times as long: {slots:,} slots are dealt whole. With train.slots = {better} it takes "
        f"{improved.slowdown:.3g} times as long",
    )
