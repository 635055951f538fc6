"""What the members of an epoch get done: steps, the pace, and what a completed step decides of doubts."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.fleet.core.commands import Fresh
from phalanx.fleet.core.messages import NO_STEP
from phalanx.fleet.core.state import Eligibility, FleetPhase, FleetState, Node, StateSource, change, note
from phalanx.observe.events import IncidentKind

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
    """Drops what nodes have said of the run (``phalanx.fleet.core.epochs.blame``) and ``step``, which is completed, has decided."""
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
