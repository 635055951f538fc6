"""Answers to operators' requests: whether one is accepted, and the event by which the core then learns of it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from phalanx.fleet.control.turn.inbox import Inbox
from phalanx.fleet.core import messages as m
from phalanx.fleet.core import resize
from phalanx.fleet.core.epochs.epoch_plan import is_needed
from phalanx.fleet.core.settings import formation_of
from phalanx.fleet.core.state import FleetState
from phalanx.run.spec import RunSpec

_BEING_DECIDED = "refused: another request of this kind is being decided; ask again"


class Answer(NamedTuple):
    """What an operator is told."""

    text: str
    event: m.CoreEvent | None = None
    """What the core is told; None if the request is refused."""


def answer(
    request: m.CoreEvent | m.Shrink | m.Grow, state: FleetState, inbox: Inbox, spec: RunSpec, own_node: str
) -> Answer:
    """The answer to a request, by the state of now and the requests that wait in ``inbox``; ``own_node`` is the coordinator's."""
    if isinstance(request, m.Shrink):
        return _shrink(request, state, inbox, own_node)
    if isinstance(request, m.Grow):
        return _grow(request.by, state, inbox, spec)
    if isinstance(request, m.Drain | m.Admit) and request.node not in state.nodes:
        known = ", ".join(sorted(state.nodes)[:20]) or "none yet"
        return Answer(f"there is no node {request.node}; there are: {known}")
    if isinstance(request, m.Drain) and is_needed(state, request.node):
        return Answer(
            f"refused: without {request.node} too few nodes are left, and the fleet would only wait. phalanx fleet stop saves "
            "and ends the run; phalanx fleet add brings a drained node back"
        )
    if isinstance(request, m.Drain) and request.node in state.leaving:
        return Answer(f"refused: {request.node} is being given back; phalanx fleet add keeps it")
    return Answer("accepted", request)


def _shrink(wish: m.Shrink, state: FleetState, inbox: Inbox, own_node: str) -> Answer:
    """Chooses the nodes to be given back; the answer has their names."""
    unknown = [name for name in wish.nodes if name not in state.nodes]
    if unknown:
        return Answer(f"there is no node {', '.join(unknown)}; phalanx status RUN lists them")
    if own_node in wish.nodes:
        return Answer(f"refused: the coordinator runs on {own_node}, which therefore stays")
    if inbox.holds(m.GiveBack):
        return Answer(_BEING_DECIDED)
    try:
        names = wish.nodes or resize.choose(state, wish.by, own_node)
        resize.require_enough(state, names)
    except resize.CannotShrinkError as error:
        return Answer(f"refused: {error}")
    return Answer(" ".join(("accepted", *names)), m.GiveBack(names))


def _grow(by: int, state: FleetState, inbox: Inbox, spec: RunSpec) -> Answer:
    """Lets ``by`` more nodes hold ranks."""
    if inbox.holds(m.Enlarge):
        return Answer(_BEING_DECIDED)
    settings, fleet = state.settings, spec.fleet
    expected = settings.expected_nodes + by
    wanted = max(settings.wanted_nodes, expected - fleet.spares)
    formation = formation_of(replace(spec, fleet=replace(fleet, nodes=wanted)))
    if formation.largest(wanted * fleet.workers_per_node) <= state.ranks:
        return Answer(
            f"refused: {wanted} nodes would hold no more than the {state.ranks} ranks of now; a replica needs more: phalanx show "
            "explains the layout"
        )
    return Answer("accepted", m.Enlarge(wanted, expected, formation.legal, formation.fewer))
