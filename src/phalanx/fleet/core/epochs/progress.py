"""Progress of an epoch's members, step by step, up to the end of the run.

While a fleet waits for nodes, or parks after a fault, its newest state is often a snapshot in memory alone. Memory ends with the agents. So
a run that is to end in such a moment enters SAVING: of each different state one living node writes the snapshot that it holds into one
checkpoint, and one of them commits it. No worker takes part, and nothing is computed: the bytes are those of the snapshot, under the
checksums that were taken with it. Hence drained nodes can do it, and quarantined ones too. Where a copy cannot be written, that node's
memory counts as gone, and the newest state that is still whole is tried, under the next epoch number. What cannot be saved is reported, in
steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from phalanx.fleet.core.commands import Fresh, Shutdown
from phalanx.fleet.core.epochs.epoch_plan import LIVING, Order, copies_of, newest_in_memory, restore_source
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, NotSaved, RankSnapshot
from phalanx.fleet.core.state import (
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    RestorePoint,
    StateSource,
    change,
    forget_copies,
    note,
)
from phalanx.observe.events import IncidentKind

# Progress: steps, the pace, and which doubts a completed step settles.

TOLD_OF_WAITING_S = 30.0


def restored_step(state: FleetState) -> int:
    """The step whose state the present epoch restores; ``NO_STEP`` if it begins the run."""
    return step_of(state.source)


def step_of(source: StateSource) -> int:
    """The step whose state an epoch with this source begins with; ``NO_STEP`` at the begin of the run."""
    return NO_STEP if isinstance(source, Fresh) else source.step


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
        text = f"has waited {waiting_s:.0f} s for samples from an object store"
        note(state, node.name, text, kind=IncidentKind.DATA_WAIT)


def _settle(state: FleetState, step: int) -> None:
    """Drops what nodes have said of the run (``phalanx.fleet.core.epochs.faults``) and ``step``, which is completed, has decided."""
    state.accusations = tuple(said for said in state.accusations if said.step >= step)
    doubt = state.doubt
    if doubt is not None and step >= doubt.step:
        state.doubt = None
        for name in doubt.nodes:
            verdict = f"step {doubt.step} is finite where other nodes compute it: this one was at fault"
            note(state, name, verdict, kind=IncidentKind.NOT_FINITE, step=doubt.step)
            node = state.nodes.get(name)
            if node is not None and node.eligibility is Eligibility.QUARANTINED:
                change(state, node, why=verdict)


def withdraw_doubt(state: FleetState) -> None:
    """Lets the nodes in again that are blamed for a step which the new epoch will not compute: it restores a state from beyond it.

    Such a state was kept by a node that was away, from an epoch that got further. Whether the step is the run's own is then not found out.
    """
    doubt = state.doubt
    if doubt is None or doubt.confirmed or not doubt.nodes or step_of(state.source) < doubt.step:
        return
    state.doubt = replace(doubt, nodes=())
    for name in doubt.nodes:
        note(state, name, f"step {doubt.step} is not computed again: nothing is known against this node")
        node = state.nodes.get(name)
        if node is not None and node.eligibility is Eligibility.QUARANTINED:
            change(state, node, eligibility=Eligibility.GOOD, why="", fault=IncidentKind.NOTE)


# Retention of snapshots in memory: pure rules over step numbers, shared by the workers of a run and the simulator.
#
# A snapshot may be dropped once a newer one is safe, that is, once every rank's own copy and its buddy's copy of the newer
# one are complete. Then all ranks hold some common step at any moment, and a fault loses at most the steps since then.
# (``phalanx.checkpoint.save.interval`` has the rule for checkpoints on disk.)


def droppable(held: Iterable[RankSnapshot], safe_step: int) -> tuple[RankSnapshot, ...]:
    """The snapshots that a node may overwrite, once all ranks' copies of ``safe_step`` are known to be complete."""
    return tuple(holding for holding in held if holding.step < safe_step)


def may_begin(newest_step: int, safe_step: int) -> bool:
    """True if a rank with two buffers may begin a snapshot: only when its newest one is safe on all ranks."""
    return newest_step <= safe_step


# The end of a run: what only the memory of nodes holds is written to disk before the agents end.

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
