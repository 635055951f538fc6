"""The price of the nodes that a run gets, with the rates of its run file: from a scheduler, a list of hosts, or as they join later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.launch.placing import Order, Topology, TopologyError
from phalanx.run.spec import RunSpec
from phalanx_plan.placing.run_traffic import RunTraffic, traffic_of
from phalanx_plan.placing.verify import Verdict, verify


def fractions(shares: Iterable[str]) -> dict[str, float]:
    """The part of its nodes' rate that may leave a domain, by level, from texts as leaf=0.5. Raises ``TopologyError``."""
    found: dict[str, float] = {}
    for text in shares:
        level, sign, value = text.partition("=")
        try:
            found[level] = float(value)
        except ValueError as error:
            raise TopologyError(f"{text!r} is not LEVEL=FRACTION, as in leaf=0.5 (launch.shares)") from error
        if not sign or not 0 < found[level] <= 1:
            raise TopologyError(f"{text!r}: a fraction is above 0 and at most 1 (launch.shares)")
    return found


def with_rates_of(topology: Topology, spec: RunSpec, traffic: RunTraffic) -> Topology:
    """The network with the rates of its nodes and uplinks: its own where it says them, else those of the run file. Raises ``TopologyError``."""
    rate = topology.node_bytes_per_s or traffic.node_bytes_per_s
    return topology.with_rates(rate, fractions(spec.launch.shares))


def verdict_on(spec: RunSpec, topology: Topology, given: Sequence[str]) -> Verdict:
    """What ``given`` nodes are worth to a run of ``fleet.nodes`` nodes; those beyond are spares.

    ``launch.order`` counts only with a ``launch.unit``, since it has a default.

    Raises:
        TopologyError: They are too few, or one is not in the network.
        RequestError, HardwareError: The run has no price.
    """
    traffic, unit = traffic_of(spec, spec.launch.cluster), spec.launch.unit
    order: Order | None = spec.launch.order if unit else None
    return verify(
        with_rates_of(topology, spec, traffic), given, traffic.shape, traffic.flows, unit=unit, order=order
    )
