"""The core: a fleet that hangs, and who is replaced for it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from fleet.small_fleets import Fleet, running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.state import FleetPhase


def hanging(**changes: Any) -> Fleet:
    """A fleet of which no step has ended for so long that its members got a request for their flight records."""
    fleet = running(stall_s=20.0, lease_s=1e6, **changes)
    fleet.handle(m.Tick(), after_s=21.0)
    assert [command for _, command in fleet.sent] == [c.Diagnose(0, 21.0)] * 4
    return fleet


def test_who_a_hanging_fleet_waits_for_is_replaced_at_once() -> None:
    fleet = hanging()
    culprit = fleet.state.seats[2]
    fleet.handle(m.Diagnosed(0, "rank 2: all_reduce number 7", (2,)))
    assert c.KillWorker(0) in fleet.commands_to(culprit)
    assert {name for name, command in fleet.sent if isinstance(command, c.Park)} == set(fleet.state.seats)
    assert any("all_reduce number 7" in incident.text for incident in fleet.state.incidents)
    fleet.handle(m.WorkerExited(culprit, 1, 0, 0, -9))
    assert len(fleet.state.nodes[culprit].strikes) == 1, "the death that was ordered is no second failure"
    fleet.park(culprit)
    fleet.handle(m.Parked(culprit, 1, 0, ("",), ()))
    assert "4" in fleet.state.seats
    assert culprit not in fleet.state.seats


@pytest.mark.parametrize(
    ("ranks", "pipeline"), [((), 1), ((0, 1, 2), 1), ((2,), 2)], ids=["nobody", "a majority", "a pipeline"]
)
def test_a_doubtful_diagnosis_is_reported_and_the_epoch_ends_by_the_clock(
    ranks: tuple[int, ...], pipeline: int
) -> None:
    fleet = hanging()
    formation = structs.replace(fleet.state.settings.formation, pipeline=pipeline)
    fleet.state.settings = structs.replace(fleet.state.settings, formation=formation)
    fleet.handle(m.Diagnosed(0, "all wait", ranks))
    assert (fleet.sent, fleet.state.phase) == ([], FleetPhase.RUNNING)
    assert fleet.state.incidents[-1].text == "epoch 0 hangs: all wait"
    fleet.handle(m.Tick(), after_s=20.0)
    assert fleet.state.phase is FleetPhase.PARKING


def test_a_fleet_that_waits_for_an_object_store_does_not_hang() -> None:
    fleet = running(stall_s=20.0, lease_s=1e6)
    first, *_ = fleet.state.seats
    for waiting_s in range(5, 1800, 5):
        waits = m.Heartbeat(first, 1, 0, m.NO_STEP, m.WorkerPhase.BOUND, float(waiting_s))
        fleet.handle(waits, m.Tick(), after_s=5.0)
        assert fleet.sent == []
    texts = [incident.text for incident in fleet.state.incidents if "samples" in incident.text]
    assert texts == ["has waited 30 s for samples from an object store"]
    fleet.handle(m.Heartbeat(first, 1, 0, m.NO_STEP, m.WorkerPhase.BOUND), m.Tick(), after_s=21.0)
    assert fleet.commands_to(first) == [c.Diagnose(0, 21.0)], "it waits no more, and still no step has ended"


def test_no_node_is_replaced_for_a_store_that_does_not_answer_while_the_members_are_diagnosed() -> None:
    fleet = hanging()
    waits = m.Heartbeat(fleet.state.seats[2], 1, 0, 0, m.WorkerPhase.BOUND, 20.0)
    fleet.handle(waits, m.Diagnosed(0, "rank 2: all_reduce number 7", (2,)))
    assert fleet.sent == []
    assert fleet.state.phase is FleetPhase.RUNNING


def test_waiting_is_reported_once_a_step() -> None:
    fleet = running(stall_s=20.0, lease_s=1e6)
    first, *_ = fleet.state.seats
    for step in (0, 0, 1, 1):
        fleet.handle(m.Heartbeat(first, 1, 0, step, m.WorkerPhase.BOUND, 40.0))
    assert sum("samples" in incident.text for incident in fleet.state.incidents) == 2


def test_a_diagnosis_that_comes_after_a_step_or_an_epoch_changes_nothing() -> None:
    fleet = hanging()
    for seat in fleet.state.seats:
        fleet.handle(m.Heartbeat(seat, 1, 0, 9, m.WorkerPhase.BOUND))
    assert fleet.handle(m.Diagnosed(0, "late", (2,))) == []
    assert fleet.handle(m.Diagnosed(3, "of another", (2,))) == []
    assert not fleet.state.vacant
