"""``[fleet]``: fault tolerance on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True)
class FleetSpec:
    """Fault tolerance on a fleet of nodes: membership, spares, heartbeats, snapshots and audits. Nothing here changes a bit of
    the weights."""

    nodes: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Number of nodes that hold ranks; 0 means no fleet: the ranks are plain processes of one machine."""
    spares: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Number of spare nodes beside them, whose workers are started and hold no rank until a node is lost."""
    workers_per_node: Annotated[int, FLEET, POSITIVE] = 1
    """Workers on each node; each holds one rank."""
    min_nodes: Annotated[int, FLEET, POSITIVE] = 1
    """Smallest number of nodes to train on; with fewer the run waits, with its state in the agents' memory and in the newest checkpoint."""
    least_tensor: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Smallest tensor degree with which the run continues when too few nodes are left for parallel.tensor, halved as often as needed: the
    bits stay, each rank holds a larger share. It needs model.lanes; 0 means parallel.tensor, so that the run waits for nodes."""
    least_context: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Smallest context degree with which the run continues, likewise. It needs model.context_tiles; 0 means parallel.context."""
    halve_first: Annotated[Literal["planned", "tensor", "context"], FLEET] = "planned"
    """The degree that is halved first, down to its least, where both may fall; "planned" takes the one for which the planner, called once at the
    start of a fleet, predicts the shorter step on half of the ranks, and enough memory."""
    heartbeat_s: Annotated[float, FLEET, ValueRange(above=0)] = 5.0
    """Seconds between two heartbeats of an agent."""
    lease_s: Annotated[float, FLEET, ValueRange(above=0)] = 15.0
    """Seconds without a heartbeat after which an agent, and its node, is lost."""
    worker_lease_s: Annotated[float, FLEET, ValueRange(above=0)] = 1.0
    """Seconds without a heartbeat to its own agent after which a worker counts as hung and is replaced; ten times as long if it is at work,
    as native code is that keeps Python's lock."""
    confirm_s: Annotated[float, FLEET, NOT_NEGATIVE] = 2.0
    """Seconds in which an agent whose connection broke may reconnect, unless a peer reports a broken collective."""
    coordinator_lease_s: Annotated[float, FLEET, ValueRange(above=0)] = 1800.0
    """Seconds without a coordinator after which an agent stops its workers and ends, so that a run without a leader keeps no node."""
    succession_s: Annotated[float, FLEET, NOT_NEGATIVE] = 30.0
    """Seconds without a coordinator after which another node of a cluster leads the run on, and again as many for each next in line; 0 means
    never. Not on local fleets, whose launcher starts the coordinator again."""
    stall_s: Annotated[float, FLEET, ValueRange(above=0)] = 120.0
    """Seconds without a finished step, and at least ten times a usual step, after which the hang is diagnosed."""
    snapshot_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 1
    """Steps between in-memory snapshots of the training state; 0 means none."""
    audit_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Steps between audits for silent data corruption, in which one slot is computed on two nodes; 0 means never."""
    health_checks: Annotated[bool, FLEET] = True
    """If true, nodes are health-checked before they join, and again whenever one of their workers died or hung."""
    straggler_window_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Straggler detection: steps after which the ranks' computing times are compared; a rank that is slow in most windows is
    replaced by a spare. 0 means never."""
    port: Annotated[int, FLEET, ValueRange(at_least=0, at_most=65535)] = 0
    """TCP port that the coordinator listens on; 0 means any free port."""
