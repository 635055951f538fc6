"""Deadlines of phases: when each passes, what is done then, and when a Tick is due."""

from __future__ import annotations

from phalanx.fleet.core.commands import Diagnose
from phalanx.fleet.core.epochs.ending import dialing_until_s, end
from phalanx.fleet.core.epochs.life_cycle import can_grow, pause_s, regroup
from phalanx.fleet.core.epochs.losses import lose, strike
from phalanx.fleet.core.orders import SEATED, Order
from phalanx.fleet.core.state import FleetPhase, FleetState


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
