"""The size of a fleet changes by request: nodes are given back to the cluster, and others are let in, with no step computed twice.

A node that is to go is *leaving*: it may hold no rank any more, so the epoch is left at a step boundary and the next one is formed without it.
Its memory still holds snapshots, perhaps the only copies of the newest step, so it goes only once the members have taken snapshots of their own
since then, or the step is on disk. Then it is told that it is given back, and its agent ends. A node leaves because an operator has asked for it
(``phalanx fleet shrink``), or because its own agent says so, which was told by its scheduler.

What the run computes does not depend on the number of nodes, so giving back and taking again changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from phalanx.fleet.core import messages as m
from phalanx.fleet.core.commands import Fresh, Shutdown
from phalanx.fleet.core.epochs.epoch_plan import ranks_of_nodes
from phalanx.fleet.core.orders import Order
from phalanx.fleet.core.state import (
    NO_SEAT,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    change,
    forget_copies,
    note,
)
from phalanx.observe.events import IncidentKind

GIVEN_BACK = "given back"


class CannotShrinkError(ValueError):
    """The nodes cannot be given back; the message says why and what can."""


def choose(state: FleetState, by: int, leader: str) -> tuple[str, ...]:
    """The nodes to give back if ``by`` are wanted: unfit ones first, then members from the last seat on, then the rest.

    The last seats are neighbors in the network, so that whoever gets the nodes finds them close together.

    Args:
        leader: The node on whose machine the coordinator runs, which stays; empty if there is none.

    Raises:
        CannotShrinkError: There are too few nodes for the run without them.
    """

    def rank(node: Node) -> tuple[int, int, str]:
        if node.eligibility is not Eligibility.GOOD:
            return 0, 0, node.name
        return (1, -node.seat, "") if node.seat != NO_SEAT else (2, 0, node.name)

    present = [
        node
        for node in state.nodes.values()
        if node.alive and node.name != leader and node.eligibility is not Eligibility.LEAVING
    ]
    chosen = tuple(node.name for node in sorted(present, key=rank)[:by])
    if len(chosen) < by:
        raise CannotShrinkError(f"by {by}: there are {len(present)} nodes beside the one that leads")
    require_enough(state, chosen)
    return chosen


def require_enough(state: FleetState, names: tuple[str, ...]) -> None:
    """Raises ``CannotShrinkError`` if too few nodes would be left without ``names``."""
    going, settings = set(names), state.settings
    good = sum(
        node.alive and node.eligibility is Eligibility.GOOD and node.name not in going
        for node in state.nodes.values()
    )
    if not ranks_of_nodes(settings, good, settings.min_nodes):
        per_node = settings.formation.workers_per_node
        least = max(settings.min_nodes, -(-settings.formation.legal[0] // per_node))
        raise CannotShrinkError(
            f"{good} nodes would be left, and the run needs {least} (fleet.min_nodes, and whole replicas); phalanx fleet stop saves and ends it"
        )


def give_back(state: FleetState, event: m.GiveBack, orders: list[Order]) -> None:  # noqa: ARG001
    """Lets nodes leave, and wants as many fewer as were members."""
    going = [
        node
        for name in event.nodes
        if (node := state.nodes.get(name)) is not None
        and node.alive
        and node.eligibility is not Eligibility.LEAVING
    ]
    members = sum(node.seat != NO_SEAT and node.eligibility is Eligibility.GOOD for node in going)
    settings = state.settings
    state.settings = replace(
        settings,
        wanted_nodes=max(1, settings.wanted_nodes - members),
        expected_nodes=max(0, settings.expected_nodes - len(going)),
    )
    for node in going:
        leave(state, node, "given back by the operator")


def leave(state: FleetState, node: Node, why: str) -> None:
    """Lets a node leave: it holds no rank from the next epoch on."""
    if node.eligibility is Eligibility.LEAVING:
        return
    note(state, node.name, why)
    change(state, node, eligibility=Eligibility.LEAVING, why=why, fault=IncidentKind.NOTE)


def enlarge(state: FleetState, event: m.Enlarge, orders: list[Order]) -> None:  # noqa: ARG001
    """Wants more nodes from now on; they take ranks when they are there."""
    settings = state.settings
    formation = replace(settings.formation, legal=event.legal, fewer=event.fewer)
    note(state, "", f"the operator wants {event.wanted_nodes} nodes", level="info")
    state.settings = replace(
        settings,
        formation=formation,
        wanted_nodes=event.wanted_nodes,
        expected_nodes=event.expected_nodes,
    )


def release(state: FleetState, orders: list[Order]) -> None:
    """Ends the agents of the nodes that are leaving, once the fleet needs nothing of theirs."""
    if not state.leaving or state.phase is not FleetPhase.RUNNING or not _has_moved_on(state):
        return
    for node in list(_idle(state)):
        note(state, node.name, GIVEN_BACK, level="info")
        forget_copies(state, node.name)
        change(state, state.nodes[node.name], alive=False, why=GIVEN_BACK, meeting_points=(), held=())
        state.suspects.pop(node.name, None)
        state.silent.discard(node.name)
        orders.append(Order(node.name, Shutdown(GIVEN_BACK)))


def _idle(state: FleetState) -> Iterator[Node]:
    for name in sorted(state.leaving):
        node = state.nodes[name]
        if node.seat == NO_SEAT and not node.engaged:
            yield node


def _has_moved_on(state: FleetState) -> bool:
    """True if what the present epoch was restored from is not needed any more: it has newer snapshots, or the step is on disk."""
    source, every = state.source, state.settings.snapshot_every_steps
    if isinstance(source, Fresh) or not every or max(state.durable, default=m.NO_STEP) >= source.step:
        return True
    # A step more than needed: a snapshot is copied, and sent to its buddy, while the next step is computed.
    return state.step > source.step + every
