"""The core: nodes and connections that are lost, reports that come late or twice, and a coordinator that was away."""

from __future__ import annotations

import pytest

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import step
from phalanx.fleet.core.invariants import check
from phalanx.fleet.core.state import FleetPhase, RestorePoint


def test_a_lost_node_is_replaced_by_the_spare_and_survivors_keep_their_ranks() -> None:
    fleet = running()
    assert fleet.state.seats == ["0", "2", "1", "3"]
    assert fleet.state.phase is FleetPhase.RUNNING
    buddy = fleet.state.seats[fleet.state.ring[2]]
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=5)
    assert fleet.state.seats == ["0", "2", "4", "3"]
    assert fleet.state.source == RestorePoint(ranks=4, step=5)
    (bind,) = fleet.commands_to("4")
    assert isinstance(bind, c.Bind)
    assert bind.epoch == 1
    assert bind.places == ((0, 2),)
    assert buddy in ("0", "2"), "in the other rack, and the only one left who has the state"
    assert [holder.node for holder in bind.resume.holders] == [buddy]


def test_a_worker_that_exits_costs_its_node_the_rank_but_not_its_memory() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("0", 1, 0, 0, -9))
    assert fleet.state.phase is FleetPhase.PARKING
    assert "0" in fleet.state.awaiting
    fleet.park("0")
    own = m.RankSnapshot(4, 0, 5, "own", epoch=0)
    fleet.handle(m.Parked("0", 1, 0, ("",), (own,)))
    (bind,) = fleet.commands_to("4")
    assert bind.places == ((0, 0),)
    assert "0" in {holder.node for holder in bind.resume.holders}


def test_reports_that_come_before_the_fault_is_known_are_kept() -> None:
    """A survivor that parks by itself, before its peer's death is known, is not waited for in vain."""
    fleet = running()
    fleet.handle(m.Parked("0", 1, 0, ("0:1",), ()))
    assert fleet.state.phase is FleetPhase.PARKING
    assert "0" not in fleet.state.awaiting


def test_a_broken_connection_alone_is_given_time_and_a_broken_collective_is_proof() -> None:
    fleet = running(confirm_s=2.0)
    fleet.handle(m.Disconnected("1", 1))
    fleet.handle(m.Tick(), after_s=1.0)
    assert fleet.state.phase is FleetPhase.RUNNING
    fleet.handle(m.Heartbeat("1", 1, 0, 3, m.WorkerPhase.BOUND))
    fleet.handle(m.Tick(), after_s=3.0)
    assert fleet.state.phase is FleetPhase.RUNNING, "it came back"
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    assert not fleet.state.nodes["1"].alive


def test_a_silent_node_is_lost_when_its_lease_runs_out() -> None:
    fleet = running(lease_s=15.0)
    for _ in range(4):
        others = [name for name in fleet.state.nodes if name != "1"]
        fleet.handle(*(m.Heartbeat(name, 1, 0, 1, m.WorkerPhase.BOUND) for name in others if name != "4"))
        fleet.handle(m.Heartbeat("4", 1, -1, -1, m.WorkerPhase.WARM), m.Tick(), after_s=5.0)
    assert not fleet.state.nodes["1"].alive
    assert fleet.state.phase is FleetPhase.PARKING


def test_a_fenced_node_is_ordered_to_start_again_and_none_of_its_reports_counts() -> None:
    fleet = running()
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    before = fleet.state.epoch, set(fleet.state.awaiting)
    deliveries = fleet.handle(m.Parked("1", 1, 0, ("1:1",), ()))
    assert (fleet.state.epoch, fleet.state.awaiting) == before
    assert [type(command) for _, command in deliveries] == [c.Fence]


def test_a_lost_command_is_repeated_when_a_heartbeat_shows_that_it_was_lost() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("0", 1, 0, 0, -9))
    fleet.handle(m.Heartbeat("2", 1, 0, 4, m.WorkerPhase.BOUND))
    assert [type(command) for command in fleet.commands_to("2")] == [c.Park]
    fleet.park("0")
    fleet.handle(m.Parked("0", 1, 0, ("",), (m.RankSnapshot(4, 0, 5, "own", epoch=0),)))
    fleet.handle(m.Heartbeat("2", 1, -1, -1, m.WorkerPhase.WARM))
    assert [type(command) for command in fleet.commands_to("2")] == [c.Bind]


def test_a_coordinator_that_was_away_does_not_take_its_own_silence_for_theirs() -> None:
    fleet = running(lease_s=15.0)
    fleet.handle(m.Restarted(), m.Tick(), after_s=1000.0)
    assert fleet.state.phase is FleetPhase.RUNNING
    assert all(node.alive for node in fleet.state.nodes.values())


def test_a_coordinator_without_its_journal_never_uses_the_number_of_an_epoch_twice() -> None:
    fleet = Fleet(settings(2))
    for name in "01":
        fleet.handle(m.Joined(name, 3, 1, name, 7, epoch=41, bound=True, meeting_points=(f"{name}:1",)))
        assert [type(command) for command in fleet.commands_to(name)] == [c.Park]
    for name in "01":
        fleet.handle(m.Parked(name, 3, 41, (f"{name}:1",), ()))
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.epoch == 42


@pytest.mark.parametrize("parked_step", [0, 5])
def test_a_rollcall_means_the_same_as_the_reports_that_it_stands_for(parked_step: int) -> None:
    reporting, called = running(), running()
    for fleet in (reporting, called):
        fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    reporting.park(step=parked_step)
    called.handle(m.Rollcall("parked", 0, steps=(parked_step,), absent=()))
    assert called.state.source == reporting.state.source == RestorePoint(4, parked_step)
    assert called.state.seats == reporting.state.seats
    assert (
        sorted(reporting.sent) == sorted(called.sent) or dict(reporting.sent)["4"] == dict(called.sent)["4"]
    )
    called.handle(m.Rollcall("bound", 1))
    assert called.state.phase is FleetPhase.RUNNING


def test_events_of_the_coordinator_alone_are_refused_from_the_network() -> None:
    with pytest.raises(ValueError, match="type"):
        m.decode_report(m.encode(m.Restarted()))


def test_the_clock_may_step_back() -> None:
    fleet = running()
    fleet.state, _ = step(fleet.state, m.Tick(), -100.0)
    check(fleet.state)
    assert fleet.state.now_s == fleet.now_s


def test_a_join_in_the_present_epoch_counts_as_bound_only_if_it_has_that_flag() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    assert fleet.state.phase is FleetPhase.BINDING
    for bound in (False, True):
        assert fleet.state.awaiting >= {"0"}
        fleet.handle(m.Joined("0", 1, 1, "0", 7, epoch=0, bound=bound, meeting_points=("0:1",)))
    assert fleet.state.awaiting == {"1"}


def test_a_member_that_leaves_while_others_still_bind_ends_the_epoch() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    fleet.handle(m.Heartbeat("0", 1, 0, -1, m.WorkerPhase.LEAVING))
    assert (fleet.state.phase, fleet.state.recoveries) == (FleetPhase.PARKING, 1)
    assert fleet.state.reason == "node 0 is leaving epoch 0"


def test_late_reports_are_counted_once_and_change_nothing() -> None:
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.bind()
    late: list[m.CoreEvent] = [
        m.WorkerExited("0", 1, 0, 0, -9),
        m.Broken("0", 1, 0, 0),
        m.Parked("0", 1, 0, ("0:1",), ()),
        m.Bound("0", 1, 0),
        m.Suspect("nobody", "straggler"),
        m.Drain("nobody"),
        m.Admit("0"),
        m.Rollcall("parked", 0, steps=(5,)),
        m.Rollcall("parked", 1, steps=(5,)),
        m.Diagnosed(1, "not asked"),
    ]
    for count, event in enumerate(late, 1):
        assert fleet.handle(event) == []
        assert (fleet.state.stale, fleet.state.epoch, fleet.state.phase) == (count, 1, FleetPhase.RUNNING)


def test_a_member_that_has_left_while_others_still_bind_ends_the_epoch() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    fleet.handle(m.Bound("0", 1, 0))
    fleet.handle(m.Heartbeat("0", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM))
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.PARKING, "node 0 has left epoch 0")


def test_the_reason_for_the_end_of_an_epoch_has_the_last_line_of_the_worker() -> None:
    for text, ending in (("", ""), ("out of memory", ": out of memory")):
        fleet = running()
        fleet.handle(m.WorkerExited("0", 1, 0, 0, -9, text))
        assert fleet.state.reason == f"node 0: worker 0 exited with code -9{ending}"
