"""Single reports: what the core believes of them, what it counts as late, and what it remembers."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.requests import DURABLE_KEPT
from phalanx.fleet.core.settings import Formation
from phalanx.fleet.core.state import NO_SEAT, Distrust, Eligibility, FleetPhase, Node, RestorePoint


def in_epoch_1(*events: m.CoreEvent, **changes: Any) -> Fleet:
    """A fleet of which a collective broke once, after ``events``; its second epoch trains."""
    fleet = running(**changes)
    fleet.handle(*events, m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.bind()
    assert (fleet.state.epoch, fleet.state.phase) == (1, FleetPhase.RUNNING)
    return fleet


# --- senders ------------------------------------------------------------------------------------------


def test_a_join_describes_a_new_node_in_full() -> None:
    fleet = running()
    snapshots = (m.RankSnapshot(4, 0, 5, "own", epoch=0),)
    fleet.handle(
        m.Joined(
            "9", 3, 1, "host9", 17, ("rack1",), snapshots, meeting_points=("9:1",), started_as_spare=True
        )
    )
    assert fleet.state.nodes["9"] == Node(
        "9",
        3,
        1,
        "host9",
        17,
        ("rack1",),
        meeting_points=("9:1",),
        started_as_spare=True,
        snapshots=snapshots,
    )
    assert "9" in fleet.state.spares


@pytest.mark.parametrize("incarnation", [1, 2])
def test_an_agent_that_joins_again_keeps_its_seat_and_its_record(incarnation: int) -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("1", 1, 0, 0, -9), m.Drain("1"))
    before = fleet.state.nodes["1"]
    fleet.join("1", incarnation=incarnation)
    after = fleet.state.nodes["1"]
    assert (after.seat, after.eligibility) == (before.seat, Eligibility.DRAINED)
    assert after.strikes[:1] == before.strikes != ()
    assert after.reason == (before.reason if incarnation == 1 else "its agent was started again")


def test_only_the_present_incarnation_is_believed_and_others_are_answered_by_what_they_lack() -> None:
    fleet = running()
    fleet.join("4", incarnation=2)
    deliveries = [
        fleet.handle(m.Ready(name, life, ("x:1",))) for name, life in (("4", 1), ("4", 3), ("9", 1))
    ]
    assert deliveries == [[], [("4", c.TellAll())], [("9", c.TellAll())]]
    assert (fleet.state.stale, fleet.state.nodes["4"].meeting_points) == (3, ("4:1",))
    assert fleet.handle(m.Joined("4", 1, 1, "4", 7)) == []
    assert (fleet.state.stale, fleet.state.nodes["4"].incarnation) == (4, 2)


def test_a_fenced_node_that_joins_again_is_fenced_again_until_it_begins_anew() -> None:
    fleet = running()
    fleet.handle(m.Disconnected("4", 1), m.Tick(), after_s=0.0)
    fleet.handle(m.Tick(), after_s=3.0)
    strikes = fleet.state.nodes["4"].strikes
    fleet.join("4")
    assert [type(command) for command in fleet.commands_to("4")] == [c.Fence]
    assert not fleet.state.nodes["4"].alive
    fleet.join("4", incarnation=2)
    assert fleet.state.nodes["4"].alive
    assert fleet.state.nodes["4"].strikes == strikes, "it was fenced, so it has not failed once more"


def test_a_broken_connection_is_no_sign_of_life_and_a_second_one_buys_no_time() -> None:
    fleet = running(confirm_s=2.0)
    fleet.handle(m.Disconnected("4", 1))
    fleet.handle(m.Disconnected("4", 1), after_s=1.5)
    assert fleet.state.last_seen_s["4"] == 0.0
    fleet.handle(m.Tick(), after_s=0.5)
    assert not fleet.state.nodes["4"].alive


def test_every_report_is_a_sign_of_life_and_ends_the_doubt_about_a_connection() -> None:
    for event in (m.Ready("4", 1, ("4:1",)), m.Joined("4", 1, 1, "4", 7, meeting_points=("4:1",))):
        fleet = running()
        fleet.handle(m.Disconnected("4", 1))
        fleet.handle(event, after_s=1.0)
        assert (fleet.state.suspects, fleet.state.last_seen_s["4"]) == ({}, 1.0)


def test_events_that_are_folded_count_like_single_ones() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    fleet.handle(m.Folded((m.Bound("0", 1, 0), m.Bound("1", 1, 0))))
    assert fleet.state.phase is FleetPhase.RUNNING


def test_when_the_run_is_over_a_node_that_joins_is_shut_down_and_nothing_else_counts() -> None:
    fleet = running()
    fleet.handle(m.RunFinished(0, '{"step": 9}'))
    assert (fleet.state.reason, fleet.state.result_json) == ("all steps are done", '{"step": 9}')
    assert fleet.state.incidents[-1].text == "finished: all steps are done"
    assert fleet.handle(m.Joined("9", 1, 1, "9", 7)) == [("9", c.Shutdown("all steps are done"))]
    assert fleet.handle(m.Broken("0", 1, 0, 0), m.Folded((m.Drain("1"),))) == []
    assert (fleet.state.stale, "9" in fleet.state.nodes) == (0, False)


def test_the_time_before_the_first_epoch_is_counted_from_the_coordinators_start() -> None:
    state = initial_state(settings(2), 50.0)
    assert (state.now_s, state.since_s) == (50.0, 50.0)


# --- workers ------------------------------------------------------------------------------------------


def test_a_node_whose_workers_are_not_warm_takes_no_rank_until_it_reports_that_they_are() -> None:
    fleet = Fleet(settings(2))
    assert fleet.handle(m.Joined("0", 1, 2, "0", 7, meeting_points=("0:1", ""))) == []
    assert not fleet.state.spares
    fleet.handle(m.Ready("0", 1, ("0:1", "0:2")))
    assert fleet.state.spares == {"0"}
    fleet.handle(m.Heartbeat("0", 1, m.NO_EPOCH, -1, m.WorkerPhase.COLD))
    assert not fleet.state.spares
    assert fleet.state.nodes["0"].reason == "its workers are not warm"
    assert fleet.handle(m.Heartbeat("0", 1, m.NO_EPOCH, -1, m.WorkerPhase.COLD)) == []
    deliveries = fleet.handle(m.Heartbeat("0", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM))
    assert deliveries == [("0", c.TellAll())], "where its workers can be met was forgotten"


def test_a_node_whose_worker_was_started_again_by_the_time_it_parks_keeps_its_rank() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("1", 1, 0, 0, -9))
    fleet.park("1")
    fleet.handle(m.Parked("1", 1, 0, ("1:2",), ()))
    assert "1" in fleet.state.seats
    assert fleet.state.nodes["1"].meeting_points == ("1:2",)


def test_a_spare_that_claims_to_train_moves_no_step_and_is_called_back() -> None:
    fleet = running()
    deliveries = fleet.handle(m.Heartbeat("4", 1, 0, 99, m.WorkerPhase.BOUND))
    assert deliveries == [("4", c.Park(0, "it is not a member of this epoch"))]
    assert (fleet.state.step, fleet.state.spares) == (m.NO_STEP, set())
    # Its Parked is lost: it gets a request for its description, and counts again with it.
    deliveries = fleet.handle(m.Heartbeat("4", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM))
    assert (deliveries, fleet.state.spares) == ([("4", c.TellAll())], set())
    fleet.join("4")
    assert fleet.state.spares == {"4"}
    assert fleet.handle(m.Heartbeat("4", 1, m.NO_EPOCH, -1, m.WorkerPhase.WARM)) == []


def test_a_successor_counts_the_snapshots_that_a_node_took_before_it_left_and_could_not_report() -> None:
    fleet = Fleet(settings(1))
    fleet.state.epoch, fleet.state.phase = 1, FleetPhase.FORMING
    fleet.handle(
        m.Joined("0", 1, 1, "0", 7, snapshots=(copy_of(4),), epoch=1, bound=True, meeting_points=("0:1",))
    )
    # It leaves epoch 1 after step 5, its Parked is lost, and so is the answer to its heartbeat at first.
    for _ in range(2):
        assert fleet.handle(m.Heartbeat("0", 1, m.NO_EPOCH, 5, m.WorkerPhase.WARM)) == [("0", c.TellAll())]
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.handle(m.Joined("0", 1, 1, "0", 7, snapshots=(copy_of(4), copy_of(5)), meeting_points=("0:1",)))
    assert fleet.state.source == RestorePoint(1, 5)


def copy_of(step: int) -> m.RankSnapshot:
    return m.RankSnapshot(1, 0, step, "own", 1, epoch=1)


def test_only_members_that_train_in_the_present_epoch_move_the_step() -> None:
    fleet = in_epoch_1()
    fleet.handle(m.Heartbeat("0", 1, 1, 7, m.WorkerPhase.BINDING))
    assert fleet.state.step == 5
    fleet.handle(m.Heartbeat("0", 1, 1, 7, m.WorkerPhase.BOUND))
    assert fleet.state.step == 7
    fleet.handle(m.Heartbeat("0", 1, 0, 9, m.WorkerPhase.BOUND))
    assert (fleet.state.step, fleet.state.phase) == (7, FleetPhase.PARKING)


def test_a_member_that_missed_its_stop_gets_it_again() -> None:
    fleet = running()
    fleet.handle(m.StopRun())
    assert fleet.handle(m.Heartbeat("0", 1, 0, 3, m.WorkerPhase.BOUND)) == [("0", c.Stop(0))]


def test_a_member_that_leaves_a_running_epoch_ends_it() -> None:
    fleet = running()
    fleet.handle(m.Heartbeat("0", 1, 0, 3, m.WorkerPhase.LEAVING))
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.PARKING, "node 0 has left epoch 0")


def test_a_member_that_still_forms_the_epoch_is_left_alone_and_one_of_an_earlier_epoch_gets_its_order_again() -> (
    None
):
    fleet = in_epoch_1()
    fleet.handle(m.Broken("0", 1, 1, 0))
    fleet.park()
    assert fleet.handle(m.Heartbeat("0", 1, 2, -1, m.WorkerPhase.BINDING)) == []
    assert [type(command) for _, command in fleet.handle(m.Heartbeat("0", 1, 0, 5, m.WorkerPhase.BOUND))] == [
        c.Bind
    ]
    assert fleet.state.phase is FleetPhase.BINDING


def test_a_worker_that_failed_outside_of_an_epoch_costs_its_node_nothing_while_the_node_trains() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("0", 1, m.NO_EPOCH, 0, -9))
    assert (fleet.state.stale, fleet.state.phase) == (1, FleetPhase.RUNNING)
    fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9))
    assert (fleet.state.stale, fleet.state.spares) == (1, set())
    fleet.handle(m.Broken("0", 1, 0, 0), m.WorkerExited("0", 1, m.NO_EPOCH, 0, -9))
    assert [len(fleet.state.nodes[name].strikes) for name in "04"] == [1, 1]


def test_a_worker_that_fails_twice_without_having_been_warm_in_between_has_failed_once() -> None:
    fleet = running()
    fleet.handle(m.WorkerHung("4", 1, m.NO_EPOCH, 0, 3.25), m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9))
    node = fleet.state.nodes["4"]
    assert (node.reason, len(node.strikes)) == ("worker 0 hung, silent for 3.2 s", 1)
    assert fleet.state.stale == 1
    assert [incident.text for incident in fleet.state.incidents] == [node.reason]


def test_an_incident_records_whether_its_node_held_ranks() -> None:
    fleet = running()
    (spare,) = fleet.state.spares
    fleet.handle(m.WorkerHung(spare, 1, m.NO_EPOCH, 0, 3.0), m.WorkerHung("0", 1, fleet.state.epoch, 0, 3.0))
    held_ranks = {incident.node: incident.held_ranks for incident in fleet.state.incidents if incident.node}
    assert held_ranks == {spare: False, "0": True}


def test_an_innocent_worker_is_noted_and_must_be_warm_again() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9, "killed", innocent=True))
    node = fleet.state.nodes["4"]
    assert (node.strikes, node.meeting_points) == ((), ())
    assert node.reason == fleet.state.incidents[-1].text == "worker 0 exited with code -9: killed"


def test_long_texts_of_workers_are_cut() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, 1, "x" * 300))
    assert fleet.state.nodes["4"].reason.count("x") == 200 + 1, "one is in 'exited'"
    fleet.handle(m.Broken("0", 1, 0, 0, "y" * 300))
    assert fleet.state.reason == "node 0, worker 0: " + "y" * 200


def test_a_broken_collective_without_a_text_is_reported_as_such() -> None:
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0))
    assert fleet.state.reason == "node 0, worker 0: a collective broke"


def test_once_a_collective_has_broken_a_broken_connection_is_proof_against_members_alone() -> None:
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0), m.Disconnected("1", 1), m.Disconnected("4", 1))
    assert [fleet.state.nodes[name].alive for name in "14"] == [False, True]
    assert fleet.state.nodes["1"].reason == "its connection and a collective broke"
    assert list(fleet.state.suspects) == ["4"]


# --- checkpoints and corruption -----------------------------------------------------------------------


def test_checkpoints_are_listed_once_in_order_and_not_before_their_epoch_is_known() -> None:
    fleet = running()
    fleet.handle(*(m.Durable("0", 1, 0, step) for step in (8, 4, 8, m.NO_STEP)), m.Durable("0", 1, 1, 12))
    assert (fleet.state.durable, fleet.state.stale) == ([4, 8], 0)


def test_only_the_newest_checkpoints_are_listed() -> None:
    fleet = running()
    fleet.handle(m.DiskHolds(tuple(range(-1, DURABLE_KEPT + 3))))
    assert fleet.state.durable == list(range(3, DURABLE_KEPT + 3))
    fleet.handle(m.Durable("0", 1, 0, DURABLE_KEPT + 3))
    assert fleet.state.durable == list(range(4, DURABLE_KEPT + 4))


def test_what_the_disk_holds_is_believed_but_for_new_checkpoints_of_an_epoch_that_computed_wrongly() -> None:
    fleet = running()
    fleet.handle(m.DiskHolds((4, 8)), m.Suspect("1", "corruption", trusted_step=6))
    fleet.handle(m.DiskHolds((2, 4, 8, 12)))
    assert (fleet.state.durable, fleet.state.condemned) == ([2, 4], [8, 12])
    fleet.park()
    fleet.bind()
    fleet.handle(m.DiskHolds((4, 12, 16)))
    assert (fleet.state.durable, fleet.state.condemned) == ([4, 16], [12]), "16 comes from the epoch after"


def test_a_checkpoint_that_an_epoch_saved_after_it_computed_wrongly_does_not_count() -> None:
    fleet = running()
    fleet.handle(
        m.Suspect("1", "corruption", trusted_step=6), m.Durable("0", 1, 0, 8), m.Durable("0", 1, 0, 6)
    )
    assert fleet.state.durable == [6]


def test_a_corruption_that_is_reported_again_after_its_epoch_rolls_back_only_if_it_goes_further_back() -> (
    None
):
    suspicion = m.Suspect("1", "corruption", trusted_step=6, epoch=0)
    fleet = in_epoch_1(suspicion)
    fleet.handle(suspicion)
    assert (fleet.state.phase, fleet.state.distrust) == (FleetPhase.RUNNING, (Distrust(0, 6),))
    fleet.handle(m.Suspect("1", "corruption", trusted_step=5, epoch=0))
    assert fleet.state.reason == "node 1 computed wrongly; back to step 5"
    assert fleet.state.distrust == (Distrust(1, 5),)


def test_a_corruption_of_a_new_epoch_rolls_back_although_an_earlier_one_went_as_far() -> None:
    fleet = in_epoch_1(m.Suspect("1", "corruption", trusted_step=6, epoch=0))
    fleet.handle(m.Suspect("2", "corruption", trusted_step=6, epoch=1))
    assert (fleet.state.phase, fleet.state.distrust) == (
        FleetPhase.PARKING,
        (Distrust(1, 6),),
    )


def test_the_nodes_of_ranks_that_computed_wrongly_are_each_named_once() -> None:
    fleet = running(2, 0, formation=Formation(2, (2, 4)))
    for name in "01":
        points = (f"{name}:1", f"{name}:2")
        fleet.handle(m.Joined(name, 1, 2, name, 7, meeting_points=points))
    fleet.bind()
    fleet.handle(m.Suspect("0", "health", "memory", epoch=0, ranks=(2, 3, 4, 9)))
    assert [fleet.state.nodes[name].eligibility for name in fleet.state.seats] == [
        Eligibility.GOOD,
        Eligibility.QUARANTINED,
    ]
    assert [incident.text for incident in fleet.state.incidents][:1] == ["health: memory"]
    assert fleet.state.stale == 0
    fleet.handle(m.Suspect("0", "health", "memory", epoch=3, ranks=(0,)))
    assert fleet.state.stale == 1
    fleet.handle(m.Suspect("1", "health", "again"))
    assert (fleet.state.stale, fleet.state.nodes["1"].reason) == (2, "health: memory")


def test_a_slow_member_without_a_spare_is_noted_and_a_slow_spare_is_quarantined() -> None:
    fleet = running(spares=0)
    fleet.handle(m.Suspect("1", "straggler", "z" * 300))
    assert fleet.state.incidents[-1].text == "slow, and no spare to take its place: " + "z" * 200
    assert fleet.state.nodes["1"].eligibility is Eligibility.GOOD
    fleet.handle(m.Joined("8", 1, 1, "8", 7, meeting_points=("",)), m.Suspect("8", "straggler", "z" * 300))
    assert fleet.state.nodes["8"].eligibility is Eligibility.QUARANTINED
    assert fleet.state.nodes["8"].reason == fleet.state.incidents[-1].text == "straggler: " + "z" * 200


# --- operators ----------------------------------------------------------------------------------------


def test_a_node_is_drained_once_and_admitted_with_a_clean_record() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9), m.Drain("4"), m.Drain("4"))
    assert (fleet.state.stale, fleet.state.nodes["4"].reason) == (1, "drained by the operator")
    fleet.handle(m.Admit("4"))
    node = fleet.state.nodes["4"]
    assert (node.eligibility, node.reason, node.strikes) == (Eligibility.GOOD, "", ())
    assert [incident.text for incident in fleet.state.incidents[-2:]] == [
        "drained by the operator",
        "admitted by the operator",
    ]


def test_the_failures_of_a_node_that_is_not_yet_quarantined_can_be_forgotten() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("4", 1, m.NO_EPOCH, 0, -9), m.Admit("4"))
    assert (fleet.state.stale, fleet.state.nodes["4"].strikes) == (0, ())


def test_a_second_stop_ends_the_run_at_once() -> None:
    fleet = running()
    fleet.handle(m.StopRun(), m.StopRun())
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FINISHED, "stopped at once")


def test_a_stop_while_members_bind_is_sent_when_they_have_bound() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1")
    assert fleet.handle(m.StopRun()) == []
    assert fleet.handle(m.Bound("0", 1, 0), m.Heartbeat("0", 1, 0, -1, m.WorkerPhase.BOUND)) == []
    fleet.bind()
    assert fleet.sent == [("0", c.Stop(0)), ("1", c.Stop(0))]


@pytest.mark.parametrize("event", [m.RunFinished(0, "{}"), m.Fatal(0, "0", "loss is nan", unanimous=True)])
def test_the_end_of_the_run_is_believed_while_members_leave_and_not_while_they_wait(
    event: m.CoreEvent,
) -> None:
    fleet = running()
    fleet.handle(m.Broken("0", 1, 0, 0), event)
    assert fleet.state.phase in (FleetPhase.FINISHED, FleetPhase.FAILED)
    fleet = running(nodes=2, spares=0, min_nodes=2)
    fleet.handle(m.Disconnected("1", 1), m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.handle(event)
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.WAITING, 1)


# --- hangs, and the coordinator's own absence ---------------------------------------------------------


def hanging(**changes: Any) -> Fleet:
    """A fleet of which no step has ended for so long that its members got a request for their flight records."""
    fleet = running(stall_s=20.0, lease_s=1e6, **changes)
    fleet.handle(m.Tick(), after_s=21.0)
    return fleet


def test_half_of_the_ranks_may_be_found_hanging_and_ranks_that_do_not_exist_are_not_counted() -> None:
    fleet = hanging()
    fleet.handle(m.Diagnosed(0, "w" * 300, (0, 1, 4, 5)))
    culprits = fleet.state.seats[:2]
    killed = [name for name, command in fleet.sent if isinstance(command, c.KillWorker)]
    assert killed == culprits
    assert all(fleet.state.nodes[name].reason == "hangs: " + "w" * 200 for name in culprits)
    assert all(not fleet.state.nodes[name].warm for name in culprits)


def test_the_diagnosis_of_another_epoch_is_late() -> None:
    fleet = hanging()
    assert fleet.handle(m.Diagnosed(3, "of another", (2,))) == []
    assert (fleet.state.stale, fleet.state.incidents) == (1, [])


def test_a_coordinator_that_was_away_counts_every_time_anew() -> None:
    fleet = running(lease_s=15.0, confirm_s=2.0)
    fleet.handle(m.Disconnected("1", 1), m.Rollcall("heartbeat", 0, absent=("2",)))
    fleet.handle(m.Restarted(), after_s=100.0)
    state = fleet.state
    assert (state.rolled_s, state.since_s, state.step_s, state.next_lease_s) == (100.0, 100.0, 100.0, 115.0)
    assert (state.silent, state.suspects) == (set(), {})


def test_a_node_that_left_its_seat_has_none() -> None:
    fleet = running()
    fleet.handle(m.Drain("1"))
    fleet.park()
    assert (fleet.state.nodes["1"].seat, fleet.state.nodes["4"].seat) == (NO_SEAT, 2)


def test_a_fenced_node_whose_clock_has_stepped_back_gets_the_incarnation_to_exceed() -> None:
    fleet = Fleet(settings(2))
    fleet.join("0", "1", incarnation=1000)
    fleet.bind()
    fleet.handle(m.Disconnected("1", 1000), m.Broken("0", 1000, 0, 0))
    assert not fleet.state.nodes["1"].alive
    for late in (m.Joined("1", 7, 1, "1", 7), m.Heartbeat("1", 7, -1, -1, m.WorkerPhase.COLD)):
        fleet.handle(late)
        (fence,) = fleet.commands_to("1")
        assert isinstance(fence, c.Fence)
        assert fence.incarnation == 1000
    fleet.handle(m.Joined("1", 1001, 1, "1", 7, meeting_points=("1:1",)))
    assert fleet.state.nodes["1"].alive
