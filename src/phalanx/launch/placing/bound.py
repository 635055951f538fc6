"""Bounds from below what the nodes' own links need in a step, over all placements: what a certificate compares with.

A node sends the same wherever it lies, but for what stays inside its scale-up domain. Such a domain has at most so many nodes, so a
group of ranks that spans more nodes lies in several domains: of an even exchange among n ranks in p parts, the ranks of the smallest part
send to n - floor(n / p) others; around a ring or along a chain, some node sends to the next domain. The bound adds what every node must
send and the most that some node must send besides. It holds for every placement, and can be below the best one (tests compare both with a
mixed-integer program).
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.step_cost.traffic import Flow


def least_nic_bytes(flows: Sequence[Flow], ranks_per_node: int, domain_nodes: int) -> float:
    """Bytes that the busiest node sends to other scale-up domains in a step, at least.

    Args:
        flows: Groups of ranks, and what each sends; every rank is in a group of each flow.
        ranks_per_node: Consecutive ranks that share a node.
        domain_nodes: Nodes of the largest scale-up domain.
    """
    every, beyond = 0.0, 0.0
    for flow in flows:
        each, some = _node_bytes(flow, ranks_per_node, domain_nodes)
        every += each
        beyond = max(beyond, some - each)
    return every + beyond


def _node_bytes(flow: Flow, ranks_per_node: int, domain_nodes: int) -> tuple[float, float]:
    """Bytes of one flow that every node, and that some node, sends to other domains at least."""
    # Ranks of one group that can be in one domain.
    most_ranks = domain_nodes * min(flow.size, -(-ranks_per_node // flow.stride))
    if flow.size <= most_ranks:
        return 0.0, 0.0
    # Where groups fill the same nodes, what holds for one rank of a node holds for all.
    alike = flow.stride % ranks_per_node == 0 or ranks_per_node % flow.stride == 0
    if flow.pattern == "all_to_all":
        to_each = flow.sent_bytes / (flow.size - 1)
        smallest = flow.size // -(-flow.size // most_ranks)
        each = ranks_per_node * to_each * (flow.size - most_ranks)
        some = ranks_per_node * to_each * (flow.size - smallest) if alike else each
        return each, max(each, some)
    return 0.0, flow.sent_bytes * (min(flow.stride, ranks_per_node) if alike else 1)
