"""Orders: the core's output, and the command that each node should have at any moment.

Most orders go to all nodes and differ only in each node's own ranks, so the core issues one, addressed to a group, and
``deliveries`` turns it into a command for each node. A node's *standing order*, the command that it should have now, is
a function of the state: a lost command is repeated by computing it again, and the core keeps no list of what it sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from phalanx.fleet.core.commands import (
    Bind,
    Command,
    Fence,
    FromMemory,
    Park,
    Release,
    Resume,
    SaveSnapshots,
    Shutdown,
)
from phalanx.fleet.core.epochs.epoch_plan import Crowds, holders_for, needs_buddy, share_of_holders
from phalanx.fleet.core.messages import Holder
from phalanx.fleet.core.state import NO_SEAT, Eligibility, FleetPhase, FleetState, Node, RestorePoint

SEATED = "*seated"
"""All nodes that have a seat."""
LIVING = "*living"
"""All nodes that are not fenced."""


class Order(Struct, frozen=True):
    """A command for a node or a group; without a command, the standing order of each."""

    to: str
    command: Command | None = None


def deliveries(state: FleetState, orders: Iterable[Order]) -> Iterator[tuple[str, Command]]:
    """Yields (node, command) for each order. To be called with the state that came with the orders."""
    crowds = Crowds()
    for order in orders:
        for name in _addressed(state, order.to):
            command = order.command
            if command is None and name in state.nodes:
                command = standing_order(state, state.nodes[name], crowds)
            if command is not None:
                yield name, command


def _addressed(state: FleetState, to: str) -> list[str]:
    if to == SEATED:
        return list(state.seats)
    if to == LIVING:
        return [name for name, node in state.nodes.items() if node.alive]
    return [to]


def standing_order(state: FleetState, node: Node, crowds: Crowds) -> Command | None:
    """The command that a node should have now, or None if there is none. ``crowds`` is kept between nodes, for one ``state``."""
    if not node.alive and node.eligibility is Eligibility.LEAVING:
        return Shutdown(node.why)
    if not node.alive:
        return Fence(node.why, node.incarnation)
    if state.phase in (FleetPhase.FINISHED, FleetPhase.FAILED):
        return Shutdown(state.reason)
    if state.phase is FleetPhase.PARKING and node.name in state.awaiting:
        return Park(state.epoch, state.reason, state.planned)
    if state.phase is FleetPhase.SAVING:
        return _save(state, node.name)
    if state.phase is FleetPhase.BINDING:
        return bind(state, node, crowds) if node.seat != NO_SEAT else Release(state.epoch)
    return None


def _save(state: FleetState, name: str) -> SaveSnapshots | None:
    share, source = state.writing.get(name), state.source
    if share is None or not isinstance(source, RestorePoint):
        return None
    return SaveSnapshots(
        epoch=state.epoch,
        attempt=state.fencing.attempt + state.epoch,
        step=source.step,
        ranks=source.ranks,
        states=state.settings.formation.keys(source.ranks),
        share=tuple(share),
    )


def bind(state: FleetState, node: Node, crowds: Crowds) -> Bind:
    """The Bind with which a node that has a seat enters the present epoch. ``crowds`` as in ``standing_order``."""
    ranks = state.settings.formation.ranks_of(node.seat, state.ranks)
    return Bind(
        epoch=state.epoch,
        attempt=state.fencing.attempt + state.epoch,
        ranks=state.ranks,
        places=tuple(enumerate(ranks)),
        meeting_point=state.nodes[state.seats[0]].meeting_points[0],
        resume=_resume(state, node, crowds),
        buddies=_buddies(state, node),
        left_s_ago=None if state.left_s is None else max(0.0, state.now_s - state.left_s),
        left_planned=state.left_planned,
        key=state.epoch_key,
        nonfinite_step=state.doubt.step if state.doubt is not None and state.doubt.confirmed else None,
    )


def _resume(state: FleetState, node: Node, crowds: Crowds) -> Resume:
    source = state.source
    if isinstance(source, RestorePoint):
        if source.ranks == state.ranks:
            return FromMemory(source.step, source.ranks, holders_for(state, source, node, crowds))
        share = share_of_holders(state, source, node, crowds)
        return FromMemory(source.step, source.ranks, share, shared=True)
    return source


def _buddies(state: FleetState, node: Node) -> tuple[Holder, ...]:
    buddy = state.nodes[state.seats[state.ring[node.seat]]]
    own = state.settings.formation.ranks_of(node.seat, state.ranks)
    ranks = tuple(rank for rank in own if needs_buddy(state, state.seats, state.ranks, rank))
    if buddy.name == node.name or not ranks:
        return ()
    return (Holder(ranks, buddy.name, buddy.host, buddy.data_port),)
