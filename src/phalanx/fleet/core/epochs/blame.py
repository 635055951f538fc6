"""Blame: a fault that a node reports of the run is the node's own until another node has found the same.

Two kinds of report would end a run, or change its bits, on the word of one machine.

- *The run cannot go on* (``Fatal``): data that cannot be read, another dataset, a model that cannot be built. The node is set aside
  and the others go on without it. The run ends when a second node says the same, or when it cannot be trained without the first.
- *A step is not finite* (``Suspect`` with "nonfinite"): a single faulty accelerator makes the loss of the whole step NaN. The step is
  computed again: without the nodes whose own losses were not finite, if they are not the majority and the others suffice; else with every
  rank on another node. If it is finite now, the first result was a fault, and the nodes that were blamed stay in quarantine. If not, it is
  the run's own, those nodes are let in again, and the next epoch is told so: only then does ``train.on_nonfinite`` apply.

The second rule recomputes rather than votes, so it needs neither slots that are computed twice nor a check of each gradient. Its limit: a
node that makes every gradient of its slots NaN, and never a loss, moves with the ranks and is taken for the run.
"""

from __future__ import annotations

from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.ending import end
from phalanx.fleet.core.epochs.epoch_plan import can_do_without
from phalanx.fleet.core.epochs.life_cycle import IN_EPOCH, regroup
from phalanx.fleet.core.orders import Order
from phalanx.fleet.core.state import (
    Accusation,
    Eligibility,
    FleetPhase,
    FleetState,
    NonFiniteDoubt,
    change,
    note,
)
from phalanx.observe.events import IncidentKind


def fatal(state: FleetState, event: m.Fatal, orders: list[Order]) -> None:
    """Handles the report that the run cannot go on."""
    if event.epoch != state.epoch or state.phase not in (*IN_EPOCH, FleetPhase.PARKING):
        state.stale += 1
        return
    others = [said.node for said in state.accusations if said.kind == event.kind and said.node != event.node]
    alone = event.node not in state.nodes or not can_do_without(state, {event.node})
    if event.unanimous or others or alone:
        also = f" (node {others[0]} said the same)" if others else ""
        end(state, orders, FleetPhase.FAILED, f"node {event.node}: {event.text}{also}")
        return
    state.accusations = (*state.accusations, Accusation(event.node, event.kind, state.step))
    set_aside(state, event.node, f"cannot train this run: {event.text[:200]}", IncidentKind.NOTE)
    regroup(
        state, orders, f"node {event.node} cannot train this run, and is alone in that: {event.text[:200]}"
    )


def nonfinite(state: FleetState, event: m.Suspect, orders: list[Order]) -> None:
    """Handles the report, by any member, that a step's loss or gradient is not finite."""
    doubt, step = state.doubt, event.step
    known = doubt is not None and doubt.epoch == event.epoch  # every member says it
    if (
        step is None
        or event.epoch != state.epoch
        or state.phase not in (*IN_EPOCH, FleetPhase.PARKING)
        or known
    ):
        state.stale += 1
        return
    what = f"step {step} is not finite: {event.evidence[:200]}"
    if doubt is not None and doubt.step == step:
        _let_in_again(state, doubt)
        state.doubt = NonFiniteDoubt(step, state.epoch, confirmed=True)
        regroup(state, orders, f"{what}; computed by other nodes, it is the same: it is the run's own")
        return
    if doubt is not None and doubt.step > step:
        # State of an earlier step was restored, and this step fails before that one could be computed without them: nothing is
        # known of them now. Whoever is at fault is blamed again.
        _let_in_again(state, doubt)
    per_node = state.settings.formation.workers_per_node
    seats = {rank // per_node for rank in event.ranks if rank < state.ranks}
    blamed = {state.seats[seat] for seat in seats}
    # The ranks of a replica compute a slot together: which of its nodes is at fault, the loss does not say.
    formation = state.settings.formation
    together = formation.pipeline * formation.slot_ranks(state.ranks) > per_node
    if together or 2 * len(blamed) > len(state.seats) or not can_do_without(state, blamed):
        blamed = set()
    for name in sorted(blamed):
        set_aside(state, name, f"{what}; the others compute it again", IncidentKind.NOT_FINITE, step)
    state.doubt = NonFiniteDoubt(step, state.epoch, tuple(sorted(blamed)))
    how = f"without node {', '.join(sorted(blamed))}" if blamed else "with every rank on another node"
    regroup(state, orders, f"{what}; it is computed again {how}")


def _let_in_again(state: FleetState, doubt: NonFiniteDoubt) -> None:
    for name in doubt.nodes:
        node = state.nodes.get(name)
        if node is not None and node.eligibility is Eligibility.QUARANTINED:
            change(state, node, eligibility=Eligibility.GOOD, why="", fault=IncidentKind.NOTE)


def set_aside(state: FleetState, name: str, why: str, kind: IncidentKind, step: int = m.NO_STEP) -> None:
    """Notes why a node is unfit, and quarantines it if it may hold ranks."""
    note(state, name, why, kind=kind, step=step)
    node = state.nodes[name]
    if node.eligibility is Eligibility.GOOD:
        change(state, node, eligibility=Eligibility.QUARANTINED, why=why, fault=kind)
