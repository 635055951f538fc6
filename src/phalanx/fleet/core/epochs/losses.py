"""Nodes that are lost: leases that run out, failures that are counted, and the fence that shuts a lost node out."""

from __future__ import annotations

from phalanx.fleet.core.orders import Order
from phalanx.fleet.core.state import Eligibility, FleetState, Node, change, forget_copies, note
from phalanx.observe.events import IncidentKind

MASS_PATIENCE = 4
"""If most nodes fall silent at once, the coordinator itself is likely cut off: leases last this many times longer."""


def lose(state: FleetState, orders: list[Order], node: Node, why: str) -> None:
    """Fences a node: messages of this incarnation are ignored from now on, and its snapshots count as gone."""
    strike(state, node, why, alive=False, meeting_points=(), held=())
    forget_copies(state, node.name)
    state.suspects.pop(node.name, None)
    state.silent.discard(node.name)
    state.awaiting.discard(node.name)
    state.writing.pop(node.name, None)
    orders.append(Order(node.name))


def strike(state: FleetState, node: Node, why: str, **changes: object) -> None:
    """Records a failure of a node; one that fails too often is quarantined."""
    settings = state.settings
    recent = tuple(at_s for at_s in node.strikes if state.now_s - at_s < settings.strike_window_s)
    strikes = (*recent, state.now_s)
    lemon = len(strikes) >= settings.strikes and node.eligibility is Eligibility.GOOD
    if lemon:
        why = f"{why}; {len(strikes)} failures within {settings.strike_window_s:g} s: quarantined"
        changes["eligibility"] = Eligibility.QUARANTINED
    note(state, node.name, why, kind=IncidentKind.LOST)
    change(state, node, why=why, fault=IncidentKind.LOST, strikes=strikes[-settings.strikes :], **changes)


def last_heard_s(state: FleetState, name: str) -> float:
    """Time of the last sign of life of a node."""
    heard_s = state.heard.get(name, state.rolled_s)
    return heard_s if name in state.silent else max(heard_s, state.rolled_s)


def check_leases(state: FleetState, orders: list[Order]) -> None:
    """Fences the nodes whose lease has run out, or that have been without connection for too long."""
    settings, now_s = state.settings, state.now_s
    _lose_late(state, orders, state.suspects, settings.confirm_s, "its connection broke")
    if now_s < state.next_lease_s:
        return
    rolled = now_s - state.rolled_s < settings.lease_s
    names = state.silent if rolled else [name for name, node in state.nodes.items() if node.alive]
    heard = {name: last_heard_s(state, name) for name in names}
    _lose_late(state, orders, heard, settings.lease_s, "it fell silent")
    left = [heard_s for name, heard_s in heard.items() if state.nodes[name].alive]
    if rolled:
        left.append(state.rolled_s)
    soonest_s = min(left, default=now_s) + settings.lease_s
    state.next_lease_s = soonest_s if soonest_s > now_s else now_s + settings.lease_s / 4


def _lose_late(
    state: FleetState, orders: list[Order], since: dict[str, float], limit_s: float, what: str
) -> None:
    late = sorted(name for name, at_s in since.items() if state.now_s - at_s >= limit_s)
    alive = len(state.seats) - len(state.vacant) + len(state.spares)
    if len(late) > 2 and 2 * len(late) > alive and not state.evidence:
        late = [name for name in late if state.now_s - since[name] >= MASS_PATIENCE * limit_s]
    for name in late:
        lose(state, orders, state.nodes[name], f"{what} {state.now_s - since[name]:.1f} s ago")
