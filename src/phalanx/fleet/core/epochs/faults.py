"""Faults of nodes: blame, lost leases, and phases whose deadline passes.

A node is lost when its lease runs out, and gets a strike when it fails. A fault of the run that a single node
reports counts as the node's own until another node reports the same. A phase that does not end by its
deadline is ended here, and the nodes that it waits for are struck or lost. A roll call carries the same
report of thousands of healthy nodes.
"""

from __future__ import annotations

from itertools import filterfalse

from phalanx.fleet.core import messages as m
from phalanx.fleet.core.commands import Diagnose
from phalanx.fleet.core.epochs.epoch_plan import SEATED, Order, can_do_without
from phalanx.fleet.core.epochs.life_cycle import IN_EPOCH, can_grow, pause_s, regroup
from phalanx.fleet.core.epochs.progress import dialing_until_s, end, stepped
from phalanx.fleet.core.state import (
    Accusation,
    Census,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    NonFiniteDoubt,
    change,
    forget_copies,
    note,
    trusts,
)
from phalanx.observe.events import IncidentKind

# Deadlines of phases: when each passes, the action then, and when a Tick is due.


def check_deadlines(state: FleetState, orders: list[Order]) -> None:
    """Act on a phase that has passed its deadline.

    PARKING: lose the nodes that did not leave, or end a planned epoch at once. BINDING: strike those that did not
    bind, and regroup. SAVING: end the run. RUNNING: order a diagnosis, and at the second deadline regroup.
    """
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
    """Strike the members that did not bind, if they are a minority.

    If a majority did not, the cause is elsewhere.
    """
    if 2 * len(state.awaiting) < len(state.seats):
        for name in sorted(state.awaiting):
            strike(state, state.nodes[name], f"it did not bind epoch {state.epoch}")


def phase_deadline_s(state: FleetState) -> float | None:
    """Return the deadline of the present phase on the fleet's clock, or None if it has none.

    WAITING has one only when stopping, FORMING until ``form_s``, PARKING without awaited nodes after its pause.
    RUNNING counts from the last step, twice as long once a hang was diagnosed.
    """
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
    """Return when a Tick will next make a difference if nothing else happens: perhaps too early, never too
    late.

    It may be now: while overdue nodes are given more time, a Tick every quarter of a second is enough.
    """
    times = [state.next_lease_s, *(at_s + state.settings.confirm_s for at_s in state.suspects.values())]
    deadline_s = phase_deadline_s(state)
    if deadline_s is not None:
        times.append(deadline_s)
    if state.phase is FleetPhase.RUNNING and not state.stopping and can_grow(state):
        times.append(state.since_s + state.settings.grow_s)
    return max(state.now_s, min(times))


# Lost nodes: leases that run out, failures that are counted, and the fence that shuts a lost node out.

MASS_PATIENCE = 4
"""If most nodes fall silent at once, the coordinator itself is likely cut off: leases last this many times longer."""


def lose(state: FleetState, orders: list[Order], node: Node, reason: str) -> None:
    """Fence a node: messages of this incarnation are ignored from now on, and its copies and share of a save are
    forgotten.

    The loss counts as a strike with ``reason``, and the node gets a Fence, or a Shutdown if it was leaving.
    """
    strike(state, node, reason, alive=False, meeting_points=(), snapshots=())
    forget_copies(state, node.name)
    state.suspects.pop(node.name, None)
    state.silent.discard(node.name)
    state.awaiting.discard(node.name)
    state.writing.pop(node.name, None)
    orders.append(Order(node.name))


def strike(state: FleetState, node: Node, reason: str, **changes: object) -> None:
    """Record a failure of a node as an incident, and apply ``changes`` to its fields.

    A GOOD node with ``strikes`` failures or more within the strike window is quarantined.
    """
    settings = state.settings
    recent = tuple(at_s for at_s in node.strikes if state.now_s - at_s < settings.strike_window_s)
    strikes = (*recent, state.now_s)
    lemon = len(strikes) >= settings.strikes and node.eligibility is Eligibility.GOOD
    if lemon:
        reason = f"{reason}; {len(strikes)} failures within {settings.strike_window_s:g} s: quarantined"
        changes["eligibility"] = Eligibility.QUARANTINED
    note(state, node.name, reason, kind=IncidentKind.LOST)
    change(
        state, node, reason=reason, fault=IncidentKind.LOST, strikes=strikes[-settings.strikes :], **changes
    )


def last_heartbeat_s(state: FleetState, name: str) -> float:
    """Return the time of a node's last heartbeat, in seconds of the fleet's clock.

    The last roll call counts as a heartbeat of every node that is not in ``state.silent``, and of unknown ones.
    """
    at_s = state.last_seen_s.get(name, state.rolled_s)
    return at_s if name in state.silent else max(at_s, state.rolled_s)


def check_leases(state: FleetState, orders: list[Order]) -> None:
    """Lose the nodes whose lease has run out, or whose connection has been broken for ``confirm_s``.

    Leases are looked at only when the next one may run out; sets that time. Within a lease after a roll call
    only silent nodes are looked at. If most of the fleet is late at once, see ``_lose_late``.
    """
    settings, now_s = state.settings, state.now_s
    _lose_late(state, orders, state.suspects, settings.confirm_s, "its connection broke")
    if now_s < state.next_lease_s:
        return
    rolled = now_s - state.rolled_s < settings.lease_s
    names = state.silent if rolled else [name for name, node in state.nodes.items() if node.alive]
    last_seen = {name: last_heartbeat_s(state, name) for name in names}
    _lose_late(state, orders, last_seen, settings.lease_s, "it fell silent")
    remaining = [at_s for name, at_s in last_seen.items() if state.nodes[name].alive]
    if rolled:
        remaining.append(state.rolled_s)
    soonest_s = min(remaining, default=now_s) + settings.lease_s
    state.next_lease_s = soonest_s if soonest_s > now_s else now_s + settings.lease_s / 4


def _lose_late(
    state: FleetState, orders: list[Order], since: dict[str, float], limit_s: float, fault: str
) -> None:
    """Lose the nodes of ``since`` (name -> time of its last sign) that have been silent for ``limit_s``.

    If these are more than two and more than half of the fleet, and no collective broke, wait four times as
    long: the network may be at fault.
    """
    late = sorted(name for name, at_s in since.items() if state.now_s - at_s >= limit_s)
    alive = len(state.seats) - len(state.vacant) + len(state.spares)
    if len(late) > 2 and 2 * len(late) > alive and not state.evidence:
        late = [name for name in late if state.now_s - since[name] >= MASS_PATIENCE * limit_s]
    for name in late:
        lose(state, orders, state.nodes[name], f"{fault} {state.now_s - since[name]:.1f} s ago")


# Roll calls: one event that stands for the same report of thousands of healthy nodes. A fleet of 12,500 nodes
# sends the same report 12,500 times at each transition. An aggregator above the agents folds them into one
# roll call that lists only the nodes that differ. The core handles it with a few set operations.


def rollcall(state: FleetState, event: m.Rollcall, orders: list[Order]) -> None:  # noqa: ARG001
    """Handle a roll call like the reports that it stands for, from all members but ``event.absent``.

    "heartbeat" renews leases, and counts progress in its epoch. "bound" stops waiting for the members while
    BINDING, and "parked" is ``_parked_all``. These two count as stale for another epoch, or if no epoch is
    bound, running or parking.
    """
    if event.report == "heartbeat":
        for name in set(event.absent) - state.silent:
            if name in state.nodes:
                state.last_seen_s[name] = last_heartbeat_s(state, name)
        state.silent = {name for name in event.absent if name in state.nodes and state.nodes[name].alive}
        state.rolled_s = state.now_s
        if state.silent:
            soonest_s = min(last_heartbeat_s(state, name) for name in state.silent)
            state.next_lease_s = min(state.next_lease_s, soonest_s + state.settings.lease_s)
        state.suspects = {name: at_s for name, at_s in state.suspects.items() if name in state.silent}
        if event.epoch == state.epoch:
            stepped(state, event.step)
    elif event.epoch != state.epoch or state.phase not in (*IN_EPOCH, FleetPhase.PARKING):
        state.stale += 1
    elif event.report == "bound":
        if state.phase is FleetPhase.BINDING:
            state.awaiting.intersection_update(event.absent)
    else:
        _parked_all(state, event)


def _parked_all(state: FleetState, event: m.Rollcall) -> None:
    """Take the roll call that members have parked: stop waiting for them, and record the steps that all hold in
    memory.

    Members that are absent or had reported by themselves are left out of that record. Outside PARKING it counts as
    stale.
    """
    if state.phase is not FleetPhase.PARKING:
        # No member was ordered to park, so no aggregator can have an answer for all.
        state.stale += 1
        return
    # Almost all have reported: compute the few that have not.
    awaited = state.awaiting
    state.awaiting = awaited.intersection(event.absent)
    steps = tuple(step for step in event.steps if step >= 0 and trusts(state, state.epoch, step))
    census = state.census
    if census is not None and census.epoch == state.epoch:
        census.steps = tuple(step for step in census.steps if step in steps)
        for name in [name for name in census.absent if name in awaited and name not in state.awaiting]:
            del census.absent[name]
    elif steps:
        silent = {*state.awaiting, *filterfalse(awaited.__contains__, state.seats)}
        absent = {name: state.nodes[name].seat for name in silent}
        state.census = Census(state.epoch, state.ranks, steps, tuple(state.seats), tuple(state.ring), absent)


# Blame: a fault of the run that one node reports is the node's own until another node reports the same.
#
# Two kinds of report would otherwise end a run, or change its bits, because of one machine.
#
# - *The run cannot continue* (``Fatal``): data that cannot be read, another dataset, a model that cannot be
#   built. The node is set aside and the others continue without it. The run ends when a second node reports
#   the same, or when it cannot be trained without the first.
# - *A step is not finite* (``Suspect`` with "nonfinite"): a single faulty accelerator makes the loss of the
#   whole step NaN. The step is computed again without the nodes whose own losses were not finite. If they are
#   the majority, or the others do not suffice, every rank moves to another node instead. If the step is
#   finite now, the first result was a fault, and the blamed nodes stay in quarantine. If not, it is the run's
#   own, and those nodes are admitted again. Only then does ``train.on_nonfinite`` apply, in the next epoch.
#
# The second rule recomputes rather than votes, so it needs neither slots that are computed twice nor a check
# of each gradient. Its limit: a node that makes every gradient of its slots NaN, and never a loss, moves with
# the ranks, and the run is blamed.


def fatal(state: FleetState, event: m.Fatal, orders: list[Order]) -> None:
    """Handle a member's report that the run cannot continue: change ``state`` and append ``orders``.

    Of another epoch, or outside BINDING, RUNNING and PARKING, it only counts as stale. End the run as FAILED if all
    ranks agree, another node reported an error of the same kind before, or the node is needed or not known. Otherwise
    note the accusation, quarantine the node and end the epoch, so that others try.
    """
    if event.epoch != state.epoch or state.phase not in (*IN_EPOCH, FleetPhase.PARKING):
        state.stale += 1
        return
    others = [
        accusation.node
        for accusation in state.accusations
        if accusation.kind == event.kind and accusation.node != event.node
    ]
    alone = event.node not in state.nodes or not can_do_without(state, {event.node})
    if event.unanimous or others or alone:
        also = f" (node {others[0]} reported the same)" if others else ""
        end(state, orders, FleetPhase.FAILED, f"node {event.node}: {event.text}{also}")
        return
    state.accusations = (*state.accusations, Accusation(event.node, event.kind, state.step))
    set_aside(state, event.node, f"cannot train this run: {event.text[:200]}", IncidentKind.NOTE)
    regroup(
        state, orders, f"node {event.node} cannot train this run, and is the only one: {event.text[:200]}"
    )


def nonfinite(state: FleetState, event: m.Suspect, orders: list[Order]) -> None:
    """Handle the report, by any member, that a step's loss or gradient is not finite.

    The first time, quarantine the blamed nodes, or move all ranks if none can be blamed, and regroup to compute it
    again. If the same step fails again, confirm that the run's own numbers are at fault and let the nodes in again.
    Later reports of an epoch count as stale.
    """
    doubt, step = state.doubt, event.step
    already_reported = doubt is not None and doubt.epoch == event.epoch  # Every member reports it.
    if (
        step is None
        or event.epoch != state.epoch
        or state.phase not in (*IN_EPOCH, FleetPhase.PARKING)
        or already_reported
    ):
        state.stale += 1
        return
    text = f"step {step} is not finite: {event.evidence[:200]}"
    if doubt is not None and doubt.step == step:
        _readmit(state, doubt)
        state.doubt = NonFiniteDoubt(step, state.epoch, confirmed=True)
        regroup(state, orders, f"{text}; computed by other nodes, it is the same: it is the run's own")
        return
    if doubt is not None and doubt.step > step:
        # An earlier step's state was restored, and this step fails before the doubted one was computed again without the nodes.
        # So they are neither cleared nor guilty; a guilty node will be blamed again.
        _readmit(state, doubt)
    per_node = state.settings.formation.workers_per_node
    seats = {rank // per_node for rank in event.ranks if rank < state.ranks}
    blamed = {state.seats[seat] for seat in seats}
    # The ranks of a replica compute a slot together, so the loss does not show which of its nodes is at
    # fault.
    formation = state.settings.formation
    together = formation.pipeline * formation.slot_ranks(state.ranks) > per_node
    if together or 2 * len(blamed) > len(state.seats) or not can_do_without(state, blamed):
        blamed = set()
    for name in sorted(blamed):
        set_aside(state, name, f"{text}; the others compute it again", IncidentKind.NOT_FINITE, step)
    state.doubt = NonFiniteDoubt(step, state.epoch, tuple(sorted(blamed)))
    how = f"without node {', '.join(sorted(blamed))}" if blamed else "with every rank on another node"
    regroup(state, orders, f"{text}; it is computed again {how}")


def _readmit(state: FleetState, doubt: NonFiniteDoubt) -> None:
    """Make the nodes that a doubt has quarantined eligible again."""
    for name in doubt.nodes:
        node = state.nodes.get(name)
        if node is not None and node.eligibility is Eligibility.QUARANTINED:
            change(state, node, eligibility=Eligibility.GOOD, reason="", fault=IncidentKind.NOTE)


def set_aside(state: FleetState, name: str, reason: str, kind: IncidentKind, step: int = m.NO_STEP) -> None:
    """Note an incident of a node, and quarantine the node if it is GOOD."""
    note(state, name, reason, kind=kind, step=step)
    node = state.nodes[name]
    if node.eligibility is Eligibility.GOOD:
        change(state, node, eligibility=Eligibility.QUARANTINED, reason=reason, fault=kind)
