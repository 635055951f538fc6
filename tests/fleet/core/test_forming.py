"""The core: who forms an epoch, with how many nodes, and when it waits for more."""

from __future__ import annotations

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.settings import Formation
from phalanx.fleet.core.state import FleetPhase, RestorePoint
from phalanx.run.identity import FencingToken


def test_the_first_epoch_begins_fresh_when_all_wanted_nodes_are_ready() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0")
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.join("1")
    binds = dict(fleet.sent)
    assert {name: bind.places for name, bind in binds.items()} == {"0": ((0, 0),), "1": ((0, 1),)}
    assert all(bind.resume == c.Fresh() and bind.meeting_point == "0:1" for bind in binds.values())


def test_nodes_started_as_spares_get_no_rank_at_first_even_if_they_are_ready_before_others() -> None:
    fleet = Fleet(settings(2))
    for name, started_as_spare in (("0", True), ("1", False), ("2", False)):
        assert fleet.state.phase is FleetPhase.FORMING
        fleet.handle(
            m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",), started_as_spare=started_as_spare)
        )
    assert fleet.state.seats == ["1", "2"]


def test_a_spare_takes_part_at_first_if_the_others_do_not_come() -> None:
    fleet = Fleet(settings(2, form_s=10.0))
    for name, started_as_spare in (("0", True), ("1", False)):
        fleet.handle(
            m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",), started_as_spare=started_as_spare)
        )
    fleet.handle(m.Tick(), after_s=9.0)
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.handle(m.Tick(), after_s=2.0)
    assert fleet.state.seats == ["0", "1"]


def test_a_spare_takes_the_place_of_a_node_that_is_lost_without_waiting() -> None:
    fleet = Fleet(settings(2, form_s=60.0, confirm_s=1.0))
    for name, started_as_spare, warm in (("0", True, True), ("1", False, True), ("2", False, False)):
        points = (f"{name}:1",) if warm else ("",)
        fleet.handle(m.Joined(name, 1, 1, name, 7, meeting_points=points, started_as_spare=started_as_spare))
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.handle(m.Disconnected("2", 1), m.Tick())
    fleet.handle(m.Tick(), after_s=1.0)
    assert fleet.state.seats == ["0", "1"]


def test_a_coordinator_that_is_started_again_does_not_begin_the_wait_for_nodes_anew() -> None:
    fleet = Fleet(settings(2, form_s=60.0, lease_s=15.0))
    fleet.join("0")
    alive = m.Heartbeat("0", 1, -1, -1, m.WorkerPhase.WARM)
    for _ in range(5):
        fleet.handle(alive, m.Tick(), after_s=10.0)
    fleet.handle(m.Restarted(), after_s=9.0)
    fleet.handle(alive, m.Tick(), after_s=14.0)
    assert fleet.state.phase is FleetPhase.FORMING, "nodes have a lease's time to come back"
    fleet.handle(m.Tick(), after_s=1.1)
    assert fleet.state.phase is FleetPhase.BINDING


def test_a_spare_takes_the_place_of_a_node_that_is_known_to_be_unfit_without_waiting() -> None:
    fleet = Fleet(settings(2, form_s=60.0))
    for name, started_as_spare, warm in (("0", True, True), ("1", False, True), ("2", False, False)):
        points = (f"{name}:1",) if warm else ("",)
        fleet.handle(m.Joined(name, 1, 1, name, 7, meeting_points=points, started_as_spare=started_as_spare))
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.handle(m.Suspect("2", "health", "memory: 3 words"))
    assert fleet.state.seats == ["0", "1"]
    assert fleet.state.nodes["2"].reason == "health: memory: 3 words"


def test_without_a_spare_the_fleet_shrinks_at_once_and_grows_when_the_node_is_back() -> None:
    fleet = running(spares=0, grow_s=30.0)
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park()
    assert fleet.state.ranks == 3
    assert fleet.state.phase is FleetPhase.BINDING
    fleet.bind()
    fleet.join("1", incarnation=2)
    assert fleet.state.phase is FleetPhase.RUNNING, "it has only just begun"
    for name in fleet.state.seats:
        fleet.handle(m.Heartbeat(name, 1, 1, 9, m.WorkerPhase.BOUND), after_s=10.0)
    fleet.handle(m.Heartbeat("1", 2, -1, -1, m.WorkerPhase.WARM))
    assert fleet.state.phase is FleetPhase.PARKING
    assert fleet.state.planned
    fleet.park()
    assert fleet.state.ranks == 4


def test_below_the_minimum_the_fleet_waits_and_goes_on_from_memory() -> None:
    fleet = running(nodes=2, spares=0, min_nodes=2)
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=7)
    assert fleet.state.phase is FleetPhase.WAITING
    fleet.join("9", incarnation=1)
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.source == RestorePoint(2, 7)


def test_a_spare_that_is_still_in_an_earlier_epoch_is_called_back_before_it_is_used() -> None:
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.bind()
    fleet.handle(m.Heartbeat("4", 1, 0, 3, m.WorkerPhase.BOUND))
    assert [type(command) for command in fleet.commands_to("4")] == [c.Park]
    assert "4" not in fleet.state.spares
    fleet.handle(m.Parked("4", 1, 0, ("4:1",), ()))
    assert "4" in fleet.state.spares


def test_the_first_formation_waits_for_all_wanted_nodes_also_where_they_have_several_workers() -> None:
    fleet = Fleet(settings(2, formation=Formation(2, (2, 4))))
    for name, phase in (("0", FleetPhase.FORMING), ("1", FleetPhase.BINDING)):
        fleet.handle(m.Joined(name, 1, 2, name, 7, meeting_points=(f"{name}:1", f"{name}:2")))
        assert fleet.state.phase is phase
    assert fleet.state.ranks == 4


def test_all_members_of_an_epoch_get_the_number_under_which_they_write() -> None:
    fleet = Fleet(settings(2))
    fleet.state.fencing = FencingToken(7, "ab")
    fleet.join("0", "1")
    binds = [command for _, command in fleet.sent if isinstance(command, c.Bind)]
    assert [bind.attempt for bind in binds] == [7, 7]
    fleet.bind()
    fleet.handle(m.WorkerExited("0", 1, 0, 0, -9), m.Ready("0", 1, ("0:1",)))
    fleet.park()
    assert fleet.state.epoch == 1
    assert {command.attempt for _, command in fleet.sent if isinstance(command, c.Bind)} == {8}


def test_no_epoch_has_the_number_of_one_whose_snapshots_an_agent_brings_along() -> None:
    fleet = Fleet(settings(1))
    snapshots = (m.RankSnapshot(1, 0, 20, "own", epoch=3),)
    fleet.handle(m.Joined("0", 1, 1, "0", 7, snapshots=snapshots, meeting_points=("0:1",)))
    assert fleet.state.epoch == 4
    assert fleet.state.step == 20
