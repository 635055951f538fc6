"""The life of epochs: when each phase ends, who is blamed, what is counted, and when a Tick is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs.epoch_plan import EpochPlan, Order
from phalanx.fleet.core.epochs.faults import last_heartbeat_s, lose, next_deadline_s, phase_deadline_s
from phalanx.fleet.core.epochs.life_cycle import _begin, can_grow, pause_s
from phalanx.fleet.core.invariants import check
from phalanx.fleet.core.settings import Formation
from phalanx.fleet.core.state import NO_SEAT, Eligibility, FleetPhase


def beat(fleet: Fleet, *but: str, step: int = 1) -> None:
    """All nodes but some send a heartbeat."""
    for name, node in fleet.state.nodes.items():
        if name not in but and node.alive:
            seated = node.seat >= 0
            phase = m.WorkerPhase.BOUND if seated else m.WorkerPhase.WARM
            epoch, reached = (fleet.state.epoch, step) if seated else (m.NO_EPOCH, m.NO_STEP)
            fleet.handle(m.Heartbeat(name, node.incarnation, epoch, reached, phase))


# --- from phase to phase ------------------------------------------------------------------------------


def test_pauses_double_from_the_fifth_try_on_up_to_the_longest() -> None:
    assert [pause_s(tries) for tries in (0, 4, 5, 6, 7, 11, 12, 90)] == [0, 0, 0.1, 0.2, 0.4, 6.4, 10, 10]


def test_a_run_that_is_stopped_before_it_was_formed_is_over() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0")
    fleet.handle(m.StopRun())
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FINISHED, "stopped before it was formed")


def test_the_first_formation_waits_exactly_as_long_as_it_may() -> None:
    fleet = Fleet(settings(3, form_s=10.0))
    fleet.join("0", "1")
    fleet.handle(m.Tick(), after_s=9.75)
    assert (fleet.state.phase, next_deadline_s(fleet.state)) == (FleetPhase.FORMING, 10.0)
    fleet.handle(m.Tick(), after_s=0.25)
    assert (fleet.state.phase, fleet.state.ranks) == (FleetPhase.BINDING, 2)


def test_a_fleet_of_too_few_nodes_forms_none_however_long_it_waits() -> None:
    fleet = Fleet(settings(3, form_s=10.0, min_nodes=2))
    fleet.join("0")
    fleet.handle(m.Tick(), after_s=11.0)
    assert (fleet.state.phase, phase_deadline_s(fleet.state)) == (FleetPhase.FORMING, None)
    fleet.join("1")
    assert fleet.state.phase is FleetPhase.BINDING


def test_an_epoch_begins_with_a_clean_slate() -> None:
    fleet = running()
    beat(fleet, step=9)
    fleet.handle(m.Parked("0", 1, 0, ("0:1",), ()), m.Broken("2", 1, 0, 0))
    assert fleet.state.early == {"0"}
    fleet.handle(m.Disconnected("1", 1))
    fleet.park()
    state = fleet.state
    assert (state.epoch, state.phase, state.early, state.evidence) == (1, FleetPhase.BINDING, set(), False)
    assert (state.planned, state.diagnosed, state.vacant) == (False, False, set())
    assert state.awaiting == set(state.seats)


@effort(max_examples=100, deadline=None)
@given(
    st.permutations([str(index) for index in range(7)]),
    st.integers(1, 5),
    st.sets(st.sampled_from(range(5))),
)
def test_whoever_leaves_stays_or_moves_each_node_has_the_seat_of_the_plan_and_only_those_without_one_are_released(
    order: list[str], count: int, lost: set[int]
) -> None:
    fleet = running(5, 2)
    before = list(fleet.state.seats)
    lost_nodes = {before[seat] for seat in lost}
    for name in sorted(lost_nodes):
        lose(fleet.state, [], fleet.state.nodes[name], "lost")
    fleet.state.phase = FleetPhase.PARKING
    # The names of the plan are equal to those of the state, and others in memory: so they come from JSON.
    seats = tuple(b"".join((name.encode(),)).decode() for name in order if name not in lost_nodes)[:count]
    if not seats:
        return
    orders: list[Order] = []
    _begin(fleet.state, orders, EpochPlan(len(seats), seats, tuple(range(len(seats))), 0, c.Fresh()))
    seat_of = {name: node.seat for name, node in fleet.state.nodes.items()}
    assert seat_of == {name: seats.index(name) if name in seats else NO_SEAT for name in seat_of}
    assert [order.to for order in orders[1:]] == sorted(set(before) - set(seats))
    check(fleet.state)


@effort(max_examples=100, deadline=None)
@given(*[st.sets(st.sampled_from([str(index) for index in range(6)])) for _ in range(4)])
def test_a_roll_call_of_those_who_parked_counts_as_the_scan_of_all_members_would(
    spoke: set[str], silent: set[str], spoke_later: set[str], silent_later: set[str]
) -> None:
    fleet = running(6, 0)
    fleet.handle(m.Broken("5", 1, 0, 0))
    absent: set[str] | None = None
    for single, away, steps in ((spoke, silent, (4, 5)), (spoke_later, silent_later, (5,))):
        for name in sorted(single & fleet.state.awaiting):
            if fleet.state.awaiting != {name}:
                fleet.handle(m.Parked(name, 1, 0, (f"{name}:1",), ()))
                absent = absent if absent is None else absent | {name}
        if not fleet.state.awaiting & away:
            return
        folded = fleet.state.awaiting - away
        fleet.handle(m.Rollcall("parked", 0, steps=steps, absent=tuple(sorted(away))))
        absent = set(fleet.state.seats) - folded if absent is None else absent - folded
        assert fleet.state.census is not None
        assert fleet.state.census.absent == {name: fleet.state.seats.index(name) for name in absent}
        assert fleet.state.census.steps == steps
        assert not fleet.state.awaiting & folded


def test_all_ranks_of_an_epoch_meet_under_the_token_of_its_begin_however_often_it_is_changed_meanwhile() -> (
    None
):
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    # A node that was bound before the first change has the token of that time, which had no name in the Bind.
    for new, before in (("k1", "k0"), ("k2", "k1")):
        fleet.handle(m.Rekeyed(new, before))
        fleet.join("1")
        assert [bind.key for bind in fleet.commands_to("1") if isinstance(bind, c.Bind)] == ["k0"]
    fleet.bind()
    fleet.handle(m.Parked("0", 1, 0, ("0:1",), ()))
    fleet.park()
    assert [bind.key for _, bind in fleet.sent if isinstance(bind, c.Bind)] == ["k2", "k2"]


def test_a_node_that_loses_its_seat_gets_the_order_that_releases_it() -> None:
    fleet = running()
    fleet.handle(m.Drain("1"))
    fleet.park()
    assert fleet.commands_to("1") == [c.Release(1)]
    assert len(fleet.sent) == 5


def test_a_state_that_is_lost_while_members_restore_it_ends_the_epoch() -> None:
    fleet = running(2, 1)
    fleet.handle(m.Broken("0", 1, 0, 0))
    fleet.handle(m.Parked("0", 1, 0, ("0:1",), (m.RankSnapshot(2, 0, 5, "own", epoch=0),)))
    fleet.handle(m.Parked("1", 1, 0, ("1:1",), (m.RankSnapshot(2, 1, 5, "own", epoch=0),)))
    assert fleet.state.phase is FleetPhase.BINDING
    fleet.handle(m.Parked("1", 1, 1, ("1:1",), ()))
    assert fleet.state.phase in (FleetPhase.PARKING, FleetPhase.BINDING)
    assert fleet.state.recoveries == 2


def test_a_planned_end_counts_as_a_regroup_and_a_fault_as_a_recovery_and_a_try() -> None:
    fleet = running(stall_s=100.0, lease_s=1e6)
    fleet.handle(m.Drain("1"), after_s=3.0)
    state = fleet.state
    assert (state.regroups, state.recoveries, state.tries, state.planned) == (1, 0, 0, True)
    assert (state.left_s, state.left_planned, state.since_s) == (3.0, True, 3.0)
    assert state.reason == "node 1: drained by the operator"
    incident = state.incidents[-1]
    assert (incident.text, incident.ended_epoch, incident.node) == (state.reason, True, "")


def test_a_fault_of_a_new_epoch_before_it_trains_does_not_move_the_time_at_which_training_ended() -> None:
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0), after_s=3.0)
    fleet.park()
    fleet.handle(m.Broken("0", 1, 1, 0), after_s=4.0)
    assert (fleet.state.left_s, fleet.state.left_planned) == (3.0, False)
    fleet.park()
    fleet.bind()
    fleet.handle(m.Broken("0", 1, 2, 0), after_s=5.0)
    assert fleet.state.left_s == 12.0


def test_nodes_that_are_gone_or_have_parked_already_are_not_waited_for() -> None:
    fleet = running()
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    assert fleet.state.awaiting == {"0", "2", "3"}


def test_the_reason_names_up_to_four_of_the_nodes_that_are_lost() -> None:
    fleet = running(6, 0, confirm_s=2.0, lease_s=1e6)
    fleet.state.evidence = True
    fleet.handle(m.Folded(tuple(m.Disconnected(name, 1) for name in "01234")))
    assert fleet.state.reason.count("its connection and a collective broke") == 4
    assert fleet.state.reason.count("; ") == 3
    assert not fleet.state.planned


def test_a_fleet_grows_when_its_epoch_is_old_enough_and_not_before_a_stop() -> None:
    for stopping in (False, True):
        fleet = running(4, 0, grow_s=30.0, lease_s=1e6)
        fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0), after_s=100.0)
        fleet.park()
        fleet.bind()
        fleet.join("1", incarnation=2)
        fleet.handle(m.Tick())
        if stopping:
            fleet.handle(m.StopRun())
        assert can_grow(fleet.state)
        assert (next_deadline_s(fleet.state) == 130.0) is not stopping
        fleet.handle(m.Tick(), after_s=29.75)
        assert fleet.state.phase is FleetPhase.RUNNING
        fleet.handle(m.Tick(), after_s=0.25)
        assert fleet.state.planned is not stopping
        assert stopping or fleet.state.reason == "more nodes are ready"


def test_a_whole_fleet_does_not_grow_by_its_spares() -> None:
    fleet = running(2, 2, formation=Formation(1, (1, 2, 3, 4)), grow_s=30.0, stall_s=40.0, lease_s=1e6)
    fleet.handle(m.Tick())
    assert not can_grow(fleet.state)
    assert next_deadline_s(fleet.state) == 40.0


def test_a_fleet_that_waits_reports_it_once() -> None:
    fleet = running(nodes=2, spares=0, min_nodes=2)
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.handle(m.Tick(), m.Tick(), after_s=1.0)
    assert (fleet.state.phase, phase_deadline_s(fleet.state)) == (FleetPhase.WAITING, None)
    waits = [incident for incident in fleet.state.incidents if "waits" in incident.text]
    assert [(incident.text, incident.at_s) for incident in waits] == [
        (
            "too few nodes: the fleet waits; the memory of their agents and the newest checkpoint hold its state",
            0.0,
        )
    ]
    fleet.handle(m.DiskHolds((5,)), m.StopRun())
    text = "stopped while waiting for nodes"
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FINISHED, text)


def test_a_run_is_given_up_after_one_more_fault_in_a_row_than_it_may_have() -> None:
    fleet = running(nodes=2, spares=0, max_tries=2)
    for tries in (0, 1, 2):  # after the first fault a step is restored that was not known, which is progress
        fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0, "illegal instruction"))
        fleet.park()
        fleet.bind()
        assert (fleet.state.phase, fleet.state.tries) == (FleetPhase.RUNNING, tries)
    fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0, "illegal instruction"))
    fleet.park()
    fleet.handle(m.DiskHolds((5,)))
    last = "node 0, worker 0: illegal instruction"
    text = f"3 faults in a row without progress; the last one: {last}; step 5 was saved from the memory of the nodes"
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FAILED, text)
    assert fleet.commands_to("1") == [c.Shutdown(text)]


# --- pace ---------------------------------------------------------------------------------------------


def test_the_pace_is_the_first_steps_time_and_then_follows_slowly() -> None:
    fleet = running()
    fleet.handle(m.Heartbeat("0", 1, 0, 1, m.WorkerPhase.BOUND), after_s=8.0)
    assert fleet.state.pace_s == 4.0, "steps 0 and 1"
    fleet.handle(m.Heartbeat("1", 1, 0, 1, m.WorkerPhase.BOUND), after_s=1.0)
    assert (fleet.state.pace_s, fleet.state.step_s) == (4.0, 8.0), "no new step"
    fleet.handle(m.Heartbeat("1", 1, 0, 2, m.WorkerPhase.BOUND), after_s=8.0)
    assert fleet.state.pace_s == pytest.approx(0.8 * 4.0 + 0.2 * 9.0)
    assert (fleet.state.step, fleet.state.step_s, fleet.state.best_step) == (2, 17.0, 2)


def test_the_first_step_is_timed_from_the_moment_when_all_have_bound() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    fleet.now_s = 5.0
    fleet.bind()
    assert fleet.state.step_s == 5.0


# --- losing nodes -------------------------------------------------------------------------------------


def test_failures_outside_of_the_window_are_forgotten() -> None:
    fleet = running(strikes=2, strike_window_s=100.0, lease_s=1e6)
    for after_s, kept in ((0.0, 1), (100.0, 1), (99.0, 2)):
        fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9), after_s=after_s)
        fleet.handle(m.Ready("4", 1, ("4:1",)))
        assert len(fleet.state.nodes["4"].strikes) == kept
    node = fleet.state.nodes["4"]
    assert node.eligibility is Eligibility.QUARANTINED
    assert node.reason == "worker 0 exited with code -9; 2 failures within 100 s: quarantined"
    fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9), after_s=1.0)
    node = fleet.state.nodes["4"]
    assert (node.strikes, node.reason) == ((199.0, 200.0), "worker 0 exited with code -9")


def test_a_drained_node_that_fails_often_stays_drained() -> None:
    fleet = running(strikes=1)
    fleet.handle(m.Drain("4"), m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9))
    assert fleet.state.nodes["4"].eligibility is Eligibility.DRAINED


def test_nothing_of_a_lost_node_counts_any_more() -> None:
    fleet = running()
    fleet.handle(m.Rollcall("heartbeat", 0, absent=("1",)), m.Broken("0", 1, 0, 0))
    snapshots = (m.RankSnapshot(4, 2, 5, "own", epoch=0),)
    fleet.handle(m.Heartbeat("1", 1, 0, 1, m.WorkerPhase.BOUND), m.Parked("1", 1, 0, ("1:1",), snapshots))
    assert fleet.state.copies
    deliveries = fleet.handle(m.Disconnected("1", 1))
    node = fleet.state.nodes["1"]
    assert (node.alive, node.meeting_points, node.snapshots) == (False, (), ())
    assert (fleet.state.copies, fleet.state.suspects, fleet.state.silent) == ({}, {}, set())
    assert deliveries == [("1", c.Fence(node.reason, 1))]
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0), m.Disconnected("1", 1))
    assert "1" not in fleet.state.awaiting


def test_a_lease_runs_out_after_its_time_and_no_sooner() -> None:
    fleet = running(lease_s=15.0)
    beat(fleet)
    fleet.now_s = 10.0
    beat(fleet, "4")
    fleet.handle(m.Tick(), after_s=4.75)
    assert fleet.state.nodes["4"].alive
    fleet.handle(m.Tick(), after_s=0.25)
    assert fleet.state.nodes["4"].reason == "it fell silent 15.0 s ago"
    assert [node.alive for node in fleet.state.nodes.values()] == [True] * 4 + [False]
    assert fleet.state.next_lease_s == 25.0
    fleet.now_s = 40.0
    beat(fleet)
    fleet.handle(m.Tick())
    assert len(fleet.state.nodes["4"].strikes) == 1, "it is lost only once"


def test_a_broken_connection_is_given_its_time_and_no_more() -> None:
    fleet = running(confirm_s=2.0, lease_s=1e6, stall_s=1e6)
    fleet.handle(m.Tick(), m.Disconnected("4", 1))
    assert next_deadline_s(fleet.state) == 2.0
    fleet.handle(m.Tick(), after_s=1.75)
    assert fleet.state.nodes["4"].alive
    fleet.handle(m.Tick(), after_s=0.25)
    assert fleet.state.nodes["4"].reason == "its connection broke 2.0 s ago"


@pytest.mark.parametrize(
    ("nodes", "silent", "lost"), [(5, "012", 0), (6, "012", 3), (3, "01", 2), (5, "0", 1)]
)
def test_if_most_nodes_fall_silent_at_once_they_are_given_more_time(
    nodes: int, silent: str, lost: int
) -> None:
    fleet = running(nodes - 1, 1, lease_s=15.0, stall_s=1e6)
    for _ in range(3):
        fleet.now_s += 5.0
        beat(fleet, *silent)
    fleet.handle(m.Tick())
    assert sum(not node.alive for node in fleet.state.nodes.values()) == lost
    assert next_deadline_s(fleet.state) > fleet.now_s


def test_most_nodes_are_lost_when_they_have_been_silent_four_times_as_long_or_a_collective_broke() -> None:
    for evidence, until_s in ((False, 60.0), (True, 15.0)):
        fleet = running(4, 1, lease_s=15.0, stall_s=1e6)
        fleet.state.evidence = evidence
        while fleet.now_s < until_s - 5.0:
            fleet.now_s += 5.0
            beat(fleet, *"0123")
            fleet.handle(m.Tick())
            assert all(node.alive for node in fleet.state.nodes.values())
        fleet.handle(m.Heartbeat("4", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM), m.Tick(), after_s=5.0)
        assert [node.alive for node in fleet.state.nodes.values()] == [False] * 4 + [True]


def test_a_rollcall_counts_as_a_heartbeat_of_all_but_the_absent() -> None:
    fleet = running(lease_s=15.0, stall_s=1e6)
    fleet.handle(m.Rollcall("heartbeat", 0, absent=("4",)), after_s=10.0)
    assert [last_heartbeat_s(fleet.state, name) for name in "014"] == [10.0, 10.0, 0.0]
    fleet.handle(m.Tick(), after_s=5.0)
    assert [name for name, node in fleet.state.nodes.items() if not node.alive] == ["4"]
    assert fleet.state.next_lease_s == 25.0


def test_the_lease_of_a_node_that_is_absent_from_a_roll_call_runs_from_the_roll_call_before() -> None:
    fleet = running(lease_s=15.0, stall_s=1e6)
    fleet.handle(m.Rollcall("heartbeat", 0), after_s=10.0)
    for _ in range(2):
        fleet.handle(m.Rollcall("heartbeat", 0, absent=("4",)), m.Tick(), after_s=7.0)
    assert fleet.state.nodes["4"].alive
    fleet.handle(m.Tick(), after_s=1.0)
    assert [name for name, node in fleet.state.nodes.items() if not node.alive] == ["4"]


def test_after_most_nodes_fell_silent_the_one_that_is_absent_from_the_next_roll_call_is_lost_at_once() -> (
    None
):
    fleet = running(lease_s=15.0, stall_s=1e6)
    fleet.handle(m.Tick(), after_s=15.0)
    assert all(node.alive for node in fleet.state.nodes.values())
    fleet.handle(m.Rollcall("heartbeat", 0, absent=("4",)), m.Tick(), after_s=1.0)
    assert [name for name, node in fleet.state.nodes.items() if not node.alive] == ["4"]


# --- deadlines ----------------------------------------------------------------------------------------


def test_whoever_does_not_leave_in_time_is_lost() -> None:
    fleet = running(park_s=15.0, lease_s=1e6)
    fleet.handle(m.Broken("0", 1, 0, 0), after_s=1.0)
    fleet.park("1")
    assert phase_deadline_s(fleet.state) == 16.0
    fleet.handle(m.Tick(), after_s=14.75)
    assert fleet.state.nodes["1"].alive
    fleet.handle(m.Tick(), after_s=0.25)
    assert fleet.state.nodes["1"].reason == "it did not leave epoch 0"
    assert fleet.state.epoch == 1


def test_a_planned_end_without_a_step_boundary_becomes_a_fault() -> None:
    fleet = running(stall_s=20.0, park_s=15.0, lease_s=1e6)
    fleet.handle(m.Drain("1"), after_s=1.0)
    assert phase_deadline_s(fleet.state) == 21.0
    deliveries = fleet.handle(m.Tick(), after_s=20.0)
    text = "no step boundary was reached (node 1: drained by the operator)"
    assert (fleet.state.reason, fleet.state.planned, fleet.state.left_planned) == (text, False, False)
    assert deliveries == [(name, c.Park(0, text)) for name in "0123"]
    assert (fleet.state.recoveries, phase_deadline_s(fleet.state)) == (1, 36.0)


def test_a_minority_that_does_not_bind_is_blamed_and_a_half_is_not() -> None:
    for bound, strikes in (("023", 1), ("02", 0)):
        fleet = Fleet(settings(4, bind_s=30.0, lease_s=1e6))
        fleet.join(*"0123")
        for name in bound:
            fleet.handle(m.Bound(name, 1, 0))
        assert phase_deadline_s(fleet.state) == 30.0
        fleet.handle(m.Tick(), after_s=30.0)
        assert fleet.state.reason == "epoch 0 was not bound within 30 s"
        assert len(fleet.state.nodes["1"].strikes) == strikes
        assert fleet.state.nodes["1"].reason == ("it did not bind epoch 0" if strikes else "")


def test_without_a_step_the_members_are_diagnosed_and_after_twice_that_time_the_epoch_ends() -> None:
    fleet = running(stall_s=20.0, lease_s=1e6)
    beat(fleet, step=0)
    fleet.handle(m.Heartbeat("0", 1, 0, 1, m.WorkerPhase.BOUND), after_s=1.0)
    assert phase_deadline_s(fleet.state) == 21.0
    fleet.handle(m.Tick(), after_s=19.75)
    assert not fleet.state.diagnosed
    fleet.handle(m.Tick(), after_s=0.25)
    assert fleet.state.diagnosed
    assert fleet.commands_to("2") == [c.Diagnose(0, 20.0)]
    assert (fleet.handle(m.Tick()), phase_deadline_s(fleet.state)) == ([], 41.0)
    fleet.handle(m.Tick(), after_s=20.0)
    assert fleet.state.reason == "no step ended for 40 s"
    fleet.park()
    assert not fleet.state.diagnosed


def test_a_slow_pace_gives_a_step_ten_times_its_usual_time() -> None:
    fleet = running(stall_s=20.0, lease_s=1e6)
    fleet.handle(m.Heartbeat("0", 1, 0, 0, m.WorkerPhase.BOUND), after_s=5.0)
    assert (fleet.state.pace_s, phase_deadline_s(fleet.state)) == (5.0, 55.0)


def test_a_pause_between_tries_is_a_deadline() -> None:
    fleet = running(2, 0, lease_s=1e6, stall_s=1e6)
    for _ in range(6):
        fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0))
        fleet.park()
        if fleet.state.phase is FleetPhase.BINDING:
            fleet.bind()
    assert (fleet.state.tries, fleet.state.phase) == (5, FleetPhase.PARKING)
    assert phase_deadline_s(fleet.state) == 0.1
    fleet.handle(m.Tick(), after_s=0.1)
    assert fleet.state.phase is FleetPhase.BINDING


def test_the_next_deadline_is_never_in_the_past() -> None:
    fleet = running(lease_s=15.0)
    fleet.now_s = 40.0
    fleet.handle(m.Heartbeat("4", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM))
    assert next_deadline_s(fleet.state) == 40.0
