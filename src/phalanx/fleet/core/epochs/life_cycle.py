"""The life cycle of epochs: one is formed, runs, is left, and the next one is formed.

FORMING -> BINDING -> RUNNING -> PARKING -> BINDING ..., with WAITING while too few nodes are usable. Any fault in any
phase leads back to PARKING, and from there to a higher epoch; a broken epoch is never repaired. A new epoch begins only
when each member of the last one has reported that its workers have left, or is fenced.
"""

from __future__ import annotations

from itertools import compress
from operator import is_not

from msgspec.structs import replace

from phalanx.fleet.core.commands import (
    Diagnose,
    Fresh,
    Park,
    Stop,
)
from phalanx.fleet.core.epochs.ending import (
    OVER,
    conclude,
    dialing_until_s,
    end,
    enter,
    from_saving,
    memory_may_come,
)
from phalanx.fleet.core.epochs.epoch_plan import (
    EpochPlan,
    is_complete,
    plan_epoch,
    possible_ranks,
    ranks_without_started_spares,
)
from phalanx.fleet.core.messages import (
    NO_EPOCH,
    NO_STEP,
)
from phalanx.fleet.core.orders import SEATED, Order
from phalanx.fleet.core.state import (
    NO_SEAT,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    RestorePoint,
    StateSource,
    change,
    forget_copies,
    node_called,
    note,
)

IN_EPOCH = (FleetPhase.BINDING, FleetPhase.RUNNING)
QUICK_TRIES, FIRST_PAUSE_S, LONGEST_PAUSE_S = 4, 0.1, 10.0
TOLD_OF_WAITING_S = 30.0
MASS_PATIENCE = 4
"""If most nodes fall silent at once, the coordinator itself is likely cut off: leases last this many times longer."""


def advance(state: FleetState, orders: list[Order]) -> None:
    """Makes every phase transition that is due. Called after each event."""
    moved = True
    while moved and state.phase not in OVER:
        moved = _TRANSITIONS[state.phase](state, orders)


def _from_forming(state: FleetState, orders: list[Order]) -> bool:
    settings, ranks = state.settings, possible_ranks(state)
    if state.stopping and memory_may_come(state):
        return False
    if state.epoch != NO_EPOCH:
        # After a resynchronization: every member parks first, so that no two epochs train at once and the newest state
        # in memory counts. Nodes that stay silent are waited for no longer than nodes of a new run.
        engaged = any(node.alive and node.engaged for node in state.nodes.values())
        return not (engaged and state.now_s - state.since_s < settings.form_s) and _form(state, orders)
    if state.stopping:
        return _form(state, orders)
    if not ranks:
        return False
    if state.now_s - state.since_s < settings.form_s:
        whole = settings.formation.largest(settings.wanted_nodes * settings.formation.workers_per_node)
        # While nodes join one by one, the first comparison decides, without a look at all of them.
        if ranks < whole or _without_spares(state, ranks) < whole or _choice_is_coming(state):
            return False
    return _form(state, orders)


def _choice_is_coming(state: FleetState) -> bool:
    """True if more nodes are about to join, and where in the network they are decides which of all are taken."""
    settings = state.settings
    if state.now_s - state.since_s >= settings.gather_s or len(state.spares) >= settings.expected_nodes:
        return False
    return any(state.nodes[name].domain and not state.nodes[name].started_as_spare for name in state.spares)


def _without_spares(state: FleetState, ranks: int) -> int:
    """Number of ranks to begin with, at most ``ranks``: nodes started as spares count where one of the others is not to be had."""
    # A node known to be unfit or lost is not waited for: one that was started as a spare takes its place.
    missing = any(
        not node.alive or node.eligibility is not Eligibility.GOOD
        for node in state.nodes.values()
        if not node.started_as_spare
    )
    return ranks if missing else ranks_without_started_spares(state)


def _from_binding(state: FleetState, orders: list[Order]) -> bool:
    if state.vacant:
        return _fill_vacancies(state, orders)
    if state.awaiting:
        lost = isinstance(state.source, RestorePoint) and not is_complete(state, state.source)
        if lost:
            regroup(state, orders, "the state was lost before all had restored it")
        return lost
    enter(state, FleetPhase.RUNNING)
    state.step_s = state.now_s
    if state.stopping:
        orders.append(Order(SEATED, Stop(state.epoch)))
    return True


def _from_running(state: FleetState, orders: list[Order]) -> bool:
    if state.vacant:
        return _fill_vacancies(state, orders)
    settled = state.now_s - state.since_s >= state.settings.grow_s and not state.stopping
    if settled and can_grow(state):
        regroup(state, orders, "more nodes are ready", planned=True)
        return True
    return False


def _from_parking(state: FleetState, orders: list[Order]) -> bool:
    rested = state.stopping or state.now_s >= state.since_s + pause_s(state.tries)
    return not state.awaiting and rested and _form(state, orders)


def pause_s(tries: int) -> float:
    """Seconds to wait before the next epoch is tried: 0 for the first ``QUICK_TRIES``, then exponential back-off.

    A fault that lasts some seconds (a flapping link, a switch that restarts) must not use up all tries in that time.
    """
    if tries <= QUICK_TRIES:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** (tries - QUICK_TRIES - 1), LONGEST_PAUSE_S)


def _from_waiting(state: FleetState, orders: list[Order]) -> bool:
    if state.stopping and memory_may_come(state):
        return False
    return bool(possible_ranks(state) or state.stopping) and _form(state, orders)


_TRANSITIONS = {
    FleetPhase.FORMING: _from_forming,
    FleetPhase.BINDING: _from_binding,
    FleetPhase.RUNNING: _from_running,
    FleetPhase.PARKING: _from_parking,
    FleetPhase.WAITING: _from_waiting,
    FleetPhase.SAVING: from_saving,
}


def can_grow(state: FleetState) -> bool:
    """True if the usable nodes allow more ranks than the present epoch has."""
    return len(state.seats) < state.settings.wanted_nodes and possible_ranks(state) > state.ranks


def _fill_vacancies(state: FleetState, orders: list[Order]) -> bool:
    nodes = [state.nodes[state.seats[seat]] for seat in sorted(state.vacant)]
    whole = all(node.alive and node.warm and not node.engaged for node in nodes)
    why = "; ".join(f"{node_called(node.name)}: {node.why or 'its workers are gone'}" for node in nodes[:4])
    regroup(state, orders, why, planned=whole)
    return True


def regroup(state: FleetState, orders: list[Order], reason: str, *, planned: bool = False) -> None:
    """Ends the present epoch. A planned end loses no step; a fault while it is under way makes it unplanned."""
    if state.phase is FleetPhase.PARKING and state.planned and not planned:
        state.planned, state.left_planned, state.reason = False, False, reason
        enter(state, FleetPhase.PARKING)
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
        enter(state, FleetPhase.PARKING)
        note(state, "", reason, ended_epoch=True)
        gone = {state.seats[seat] for seat in state.vacant if not state.nodes[state.seats[seat]].alive}
        state.awaiting = set(state.seats)
        state.awaiting.difference_update(gone, state.early)
        orders.append(Order(SEATED, Park(state.epoch, reason, planned)))


def _form(state: FleetState, orders: list[Order]) -> bool:
    """Begins the next epoch if there are enough nodes; otherwise the fleet waits."""
    if state.tries > state.settings.max_tries:
        text = f"{state.tries} faults in a row without a step between them; the last one: {state.reason}"
        conclude(state, orders, FleetPhase.FAILED, text)
        return True
    if state.stopping:
        early = "stopped before it was formed" if state.epoch == NO_EPOCH else "stopped"
        waits = state.phase is FleetPhase.WAITING
        conclude(state, orders, FleetPhase.FINISHED, "stopped while waiting for nodes" if waits else early)
        return True
    plan = plan_epoch(state)
    if plan is None:
        if state.phase is not FleetPhase.WAITING:
            enter(state, FleetPhase.WAITING)
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
    state.epoch = max(state.epoch, state.seen_epoch) + 1
    before = _step_of(state.source)
    state.ring, state.ring_level = list(plan.ring), plan.ring_level
    left = _reseat(state, plan.seats)
    state.awaiting, state.early, state.evidence, state.planned = set(plan.seats), set(), False, False
    state.ranks, state.source = plan.ranks, plan.source
    state.epoch_key = state.key
    state.step, state.diagnosed, state.told_of_waiting = _step_of(plan.source), False, False
    if state.step < before:
        # The restore lost steps: computing them again counts as progress too.
        state.best_step = state.step
    progressed(state, state.step)
    _withdraw_doubt(state)
    enter(state, FleetPhase.BINDING)
    orders += [Order(SEATED), *(Order(name) for name in left)]


def restored_step(state: FleetState) -> int:
    """The step whose state the present epoch restores; ``NO_STEP`` if it begins the run."""
    return _step_of(state.source)


def _step_of(source: StateSource) -> int:
    return NO_STEP if isinstance(source, Fresh) else source.step


def _reseat(state: FleetState, seats: tuple[str, ...]) -> list[str]:
    """Seats the nodes of an epoch, and returns those that lose their seat by it, sorted.

    What is worked out for a seat is worked out for those that change: the others are passed over by a comparison of lists. It is of
    identity, which at worst calls a seat changed that is not.
    """
    old, state.seats = state.seats, list(seats)
    both = min(len(old), len(seats))
    others = {*compress(range(both), map(is_not, old, seats)), *range(both, max(len(old), len(seats)))}
    changed = sorted(others | state.vacant)
    state.vacant = set()
    stand = [old[seat] for seat in changed if seat < len(old)]
    sit = {seats[seat]: seat for seat in changed if seat < len(seats)}
    left = sorted(name for name in stand if name not in sit)
    for name in left:
        change(state, state.nodes[name], seat=NO_SEAT)
    for name, seat in sit.items():
        if state.nodes[name].seat != seat:
            change(state, state.nodes[name], seat=seat)
    state.vacant.clear()
    return left


def progressed(state: FleetState, step: int) -> None:
    """Resets the count of tries if ``step`` is beyond the furthest one so far."""
    if step > state.best_step:
        state.best_step, state.tries = step, 0


def stepped(state: FleetState, step: int) -> None:
    """Notes that the members have completed ``step``, and updates the pace."""
    if state.phase is not FleetPhase.RUNNING or step <= state.step:
        return
    pace_s = (state.now_s - state.step_s) / (step - state.step)
    state.pace_s = 0.8 * state.pace_s + 0.2 * pace_s if state.pace_s else pace_s
    state.step, state.step_s, state.diagnosed, state.told_of_waiting = step, state.now_s, False, False
    progressed(state, step)
    _settle(state, step)


def waits_for_samples(state: FleetState, node: Node, waiting_s: float) -> None:
    """Puts off the deadline of the present step: an object store has not given ``node`` its samples, and a fleet that waits does not hang.

    The node ends its waiting by itself (``data.timeout_s``).
    """
    if state.phase is not FleetPhase.RUNNING:
        return
    state.step_s, state.diagnosed = state.now_s, False
    if waiting_s >= TOLD_OF_WAITING_S and not state.told_of_waiting:
        state.told_of_waiting = True
        note(state, node.name, f"has waited {waiting_s:.0f} s for samples from an object store")


def _settle(state: FleetState, step: int) -> None:
    """Drops what nodes have said of the run (``phalanx.fleet.core.epochs.blame``) and ``step``, which is completed, has decided."""
    state.accusations = tuple(said for said in state.accusations if said.step >= step)
    doubt = state.doubt
    if doubt is not None and step >= doubt.step:
        state.doubt = None
        for name in doubt.nodes:
            verdict = f"step {doubt.step} is finite where other nodes compute it: this one was at fault"
            note(state, name, verdict)
            node = state.nodes.get(name)
            if node is not None and node.eligibility is Eligibility.QUARANTINED:
                change(state, node, why=verdict)


def _withdraw_doubt(state: FleetState) -> None:
    """Lets the nodes in again that are blamed for a step which the new epoch will not compute: it restores a state from beyond it.

    Such a state was kept by a node that was away, from an epoch that got further. Whether the step is the run's own is then not found out.
    """
    doubt = state.doubt
    if doubt is None or doubt.confirmed or not doubt.nodes or _step_of(state.source) < doubt.step:
        return
    state.doubt = replace(doubt, nodes=())
    for name in doubt.nodes:
        note(state, name, f"step {doubt.step} is not computed again: nothing is known against this node")
        node = state.nodes.get(name)
        if node is not None and node.eligibility is Eligibility.QUARANTINED:
            change(state, node, eligibility=Eligibility.GOOD, why="")


# --- losing nodes ---------------------------------------------------------------------------------


def lose(state: FleetState, orders: list[Order], node: Node, why: str) -> None:
    """Fences a node: messages of this incarnation are ignored from now on, and its snapshots count as gone."""
    strike(state, node, why, alive=False, meeting_points=(), held=())
    forget_copies(state, node.name)
    state.suspects.pop(node.name, None)
    state.silent.discard(node.name)
    state.awaiting.discard(node.name)
    state.writing.pop(node.name, None)
    orders.append(Order(node.name))


def strike(state: FleetState, node: Node, why: str, **changes: object) -> None:
    """Records a failure of a node; one that fails too often is quarantined."""
    settings = state.settings
    recent = tuple(at_s for at_s in node.strikes if state.now_s - at_s < settings.strike_window_s)
    strikes = (*recent, state.now_s)
    lemon = len(strikes) >= settings.strikes and node.eligibility is Eligibility.GOOD
    if lemon:
        why = f"{why}; {len(strikes)} failures within {settings.strike_window_s:g} s: quarantined"
        changes["eligibility"] = Eligibility.QUARANTINED
    note(state, node.name, why)
    change(state, node, why=why, strikes=strikes[-settings.strikes :], **changes)


# --- time -----------------------------------------------------------------------------------------


def last_heard_s(state: FleetState, name: str) -> float:
    """Time of the last sign of life of a node."""
    heard_s = state.heard.get(name, state.rolled_s)
    return heard_s if name in state.silent else max(heard_s, state.rolled_s)


def check_leases(state: FleetState, orders: list[Order]) -> None:
    """Fences the nodes whose lease has run out, or that have been without connection for too long."""
    settings, now_s = state.settings, state.now_s
    _lose_late(state, orders, state.suspects, settings.confirm_s, "its connection broke")
    if now_s < state.next_lease_s:
        return
    rolled = now_s - state.rolled_s < settings.lease_s
    names = state.silent if rolled else [name for name, node in state.nodes.items() if node.alive]
    heard = {name: last_heard_s(state, name) for name in names}
    _lose_late(state, orders, heard, settings.lease_s, "it fell silent")
    left = [heard_s for name, heard_s in heard.items() if state.nodes[name].alive]
    if rolled:
        left.append(state.rolled_s)
    soonest_s = min(left, default=now_s) + settings.lease_s
    state.next_lease_s = soonest_s if soonest_s > now_s else now_s + settings.lease_s / 4


def _lose_late(
    state: FleetState, orders: list[Order], since: dict[str, float], limit_s: float, what: str
) -> None:
    late = sorted(name for name, at_s in since.items() if state.now_s - at_s >= limit_s)
    alive = len(state.seats) - len(state.vacant) + len(state.spares)
    if len(late) > 2 and 2 * len(late) > alive and not state.evidence:
        late = [name for name in late if state.now_s - since[name] >= MASS_PATIENCE * limit_s]
    for name in late:
        lose(state, orders, state.nodes[name], f"{what} {state.now_s - since[name]:.1f} s ago")


def check_deadlines(state: FleetState, orders: list[Order]) -> None:
    """Acts on a phase that has passed its deadline."""
    settings, deadline_s = state.settings, phase_deadline_s(state)
    if deadline_s is None or state.now_s < deadline_s:
        return
    if state.phase is FleetPhase.PARKING and state.planned:
        regroup(state, orders, f"no step boundary was reached ({state.reason})")
    elif state.phase is FleetPhase.PARKING:
        for name in sorted(state.awaiting):
            lose(state, orders, state.nodes[name], f"it did not leave epoch {state.epoch}")
    elif state.phase is FleetPhase.BINDING:
        _blame_unbound(state)
        regroup(state, orders, f"epoch {state.epoch} was not bound within {settings.bind_s:g} s")
    elif state.phase is FleetPhase.SAVING:
        slow = f"{state.reason}; the nodes did not save their memory within {settings.save_s:g} s"
        end(state, orders, state.ends_as, slow)
    elif state.phase is FleetPhase.RUNNING and not state.diagnosed:
        state.diagnosed = True
        orders.append(Order(SEATED, Diagnose(state.epoch, state.now_s - state.step_s)))
    elif state.phase is FleetPhase.RUNNING:
        regroup(state, orders, f"no step ended for {state.now_s - state.step_s:.0f} s")


def _blame_unbound(state: FleetState) -> None:
    """Strikes the members that did not bind, if they are a minority: if a majority did not, the cause lies elsewhere."""
    if 2 * len(state.awaiting) < len(state.seats):
        for name in sorted(state.awaiting):
            strike(state, state.nodes[name], f"it did not bind epoch {state.epoch}")


def phase_deadline_s(state: FleetState) -> float | None:
    """Deadline of the present phase, or None if it has none."""
    settings = state.settings
    if state.phase is FleetPhase.FORMING and state.now_s - state.since_s < settings.form_s:
        return state.since_s + settings.form_s
    if state.phase is FleetPhase.WAITING and state.stopping:
        return dialing_until_s(state)
    if state.phase is FleetPhase.PARKING and not state.awaiting:
        return state.since_s + pause_s(state.tries)
    if state.phase is FleetPhase.PARKING:
        return state.since_s + (settings.stall_s if state.planned else settings.park_s)
    if state.phase is FleetPhase.BINDING:
        return state.since_s + settings.bind_s
    if state.phase is FleetPhase.SAVING:
        return state.since_s + settings.save_s
    if state.phase is FleetPhase.RUNNING:
        patience_s = max(settings.stall_s, 10 * state.pace_s)
        return max(state.step_s, state.since_s) + patience_s * (2 if state.diagnosed else 1)
    return None


def next_deadline_s(state: FleetState) -> float:
    """Time at which a Tick will next make a difference if nothing else happens: perhaps too early, never too late.

    It may be now: while overdue nodes are given more time, a Tick every quarter of a second is enough.
    """
    times = [state.next_lease_s, *(at_s + state.settings.confirm_s for at_s in state.suspects.values())]
    deadline_s = phase_deadline_s(state)
    if deadline_s is not None:
        times.append(deadline_s)
    if state.phase is FleetPhase.RUNNING and not state.stopping and can_grow(state):
        times.append(state.since_s + state.settings.grow_s)
    return max(state.now_s, min(times))
