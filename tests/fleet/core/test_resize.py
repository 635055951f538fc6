"""Giving nodes back and taking more: no step computed twice, nothing lost, and nobody goes whose memory is needed."""

from __future__ import annotations

import pytest

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.epoch_plan import deliveries
from phalanx.fleet.core.invariants import batch_line, check, first_line, mark, replay, resync
from phalanx.fleet.core.requests import CannotShrinkError, choose, require_enough
from phalanx.fleet.core.state import Eligibility, FleetPhase, RestorePoint


def trained(fleet: Fleet, step: int) -> None:
    """All members have completed ``step``; time passes."""
    for name in fleet.state.seats:
        fleet.handle(m.Heartbeat(name, fleet.incarnation(name), fleet.state.epoch, step, m.WorkerPhase.BOUND))
    fleet.handle(m.Tick(), after_s=0.1)


def given_back(fleet: Fleet) -> list[str]:
    """The nodes whose agents got the order last to end, since they are given back."""
    return [to for to, command in fleet.sent if isinstance(command, c.Shutdown)]


def shrunk(fleet: Fleet, by: int, leader: str = "") -> tuple[str, ...]:
    """Gives nodes back, up to the epoch without them."""
    names = choose(fleet.state, by, leader)
    fleet.handle(m.GiveBack(names))
    fleet.park(step=5)
    fleet.bind()
    check(fleet.state)
    return names


def test_the_epoch_is_left_at_a_step_boundary_and_restored_from_memory() -> None:
    fleet = running(4, spares=0)
    fleet.handle(m.GiveBack(("3",)))
    assert all(isinstance(command, c.Park) and command.planned for _, command in fleet.sent)
    fleet.park(step=5)
    state = fleet.state
    assert (state.ranks, sorted(state.seats), state.recoveries, state.regroups) == (3, ["0", "1", "2"], 0, 1)
    assert state.source == RestorePoint(4, 5)
    check(state)


def test_a_node_goes_only_when_newer_snapshots_than_its_own_are_there() -> None:
    fleet = running(4, spares=0, snapshot_every_steps=2)
    shrunk(fleet, 1)
    for step in (5, 6, 7):
        trained(fleet, step)
        assert given_back(fleet) == []
    trained(fleet, 8)
    assert given_back(fleet) == ["3"]
    assert (fleet.state.nodes["3"].alive, fleet.state.leaving) == (False, set())
    check(fleet.state)


def test_a_node_goes_at_once_when_the_step_is_on_disk() -> None:
    fleet = running(4, spares=0, snapshot_every_steps=100)
    fleet.handle(m.DiskHolds((5,)))
    shrunk(fleet, 1)
    fleet.handle(m.Tick())
    assert given_back(fleet) == ["3"]


def test_memory_of_a_node_that_is_leaving_still_serves_when_another_fails() -> None:
    fleet = running(4, spares=0)
    fleet.handle(m.GiveBack(("3",)))
    fleet.park(step=5)
    fleet.handle(m.Disconnected("0", 1))
    fleet.handle(m.Broken("1", 1, fleet.state.epoch, 0))
    for name in sorted(fleet.state.awaiting):  # no step was completed, so they hold what they held
        snapshots = fleet.state.nodes[name].snapshots
        fleet.handle(m.Parked(name, 1, fleet.state.epoch, (f"{name}:1",), snapshots))
    assert (fleet.state.ranks, fleet.state.source) == (2, RestorePoint(4, 5))


def test_members_leave_from_the_last_seat_on_and_unfit_nodes_before_them() -> None:
    fleet = running(5, spares=1)
    assert fleet.state.seats == ["0", "2", "4", "1", "3"], "along the racks"
    assert choose(fleet.state, 2, leader="") == ("3", "1")
    assert choose(fleet.state, 2, leader="3") == ("1", "4")
    fleet.handle(m.Drain("2"))
    assert choose(fleet.state, 2, leader="") == ("2", "3")
    assert choose(fleet.state, 5, leader="0")[-1] == "5", "the spare is the last to go"


def test_spares_do_not_take_the_places_of_nodes_that_an_operator_gives_back() -> None:
    fleet = running(4, spares=1)
    shrunk(fleet, 1)
    assert (fleet.state.ranks, fleet.state.spares) == (3, {"4"})
    assert fleet.state.settings.wanted_nodes == 3


def test_a_spare_takes_the_place_of_a_node_that_its_scheduler_takes_away() -> None:
    fleet = running(4, spares=1)
    fleet.handle(m.Heartbeat("2", 1, 0, 3, m.WorkerPhase.BOUND, leaving=True))
    assert isinstance(fleet.sent[-1][1], c.Park)
    fleet.park(step=5)
    assert (fleet.state.ranks, sorted(fleet.state.seats)) == (4, ["0", "1", "3", "4"])
    fleet.bind()
    trained(fleet, 7)
    assert given_back(fleet) == ["2"]


def test_more_than_there_are_or_than_the_run_can_spare_is_refused() -> None:
    fleet = running(4, spares=0, min_nodes=3)
    with pytest.raises(CannotShrinkError, match="2 nodes would be left, and the run needs 3"):
        choose(fleet.state, 2, leader="")
    with pytest.raises(CannotShrinkError, match="there are 3 nodes beside the one that leads"):
        choose(fleet.state, 4, leader="0")
    with pytest.raises(CannotShrinkError, match="2 nodes would be left"):
        require_enough(fleet.state, ("0", "1"))


def test_what_was_given_back_can_come_again() -> None:
    fleet = running(4, spares=0)
    shrunk(fleet, 2)
    trained(fleet, 7)
    names = given_back(fleet)
    assert len(names) == 2
    # An agent that has missed the order gets it again, also under the next incarnation that it would take if it were fenced.
    fleet.handle(m.Heartbeat(names[0], 1, m.NO_EPOCH, m.NO_STEP, m.WorkerPhase.WARM))
    assert given_back(fleet) == names[:1]
    fleet.handle(m.Enlarge(4, 4, fleet.state.settings.formation.legal))
    fleet.join(*names, incarnation=2)
    assert {fleet.state.nodes[name].reason for name in names} == {""}
    fleet.handle(m.Tick(), after_s=31.0)
    fleet.park(step=9)
    assert (fleet.state.ranks, sorted(fleet.state.seats)) == (4, ["0", "1", "2", "3"])
    check(fleet.state)


def test_more_nodes_than_ever_take_ranks_when_they_are_there() -> None:
    fleet = running(2, spares=0)
    fleet.handle(m.Enlarge(4, 4, (1, 2, 3, 4)))
    assert fleet.state.phase is FleetPhase.RUNNING
    fleet.join("2", "3")
    fleet.handle(m.Tick(), after_s=31.0)
    fleet.park(step=9)
    assert fleet.state.ranks == 4


def test_a_node_whose_agent_begins_anew_while_it_is_leaving_is_a_spare() -> None:
    fleet = running(4, spares=0)
    shrunk(fleet, 1)
    fleet.join("3", incarnation=2)
    assert (fleet.state.nodes["3"].eligibility, fleet.state.spares) == (Eligibility.GOOD, {"3"})


def test_a_node_that_is_leaving_can_be_kept() -> None:
    fleet = running(4, spares=0)
    shrunk(fleet, 1)
    fleet.handle(m.Admit("3"))
    trained(fleet, 7)
    assert (given_back(fleet), fleet.state.spares) == ([], {"3"})
    fleet.handle(m.Heartbeat("3", 1, m.NO_EPOCH, m.NO_STEP, m.WorkerPhase.WARM, leaving=True))
    assert fleet.state.leaving == {"3"}, "its own scheduler still takes it away"


def test_a_coordinator_that_is_started_again_knows_who_is_leaving() -> None:
    fleet = running(4, spares=0)
    begin = first_line(Fleet(settings(4)).state)
    fleet.handle(m.GiveBack(("3",)))
    state, _, contradiction = replay([begin, *(batch_line(at_s, (event,)) for at_s, event in fleet.journal)])
    assert contradiction is None
    assert (state.leaving, state.settings.wanted_nodes) == ({"3"}, 3)


def test_a_state_that_is_rebuilt_still_knows_who_is_leaving() -> None:
    fleet = running(4, spares=0)
    fleet.handle(m.GiveBack(("3",)))
    rebuilt, orders = resync(fleet.state, mark(fleet.state), "a test")
    check(rebuilt)
    assert (rebuilt.leaving, next(deliveries(rebuilt, orders))[1]) == ({"3"}, c.TellAll())
