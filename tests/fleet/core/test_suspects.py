"""The core: nodes that compute wrongly, are slow, fail often or are drained, and the steps that are not trusted after that."""

from __future__ import annotations

from fleet.small_fleets import running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.state import Eligibility, FleetPhase


def test_a_node_that_computed_wrongly_is_quarantined_and_later_state_is_not_used() -> None:
    fleet = running()
    fleet.handle(m.DiskHolds((4, 8)), m.Suspect("1", "corruption", trusted_step=6))
    fleet.park(step=9)
    assert fleet.state.nodes["1"].eligibility is Eligibility.QUARANTINED
    assert "1" not in fleet.state.seats
    assert fleet.state.source == c.FromDisk(4)


def test_whoever_finds_a_corruption_first_names_the_rank_and_its_node_is_quarantined_once() -> None:
    fleet = running(4, 1)
    culprit = fleet.state.seats[2]
    suspicion = m.Suspect(
        fleet.state.seats[0], "corruption", trusted_step=6, epoch=fleet.state.epoch, ranks=(2,)
    )
    fleet.handle(m.Broken("1", 1, fleet.state.epoch, 0, "connection reset"), suspicion)
    again = m.Suspect(fleet.state.seats[3], "corruption", trusted_step=6, epoch=fleet.state.epoch, ranks=(2,))
    fleet.park()
    fleet.handle(again)
    eligibilities = {name: node.eligibility for name, node in fleet.state.nodes.items()}
    assert [
        name for name, eligibility in eligibilities.items() if eligibility is Eligibility.QUARANTINED
    ] == [culprit]
    assert culprit not in fleet.state.seats


def test_a_second_corruption_does_not_bring_back_what_the_first_condemned() -> None:
    fleet = running(2, 1)
    first, second = fleet.state.seats
    fleet.handle(m.Suspect(first, "corruption", trusted_step=20, epoch=0, ranks=(1,)))
    fleet.park(step=28)  # which the culprit holds in full, its own part and its buddy's
    assert (second in fleet.state.seats, fleet.state.source) == (False, c.Fresh())
    fleet.bind()
    fleet.handle(m.Suspect(first, "corruption", trusted_step=50, epoch=1, ranks=(1,)))
    fleet.park(step=58)
    assert fleet.state.epoch == 2
    assert fleet.state.source == c.Fresh(), "step 28 is before step 50, and still wrong"


def test_drained_nodes_leave_at_a_step_boundary_and_come_back_when_admitted() -> None:
    fleet = running()
    fleet.handle(m.Drain("1"))
    assert fleet.state.planned
    assert fleet.commands_to("0") == [c.Park(0, fleet.state.reason, planned=True)]
    fleet.park()
    assert "1" not in fleet.state.seats
    assert "1" not in fleet.state.spares
    fleet.bind()
    fleet.handle(m.Admit("1"))
    assert "1" in fleet.state.spares


def test_a_slow_node_is_swapped_only_for_a_spare() -> None:
    fleet = running(spares=0)
    fleet.handle(m.Suspect("1", "straggler"))
    assert fleet.state.phase is FleetPhase.RUNNING
    fleet.join("4")
    fleet.handle(m.Suspect("1", "straggler"))
    assert fleet.state.phase is FleetPhase.PARKING
    assert fleet.state.planned


def test_a_worker_killed_because_it_could_not_be_called_back_is_no_mark_against_its_node() -> None:
    fleet = running(4, 1)
    victim = fleet.state.seats[1]
    for _ in range(5):
        fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0, "connection reset"))
        fleet.handle(m.WorkerExited(victim, 1, fleet.state.epoch, 0, -9, "killed", innocent=True))
        fleet.park()
        fleet.handle(m.Ready(victim, 1, ("again:1",)))
        fleet.bind()
    assert fleet.state.nodes[victim].eligibility is Eligibility.GOOD
    assert fleet.state.nodes[victim].strikes == ()


def test_a_node_that_fails_again_and_again_is_quarantined() -> None:
    fleet = running(strikes=2)
    for incarnation in (1, 2):
        fleet.handle(m.Disconnected("4", incarnation))
        fleet.handle(m.Tick(), after_s=3.0)
        fleet.join("4", incarnation=incarnation + 1)
    assert fleet.state.nodes["4"].eligibility is Eligibility.QUARANTINED


def test_an_agent_that_starts_again_has_failed_once() -> None:
    fleet = running()
    fleet.join("1", incarnation=2)
    assert len(fleet.state.nodes["1"].strikes) == 1
    assert fleet.state.phase is FleetPhase.PARKING
    assert fleet.state.nodes["1"].alive


def test_a_fault_while_a_planned_end_is_under_way_gives_everybody_the_whole_time_to_leave() -> None:
    fleet = running(park_s=15.0, stall_s=100.0, lease_s=1e6)
    fleet.handle(m.Drain("1"))
    assert fleet.state.planned
    fleet.handle(m.Suspect("2", "corruption", trusted_step=3), after_s=14.0)
    assert not fleet.state.planned
    assert fleet.commands_to("0") == [c.Park(0, fleet.state.reason)]
    fleet.handle(m.Tick(), after_s=14.0)
    assert all(node.alive for node in fleet.state.nodes.values())
    fleet.handle(m.Tick(), after_s=2.0)
    assert [name for name, node in fleet.state.nodes.items() if node.alive] == ["4"]


def test_a_checkpoint_of_a_condemned_step_is_trusted_once_it_has_been_saved_again() -> None:
    fleet = running()
    fleet.handle(m.DiskHolds((4, 8)), m.Suspect("1", "corruption", trusted_step=6))
    assert (fleet.state.durable, fleet.state.condemned) == ([4], [8])
    fleet.park()
    fleet.bind()
    fleet.handle(m.Durable("0", 1, 1, 8))
    assert (fleet.state.durable, fleet.state.condemned) == ([4, 8], [])
