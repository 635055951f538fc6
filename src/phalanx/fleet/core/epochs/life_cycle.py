"""The life cycle of epochs: one is formed, runs, is left, and the next one is formed.

FORMING -> BINDING -> RUNNING -> PARKING -> BINDING ..., with WAITING while too few nodes are usable. Any
fault in any phase leads back to PARKING, and from there to a higher epoch; a broken epoch is never repaired.
A new epoch begins only when each member of the last one has reported that its workers have left, or is
fenced.
"""

from __future__ import annotations

from itertools import compress
from operator import is_not

from phalanx.fleet.core.commands import Park, Stop
from phalanx.fleet.core.epochs import progress
from phalanx.fleet.core.epochs.epoch_plan import (
    SEATED,
    EpochPlan,
    Order,
    is_complete,
    plan_epoch,
    possible_ranks,
    ranks_without_started_spares,
)
from phalanx.fleet.core.messages import NO_EPOCH
from phalanx.fleet.core.state import (
    NO_SEAT,
    Eligibility,
    FleetPhase,
    FleetState,
    RestorePoint,
    change,
    node_called,
    note,
)
from phalanx.observe.events import IncidentKind

IN_EPOCH = (FleetPhase.BINDING, FleetPhase.RUNNING)
QUICK_TRIES, FIRST_PAUSE_S, LONGEST_PAUSE_S = 4, 0.1, 10.0


def advance(state: FleetState, orders: list[Order]) -> None:
    """Make every phase transition that is due. Called after each event."""
    moved = True
    while moved and state.phase not in progress.OVER:
        moved = _TRANSITIONS[state.phase](state, orders)


def _from_forming(state: FleetState, orders: list[Order]) -> bool:
    """Begin the next epoch once the configured ranks are possible, or with fewer once ``form_s`` has passed.

    After a resync it first waits for engaged nodes to park, at most ``form_s``. When stopping, it ends the run once no newer memory may
    come. Return True if the state changed.
    """
    settings, ranks = state.settings, possible_ranks(state)
    if state.stopping and progress.memory_may_come(state):
        return False
    if state.epoch != NO_EPOCH:
        # After a resynchronization: every member parks first, so that no two epochs train at once and the
        # newest state in memory counts. The wait for silent nodes is no longer than in a new run.
        engaged = any(node.alive and node.engaged for node in state.nodes.values())
        return not (engaged and state.now_s - state.since_s < settings.form_s) and _form(state, orders)
    if state.stopping:
        return _form(state, orders)
    if not ranks:
        return False
    if state.now_s - state.since_s < settings.form_s:
        full_ranks = settings.formation.largest(settings.wanted_nodes * settings.formation.workers_per_node)
        # While nodes join one by one, the first comparison decides in O(1).
        if ranks < full_ranks or _without_spares(state, ranks) < full_ranks or _choice_is_coming(state):
            return False
    return _form(state, orders)


def _choice_is_coming(state: FleetState) -> bool:
    """Return True if more nodes may join within ``gather_s`` and nodes know their place in the network: the choice
    among all of them is better.
    """
    settings = state.settings
    if state.now_s - state.since_s >= settings.gather_s or len(state.spares) >= settings.expected_nodes:
        return False
    return any(state.nodes[name].domain and not state.nodes[name].started_as_spare for name in state.spares)


def _without_spares(state: FleetState, ranks: int) -> int:
    """Return the number of ranks to begin with: ``ranks`` if any other node is lost or unfit, else without those
    started as spares.
    """
    # An unfit or lost node is not awaited: a node that was started as a spare takes its place.
    missing = any(
        not node.alive or node.eligibility is not Eligibility.GOOD
        for node in state.nodes.values()
        if not node.started_as_spare
    )
    return ranks if missing else ranks_without_started_spares(state)


def _from_binding(state: FleetState, orders: list[Order]) -> bool:
    """Begin running once all members are bound. End the epoch for a vacant seat, or if no living node has a needed
    state.

    When stopping, order the members to stop as they begin. Return True if the state changed.
    """
    if state.vacant:
        return _fill_vacancies(state, orders)
    if state.awaiting:
        lost = isinstance(state.source, RestorePoint) and not is_complete(state, state.source)
        if lost:
            regroup(state, orders, "the state was lost before all had restored it")
        return lost
    progress.enter(state, FleetPhase.RUNNING)
    state.step_s = state.now_s
    if state.stopping:
        orders.append(Order(SEATED, Stop(state.epoch)))
    return True


def _from_running(state: FleetState, orders: list[Order]) -> bool:
    """End the epoch for a vacant seat, or, as planned, to grow once it has run for ``grow_s`` and more nodes are
    ready.

    Return True if the state changed.
    """
    if state.vacant:
        return _fill_vacancies(state, orders)
    settled = state.now_s - state.since_s >= state.settings.grow_s and not state.stopping
    if settled and can_grow(state):
        regroup(state, orders, "more nodes are ready", planned=True)
        return True
    return False


def _from_parking(state: FleetState, orders: list[Order]) -> bool:
    """Form the next epoch once all have parked and the pause is over; return True if one was formed."""
    rested = state.stopping or state.now_s >= state.since_s + pause_s(state.tries)
    return not state.awaiting and rested and _form(state, orders)


def pause_s(tries: int) -> float:
    """Return seconds to wait before the next epoch is tried: 0 for the first ``QUICK_TRIES``, then doubling from
    ``FIRST_PAUSE_S`` up to ``LONGEST_PAUSE_S``.

    A fault that lasts some seconds (a flapping link, a switch that restarts) must not use up all tries in that
    time.
    """
    if tries <= QUICK_TRIES:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** (tries - QUICK_TRIES - 1), LONGEST_PAUSE_S)


def _from_waiting(state: FleetState, orders: list[Order]) -> bool:
    """Form an epoch once enough nodes are there, or to stop; return True if one was formed."""
    if state.stopping and progress.memory_may_come(state):
        return False
    return bool(possible_ranks(state) or state.stopping) and _form(state, orders)


_TRANSITIONS = {
    FleetPhase.FORMING: _from_forming,
    FleetPhase.BINDING: _from_binding,
    FleetPhase.RUNNING: _from_running,
    FleetPhase.PARKING: _from_parking,
    FleetPhase.WAITING: _from_waiting,
    FleetPhase.SAVING: progress.from_saving,
}


def can_grow(state: FleetState) -> bool:
    """Return True if the usable nodes allow more ranks than the present epoch has."""
    return len(state.seats) < state.settings.wanted_nodes and possible_ranks(state) > state.ranks


def _fill_vacancies(state: FleetState, orders: list[Order]) -> bool:
    """End the epoch to replace the nodes of vacant seats, whose reasons become its own. Return True.

    It is planned if all of them are alive and idle, for example drained.
    """
    nodes = [state.nodes[state.seats[seat]] for seat in sorted(state.vacant)]
    planned = all(node.alive and node.warm and not node.engaged for node in nodes)
    reason = "; ".join(
        f"{node_called(node.name)}: {node.reason or 'its workers are gone'}" for node in nodes[:4]
    )
    regroup(state, orders, reason, planned=planned, kind=nodes[0].fault)
    return True


def regroup(
    state: FleetState,
    orders: list[Order],
    reason: str,
    *,
    planned: bool = False,
    kind: IncidentKind = IncidentKind.NOTE,
) -> None:
    """End the present epoch: note it as an incident, count it, and order all members to park.

    A planned end, at a step boundary, counts as a regroup; any other, and any while BINDING, as a recovery and
    a try. An unplanned end while a planned one is in progress replaces it, as a recovery. Otherwise does
    nothing outside an epoch.
    """
    if state.phase is FleetPhase.PARKING and state.planned and not planned:
        state.planned, state.left_planned, state.reason = False, False, reason
        progress.enter(state, FleetPhase.PARKING)
        state.recoveries += 1
        orders += [Order(name, Park(state.epoch, reason)) for name in sorted(state.awaiting)]
    elif state.phase in IN_EPOCH:
        planned = planned and state.phase is FleetPhase.RUNNING
        if planned:
            state.regroups += 1
        else:
            state.recoveries += 1
            state.tries += 1
        state.reason, state.planned = reason, planned
        if state.phase is FleetPhase.RUNNING or state.left_s is None:
            state.left_s, state.left_planned = state.now_s, planned
        progress.enter(state, FleetPhase.PARKING)
        note(state, "", reason, ended_epoch=True, kind=kind)
        lost = {state.seats[seat] for seat in state.vacant if not state.nodes[state.seats[seat]].alive}
        state.awaiting = set(state.seats)
        state.awaiting.difference_update(lost, state.early)
        orders.append(Order(SEATED, Park(state.epoch, reason, planned)))


def _form(state: FleetState, orders: list[Order]) -> bool:
    """Begin the next epoch if there are enough nodes; otherwise wait, noted once. Return True if the state changed.

    When stopping, or after more than ``max_tries`` faults in a row, conclude the run instead.
    """
    if state.tries > state.settings.max_tries:
        text = f"{state.tries} faults in a row without progress; the last one: {state.reason}"
        progress.conclude(state, orders, FleetPhase.FAILED, text)
        return True
    if state.stopping:
        early = "stopped before it was formed" if state.epoch == NO_EPOCH else "stopped"
        waits = state.phase is FleetPhase.WAITING
        progress.conclude(
            state, orders, FleetPhase.FINISHED, "stopped while waiting for nodes" if waits else early
        )
        return True
    plan = plan_epoch(state)
    if plan is None:
        if state.phase is not FleetPhase.WAITING:
            progress.enter(state, FleetPhase.WAITING)
            note(
                state,
                "",
                "too few nodes: the fleet waits; the memory of their agents and the newest checkpoint hold its state",
            )
            return True
        return False
    _begin(state, orders, plan)
    return True


def _begin(state: FleetState, orders: list[Order], plan: EpochPlan) -> None:
    """Begin the epoch of a plan with the next unused number: seat its nodes, wait for all to bind, and order them
    to.

    Nodes that lose their seat get their standing order too. Progress, evidence and diagnosis of the last epoch are
    reset.
    """
    state.epoch = max(state.epoch, state.seen_epoch) + 1
    before = progress.step_of(state.source)
    state.ring, state.ring_level = list(plan.ring), plan.ring_level
    unseated = _reseat(state, plan.seats)
    state.awaiting, state.early, state.evidence, state.planned = set(plan.seats), set(), False, False
    state.ranks, state.source = plan.ranks, plan.source
    state.epoch_key = state.key
    state.step, state.diagnosed, state.is_wait_recorded = progress.step_of(plan.source), False, False
    if state.step < before:
        # The restore lost steps: computing them again counts as progress too.
        state.best_step = state.step
    progress.progressed(state, state.step)
    progress.withdraw_doubt(state)
    progress.enter(state, FleetPhase.BINDING)
    orders += [Order(SEATED), *(Order(name) for name in unseated)]


def _reseat(state: FleetState, seats: tuple[str, ...]) -> list[str]:
    """Set the seats of an epoch and each node's record of its seat, and clear the vacancies. Return the nodes that
    lose their seat, sorted.

    Only seats that change cost time. They are found by comparing identities, so an equal name may be treated as
    changed.
    """
    old, state.seats = state.seats, list(seats)
    both = min(len(old), len(seats))
    others = {*compress(range(both), map(is_not, old, seats)), *range(both, max(len(old), len(seats)))}
    changed = sorted(others | state.vacant)
    state.vacant = set()
    stand = [old[seat] for seat in changed if seat < len(old)]
    sit = {seats[seat]: seat for seat in changed if seat < len(seats)}
    unseated = sorted(name for name in stand if name not in sit)
    for name in unseated:
        change(state, state.nodes[name], seat=NO_SEAT)
    for name, seat in sit.items():
        if state.nodes[name].seat != seat:
            change(state, state.nodes[name], seat=seat)
    state.vacant.clear()
    return unseated
