"""The replay of a journal that leads to a contradiction: the state is rebuilt, as the live coordinator would have done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleet.core.test_resync import BREAKS
from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import decide
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.epoch_plan import Order
from phalanx.fleet.core.invariants import Replayed, batch_line, check, first_line, replay
from phalanx.fleet.core.state import FleetPhase, FleetState

TRIGGER = m.Admit("nobody")


def stumbling(state: FleetState, event: m.CoreEvent, now_s: float) -> tuple[FleetState, list[Order]]:
    """A core that raises on the trigger, halfway through a change."""
    if event == TRIGGER:
        state.seats[0] = "nobody"
        raise KeyError("nobody")
    return decide.step(state, event, now_s)


def replayed(fleet: Fleet, *batches: tuple[m.CoreEvent, ...], step: decide.CoreStep = stumbling) -> Replayed:
    """The replay of a journal that begins at the fleet's state and goes on with the batches."""
    lines = [batch_line(fleet.now_s + number, batch) for number, batch in enumerate(batches, 1)]
    return replay([first_line(fleet.state), *lines], step)


def check_asks_everybody(state: FleetState) -> None:
    check(state)
    assert (state.phase, state.seats, state.tries) == (FleetPhase.FORMING, [], 1)
    assert all(node.engaged for node in state.nodes.values())
    assert any("contradicted itself" in incident.text for incident in state.incidents)


def test_a_last_batch_on_which_the_core_raises_leads_to_a_rebuilt_state() -> None:
    state, _, contradiction = replayed(running(), (m.Tick(),), (TRIGGER, m.Tick()))
    check_asks_everybody(state)
    assert isinstance(contradiction, KeyError)


@pytest.mark.parametrize("how", BREAKS)
def test_a_last_batch_that_breaks_an_invariant_leads_to_a_rebuilt_state(
    how: Callable[[FleetState], None],
) -> None:
    def breaking(state: FleetState, event: m.CoreEvent, now_s: float) -> tuple[FleetState, list[Order]]:
        state, orders = decide.step(state, event, now_s)
        if event == TRIGGER:
            how(state)
        return state, orders

    state, _, contradiction = replayed(running(), (TRIGGER,), step=breaking)
    check(state)
    assert contradiction is not None
    assert state.phase is FleetPhase.FORMING


def test_requests_behind_the_event_that_raised_are_not_lost() -> None:
    assert replayed(running(), (TRIGGER, m.StopRun(), m.Tick())).state.stopping


def test_after_lines_behind_the_contradiction_every_node_still_gets_a_request() -> None:
    fleet = running()
    names = list(fleet.state.seats)
    away = tuple(m.Parked(name, 1, 0, (f"{name}:1",), ()) for name in names)
    state, _, contradiction = replayed(
        fleet, (TRIGGER,), away, (m.Joined("4", 1, 1, "4", 7, meeting_points=("4:1",)),)
    )
    check(state)
    assert contradiction is not None
    assert (state.phase, state.seats) == (FleetPhase.FORMING, [])
    assert all(node.engaged for node in state.nodes.values())


def test_a_journal_without_a_contradiction_is_replayed_to_the_state_that_was() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    journal = [batch_line(now_s, (event,)) for now_s, event in fleet.journal]
    state, restarts, contradiction = replay(
        [first_line(decide.initial_state(fleet.state.settings, 0.0)), *journal]
    )
    assert (state, restarts, contradiction) == (fleet.state, 0, None)
