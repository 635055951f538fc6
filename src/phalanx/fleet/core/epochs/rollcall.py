"""Roll calls: one event that stands for the same report of thousands of healthy nodes.

A fleet of 12,500 nodes sends the same report 12,500 times at each transition. An aggregator above the agents folds them
into one roll call that lists only the nodes that differ, and the core handles it with a few set operations.
"""

from __future__ import annotations

from itertools import filterfalse

from phalanx.fleet.core.epochs.life_cycle import IN_EPOCH
from phalanx.fleet.core.epochs.losses import last_heard_s
from phalanx.fleet.core.epochs.progress import stepped
from phalanx.fleet.core.messages import Rollcall
from phalanx.fleet.core.orders import Order
from phalanx.fleet.core.state import Census, FleetPhase, FleetState, trusts


def rollcall(state: FleetState, event: Rollcall, orders: list[Order]) -> None:  # noqa: ARG001
    """Handles a roll call like the reports that it stands for."""
    if event.what == "heartbeat":
        for name in set(event.absent) - state.silent:
            if name in state.nodes:
                state.heard[name] = last_heard_s(state, name)
        state.silent = {name for name in event.absent if name in state.nodes and state.nodes[name].alive}
        state.rolled_s = state.now_s
        if state.silent:
            soonest_s = min(last_heard_s(state, name) for name in state.silent)
            state.next_lease_s = min(state.next_lease_s, soonest_s + state.settings.lease_s)
        state.suspects = {name: at_s for name, at_s in state.suspects.items() if name in state.silent}
        if event.epoch == state.epoch:
            stepped(state, event.step)
    elif event.epoch != state.epoch or state.phase not in (*IN_EPOCH, FleetPhase.PARKING):
        state.stale += 1
    elif event.what == "bound":
        if state.phase is FleetPhase.BINDING:
            state.awaiting.intersection_update(event.absent)
    else:
        _parked_all(state, event)


def _parked_all(state: FleetState, event: Rollcall) -> None:
    if state.phase is not FleetPhase.PARKING:
        # No member was told to park, so no aggregator can have an answer for all.
        state.stale += 1
        return
    # Who has spoken is all but a few: what is worked out are those few.
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
