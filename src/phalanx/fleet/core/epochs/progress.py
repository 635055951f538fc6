"""Progress of an epoch's members, step by step, up to the end of the run.

While a fleet waits for nodes, or parks after a fault, its newest state is often a snapshot in memory alone,
which is lost when the agents end. So a run that is to end in such a moment enters SAVING. For each different
state, one living node writes its snapshot into one checkpoint, and one of them commits it. No worker takes
part, and nothing is computed: the bytes and checksums are those of the snapshot. Hence drained and
quarantined nodes can do it too. If a copy cannot be written, that node's memory counts as lost. The newest
state that is still complete is then tried, under the next epoch number. Steps that cannot be saved are
reported.
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

# Progress: steps, the pace, and the doubts that a completed step settles.

TOLD_OF_WAITING_S = 30.0


def restored_step(state: FleetState) -> int:
    """Return the step whose state the present epoch restores; ``NO_STEP`` if it begins the run."""
    return step_of(state.source)


def step_of(source: StateSource) -> int:
    """Return the step whose state an epoch with this source begins with; ``NO_STEP`` at the begin of the run."""
    return NO_STEP if isinstance(source, Fresh) else source.step


def progressed(state: FleetState, step: int) -> None:
    """Reset the count of tries if ``step`` is beyond the furthest one so far."""
    if step > state.best_step:
        state.best_step, state.tries = step, 0


def stepped(state: FleetState, step: int) -> None:
    """Record that the members have completed ``step``: update pace and progress, and settle doubts about it.

    Ignored unless running and ahead of the last step. The pace is a moving average, in seconds a step.
    """
    if state.phase is not FleetPhase.RUNNING or step <= state.step:
        return
    pace_s = (state.now_s - state.step_s) / (step - state.step)
    state.pace_s = 0.8 * state.pace_s + 0.2 * pace_s if state.pace_s else pace_s
    state.step, state.step_s, state.diagnosed, state.is_wait_recorded = step, state.now_s, False, False
    progressed(state, step)
    _settle(state, step)


def waits_for_samples(state: FleetState, node: Node, waiting_s: float) -> None:
    """Restart the deadline of the present step: an object store has not delivered ``node``'s samples, so this is no
    hang.

    Ignored unless running. A long wait is noted once a step. The node ends its waiting by itself
    (``data.timeout_s``).
    """
    if state.phase is not FleetPhase.RUNNING:
        return
    state.step_s, state.diagnosed = state.now_s, False
    if waiting_s >= TOLD_OF_WAITING_S and not state.is_wait_recorded:
        state.is_wait_recorded = True
        text = f"has waited {waiting_s:.0f} s for samples from an object store"
        note(state, node.name, text, kind=IncidentKind.DATA_WAIT)


def _settle(state: FleetState, step: int) -> None:
    """Drop the accusations of steps before ``step``, and the doubt about a step up to ``step``: it was finite this
    time.

    The nodes that the doubt had blamed are proven at fault: they stay quarantined, with that as reason and
    incident.
    """
    state.accusations = tuple(accusation for accusation in state.accusations if accusation.step >= step)
    doubt = state.doubt
    if doubt is not None and step >= doubt.step:
        state.doubt = None
        for name in doubt.nodes:
            verdict = f"step {doubt.step} is finite where other nodes compute it: this one was at fault"
            note(state, name, verdict, kind=IncidentKind.NOT_FINITE, step=doubt.step)
            node = state.nodes.get(name)
            if node is not None and node.eligibility is Eligibility.QUARANTINED:
                change(state, node, reason=verdict)


def withdraw_doubt(state: FleetState) -> None:
    """Make the blamed nodes of an unconfirmed doubt eligible again, if the new epoch restores a step at or after
    the doubted one.

    Then that step is not computed again, and whether it is the run's own fault stays unknown. The doubt itself stays,
    without nodes.
    """
    doubt = state.doubt
    if doubt is None or doubt.confirmed or not doubt.nodes or step_of(state.source) < doubt.step:
        return
    state.doubt = replace(doubt, nodes=())
    for name in doubt.nodes:
        note(state, name, f"step {doubt.step} is not computed again: there is no evidence against this node")
        node = state.nodes.get(name)
        if node is not None and node.eligibility is Eligibility.QUARANTINED:
            change(state, node, eligibility=Eligibility.GOOD, reason="", fault=IncidentKind.NOTE)


# Retention of snapshots in memory: pure rules over step numbers, shared by the workers of a run and the
# simulator. A snapshot may be dropped once a newer one is safe: every rank's own copy and its buddy's copy of
# it are complete. Then all ranks hold some common step at any moment, and a fault loses at most the steps
# since then. (``phalanx.checkpoint.save.save_schedule`` has the rule for checkpoints on disk.)


def droppable(snapshots: Iterable[RankSnapshot], safe_step: int) -> tuple[RankSnapshot, ...]:
    """Return the snapshots that a node may overwrite once all copies of ``safe_step`` are complete."""
    return tuple(snapshot for snapshot in snapshots if snapshot.step < safe_step)


def may_begin(newest_step: int, safe_step: int) -> bool:
    """Return True if a rank with two buffers may begin a snapshot: only when its newest one is safe on all
    ranks.
    """
    return newest_step <= safe_step


# The end of a run: state that is only in the memory of nodes is written to disk before the agents end.

OVER = (FleetPhase.FINISHED, FleetPhase.FAILED)


def enter(state: FleetState, phase: FleetPhase) -> None:
    """Begin a phase."""
    state.phase, state.since_s = phase, state.now_s


def end(state: FleetState, orders: list[Order], phase: FleetPhase, reason: str) -> None:
    """Enter ``phase``, FINISHED or FAILED, and order all living agents to shut down.

    The incident and the reason also name the steps that are not on disk and are lost.
    """
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
    """Return the step from which the run would resume if all memory were lost now."""
    return max(state.durable, default=state.settings.first_step)


def unsaved_steps(state: FleetState) -> int:
    """Return the number of completed steps, as far as reported, that are on no disk."""
    return 0 if state.result_json else max(0, state.best_step - newest_saved(state))


def dialing_until_s(state: FleetState) -> float:
    """Return the time until which dialing agents may hold the newest steps; minus infinity if none is awaited.

    It is ``form_s`` after the begin of forming, else after the last request for every node's description.
    """
    start_s = state.since_s if state.phase is FleetPhase.FORMING else state.reports_requested_s
    return -math.inf if start_s is None else start_s + state.settings.form_s


def memory_may_come(state: FleetState) -> bool:
    """Return True if agents that still dial may hold newer steps than those at hand, so a stop has to wait.

    False for a run that has computed nothing, or after ``form_s``. False once the configured number of nodes have
    described themselves, and the newest step that any of them names can be restored.
    """
    has_computed = (
        state.fencing.attempt > 0 or state.durable or max(state.epoch, state.seen_epoch) != NO_EPOCH
    )
    if not (has_computed or state.reports_requested_s is not None) or state.now_s >= dialing_until_s(state):
        return False
    # After a resynchronization a heartbeat may come before the description. A node started as a spare counts
    # if it holds a state.
    described = sum(
        node.alive
        and not node.engaged
        and (node.warm or bool(node.snapshots) or state.epoch == NO_EPOCH)
        and (bool(node.snapshots) or not node.started_as_spare)
        for node in state.nodes.values()
    )
    newest = newest_in_memory(state)
    newest_step = NO_STEP if newest is None else newest.step
    newest_reported = max(
        (snapshot.step for node in state.nodes.values() if node.alive for snapshot in node.snapshots),
        default=NO_STEP,
    )
    return described < state.settings.wanted_nodes or max(newest_step, newest_saved(state)) < newest_reported


def conclude(state: FleetState, orders: list[Order], phase: FleetPhase, reason: str) -> None:
    """End the run as ``phase`` while no worker is in an epoch, once memory's newest state is on disk.

    If nothing in memory is newer, the run ends now; else it enters SAVING, and the holders are ordered to write it.
    """
    source = restore_source(state)
    if not isinstance(source, RestorePoint) or source.step <= newest_saved(state):
        end(state, orders, phase, reason)
        return
    # A new number, so that an earlier try's draft is never mixed with this one's.
    state.epoch = max(state.epoch, state.seen_epoch) + 1
    state.source, state.ends_as, state.reason = source, phase, reason
    state.writing = _shares(state, source)
    enter(state, FleetPhase.SAVING)
    orders += [Order(name) for name in sorted(state.writing)]


def _shares(state: FleetState, point: RestorePoint) -> dict[str, list[tuple[int, int]]]:
    """Return node -> (rank, state) of the snapshots that it is to write: each state once, given to the holder with
    the fewest so far.
    """
    shares: dict[str, list[tuple[int, int]]] = {}
    for key in range(state.settings.formation.keys(point.ranks)):
        copies = copies_of(state, point, key)
        name = min(copies, key=lambda holder: (len(shares.get(holder, ())), holder))
        shares.setdefault(name, []).append((copies[name], key))
    return shares


def from_saving(state: FleetState, orders: list[Order]) -> bool:
    """End the run once its newest state is on disk. If a share of it was lost with a node, conclude again.

    Then the newest state that is still complete in memory is saved, or the run ends. Return True if the state
    changed.
    """
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
    """Handle a node's report, while the run ends, that it cannot write its share.

    Note it, forget all its copies, and conclude again: the newest state that is still complete in memory is
    saved under a new epoch number. If none is newer than on disk, the run ends now. From an unknown node, or of
    another epoch, phase or incarnation, it counts as stale.
    """
    node = state.nodes.get(event.node)
    stale = event.epoch != state.epoch or state.phase is not FleetPhase.SAVING
    if node is None or stale or node.incarnation != event.incarnation:
        state.stale += 1
        return
    note(state, node.name, f"cannot save the snapshots that it holds: {event.text[:200]}")
    forget_copies(state, node.name)
    change(state, node, snapshots=())
    conclude(state, orders, state.ends_as, state.reason)
