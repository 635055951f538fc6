"""The end of a run: what only the memory of nodes holds is written to disk before the agents are told to go.

While a fleet waits for nodes, or parks after a fault, its newest state is often a snapshot in memory alone. Memory ends with the agents. So a
run that is to end in such a moment enters SAVING: of each different state one living node is told to write the snapshot that it holds into one
checkpoint, and one of them commits it. No worker takes part, and nothing is computed: the bytes are those of the snapshot, under the checksums
that were taken with it. Hence drained nodes can do it, and quarantined ones too. Where a copy cannot be written, that node's memory counts as
gone, and the newest state that is still whole is tried, under the next epoch number. What cannot be saved is told, in steps.
"""

from __future__ import annotations

import math

from phalanx.fleet.core.commands import Shutdown
from phalanx.fleet.core.epochs.epoch_plan import copies_of, newest_in_memory, restore_source
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, NotSaved
from phalanx.fleet.core.orders import LIVING, Order
from phalanx.fleet.core.state import FleetPhase, FleetState, RestorePoint, change, forget_copies, note

OVER = (FleetPhase.FINISHED, FleetPhase.FAILED)


def enter(state: FleetState, phase: FleetPhase) -> None:
    """Begins a phase."""
    state.phase, state.since_s = phase, state.now_s


def end(state: FleetState, orders: list[Order], phase: FleetPhase, reason: str) -> None:
    """Ends the run, FINISHED or FAILED, and says which steps are lost."""
    enter(state, phase)
    lost = unsaved_steps(state)
    if lost:
        saved = newest_saved(state)
        steps = f"step {saved + 1} is" if lost == 1 else f"steps {saved + 1} to {saved + lost} are"
        reason += f"; {steps} not on disk, and will be computed again"
    state.reason, state.awaiting, state.writing = reason, set(), {}
    note(state, "", f"{phase}: {reason}", level="error" if phase is FleetPhase.FAILED else "info")
    orders.append(Order(LIVING, Shutdown(reason)))


def newest_saved(state: FleetState) -> int:
    """The step from which the run would go on if all memory were lost now."""
    return max(state.durable, default=state.settings.first_step)


def unsaved_steps(state: FleetState) -> int:
    """The number of completed steps, as far as reported, that are on no disk."""
    return 0 if state.result_json else max(0, state.best_step - newest_saved(state))


def dialing_until_s(state: FleetState) -> float:
    """The time until which agents that still dial may hold the newest steps: ``form_s`` from the begin of forming, or from the moment
    at which every node was asked anew, if the fleet waits since then."""
    begun_s = state.since_s if state.phase is FleetPhase.FORMING else state.asked_s
    return -math.inf if begun_s is None else begun_s + state.settings.form_s


def memory_may_come(state: FleetState) -> bool:
    """True if agents that still dial may hold the newest steps: a fleet that is stopped while it forms or waits gives them some time.

    Nobody is waited for in a run that has computed nothing yet, nor once as many nodes as the run wants have described themselves and hold
    the newest state that any of them names.
    """
    begun = state.fencing.attempt > 0 or state.durable or max(state.epoch, state.seen_epoch) != NO_EPOCH
    if not (begun or state.asked_s is not None) or state.now_s >= dialing_until_s(state):
        return False
    # After a resynchronization a heartbeat may come before the description; a node that was started as a spare counts if it holds a state.
    described = sum(
        node.alive
        and not node.engaged
        and (node.warm or bool(node.held) or state.epoch == NO_EPOCH)
        and (bool(node.held) or not node.started_as_spare)
        for node in state.nodes.values()
    )
    newest = newest_in_memory(state)
    whole = NO_STEP if newest is None else newest.step
    named = max(
        (held.step for node in state.nodes.values() if node.alive for held in node.held), default=NO_STEP
    )
    return described < state.settings.wanted_nodes or max(whole, newest_saved(state)) < named


def conclude(state: FleetState, orders: list[Order], phase: FleetPhase, reason: str) -> None:
    """Ends the run while no worker is in an epoch, once the newest state of memory is on disk if it is not yet."""
    source = restore_source(state)
    if not isinstance(source, RestorePoint) or source.step <= newest_saved(state):
        end(state, orders, phase, reason)
        return
    # A number of its own: what an earlier try has left in its draft is never mixed with this one's.
    state.epoch = max(state.epoch, state.seen_epoch) + 1
    state.source, state.ends_as, state.reason = source, phase, reason
    state.writing = _shares(state, source)
    enter(state, FleetPhase.SAVING)
    orders += [Order(name) for name in sorted(state.writing)]


def _shares(state: FleetState, point: RestorePoint) -> dict[str, list[tuple[int, int]]]:
    """Node -> (rank, state) of the snapshots that it is to write: each different state once, the work spread over its holders."""
    shares: dict[str, list[tuple[int, int]]] = {}
    for key in range(state.settings.formation.keys(point.ranks)):
        held = copies_of(state, point, key)
        name = min(held, key=lambda holder: (len(shares.get(holder, ())), holder))
        shares.setdefault(name, []).append((held[name], key))
    return shares


def from_saving(state: FleetState, orders: list[Order]) -> bool:
    """Ends the run once its newest state is on disk; a node that was lost meanwhile is replaced by another holder."""
    assert isinstance(state.source, RestorePoint)
    if state.source.step in state.durable:
        reason = f"{state.reason}; step {state.source.step} was saved from the memory of the nodes"
        end(state, orders, state.ends_as, reason)
        return True
    if sum(map(len, state.writing.values())) == state.settings.formation.keys(state.source.ranks):
        return False
    conclude(state, orders, state.ends_as, state.reason)
    return True


def not_saved(state: FleetState, event: NotSaved, orders: list[Order]) -> None:
    """Handles the report that a node cannot write its share: what it holds counts as gone."""
    node = state.nodes.get(event.node)
    stale = event.epoch != state.epoch or state.phase is not FleetPhase.SAVING
    if node is None or stale or node.incarnation != event.incarnation:
        state.stale += 1
        return
    note(state, node.name, f"cannot save the snapshots that it holds: {event.text[:200]}")
    forget_copies(state, node.name)
    change(state, node, held=())
    conclude(state, orders, state.ends_as, state.reason)
