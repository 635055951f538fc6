"""The core: what it decides when nodes fall, return, hang, lie or contradict themselves."""

from __future__ import annotations

import pytest
from msgspec import structs

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import step
from phalanx.fleet.core.epochs import next_deadline_s
from phalanx.fleet.core.invariants import check
from phalanx.fleet.core.settings import Formation
from phalanx.fleet.core.state import Eligibility, FleetPhase, RestorePoint


def test_the_first_epoch_begins_fresh_when_all_wanted_nodes_are_ready() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0")
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.join("1")
    binds = dict(fleet.said)
    assert {name: bind.places for name, bind in binds.items()} == {"0": ((0, 0),), "1": ((0, 1),)}
    assert all(bind.resume == m.Fresh() and bind.meeting_point == "0:1" for bind in binds.values())


def test_nodes_started_as_spares_get_no_rank_at_first_even_if_they_are_ready_before_others() -> None:
    fleet = Fleet(settings(2))
    for name, started_as_spare in (("0", True), ("1", False), ("2", False)):
        assert fleet.state.phase is FleetPhase.FORMING
        fleet.hear(
            m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",), started_as_spare=started_as_spare)
        )
    assert fleet.state.seats == ["1", "2"]


def test_a_spare_takes_part_at_first_if_the_others_do_not_come() -> None:
    fleet = Fleet(settings(2, form_s=10.0))
    for name, started_as_spare in (("0", True), ("1", False)):
        fleet.hear(
            m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",), started_as_spare=started_as_spare)
        )
    fleet.hear(m.Tick(), after_s=9.0)
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.hear(m.Tick(), after_s=2.0)
    assert fleet.state.seats == ["0", "1"]


def test_a_spare_takes_the_place_of_a_node_that_is_known_to_be_unfit_without_waiting() -> None:
    fleet = Fleet(settings(2, form_s=60.0))
    for name, started_as_spare, warm in (("0", True, True), ("1", False, True), ("2", False, False)):
        points = (f"{name}:1",) if warm else ("",)
        fleet.hear(m.Joined(name, 1, 1, name, 7, meeting_points=points, started_as_spare=started_as_spare))
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.hear(m.Suspect("2", "health", "memory: 3 words"))
    assert fleet.state.seats == ["0", "1"]
    assert fleet.state.nodes["2"].why == "health: memory: 3 words"


def test_a_lost_node_is_replaced_by_the_spare_and_survivors_keep_their_ranks() -> None:
    fleet = running()
    assert fleet.state.seats == ["0", "2", "1", "3"]
    assert fleet.state.phase is FleetPhase.RUNNING
    buddy = fleet.state.seats[fleet.state.ring[2]]
    fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=5)
    assert fleet.state.seats == ["0", "2", "4", "3"]
    assert fleet.state.source == RestorePoint(ranks=4, step=5)
    (bind,) = fleet.told("4")
    assert isinstance(bind, m.Bind)
    assert bind.epoch == 1
    assert bind.places == ((0, 2),)
    assert buddy in ("0", "2"), "in the other rack, and the only one left who has the state"
    assert [holder.node for holder in bind.resume.holders] == [buddy]


def test_without_a_spare_the_fleet_shrinks_at_once_and_grows_when_the_node_is_back() -> None:
    fleet = running(spares=0, grow_s=30.0)
    fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park()
    assert fleet.state.ranks == 3
    assert fleet.state.phase is FleetPhase.BINDING
    fleet.bind()
    fleet.join("1", incarnation=2)
    assert fleet.state.phase is FleetPhase.RUNNING, "it has only just begun"
    for name in fleet.state.seats:
        fleet.hear(m.Heartbeat(name, 1, 1, 9, m.WorkerPhase.BOUND), after_s=10.0)
    fleet.hear(m.Heartbeat("1", 2, -1, -1, m.WorkerPhase.WARM))
    assert fleet.state.phase is FleetPhase.PARKING
    assert fleet.state.planned
    fleet.park()
    assert fleet.state.ranks == 4


def test_below_the_minimum_the_fleet_waits_and_goes_on_from_memory() -> None:
    fleet = running(wanted=2, spares=0, min_nodes=2)
    fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=7)
    assert fleet.state.phase is FleetPhase.WAITING
    fleet.join("9", incarnation=1)
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.source == RestorePoint(2, 7)


def test_a_fleet_that_waits_and_is_told_to_stop_puts_on_disk_what_only_memory_holds() -> None:
    fleet = running(wanted=2, spares=0, min_nodes=2)
    fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=7)
    fleet.hear(m.StopRun())
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.source == RestorePoint(2, 7)
    fleet.bind()
    assert fleet.told("0") == [m.Stop(fleet.state.epoch)]


def test_a_fleet_that_waits_and_is_told_to_stop_ends_at_once_if_the_disk_has_it_all() -> None:
    fleet = running(wanted=2, spares=0, min_nodes=2)
    fleet.hear(m.Durable("0", 1, 0, 7), m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park(step=7)
    fleet.hear(m.StopRun())
    assert fleet.state.phase is FleetPhase.FINISHED


def test_a_worker_that_exits_costs_its_node_the_rank_but_not_its_memory() -> None:
    fleet = running()
    fleet.hear(m.WorkerExited("0", 1, 0, 0, -9))
    assert fleet.state.phase is FleetPhase.PARKING
    assert "0" in fleet.state.awaiting
    fleet.park("0")
    own = m.RankSnapshot(4, 0, 5, "own", epoch=0)
    fleet.hear(m.Parked("0", 1, 0, ("",), (own,)))
    (bind,) = fleet.told("4")
    assert bind.places == ((0, 0),)
    assert "0" in {holder.node for holder in bind.resume.holders}


def test_reports_that_come_before_the_fault_is_known_are_kept() -> None:
    """A survivor that parks by itself, before its peer's death is known, is not waited for in vain."""
    fleet = running()
    fleet.hear(m.Parked("0", 1, 0, ("0:1",), ()))
    assert fleet.state.phase is FleetPhase.PARKING
    assert "0" not in fleet.state.awaiting


def test_a_broken_connection_alone_is_given_time_and_a_broken_collective_is_proof() -> None:
    fleet = running(confirm_s=2.0)
    fleet.hear(m.Disconnected("1", 1))
    fleet.hear(m.Tick(), after_s=1.0)
    assert fleet.state.phase is FleetPhase.RUNNING
    fleet.hear(m.Heartbeat("1", 1, 0, 3, m.WorkerPhase.BOUND))
    fleet.hear(m.Tick(), after_s=3.0)
    assert fleet.state.phase is FleetPhase.RUNNING, "it came back"
    fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    assert not fleet.state.nodes["1"].alive


def test_a_silent_node_is_lost_when_its_lease_runs_out() -> None:
    fleet = running(lease_s=15.0)
    for _ in range(4):
        others = [name for name in fleet.state.nodes if name != "1"]
        fleet.hear(*(m.Heartbeat(name, 1, 0, 1, m.WorkerPhase.BOUND) for name in others if name != "4"))
        fleet.hear(m.Heartbeat("4", 1, -1, -1, m.WorkerPhase.WARM), m.Tick(), after_s=5.0)
    assert not fleet.state.nodes["1"].alive
    assert fleet.state.phase is FleetPhase.PARKING


def test_a_fenced_node_is_told_to_start_anew_and_nothing_that_it_says_counts() -> None:
    fleet = running()
    fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    before = fleet.state.epoch, set(fleet.state.awaiting)
    said = fleet.hear(m.Parked("1", 1, 0, ("1:1",), ()))
    assert (fleet.state.epoch, fleet.state.awaiting) == before
    assert [type(command) for _, command in said] == [m.Fence]


def test_a_lost_command_is_repeated_when_a_heartbeat_shows_that_it_was_lost() -> None:
    fleet = running()
    fleet.hear(m.WorkerExited("0", 1, 0, 0, -9))
    fleet.hear(m.Heartbeat("2", 1, 0, 4, m.WorkerPhase.BOUND))
    assert [type(command) for command in fleet.told("2")] == [m.Park]
    fleet.park("0")
    fleet.hear(m.Parked("0", 1, 0, ("",), (m.RankSnapshot(4, 0, 5, "own", epoch=0),)))
    fleet.hear(m.Heartbeat("2", 1, -1, -1, m.WorkerPhase.WARM))
    assert [type(command) for command in fleet.told("2")] == [m.Bind]


def test_a_node_that_computed_wrongly_is_quarantined_and_later_state_is_not_used() -> None:
    fleet = running()
    fleet.hear(m.DiskHolds((4, 8)), m.Suspect("1", "corruption", trusted_step=6))
    fleet.park(step=9)
    assert fleet.state.nodes["1"].eligibility is Eligibility.QUARANTINED
    assert "1" not in fleet.state.seats
    assert fleet.state.source == m.FromDisk(4)


def test_whoever_finds_a_corruption_first_names_the_rank_and_its_node_is_quarantined_once() -> None:
    fleet = running(4, 1)
    culprit = fleet.state.seats[2]
    found = m.Suspect(fleet.state.seats[0], "corruption", trusted_step=6, epoch=fleet.state.epoch, ranks=(2,))
    fleet.hear(m.Broken("1", 1, fleet.state.epoch, 0, "connection reset"), found)
    again = m.Suspect(fleet.state.seats[3], "corruption", trusted_step=6, epoch=fleet.state.epoch, ranks=(2,))
    fleet.park()
    fleet.hear(again)
    eligibilities = {name: node.eligibility for name, node in fleet.state.nodes.items()}
    assert [
        name for name, eligibility in eligibilities.items() if eligibility is Eligibility.QUARANTINED
    ] == [culprit]
    assert culprit not in fleet.state.seats


def test_a_second_corruption_does_not_bring_back_what_the_first_condemned() -> None:
    fleet = running(2, 1)
    first, second = fleet.state.seats
    fleet.hear(m.Suspect(first, "corruption", trusted_step=20, epoch=0, ranks=(1,)))
    fleet.park(step=28)  # which the culprit holds in full, its own part and its buddy's
    assert (second in fleet.state.seats, fleet.state.source) == (False, m.Fresh())
    fleet.bind()
    fleet.hear(m.Suspect(first, "corruption", trusted_step=50, epoch=1, ranks=(1,)))
    fleet.park(step=58)
    assert fleet.state.epoch == 2
    assert fleet.state.source == m.Fresh(), "step 28 is before step 50, and still wrong"


def test_a_run_that_ends_before_all_are_heard_to_have_begun_has_ended() -> None:
    fleet = running(2, 0)
    fleet.hear(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.hear(m.Bound("0", 1, 1), m.RunFinished(1, "{}"))
    assert (fleet.state.phase, fleet.state.result_json) == (FleetPhase.FINISHED, "{}")


def test_drained_nodes_leave_at_a_step_boundary_and_come_back_when_admitted() -> None:
    fleet = running()
    fleet.hear(m.Drain("1"))
    assert fleet.state.planned
    assert fleet.told("0") == [m.Park(0, fleet.state.reason, planned=True)]
    fleet.park()
    assert "1" not in fleet.state.seats
    assert "1" not in fleet.state.spares
    fleet.bind()
    fleet.hear(m.Admit("1"))
    assert "1" in fleet.state.spares


def test_a_slow_node_is_swapped_only_for_a_spare() -> None:
    fleet = running(spares=0)
    fleet.hear(m.Suspect("1", "straggler"))
    assert fleet.state.phase is FleetPhase.RUNNING
    fleet.join("4")
    fleet.hear(m.Suspect("1", "straggler"))
    assert fleet.state.phase is FleetPhase.PARKING
    assert fleet.state.planned


def test_a_worker_killed_because_it_could_not_be_called_back_is_no_mark_against_its_node() -> None:
    fleet = running(4, 1)
    victim = fleet.state.seats[1]
    for _ in range(5):
        fleet.hear(m.Broken("0", 1, fleet.state.epoch, 0, "connection reset"))
        fleet.hear(m.WorkerExited(victim, 1, fleet.state.epoch, 0, -9, "killed", innocent=True))
        fleet.park()
        fleet.hear(m.Ready(victim, 1, ("again:1",)))
        fleet.bind()
    assert fleet.state.nodes[victim].eligibility is Eligibility.GOOD
    assert fleet.state.nodes[victim].strikes == ()


def test_a_node_that_fails_again_and_again_is_quarantined() -> None:
    fleet = running(strikes=2)
    for incarnation in (1, 2):
        fleet.hear(m.Disconnected("4", incarnation))
        fleet.hear(m.Tick(), after_s=3.0)
        fleet.join("4", incarnation=incarnation + 1)
    assert fleet.state.nodes["4"].eligibility is Eligibility.QUARANTINED


def test_a_run_that_fails_at_the_same_step_for_ever_is_given_up() -> None:
    fleet = running(wanted=2, spares=0, max_tries=3)
    for _ in range(5):
        fleet.hear(m.Broken("0", 1, fleet.state.epoch, 0, "illegal instruction"))
        fleet.park(step=5)
        fleet.bind()
    assert fleet.state.phase is FleetPhase.FAILED
    assert "illegal instruction" in fleet.state.reason


def test_faults_that_follow_each_other_without_a_step_are_given_more_and_more_time_to_pass() -> None:
    fleet = running(2, 0, max_tries=50)
    waited_s = []
    for _ in range(12):
        epoch, begin_s = fleet.state.epoch, fleet.now_s
        fleet.hear(m.Broken("0", 1, epoch, 0, "connection reset"))
        fleet.park()
        while fleet.state.epoch == epoch:
            due_s = next_deadline_s(fleet.state)
            fleet.hear(m.Tick(), after_s=max(due_s - fleet.now_s, 0.01))
        waited_s.append(fleet.now_s - begin_s)
        fleet.bind()
    assert waited_s[:4] == [0.0] * 4
    assert waited_s == sorted(waited_s)
    assert waited_s[-1] > 10 * waited_s[5] > 0


def test_a_stop_lets_the_run_save_and_end() -> None:
    fleet = running()
    fleet.hear(m.StopRun())
    assert fleet.told("0") == [m.Stop(0)]
    fleet.hear(m.RunFinished(0, '{"step": 9}'))
    assert fleet.state.phase is FleetPhase.FINISHED
    assert fleet.told("4") == [m.Shutdown("stopped")]


def test_a_coordinator_that_was_away_does_not_take_its_own_silence_for_theirs() -> None:
    fleet = running(lease_s=15.0)
    fleet.hear(m.Restarted(), m.Tick(), after_s=1000.0)
    assert fleet.state.phase is FleetPhase.RUNNING
    assert all(node.alive for node in fleet.state.nodes.values())


def test_a_coordinator_without_its_journal_never_uses_the_number_of_an_epoch_twice() -> None:
    fleet = Fleet(settings(2))
    for name in "01":
        fleet.hear(m.Joined(name, 3, 1, name, 7, epoch=41, bound=True, meeting_points=(f"{name}:1",)))
        assert [type(command) for command in fleet.told(name)] == [m.Park]
    for name in "01":
        fleet.hear(m.Parked(name, 3, 41, (f"{name}:1",), ()))
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.epoch == 42


def test_a_rollcall_means_the_same_as_the_reports_that_it_stands_for() -> None:
    one, other = running(), running()
    for fleet in (one, other):
        fleet.hear(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    one.park(step=5)
    other.hear(m.Rollcall("parked", 0, steps=(5,), absent=()))
    assert other.state.source == one.state.source
    assert other.state.seats == one.state.seats
    assert sorted(one.said) == sorted(other.said) or dict(one.said)["4"] == dict(other.said)["4"]
    other.hear(m.Rollcall("bound", 1))
    assert other.state.phase is FleetPhase.RUNNING


def test_what_only_the_coordinator_may_say_is_refused_from_the_network() -> None:
    with pytest.raises(ValueError, match="type"):
        m.decode_report(m.encode(m.Restarted()))


def test_the_clock_may_step_back() -> None:
    fleet = running()
    fleet.state, _ = step(fleet.state, m.Tick(), -100.0)
    check(fleet.state)
    assert fleet.state.now_s == fleet.now_s


def hanging(**changes: object) -> Fleet:
    """A fleet of which no step has ended for so long that its members were asked what they wait for."""
    fleet = running(stall_s=20.0, lease_s=1e6, **changes)
    fleet.hear(m.Tick(), after_s=21.0)
    assert [command for _, command in fleet.said] == [m.Diagnose(0, 21.0)] * 4
    return fleet


def test_who_a_hanging_fleet_waits_for_is_replaced_at_once() -> None:
    fleet = hanging()
    culprit = fleet.state.seats[2]
    fleet.hear(m.Diagnosed(0, "rank 2: all_reduce number 7", (2,)))
    assert m.KillWorker(0) in fleet.told(culprit)
    assert {name for name, command in fleet.said if isinstance(command, m.Park)} == set(fleet.state.seats)
    assert any("all_reduce number 7" in incident.what for incident in fleet.state.incidents)
    fleet.hear(m.WorkerExited(culprit, 1, 0, 0, -9))
    assert len(fleet.state.nodes[culprit].strikes) == 1, "the death that was ordered is no second failure"
    fleet.park(culprit)
    fleet.hear(m.Parked(culprit, 1, 0, ("",), ()))
    assert "4" in fleet.state.seats
    assert culprit not in fleet.state.seats


@pytest.mark.parametrize(
    ("ranks", "pipeline"), [((), 1), ((0, 1, 2), 1), ((2,), 2)], ids=["nobody", "a majority", "a pipeline"]
)
def test_a_doubtful_diagnosis_is_told_and_the_epoch_ends_by_the_clock(
    ranks: tuple[int, ...], pipeline: int
) -> None:
    fleet = hanging()
    formation = structs.replace(fleet.state.settings.formation, pipeline=pipeline)
    fleet.state.settings = structs.replace(fleet.state.settings, formation=formation)
    fleet.hear(m.Diagnosed(0, "all wait", ranks))
    assert (fleet.said, fleet.state.phase) == ([], FleetPhase.RUNNING)
    assert fleet.state.incidents[-1].what == "epoch 0 hangs: all wait"
    fleet.hear(m.Tick(), after_s=20.0)
    assert fleet.state.phase is FleetPhase.PARKING


def test_a_diagnosis_that_comes_after_a_step_or_an_epoch_changes_nothing() -> None:
    fleet = hanging()
    for seat in fleet.state.seats:
        fleet.hear(m.Heartbeat(seat, 1, 0, 9, m.WorkerPhase.BOUND))
    assert fleet.hear(m.Diagnosed(0, "late", (2,))) == []
    assert fleet.hear(m.Diagnosed(3, "of another", (2,))) == []
    assert not fleet.state.vacant


# --- what single reports lead to ----------------------------------------------------------------------


def test_a_join_in_the_present_epoch_counts_as_bound_only_if_it_says_so() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    assert fleet.state.phase is FleetPhase.BINDING
    for bound in (False, True):
        assert fleet.state.awaiting >= {"0"}
        fleet.hear(m.Joined("0", 1, 1, "0", 7, epoch=0, bound=bound, meeting_points=("0:1",)))
    assert fleet.state.awaiting == {"1"}


def test_a_member_that_leaves_while_others_still_bind_ends_the_epoch() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    fleet.hear(m.Heartbeat("0", 1, 0, -1, m.WorkerPhase.LEAVING))
    assert (fleet.state.phase, fleet.state.recoveries) == (FleetPhase.PARKING, 1)
    assert fleet.state.reason == "node 0 is leaving epoch 0"


def test_an_agent_that_starts_again_has_failed_once() -> None:
    fleet = running()
    fleet.join("1", incarnation=2)
    assert len(fleet.state.nodes["1"].strikes) == 1
    assert fleet.state.phase is FleetPhase.PARKING
    assert fleet.state.nodes["1"].alive


def test_what_the_run_itself_cannot_survive_ends_it_and_only_in_its_own_epoch() -> None:
    fleet = running()
    fleet.hear(m.Fatal(3, "0", "of another epoch"))
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.RUNNING, 1)
    fleet.hear(m.RunFinished(3, "{}"))
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.RUNNING, 2)
    fleet.hear(m.Fatal(0, "0", "loss is nan"))
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FAILED, "node 0: loss is nan")
    fleet.hear(m.RunFinished(0, "{}"))
    assert fleet.state.phase is FleetPhase.FAILED


def test_late_reports_are_counted_once_and_change_nothing() -> None:
    fleet = running()
    fleet.hear(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.bind()
    late = [
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
        assert fleet.hear(event) == []
        assert (fleet.state.stale, fleet.state.epoch, fleet.state.phase) == (count, 1, FleetPhase.RUNNING)


def test_a_spare_that_is_still_in_an_earlier_epoch_is_called_back_before_it_is_used() -> None:
    fleet = running()
    fleet.hear(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.bind()
    fleet.hear(m.Heartbeat("4", 1, 0, 3, m.WorkerPhase.BOUND))
    assert [type(command) for command in fleet.told("4")] == [m.Park]
    assert "4" not in fleet.state.spares
    fleet.hear(m.Parked("4", 1, 0, ("4:1",), ()))
    assert "4" in fleet.state.spares


def test_only_steps_beyond_the_furthest_one_are_progress_unless_ground_was_lost() -> None:
    fleet = running(wanted=2, spares=0)

    def reach(step: int) -> int:
        for name in fleet.state.seats:
            fleet.hear(m.Heartbeat(name, 1, fleet.state.epoch, step, m.WorkerPhase.BOUND))
        return fleet.state.tries

    def fail(snapshot: int) -> None:
        fleet.hear(m.Broken("0", 1, fleet.state.epoch, 0))
        fleet.park(step=snapshot)
        fleet.bind()

    reach(9)
    fail(snapshot=5)
    assert [reach(7), reach(9), reach(10)] == [1, 1, 0]
    fail(snapshot=9)
    fail(snapshot=6)  # behind step 9, which was restored before
    assert [fleet.state.tries, reach(7)] == [2, 0]


def test_a_fault_while_a_planned_end_is_under_way_gives_everybody_the_whole_time_to_leave() -> None:
    fleet = running(park_s=15.0, stall_s=100.0, lease_s=1e6)
    fleet.hear(m.Drain("1"))
    assert fleet.state.planned
    fleet.hear(m.Suspect("2", "corruption", trusted_step=3), after_s=14.0)
    assert not fleet.state.planned
    assert fleet.told("0") == [m.Park(0, fleet.state.reason)]
    fleet.hear(m.Tick(), after_s=14.0)
    assert all(node.alive for node in fleet.state.nodes.values())
    fleet.hear(m.Tick(), after_s=2.0)
    assert [name for name, node in fleet.state.nodes.items() if node.alive] == ["4"]


def test_a_member_that_has_left_while_others_still_bind_ends_the_epoch() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    fleet.hear(m.Bound("0", 1, 0))
    fleet.hear(m.Heartbeat("0", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM))
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.PARKING, "node 0 has left epoch 0")


def test_the_reason_for_the_end_of_an_epoch_has_what_the_worker_said_last() -> None:
    for text, said in (("", ""), ("out of memory", ": out of memory")):
        fleet = running()
        fleet.hear(m.WorkerExited("0", 1, 0, 0, -9, text))
        assert fleet.state.reason == f"node 0: worker 0 exited with code -9{said}"


def test_a_checkpoint_of_a_condemned_step_is_trusted_once_it_has_been_saved_again() -> None:
    fleet = running()
    fleet.hear(m.DiskHolds((4, 8)), m.Suspect("1", "corruption", trusted_step=6))
    assert (fleet.state.durable, fleet.state.condemned) == ([4], [8])
    fleet.park()
    fleet.bind()
    fleet.hear(m.Durable("0", 1, 1, 8))
    assert (fleet.state.durable, fleet.state.condemned) == ([4, 8], [])


def test_the_first_formation_waits_for_all_wanted_nodes_also_where_they_have_several_workers() -> None:
    fleet = Fleet(settings(2, formation=Formation(2, (2, 4))))
    for name, phase in (("0", FleetPhase.FORMING), ("1", FleetPhase.BINDING)):
        fleet.hear(m.Joined(name, 1, 2, name, 7, meeting_points=(f"{name}:1", f"{name}:2")))
        assert fleet.state.phase is phase
    assert fleet.state.ranks == 4
