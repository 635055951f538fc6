"""Invariants: what must hold of the core's state after every event, whatever has happened.

The simulator checks them after each event. The live coordinator checks them once per turn, after the events of the turn
and before any command is sent, since only commands can do harm; a violation is a bug in the core, never a fault of the
fleet, and ``phalanx.fleet.core.resync`` is the answer to it.

Cost, measured on one busy core with 8 workers a node: 0.63 ms for 1,000 nodes, 11.5 ms for 12,500. Of 216,000 heartbeats/s
that the core takes for 1,000 nodes, 1,580/s would be left with a check after each; once per turn, a turn of 1,000
heartbeats takes 2.6 ms instead of 2.0 ms, and a turn comes about once a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from phalanx.fleet.core.epochs.life_cycle import pause_s
from phalanx.fleet.core.state import NO_SEAT, FleetPhase, FleetState, RestorePoint, is_leaving, usable


class BrokenInvariant(AssertionError):  # noqa: N818
    """The core has contradicted itself; the text says how, and how to reproduce it."""


class Mark(Struct, frozen=True):
    """The part of a state that later states are compared with: numbers that may only grow, and the phase."""

    epoch: int
    ended: int
    """Epochs that were ended."""
    phase: FleetPhase


def mark(state: FleetState) -> Mark:
    """The mark of a state, to be taken before an event."""
    return Mark(state.epoch, state.recoveries + state.regroups, state.phase)


def check(state: FleetState, before: Mark | None = None) -> None:
    """Raises BrokenInvariant naming everything that does not hold. Costs O(nodes)."""
    wrong = [*_seats(state), *_phases(state), *(_order(state, before) if before else ())]
    if wrong:
        raise BrokenInvariant("; ".join(wrong))


def _seats(state: FleetState) -> Iterator[str]:
    if len(set(state.seats)) != len(state.seats):
        yield f"a node has two seats: {state.seats}"
    for seat, name in enumerate(state.seats):
        node = state.nodes[name]
        if node.seat != seat:
            yield f"node {name} has seat {node.seat} by its own record, and holds seat {seat}"
    # One pass, which asks of each node once: it is most of what a turn of a large fleet costs.
    seats, vacant, spares, leaving = state.seats, state.vacant, state.spares, state.leaving
    for name, node in state.nodes.items():
        seat, fit = node.seat, usable(state, node)
        if seat == NO_SEAT:
            if fit != (name in spares):
                yield f"node {name} is wrongly {'not ' if fit else ''}called a spare"
        elif seat >= len(seats) or seats[seat] != name:
            yield f"node {name} has seat {seat} by its own record, which another node holds"
        elif fit == (seat in vacant):
            yield f"seat {seat} (node {name}) is wrongly called {'vacant' if fit else 'taken'}"
        elif name in spares:
            yield f"node {name} is wrongly called a spare"
        if is_leaving(node) != (name in leaving):
            yield f"node {name} is wrongly {'' if name in leaving else 'not '}called leaving"
    if state.seats and sorted(state.ring) != list(range(len(state.seats))):
        yield f"the ring of buddies {state.ring} is no permutation of the seats"


def _phases(state: FleetState) -> Iterator[str]:
    seated, formation = set(state.seats), state.settings.formation
    if not state.awaiting <= seated:
        yield f"waits for nodes without a seat: {sorted(state.awaiting - seated)}"
    if state.awaiting and state.phase not in (FleetPhase.PARKING, FleetPhase.BINDING):
        yield f"waits for {sorted(state.awaiting)} while {state.phase}"
    pausing = state.phase is FleetPhase.PARKING and state.now_s < state.since_s + pause_s(state.tries)
    if not state.awaiting and state.phase in (FleetPhase.PARKING, FleetPhase.BINDING) and not pausing:
        yield f"waits for nobody while {state.phase}"
    if any(not state.nodes[name].alive for name in state.awaiting):
        yield "waits for the dead"
    if (state.phase is FleetPhase.SAVING) != bool(state.writing):
        yield f"{state.writing} are to be saved while {state.phase}"
    if any(not state.nodes[name].alive for name in state.writing):
        yield "the dead are to save their memory"
    if isinstance(state.source, RestorePoint) and state.writing:
        states = sorted(key for share in state.writing.values() for _, key in share)
        if states != list(range(formation.keys(state.source.ranks))):
            yield f"the states {states} are to be saved, each once"
    if state.phase in (FleetPhase.BINDING, FleetPhase.RUNNING):
        if state.vacant:
            yield f"{state.phase} with vacant seats {sorted(state.vacant)}"
        if state.ranks not in formation.legal or formation.seats(state.ranks) != len(state.seats):
            yield f"{len(state.seats)} seats for {state.ranks} ranks"


def _order(state: FleetState, before: Mark) -> Iterator[str]:
    if state.epoch < before.epoch:
        yield f"epoch {before.epoch} was followed by {state.epoch}"
    ended = state.recoveries + state.regroups > before.ended
    if state.epoch > before.epoch and before.phase in (FleetPhase.RUNNING, FleetPhase.BINDING) and not ended:
        yield f"epoch {state.epoch} began while {before.epoch} was {before.phase}"
    if before.phase in (FleetPhase.FINISHED, FleetPhase.FAILED) and state.phase is not before.phase:
        yield f"{before.phase} was followed by {state.phase}"
