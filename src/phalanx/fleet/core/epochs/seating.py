"""Seating: which node gets which seat in the next epoch. Pure functions.

As long as the number of seats stays, survivors keep theirs, so that no node reads a state that it already
has. The nearest spares fill the vacant ones. When the number changes, most ranks get another part of the
state anyway, and a seat stands for another stage and replica than before. A fleet that kept its seats would
spread its pipelines over the network. So seats are dealt as at the first formation: units below one switch if
possible, neighbors near each other along the tree (``phalanx.launch.placing``). Below the lowest switch the
order of the nodes costs nothing. There each node takes the seat whose state it has, or one of its own stage,
if there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from phalanx.fleet.core.settings import CoreSettings, Formation
from phalanx.fleet.core.state import NO_SEAT, FleetState, Node
from phalanx.launch.placing import PlacedUnits, from_domains, place_units, sequence

Domain = tuple[str, ...]


def common_levels(first: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of levels, from the widest, in which two failure domains agree."""
    levels = 0
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            break
        levels += 1
    return levels


def deal(state: FleetState, ranks: int, *, keep: bool = False) -> tuple[str, ...]:
    """Return seat -> node of an epoch of ``ranks`` ranks, with the nodes usable now; there must be enough.

    With an unchanged number of seats, or ``keep``, survivors keep their seats. With another number, nodes are
    chosen and placed along the network tree if all domains are known. Call it when no worker is in an epoch any
    more.
    """
    count = state.settings.formation.seats(ranks)
    if not state.seats:
        return tuple(_first_deal(state, count))
    lost = Counter(state.nodes[state.seats[seat]].domain for seat in state.vacant)
    # Where several nodes of a rack have failed at once the rack is at fault, and its other nodes may follow.
    failing = {domain for domain, seats in lost.items() if domain and seats > 1}
    if count != len(state.seats) and not keep:
        chosen = _choice(state, count, failing)
        if all(state.nodes[name].domain for name in chosen):
            return tuple(_stay(state, _along_the_tree(state, chosen, count), ranks))
    return tuple(_fill(state, count, failing))


# --- the same seats -------------------------------------------------------------------------------


def _fill(state: FleetState, count: int, failing: Collection[Domain]) -> list[str]:
    """Return ``count`` seats in which survivors keep theirs; others go to spares and to nodes whose seats no longer
    exist.

    Each gets the candidate that is nearest to the seat's home domain.
    """
    seats_kept = [*state.seats[:count], *[""] * (count - len(state.seats))]
    candidates = set(state.spares)
    candidates.update(
        state.seats[seat] for seat in range(count, len(state.seats)) if seat not in state.vacant
    )
    for seat in (*sorted(seat for seat in state.vacant if seat < count), *range(len(state.seats), count)):
        near = _home(state, seats_kept, seat)
        chosen = min(candidates, key=lambda name: _distance(state.nodes[name], near, failing))
        candidates.remove(chosen)
        seats_kept[seat] = chosen
    return seats_kept


def _home(state: FleetState, kept: Sequence[str], seat: int) -> Domain:
    """Return the preferred domain for a vacant seat: that of most others of its block.

    If the block has no others, that of the seat's last node, or of the last seat for a new one.
    """
    block = state.settings.block
    first = seat - seat % block
    others = Counter(
        state.nodes[name].domain
        for place, name in enumerate(kept[first : first + block], first)
        if name and place != seat and place not in state.vacant
    )
    if others:
        return max(others, key=lambda domain: (others[domain], domain))
    return state.nodes[state.seats[min(seat, len(state.seats) - 1)]].domain


def _distance(node: Node, near: Domain, failing: Collection[Domain]) -> tuple[bool, int, str]:
    return node.domain in failing, -common_levels(node.domain, near), node.name


# --- along the tree -------------------------------------------------------------------------------


def _first_deal(state: FleetState, count: int) -> list[str]:
    """Return seat -> node for a fleet that has no seats yet, placed along the network tree.

    Nodes started as spares are taken only in place of missing ones.
    """
    nodes = state.nodes
    first = sum(not nodes[name].started_as_spare for name in state.spares)
    chosen = sorted(state.spares, key=lambda name: (nodes[name].started_as_spare, name))
    return _along_the_tree(state, chosen[: max(count, first)], count)


def _choice(state: FleetState, count: int, failing: Collection[Domain]) -> list[str]:
    """Choose the nodes for a fleet of ``count`` seats: all members, and spares; those of failing domains only if
    needed.

    For a smaller fleet, returns all members, which may be more than ``count``. The spares nearest to members are taken
    unless others tear fewer placement units. Members are replaced only if that alone tears the fewest.
    """
    members = [name for seat, name in enumerate(state.seats) if seat not in state.vacant]
    missing = count - len(members)
    if missing <= 0:
        return members
    sound = [name for name in sorted(state.spares) if state.nodes[name].domain not in failing]
    spares = sound if missing <= len(sound) else sorted(state.spares)
    near, everybody = [*members, *_nearest(state, members, spares)[:missing]], [*members, *spares]
    unit, _ = shape_of(state.settings, count)
    if unit == 1:
        return near
    least = _placed(state, everybody, unit, count)
    for chosen in (near, [*members, *_completing(state, members, spares, unit, missing)]):
        if _torn(_placed(state, chosen, unit, count)) <= _torn(least):
            return chosen
    return _of_the_same_domains(state, everybody, least)


def _of_the_same_domains(state: FleetState, names: Sequence[str], placed: PlacedUnits) -> list[str]:
    """Return the first of ``names`` in each lowest domain, as many as ``placed`` has there. Earlier names (members)
    win.
    """
    room = Counter(state.nodes[name].domain for name in placed.nodes)
    chosen = []
    for name in names:
        domain = state.nodes[name].domain
        if room[domain]:
            room[domain] -= 1
            chosen.append(name)
    return chosen


def _nearest(state: FleetState, members: Sequence[str], spares: Sequence[str]) -> list[str]:
    """Sort spares by the number of levels, from the widest, that they share with some member, most first."""
    nodes = state.nodes
    domains = {nodes[name].domain for name in members}
    inhabited = {domain[:levels] for domain in domains for levels in range(1, len(domain) + 1)}

    def shared(name: str) -> int:
        domain = nodes[name].domain
        return sum(domain[:levels] in inhabited for levels in range(1, len(domain) + 1))

    return sorted(spares, key=lambda name: (-shared(name), name))


def _completing(
    state: FleetState, members: Sequence[str], spares: Sequence[str], unit: int, missing: int
) -> list[str]:
    """Return ``missing`` spares that complete units of ``unit`` nodes: in the lowest domains first, and where
    fewest suffice.

    Nearer spares win. The members and they must make complete units, with no node left over.
    """
    nodes, chosen = state.nodes, list[str]()
    # Domain -> its nodes that are in no unit of a domain below, and its spares that are not chosen yet.
    loose = Counter(nodes[name].domain for name in members)
    left = _nearest(state, members, spares)
    for level in range(max(len(nodes[name].domain) for name in (*members, *spares)), -1, -1):
        free: dict[Domain, list[str]] = defaultdict(list)
        for name in reversed(left):
            free[nodes[name].domain[:level]].append(name)
        turn = {domain: number for number, domain in enumerate(reversed(free))}
        queue = [(unit - loose[domain] % unit, turn[domain], domain) for domain in free]
        heapify(queue)
        while queue:
            needed, _, domain = heappop(queue)
            if needed <= min(missing - len(chosen), len(free[domain])):
                chosen += [free[domain].pop() for _ in range(needed)]
                loose[domain] += needed
                heappush(queue, (unit, turn[domain], domain))
        taken = set(chosen)
        left = [name for name in left if name not in taken]
        above: Counter[Domain] = Counter()
        for domain, count in loose.items():
            above[domain[: max(level - 1, 0)]] += count % unit
        loose = above
    return chosen


def _placed(state: FleetState, names: Sequence[str], unit: int, count: int) -> PlacedUnits:
    """Return the best placement of units of ``unit`` nodes along the nodes' network domains."""
    topology = from_domains({name: state.nodes[name].domain for name in names})
    return place_units(topology, unit, count // unit)


def _torn(placed: PlacedUnits) -> list[int]:
    """Return the number of units that span more than one domain, for each level from the lowest."""
    return [sum(unit.depth < level for unit in placed.units) for level in range(placed.levels, 0, -1)]


def shape_of(settings: CoreSettings, count: int) -> tuple[int, int]:
    """Return (seats placed together, seats of a block) in an epoch of ``count`` seats.

    The block is 1 if blocks do not divide every pipeline stage. The first is the unit, else the block, else 1,
    whichever divides ``count``.
    """
    block = settings.block if count % (settings.formation.pipeline * settings.block) == 0 else 1
    return next(seats for seats in (settings.unit, block, 1) if count % seats == 0), block


def _along_the_tree(state: FleetState, names: Sequence[str], count: int) -> list[str]:
    """Return seat -> node for ``count`` of ``names``: units below one switch if possible, neighboring seats near
    each other (``launch.placing``).
    """
    settings = state.settings
    unit, block = shape_of(settings, count)
    placed = _placed(state, names, unit, count).nodes
    seats = [""] * count
    order = sequence(count, settings.formation.pipeline, block, settings.order)
    for name, seat in zip(placed, order, strict=True):
        seats[seat] = name
    return seats


def _stay(state: FleetState, seats: Sequence[str], ranks: int) -> list[str]:
    """Permute nodes within each lowest domain so that as many as possible keep their state, else their stage.

    Return the new seat -> node. Nodes that keep neither fill the remaining seats in order.
    """
    formation = state.settings.formation
    places: dict[Domain, list[int]] = defaultdict(list)
    for seat, name in enumerate(seats):
        places[state.nodes[name].domain].append(seat)
    settled = list(seats)
    for free in places.values():
        names = sorted((seats[seat] for seat in free), key=lambda name: _before(state.nodes[name]))
        for exactly in (True, False):
            seats_by_part: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for seat in reversed(free):
                seats_by_part[_part(formation, ranks, seat, exactly=exactly)].append(seat)
            for name in list(names):
                node = state.nodes[name]
                part = (
                    () if node.seat == NO_SEAT else _part(formation, state.ranks, node.seat, exactly=exactly)
                )
                if seats_by_part[part]:
                    settled[seats_by_part[part].pop()] = name
                    names.remove(name)
            free = sorted(seat for group in seats_by_part.values() for seat in group)
        for seat, name in zip(free, names, strict=True):
            settled[seat] = name
    return settled


def _before(node: Node) -> tuple[bool, int, str]:
    return node.seat == NO_SEAT, node.seat, node.name


def _part(formation: Formation, ranks: int, seat: int, *, exactly: bool) -> tuple[int, ...]:
    """Return the key of the state of a seat's first rank: with ``exactly`` (stage, ranks of a stage, part), else
    (stage,).
    """
    share = formation.stage_ranks(ranks)
    stage, part = divmod(formation.key(ranks, seat * formation.workers_per_node), share)
    return (stage, share, part) if exactly else (stage,)
