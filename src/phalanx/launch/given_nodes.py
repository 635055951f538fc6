"""Verifies the nodes that a run gets, whoever gives them: a scheduler, a list of hosts, or somebody who has nodes join later.

The price is that of ``placing/verify.py``. Here is what surrounds it: the network as a list of hosts describes it, rates and limit as the run file
has them, and when nodes are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.launch.engines.hosts import Host
from phalanx.launch.placing.seats import Order
from phalanx.launch.placing.topology import Topology, TopologyError, from_domains
from phalanx.launch.placing.verify import Verdict, verify
from phalanx.launch.run_traffic import RunTraffic, traffic_of
from phalanx.run.spec import RunSpec


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


def network_of(hosts: Sequence[Host]) -> Topology:
    """The network of hosts that name their domains; its levels are "level 1" and on, the widest first.

    Raises ``TopologyError`` if none does, or some do not: where those are is not known, and so no price.
    """
    if not any(host.domain for host in hosts):
        raise TopologyError("no host says where it is in the network: domain=POD/RACK on every line")
    without = [host.name for host in hosts if not host.domain]
    if without:
        raise TopologyError(
            f"{', '.join(without[:4])}: no domain=, and other hosts have one: write it on every line"
        )
    return from_domains({host.name: host.domain for host in hosts}, "the hosts")


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


def too_slow(spec: RunSpec, verdict: Verdict) -> str:
    """Why nodes with this verdict are not to be used: they lose more than ``launch.most_lost_ms``; empty if they may be."""
    limit_ms = spec.launch.most_lost_ms
    if not limit_ms or 1e3 * verdict.lost_s <= limit_ms:
        return ""
    return f"these nodes lose more of a step than launch.most_lost_ms = {limit_ms:g}: {verdict.sentence}. Take others, or allow more"


def loses_more(before: Verdict | None, after: Verdict) -> bool:
    """True if a fleet loses more with the nodes that join it; ``before`` is ``None`` if it has no price without them.

    A fleet that is too slow already is not made so by who joins it.
    """
    return before is None or after.lost_s > before.lost_s * (1 + 1e-9)
