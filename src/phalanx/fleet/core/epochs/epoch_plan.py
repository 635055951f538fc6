"""Plans of epochs, and the orders that carry them out. Pure functions.

A plan has the number of ranks, the buddy of each seat, and the state to restore.
``phalanx.fleet.core.epochs.seating`` assigns nodes to seats. The number of ranks changes, by whole replicas,
only when there are too few spares, or more nodes than before. Second copies of snapshots go to a *buddy* in
another failure domain (after Gemini, SOSP 2023, whose copies are placed so that a failure of one group loses
none). A snapshot can be restored when living nodes hold each of its different states; ranks that differ only
in the replicate axis hold the same one.

Orders are the core's output. ``standing_order`` is the command that a node should have at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from msgspec import Struct

from phalanx.fleet.core import commands as c
from phalanx.fleet.core.epochs.seating import common_levels, deal
from phalanx.fleet.core.messages import NO_STEP, Holder
from phalanx.fleet.core.settings import CoreSettings
from phalanx.fleet.core.state import (
    NO_SEAT,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    RestorePoint,
    StateSource,
)

HOLDERS_NAMED = 3
"""Holders listed for one state in a Bind; no more, so that messages stay small."""
_FEW = 8
"""The number of holders of a state up to which each member finds its nearest by itself."""


class EpochPlan(Struct, frozen=True):
    """The next epoch."""

    ranks: int
    seats: tuple[str, ...]
    ring: tuple[int, ...]
    ring_level: int
    source: StateSource


# --- ranks ----------------------------------------------------------------------------------------


def possible_ranks(state: FleetState) -> int:
    """Return the largest legal number of ranks with the nodes that are usable now; 0 if they are too few."""
    usable = len(state.seats) - len(state.vacant) + len(state.spares)
    return ranks_of_nodes(state.settings, usable, state.settings.min_nodes)


def can_do_without(state: FleetState, names: set[str]) -> bool:
    """Return True if the nodes that are usable now would suffice for an epoch without ``names``."""
    seated = {name for seat, name in enumerate(state.seats) if seat not in state.vacant}
    usable = len((seated | state.spares) - names)
    return ranks_of_nodes(state.settings, usable, state.settings.min_nodes) > 0


def is_needed(state: FleetState, name: str) -> bool:
    """Return True if there are enough nodes for an epoch, but not without ``name``.

    Drained and leaving nodes do not count.
    """
    unavailable = (Eligibility.DRAINED, Eligibility.LEAVING)
    leaving = {node.name for node in state.nodes.values() if node.eligibility in unavailable}
    return can_do_without(state, leaving) and not can_do_without(state, leaving | {name})


def ranks_without_started_spares(state: FleetState) -> int:
    """Return the largest legal number of ranks on the ready nodes of an unformed fleet, without those started as
    spares; 0 if too few.
    """
    ready = sum(not state.nodes[name].started_as_spare for name in state.spares)
    return ranks_of_nodes(state.settings, ready, state.settings.min_nodes)


def ranks_of_nodes(settings: CoreSettings, nodes: int, least: int) -> int:
    """Return the largest legal number of ranks on ``nodes`` nodes, at most on the configured number of nodes.

    0 if they are fewer than ``least``, or no layout fits.
    """
    if nodes < least:
        return 0
    per_node = settings.formation.workers_per_node
    return settings.formation.largest(min(nodes, settings.wanted_nodes) * per_node)


def plan_epoch(state: FleetState) -> EpochPlan | None:
    """Return the plan of the next epoch with the nodes usable now, or None if they are too few.

    Call it only when no worker is in an epoch any more. If a step is computed again because of an unattributed
    non-finite value, every rank moves to another node.
    """
    ranks = possible_ranks(state)
    if not ranks:
        return None
    # Every rank must change its node if the next epoch recomputes a step for which no particular node is blamed.
    doubt = state.doubt
    moves_all = doubt is not None and doubt.epoch == state.epoch and not doubt.nodes and not doubt.confirmed
    seats = deal(state, ranks, keep=moves_all)
    if moves_all:
        seats = (*seats[1:], seats[0])
        ring, level = buddy_ring([state.nodes[name].domain for name in seats])
    else:
        ring, level = _ring(state, seats)
    return EpochPlan(ranks, seats, ring, level, restore_source(state))


# --- buddies --------------------------------------------------------------------------------------


def buddy_ring(domains: Sequence[tuple[str, ...]]) -> tuple[tuple[int, ...], int]:
    """Return seat -> the seat of its buddy, and the number of levels of the domain in which buddies differ.

    Each seat is the buddy of exactly one other. The seats are sorted by domain and rotated by the size of the
    largest domain, at the widest level at which no domain has more than half of the seats. So no buddy is in
    its seat's own domain of that level. Without such a level they are rotated by one, and the number is 0. A
    single seat is its own buddy and keeps one copy only.
    """
    count = len(domains)
    order = sorted(range(count), key=domains.__getitem__)
    depth = max(map(len, domains))
    shift, level = min(1, count - 1), 0
    for levels in range(1, depth + 1):
        largest = max(Counter(map(itemgetter(slice(levels)), domains)).values())
        if 2 * largest <= count:
            shift, level = largest, levels
            break
    ring = [0] * count
    for place, seat in enumerate(order):
        ring[seat] = order[(place + shift) % count]
    return tuple(ring), level


def _ring(state: FleetState, seats: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
    """Return the present ring if it still separates domains with the new seats, so that copies are where they
    are needed; else a new one.
    """
    nodes, level = state.nodes, state.ring_level
    if len(seats) == len(state.ring):
        changed = sorted(state.vacant)
        touched = {*changed, *(state.ring.index(seat) for seat in changed)}
        if all(
            not level or nodes[seats[seat]].domain[:level] != nodes[seats[state.ring[seat]]].domain[:level]
            for seat in touched
        ):
            return tuple(state.ring), level
    return buddy_ring([nodes[name].domain for name in seats])


def needs_buddy(state: FleetState, seats: Sequence[str], ranks: int, rank: int) -> bool:
    """Return True if no replica in another failure domain (on another node, if domains are unknown) holds the state
    of ``rank``.

    ``seats`` are the nodes by seat in an epoch of ``ranks`` ranks.
    """
    formation = state.settings.formation
    node = state.nodes[seats[rank // formation.workers_per_node]]
    for replica in formation.replicas(ranks, formation.key(ranks, rank)):
        other = state.nodes[seats[replica // formation.workers_per_node]]
        if other.name != node.name and (not node.domain or other.domain != node.domain):
            return False
    return True


# --- snapshots ------------------------------------------------------------------------------------


def restore_source(state: FleetState) -> StateSource:
    """Return the state that the next epoch restores: the newest in memory if not older than the newest durable
    step.

    Otherwise that step from disk, or a fresh start if there is none.
    """
    point = newest_in_memory(state)
    saved = max(state.durable, default=NO_STEP)
    if point is not None and point.step >= saved:
        return point
    return c.FromDisk(saved) if saved != NO_STEP else c.Fresh()


def newest_in_memory(state: FleetState) -> RestorePoint | None:
    """Return the newest snapshot whose every state is on living nodes, or None."""
    names = (name.split("/") for name in state.copies)
    points = {(int(step), int(ranks)) for ranks, step in names}
    census = state.census
    if census is not None:
        points |= {(step, census.ranks) for step in census.steps}
    for step, ranks in sorted(points, reverse=True):
        point = RestorePoint(ranks, step)
        if is_complete(state, point):
            return point
    return None


def is_complete(state: FleetState, point: RestorePoint) -> bool:
    """Return True if living nodes hold each different state of a snapshot."""
    formation, census = state.settings.formation, state.census
    if census is None or point.ranks != census.ranks or point.step not in census.steps:
        return len(state.copies.get(_name(point), ())) == formation.keys(point.ranks)
    keys = {
        formation.key(point.ranks, rank)
        for seat in census.absent.values()
        for rank in formation.ranks_of(seat, point.ranks)
    }
    return all(copies_of(state, point, key) for key in keys)


def copies_of(state: FleetState, point: RestorePoint, key: int) -> dict[str, int]:
    """Return living node -> rank of its copy, for the nodes that hold state ``key`` of a snapshot; own copies
    before buddies'.

    Copies come from reports, and from the last roll call if it has this snapshot.
    """
    formation, census = state.settings.formation, state.census
    names = dict(state.copies.get(_name(point), {}).get(str(key), {}))
    if census is None or point.ranks != census.ranks or point.step not in census.steps:
        return names
    for rank in formation.replicas(point.ranks, key):
        seat = rank // formation.workers_per_node
        buddy = census.ring[seat] if needs_buddy(state, census.seats, point.ranks, rank) else seat
        for name in (census.seats[seat], census.seats[buddy]):
            if name not in census.absent and name not in names:
                names[name] = rank
    return names


def _name(point: RestorePoint) -> str:
    return f"{point.ranks}/{point.step}"


class Crowd:
    """The holders of a state that many replicas have, indexed by domain, so that finding the nearest takes no
    scan.
    """

    def __init__(self, state: FleetState, ranks_by_node: dict[str, int]) -> None:
        """Index the holders of a state by domain: at each level, the first ``HOLDERS_NAMED`` by name."""
        self.ranks_by_node = ranks_by_node
        self._first: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(ranks_by_node):
            domain = state.nodes[name].domain
            for levels in range(len(domain) + 1):
                nearest = self._first.setdefault(domain[:levels], [])
                if len(nearest) < HOLDERS_NAMED:
                    nearest.append(name)

    def near(self, node: Node) -> dict[str, int]:
        """Return node -> rank of some holders, among them the ``HOLDERS_NAMED`` nearest to ``node``, and itself if
        it is one.

        They are the first by name of each domain that ``node`` is in.
        """
        prefixes = (node.domain[:levels] for levels in range(len(node.domain) + 1))
        names = {name for prefix in prefixes for name in self._first.get(prefix, ())}
        return {name: self.ranks_by_node[name] for name in (*names, node.name) if name in self.ranks_by_node}


Crowds = dict[int, Crowd]
"""Key of a state -> its holders: shared by the Binds of one epoch, for as long as the core's state does not
change.
"""


def holders_for(state: FleetState, point: RestorePoint, node: Node, crowds: Crowds) -> tuple[Holder, ...]:
    """Return holders of the states of a member's own ranks in a snapshot of the present number of ranks,
    nearest first.
    """
    return _nearest(state, point, node, state.settings.formation.ranks_of(node.seat, state.ranks), crowds)


def share_of_holders(
    state: FleetState, point: RestorePoint, node: Node, crowds: Crowds
) -> tuple[Holder, ...]:
    """Return a member's share of the holders of all states of a snapshot with another number of ranks.

    Each rank cuts its boxes from several states, and only their descriptions show from which. So it needs all
    holders. The shares of all members make up all states; one share is never empty.
    """
    formation, seats = state.settings.formation, len(state.seats)
    keys = formation.keys(point.ranks)
    share = range(node.seat * keys // seats, (node.seat + 1) * keys // seats) or (node.seat % keys,)
    return _nearest(state, point, node, [formation.replicas(point.ranks, key)[0] for key in share], crowds)


def _nearest(
    state: FleetState, point: RestorePoint, node: Node, ranks: Sequence[int], crowds: Crowds
) -> tuple[Holder, ...]:
    """Return the ``HOLDERS_NAMED`` nearest holders of the state of each of ``ranks``: itself, then by domain, then
    by name.

    A node is listed once with all ranks for which it is at that place. All first choices come before all second
    ones.
    """
    states: dict[tuple[int, str], dict[int, None]] = {}
    for rank in ranks:
        copies = _candidates(state, point, node, state.settings.formation.key(point.ranks, rank), crowds)
        order = sorted(
            copies,
            key=lambda name: (
                name != node.name,
                -common_levels(state.nodes[name].domain, node.domain),
                name,
            ),
        )
        for place, name in enumerate(order[:HOLDERS_NAMED]):
            states.setdefault((place, name), {})[copies[name]] = None
    # All nearest holders come before all second ones, so the order for each state is kept.
    return tuple(
        Holder(tuple(node_ranks), name, state.nodes[name].host, state.nodes[name].data_port)
        for (_, name), node_ranks in sorted(states.items(), key=lambda item: item[0][0])
    )


def _candidates(
    state: FleetState, point: RestorePoint, node: Node, key: int, crowds: Crowds
) -> dict[str, int]:
    """Return the holders of a state that may be among the nearest, with their ranks; all if there are at most
    ``_FEW``.
    """
    if key not in crowds:
        copies = copies_of(state, point, key)
        if len(copies) <= _FEW:
            return copies
        crowds[key] = Crowd(state, copies)
    return crowds[key].near(node)


# Orders: one for a node or a group, delivered as a command for each node. Most orders go to all nodes and
# differ only in each node's own ranks. So the core issues one, addressed to a group, and ``deliveries`` turns
# it into a command for each node. A node's *standing order*, the command that it should have now, is a
# function of the state. A lost command is repeated by computing it again, and the core keeps no list of sent
# commands.


SEATED = "*seated"
"""All nodes that have a seat."""
LIVING = "*living"
"""All nodes that are not fenced."""


class Order(Struct, frozen=True):
    """A command for a node or a group; without a command, the standing order of each."""

    to: str
    command: c.Command | None = None


def deliveries(state: FleetState, orders: Iterable[Order]) -> Iterator[tuple[str, c.Command]]:
    """Yield (node, command) for each order and addressed node; call it with the state that came with the orders.

    An order without a command means the node's standing order, which may be none.
    """
    crowds = Crowds()
    for order in orders:
        for name in _addressed(state, order.to):
            command = order.command
            if command is None and name in state.nodes:
                command = standing_order(state, state.nodes[name], crowds)
            if command is not None:
                yield name, command


def _addressed(state: FleetState, to: str) -> list[str]:
    """Return the names of the nodes that an order is addressed to: all seated, all living, or one name."""
    if to == SEATED:
        return list(state.seats)
    if to == LIVING:
        return [name for name, node in state.nodes.items() if node.alive]
    return [to]


def standing_order(state: FleetState, node: Node, crowds: Crowds) -> c.Command | None:
    """Return the command that a node should have now, or None if there is none.

    Lost: Shutdown if it was leaving, else Fence. After the run's end: Shutdown. PARKING: Park while awaited. SAVING:
    SaveSnapshots. BINDING: Bind, or Release without a seat. ``crowds`` is a cache for one ``state``, shared by calls for several nodes.
    """
    if not node.alive and node.eligibility is Eligibility.LEAVING:
        return c.Shutdown(node.reason)
    if not node.alive:
        return c.Fence(node.reason, node.incarnation)
    if state.phase in (FleetPhase.FINISHED, FleetPhase.FAILED):
        return c.Shutdown(state.reason)
    if state.phase is FleetPhase.PARKING and node.name in state.awaiting:
        return c.Park(state.epoch, state.reason, state.planned)
    if state.phase is FleetPhase.SAVING:
        return _save(state, node.name)
    if state.phase is FleetPhase.BINDING:
        return bind(state, node, crowds) if node.seat != NO_SEAT else c.Release(state.epoch)
    return None


def _save(state: FleetState, name: str) -> c.SaveSnapshots | None:
    """Return the command to write the node's share of snapshots, or None if it has none."""
    share, source = state.writing.get(name), state.source
    if share is None or not isinstance(source, RestorePoint):
        return None
    return c.SaveSnapshots(
        epoch=state.epoch,
        attempt=state.fencing.attempt + state.epoch,
        step=source.step,
        ranks=source.ranks,
        states=state.settings.formation.keys(source.ranks),
        share=tuple(share),
    )


def bind(state: FleetState, node: Node, crowds: Crowds) -> c.Bind:
    """Return the Bind with which a seated node enters the present epoch: ranks, meeting point, what to restore,
    buddies.

    ``crowds`` as in ``standing_order``.
    """
    ranks = state.settings.formation.ranks_of(node.seat, state.ranks)
    return c.Bind(
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


def _resume(state: FleetState, node: Node, crowds: Crowds) -> c.Resume:
    """Return what a node restores: from memory with the holders, from disk, or a fresh start.

    With another number of ranks the node gets only its share of all holders (``shared``).
    """
    source = state.source
    if isinstance(source, RestorePoint):
        if source.ranks == state.ranks:
            return c.FromMemory(source.step, source.ranks, holders_for(state, source, node, crowds))
        share = share_of_holders(state, source, node, crowds)
        return c.FromMemory(source.step, source.ranks, share, shared=True)
    return source


def _buddies(state: FleetState, node: Node) -> tuple[Holder, ...]:
    """Return the buddy that gets the snapshots of a node's ranks; empty if replicas hold them, or it is its own buddy."""
    buddy = state.nodes[state.seats[state.ring[node.seat]]]
    own = state.settings.formation.ranks_of(node.seat, state.ranks)
    ranks = tuple(rank for rank in own if needs_buddy(state, state.seats, state.ranks, rank))
    if buddy.name == node.name or not ranks:
        return ()
    return (Holder(ranks, buddy.name, buddy.host, buddy.data_port),)
