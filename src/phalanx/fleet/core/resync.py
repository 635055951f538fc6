"""Resynchronization: a state that contradicts itself is rebuilt from what the nodes say.

A broken invariant is a bug in the core (or a bit that flipped in its memory), and decisions of such a state cannot be
trusted: they might seat two nodes on one rank, or begin an epoch while an old one still trains. Four answers are possible.

- To end the process is a crash loop: the next coordinator replays the same journal to the same state.
- To log it and go on sends commands that nobody can vouch for, and only commands can do harm.
- To say nothing any more is safe, since training goes on without a coordinator, but only until the next fault.
- To drop what is derived, and ask every node, is what happens when a journal was lost; agents and core know that case.

The last one is taken. The commands of the contradictory turn are never sent. What nodes cannot repeat is kept: who is
fenced (so that no earlier incarnation is believed), who is quarantined or drained, the highest epoch (a number is never used twice), which
steps are not to be trusted, what is on disk. Seats, the buddy ring, copies and everybody whom the core waits for are
dropped. Each node counts as engaged until it has said that its workers are in no epoch, and the next epoch forms when no
living node is engaged any more (or ``form_s`` has passed), so that every member has parked and its snapshot counts. Each
resynchronization counts as a fault without progress, so a bug that strikes again at once ends the run after ``max_tries``,
with its text as the reason. A coordinator that is killed before the rebuilt state is on disk is no exception: the replay of
its journal resynchronizes likewise (``phalanx.fleet.core.replay``). A journal with damaged lines leads to a state that is
rebuilt in the same way: what the lost lines said, the nodes say again.
"""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.fleet.core.commands import (
    Shutdown,
    TellAll,
)
from phalanx.fleet.core.epochs.ending import OVER, end
from phalanx.fleet.core.epochs.life_cycle import IN_EPOCH
from phalanx.fleet.core.invariants import Mark
from phalanx.fleet.core.orders import LIVING, Order
from phalanx.fleet.core.state import NO_SEAT, FleetPhase, FleetState, is_leaving, note

_REASON_MAX = 1000


def reason(error: Exception) -> str:
    """The text of a contradiction, for people, and not longer than an incident should be."""
    return f"{error or type(error).__name__}"[:_REASON_MAX]


def resync(
    state: FleetState, before: Mark, why: str, cause: str = "the coordinator's state contradicted itself"
) -> tuple[FleetState, list[Order]]:
    """A state that keeps its invariants in place of ``state``, and the orders that ask every node to describe itself.

    A run that was over, or that the contradictory turn ended, stays over.

    Args:
        state: The state that contradicts itself.
        before: The mark of the last state that did not.
        why: What was wrong, for people.
        cause: Why the state is not to be trusted, for people.
    """
    was_over = before.phase in OVER
    over = was_over or state.phase in OVER
    nodes = {
        node.name: replace(node, seat=NO_SEAT, meeting_points=(), held=(), engaged=node.alive)
        for node in state.nodes.values()
    }
    now_s, epoch = state.now_s, max(state.epoch, before.epoch)
    rebuilt = FleetState(
        settings=state.settings,
        fencing=state.fencing,
        phase=before.phase if was_over else state.phase if over else FleetPhase.FORMING,
        epoch=epoch,
        seen_epoch=max(state.seen_epoch, epoch),
        now_s=now_s,
        since_s=now_s,
        asked_s=now_s,
        reason=state.reason if over else why,
        left_s=now_s if state.left_s is None else state.left_s,
        stopping=state.stopping,
        step=state.step,
        step_s=now_s,
        pace_s=state.pace_s,
        best_step=state.best_step,
        tries=state.tries + 1,
        durable=state.durable,
        condemned=state.condemned,
        distrust=state.distrust,
        accusations=state.accusations,
        doubt=state.doubt,
        source=state.source,
        result_json=state.result_json,
        key=state.key,
        nodes=nodes,
        leaving={name for name, node in nodes.items() if is_leaving(node)},
        rolled_s=now_s,  # nobody's silence counts from before
        next_lease_s=now_s + state.settings.lease_s,
        incidents=state.incidents,
        stale=state.stale,
        recoveries=state.recoveries + 1,
        regroups=state.regroups,
    )
    text = f"{cause}, every node is asked anew: {why}"
    note(rebuilt, "", text, ended_epoch=before.phase in IN_EPOCH)
    orders: list[Order] = []
    if over and not was_over:  # the turn that told the nodes was dropped
        orders.append(Order(LIVING, Shutdown(rebuilt.reason)))
    elif not over and rebuilt.tries > rebuilt.settings.max_tries:
        end(
            rebuilt,
            orders,
            FleetPhase.FAILED,
            f"{rebuilt.tries} faults in a row without a step between them; the last one: {why}",
        )
    elif not over:
        orders.append(Order(LIVING, TellAll()))
    return rebuilt, orders
