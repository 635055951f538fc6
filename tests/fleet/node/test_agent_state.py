"""The decisions of an agent: epochs are never entered again, what it reports is true, and nobody is given up or kept too long."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.node import worker_link as wl
from phalanx.fleet.node.agent_actions import (
    AgentAction,
    CheckHealth,
    DiscardSnapshots,
    EndAgent,
    KillProcess,
    NodeIdentity,
    Patience,
    SaveMemory,
    SendReport,
    SendToWorker,
    StartProcess,
    StreamSnapshot,
)
from phalanx.fleet.node.agent_state import AgentState

LEASE_S, LEAVE_S = 1.0, 5.0
HOLDING = m.RankSnapshot(2, 0, 7, "own", 64)


def agent(workers: int = 1, *, checked: bool = False) -> AgentState:
    """An agent with all workers started."""
    state = AgentState(
        NodeIdentity("node-0", workers, "127.0.0.1", 4000),
        5,
        Patience(LEASE_S, LEAVE_S, 60.0, 10.0),
        lambda: (HOLDING,),
        checked=checked,
    )
    for index in range(workers):
        state.on_started(index, 0.0)
    return state


def warm(workers: int = 1) -> AgentState:
    state = agent(workers)
    for index in range(workers):
        state.on_worker_message(index, wl.Warm(100 + index, f"h:{index}"), 0.0, 0.0)
    return state


def bind(epoch: int, *ranks: int, **more: object) -> c.Bind:
    fields: dict[str, object] = {"resume": c.Fresh(), **more}
    return c.Bind(epoch, epoch, 8, tuple(enumerate(ranks)), "h:0", **fields)  # type: ignore[arg-type]


def in_epoch(epoch: int, *ranks: int, **more: object) -> AgentState:
    state = warm(len(ranks))
    state.on_command(bind(epoch, *ranks, **more), 0.0, 0.0)
    for index in range(len(ranks)):
        state.on_worker_message(index, wl.JoinedEpoch(epoch, 0), 0.0, 0.0)
    return state


def reports(actions: list[AgentAction]) -> list[m.AgentMessage]:
    return [action.report for action in actions if isinstance(action, SendReport)]


def orders(actions: list[AgentAction]) -> list[tuple[int, wl.ToWorker]]:
    return [(action.worker, action.message) for action in actions if isinstance(action, SendToWorker)]


def test_ready_is_sent_when_the_last_worker_is_warm() -> None:
    state = agent(2)
    assert state.phase() == "cold"
    assert reports(state.on_worker_message(1, wl.Warm(2, "h:1"), 0.0, 0.0)) == []
    assert reports(state.on_worker_message(0, wl.Warm(1, "h:0"), 0.0, 0.0)) == [
        m.Ready("node-0", 5, ("h:0", "h:1"))
    ]
    assert state.phase() == "warm"


def test_bound_is_sent_when_the_last_worker_that_holds_a_rank_is_bound() -> None:
    state = warm(3)
    binds = orders(state.on_command(bind(4, 6, 7), 0.0, 0.0))
    assert [
        (index, order.rank, order.epoch) for index, order in binds if isinstance(order, wl.JoinEpoch)
    ] == [
        (0, 6, 4),
        (1, 7, 4),
    ]
    assert reports(state.on_worker_message(0, wl.JoinedEpoch(4, 0), 0.0, 0.0)) == []
    assert state.phase() == "binding"
    assert reports(state.on_worker_message(1, wl.JoinedEpoch(4, 0), 0.0, 0.0)) == [m.Bound("node-0", 5, 4)]
    assert state.heartbeat().epoch == 4


def test_where_the_state_is_and_what_belongs_to_no_future_is_passed_on() -> None:
    holders = (m.Holder((6, 7), "node-2", "10.0.0.2", 4002), m.Holder((6,), "node-3", "10.0.0.3", 4002))
    actions = warm().on_command(bind(4, 6, resume=c.FromMemory(7, 8, holders)), 0.0, 0.0)
    assert actions[0] == DiscardSnapshots(7)
    ((_, order),) = orders(actions)
    assert isinstance(order, wl.JoinEpoch)
    assert order.resume == c.FromMemory(7, 8, holders)


def test_parked_is_sent_when_the_last_worker_is_out_and_again_at_every_request() -> None:
    state = in_epoch(4, 0, 1)
    parks = orders(state.on_command(c.Park(4, "a node died"), 1.0, 100.0))
    assert [index for index, _ in parks] == [0, 1]
    assert reports(state.on_worker_message(0, wl.LeftEpoch(4, "h:8"), 1.0, 100.0)) == []
    answer = m.Parked("node-0", 5, 4, ("h:8", "h:9"), (HOLDING,))
    assert reports(state.on_worker_message(1, wl.LeftEpoch(4, "h:9"), 1.0, 100.0)) == [answer]
    assert reports(state.on_command(c.Park(4, "a node died"), 2.0, 101.0)) == [answer]


def test_an_epoch_that_was_parked_is_not_entered_even_if_the_bind_comes_late() -> None:
    state = warm()
    state.on_command(c.Park(4), 0.0, 0.0)
    assert state.on_command(bind(4, 0), 0.0, 0.0) == []
    assert orders(state.on_command(bind(5, 0), 0.0, 0.0))


def test_a_worker_that_dies_leaves_its_epoch_is_reported_and_replaced() -> None:
    state = in_epoch(4, 0, 1)
    actions = state.on_exit(1, -9, "last line", 100.0)
    assert reports(actions) == [m.WorkerExited("node-0", 5, 4, 1, -9, "last line")]
    assert StartProcess(1) in actions
    assert state.phase() == "cold"
    state.on_command(c.Park(4), 0.0, 100.0)
    (parked,) = reports(state.on_worker_message(0, wl.LeftEpoch(4, "h:8"), 0.0, 100.0))
    assert isinstance(parked, m.Parked)
    assert parked.meeting_points == ("h:8", "")


def test_a_silent_worker_is_killed_and_reported_once() -> None:
    state = in_epoch(4, 0)
    state.on_tick(0.0, 0.0)
    for now_s in (0.4, 0.8):
        assert state.on_tick(now_s, 0.0) == []
    actions = state.on_tick(LEASE_S + 0.1, 0.0)
    assert KillProcess(0) in actions
    assert reports(actions) == [m.WorkerHung("node-0", 5, 4, 0, LEASE_S + 0.1)]
    assert state.on_tick(LEASE_S + 0.2, 0.0) == []
    assert reports(state.on_exit(0, -9, "", 0.0)) == []


def test_who_stood_still_itself_blames_no_worker() -> None:
    state = in_epoch(4, 0)
    state.on_tick(0.0, 0.0)
    assert state.on_tick(60.0, 0.0) == []
    assert state.on_tick(60.3, 0.0) == []


def test_a_node_that_was_not_in_the_last_epoch_gets_the_time_of_its_end() -> None:
    ((_, order),) = orders(warm().on_command(bind(4, 0, left_s_ago=3.0, left_planned=True), 0.0, 100.0))
    assert isinstance(order, wl.JoinEpoch)
    assert (order.detected_unix_s, order.planned) == (97.0, True)


def test_where_epochs_failed_one_after_another_the_end_of_the_last_that_trained_counts() -> None:
    state = in_epoch(4, 0)
    state.on_command(c.Park(4), 0.0, 100.0)
    state.on_worker_message(0, wl.LeftEpoch(4, "h:8"), 0.0, 100.0)
    ((_, order),) = orders(state.on_command(bind(5, 0, left_s_ago=30.0), 0.0, 100.0))
    assert isinstance(order, wl.JoinEpoch)
    assert (order.detected_unix_s, order.planned) == (70.0, False)


def test_a_heartbeat_has_the_longest_waiting_for_samples_and_none_of_an_epoch_that_is_over() -> None:
    state = in_epoch(4, 0, 1)
    for index, waiting_s in ((0, 7.0), (1, 0.0)):
        state.on_worker_message(index, wl.Alive(4, 3, "step", 0.0, waiting_s), 1.0, 0.0)
    assert state.heartbeat().waiting_s == 7.0
    state.on_worker_message(0, wl.Alive(4, 3, "step", 0.0), 2.0, 0.0)
    assert state.heartbeat().waiting_s == 0.0
    state.on_worker_message(0, wl.Alive(4, 3, "step", 0.0, 9.0), 3.0, 0.0)
    state.on_command(c.Park(4), 3.0, 0.0)
    for index in (0, 1):
        state.on_worker_message(index, wl.LeftEpoch(4, "1:1"), 3.0, 0.0)
    state.on_command(bind(5, 0, 1), 4.0, 0.0)
    assert state.heartbeat().waiting_s == 0.0


def test_a_worker_that_does_not_leave_is_killed_but_is_given_its_time_for_a_planned_end() -> None:
    for planned in (False, True):
        state = in_epoch(4, 0)
        state.on_command(c.Park(4, planned=planned), 0.0, 0.0)
        killed = []
        for tenth in range(100):
            now_s = tenth / 10
            state.on_worker_message(0, wl.Alive(4, 3, "step", 0.0), now_s, 0.0)
            killed += [action for action in state.on_tick(now_s, 0.0) if isinstance(action, KillProcess)]
        assert bool(killed) is not planned


def test_a_worker_that_has_not_begun_to_train_is_given_little_time_to_leave() -> None:
    state = warm()
    state.on_command(bind(4, 0), 0.0, 0.0)
    state.on_command(c.Park(4), 0.0, 0.0)
    killed = []
    for tenth in range(20):
        state.on_worker_message(0, wl.Alive(4, -1, "meeting", 0.0), tenth / 10, 0.0)
        killed += [action for action in state.on_tick(tenth / 10, 0.0) if isinstance(action, KillProcess)]
    assert killed == [KillProcess(0)]
    (exit_report,) = [
        report for report in reports(state.on_exit(0, -9, "", 0.0)) if isinstance(report, m.WorkerExited)
    ]
    assert exit_report.innocent


def test_a_planned_end_that_turns_into_a_fault_is_hurried() -> None:
    state = in_epoch(4, 0)
    state.on_command(c.Park(4, planned=True), 0.0, 0.0)
    ((_, park),) = orders(state.on_command(c.Park(4, "now"), 0.0, 0.0))
    assert isinstance(park, wl.LeaveEpoch)
    assert not park.planned


def test_an_expelled_agent_kills_its_workers_and_comes_back_as_another() -> None:
    state = in_epoch(4, 0, 1)
    actions = state.on_command(c.Fence("too late", 5), 0.0, 100.0)
    assert {action for action in actions if isinstance(action, KillProcess)} == {
        KillProcess(0),
        KillProcess(1),
    }
    (joined,) = reports(actions)
    assert isinstance(joined, m.Joined)
    assert joined.incarnation > 5
    assert (joined.epoch, joined.snapshots, joined.meeting_points) == (m.NO_EPOCH, (HOLDING,), ("", ""))
    assert state.on_worker_message(0, wl.TrainingFinished(4, "{}"), 0.0, 0.0) == []  # it was fenced
    assert (
        state.on_command(c.Fence("too late", 5), 0.0, 100.0) == []
    )  # the order was for its earlier incarnation
    assert reports(state.on_exit(0, -9, "", 0.0)) == []


def test_only_the_node_of_rank_0_reports_the_end_of_the_run_once_all_its_workers_have_finished() -> None:
    other = in_epoch(4, 2)
    assert reports(other.on_worker_message(0, wl.TrainingFinished(4, "{}"), 0.0, 0.0)) == []
    first = in_epoch(4, 0, 1)
    assert reports(first.on_worker_message(0, wl.TrainingFinished(4, '{"step": 9}'), 0.0, 0.0)) == []
    assert reports(first.on_worker_message(1, wl.TrainingFinished(4, ""), 0.0, 0.0)) == [
        m.RunFinished(4, '{"step": 9}')
    ]
    assert first.on_exit(0, 0, "", 0.0) == []  # it need not live on


def test_a_snapshot_is_safe_at_once_where_replicas_hold_the_state_and_else_when_the_buddy_has_it() -> None:
    taken = wl.SnapshotTaken(4, 8, 0, 7)
    alone = in_epoch(4, 0)
    assert orders(alone.on_worker_message(0, taken, 0.0, 0.0)) == [(0, wl.SnapshotSafe(4, 7))]
    state = in_epoch(4, 0, buddies=(m.Holder((0,), "node-1", "10.0.0.1", 4001),))
    assert state.on_worker_message(0, taken, 0.0, 0.0) == [StreamSnapshot(0, taken, "10.0.0.1:4001")]
    assert orders(state.on_pushed(0, taken)) == [(0, wl.SnapshotSafe(4, 7))]


def test_reports_that_the_coordinator_may_have_missed_are_sent_again_on_the_next_connection() -> None:
    state = in_epoch(4, 0)
    (broken,) = reports(state.on_worker_message(0, wl.EpochBroken(4, "a peer has gone"), 0.0, 50.0))
    assert state.greet() == [state.joined(), broken]
    state.on_command(c.Park(4), 0.0, 60.0)
    state.on_worker_message(0, wl.LeftEpoch(4, "h:8"), 0.0, 60.0)
    assert state.greet() == [state.joined()]
    ((_, order),) = orders(state.on_command(bind(5, 0), 0.0, 70.0))
    assert isinstance(order, wl.JoinEpoch)
    assert order.detected_unix_s == 50.0  # when this node first noticed it, not when the order came


def test_a_worker_that_cannot_start_is_no_end_of_the_run() -> None:
    state = agent()
    assert state.on_worker_message(0, wl.RunFailed(-1, "no data at data.path"), 0.0, 0.0) == []
    (exited,) = reports(state.on_exit(0, 1, "traceback", 0.0))
    assert isinstance(exited, m.WorkerExited)
    assert exited.text == "no data at data.path"
    assert reports(
        in_epoch(4, 0).on_worker_message(0, wl.RunFailed(4, "loss is nan", "NonFiniteError", True), 0.0, 0.0)
    ) == [m.Fatal(4, "node-0", "loss is nan", "NonFiniteError", True)]


def test_shutdown_ends_the_agent() -> None:
    assert in_epoch(4, 0).on_command(c.Shutdown("all steps are done"), 0.0, 0.0) == [
        EndAgent("all steps are done")
    ]


def test_a_node_is_offered_when_its_workers_are_warm_and_its_checks_passed_whichever_is_last() -> None:
    for checks_last in (True, False):
        state = agent(checked=True)
        assert state.examine() == [CheckHealth()]
        warmed = partial(state.on_worker_message, 0, wl.Warm(1, "h:0"), 0.0, 0.0)
        acts = [warmed, partial(state.on_health_checked, "")]
        first, last = acts if checks_last else reversed(acts)
        assert reports(first()) == []
        assert state.phase() == "cold"
        assert state.joined().meeting_points == ("",)
        assert reports(last()) == [m.Ready("node-0", 5, ("h:0",))]


def test_a_node_that_fails_its_checks_reports_the_reason_and_is_offered_once_it_passes() -> None:
    state = agent(checked=True)
    state.on_worker_message(0, wl.Warm(1, "h:0"), 0.0, 0.0)
    assert reports(state.on_health_checked("disk: torn")) == [m.Suspect("node-0", "health", "disk: torn")]
    assert state.phase() == "cold"
    assert reports(state.on_health_checked("")) == [m.Ready("node-0", 5, ("h:0",))]


def test_a_node_is_checked_again_when_a_worker_died_or_hung_and_not_when_it_was_ordered_to_end() -> None:
    state = agent(checked=True)
    state.on_health_checked("")
    state.on_worker_message(0, wl.Warm(1, "h:0"), 0.0, 0.0)
    assert CheckHealth() in state.on_exit(0, -9, "", 0.0)
    state.on_started(0, 0.0)
    state.on_health_checked("")
    state.on_worker_message(0, wl.Warm(1, "h:0"), 0.0, 0.0)
    assert CheckHealth() not in state.on_command(c.Fence("late", 5), 0.0, 0.0)
    assert CheckHealth() not in state.on_exit(0, -9, "", 0.0)
    state.on_started(0, 0.0)
    state.on_worker_message(0, wl.Warm(1, "h:0"), 0.0, 0.0)
    times = [0.1 * tick for tick in range(30)]
    assert sum(CheckHealth() in state.on_tick(now_s, now_s) for now_s in times) == 1, "its worker is silent"
    assert state.phase() == "cold"


def test_a_worker_that_finds_itself_unfit_accuses_its_node_and_its_end_is_no_failure() -> None:
    state = agent()
    assert reports(state.on_worker_message(0, wl.Unfit("memory: 3 words"), 0.0, 0.0)) == [
        m.Suspect("node-0", "health", "worker 0: memory: 3 words")
    ]
    assert state.on_exit(0, 0, "", 0.0) == [StartProcess(0)]


def test_each_worker_in_the_epoch_gets_a_request_for_its_flight_record_and_answers_once() -> None:
    state = in_epoch(4, 6, 7)
    assert orders(state.on_command(c.Diagnose(4, 9.0), 0.0, 0.0)) == [
        (0, wl.SendFlightRecord(4)),
        (1, wl.SendFlightRecord(4)),
    ]
    answer = wl.FlightRecordSent(4, "x" * 2 * m.MOST_RECORD_BYTES)
    (report,) = reports(state.on_worker_message(1, answer, 0.0, 0.0))
    assert isinstance(report, m.Recorded)
    assert m.decode_report(m.encode(report)) == report, "a record of any size fits into a report"
    assert state.on_worker_message(1, answer, 0.0, 0.0) == [], "a flood ends at the agent"
    assert state.on_worker_message(0, wl.FlightRecordSent(3, "{}"), 0.0, 0.0) == []
    assert orders(state.on_command(c.Diagnose(3, 9.0), 0.0, 0.0)) == []


EPOCHS = st.integers(-1, 6)
WORDS = st.one_of(
    st.builds(wl.Warm, st.just(1), st.just("h:1")),
    st.builds(wl.Alive, EPOCHS, st.integers(-1, 9), st.just("step"), st.just(0.0)),
    st.builds(wl.JoinedEpoch, EPOCHS, st.just(0)),
    st.builds(wl.EpochBroken, EPOCHS, st.just("gone")),
    st.builds(wl.FlightRecordSent, EPOCHS, st.just("{}")),
    st.builds(wl.LeftEpoch, EPOCHS, st.just("h:2")),
    st.builds(wl.SnapshotTaken, EPOCHS, st.just(8), st.integers(0, 7), st.integers(0, 9)),
    st.builds(wl.TrainingFinished, EPOCHS, st.sampled_from(["", "{}"])),
    st.builds(wl.RunFailed, EPOCHS, st.just("nan")),
)
COMMANDS = st.one_of(
    st.builds(c.Park, EPOCHS, planned=st.booleans()),
    st.builds(lambda epoch, first: bind(epoch, first, first + 1), st.integers(0, 6), st.integers(0, 6)),
    st.builds(c.Release, EPOCHS),
    st.builds(c.KillWorker, st.integers(0, 5)),
    st.builds(c.Diagnose, EPOCHS, st.just(1.0)),
    st.just(c.TellAll()),
    st.builds(c.Fence, st.just("late"), st.sampled_from([4, 5])),
    st.builds(c.Stop, EPOCHS),
)
EXITED = st.tuples(st.integers(0, 1), st.sampled_from([-9, 0, 1]))
HAPPENINGS = st.lists(
    st.one_of(COMMANDS, st.tuples(st.integers(0, 1), WORDS), EXITED, st.floats(0.0, 3.0)), max_size=60
)


@given(HAPPENINGS)
@settings(max_examples=300, deadline=None)
def test_for_any_events_in_any_order_the_reports_are_true(
    happenings: list[c.Command | tuple[int, wl.ToAgent] | tuple[int, int] | float],
) -> None:
    state, now_s, fence = warm(2), 0.0, -1
    running = {0, 1}
    inside: dict[int, int] = {}
    for happening in happenings:
        match happening:
            case float():
                now_s += happening
                actions = state.on_tick(now_s, now_s)
            case (int(index), int(code)):
                if index not in running:
                    continue
                running.discard(index)
                inside.pop(index, None)
                actions = state.on_exit(index, code, "", now_s)
            case (int(index), word):
                if index not in running:
                    continue
                if isinstance(word, wl.LeftEpoch) and inside.get(index, 99) <= word.epoch:
                    del inside[index]
                actions = state.on_worker_message(index, word, now_s, now_s)
            case command:
                if isinstance(command, c.Park):
                    fence = max(fence, command.epoch)
                if isinstance(command, c.Fence) and command.incarnation >= state.incarnation:
                    inside.clear()
                actions = state.on_command(command, now_s, now_s)
        for action in actions:
            match action:
                case SendToWorker(index, wl.JoinEpoch() as order):
                    assert order.epoch > fence, "an epoch was entered again"
                    assert index not in inside, "a worker was bound twice"
                    inside[index] = order.epoch
                case SendReport(m.Parked()):
                    assert not inside, "it reports that its workers are out, but one is not"
                case StartProcess(index):
                    assert index not in running, "a worker was started over a living one"
                    running.add(index)
                    state.on_started(index, now_s)
                case _:
                    pass
        assert state.joined().incarnation == state.incarnation >= 5


@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans()), max_size=80))
def test_an_agent_ends_once_no_coordinator_was_there_for_a_minute_of_its_own_waking_time(
    ticks: list[tuple[float, bool]],
) -> None:
    state, now_s, alone_s = in_epoch(4, 0), 0.0, 0.0
    state.on_tick(now_s, 0.0, attached=True)
    for wait_s, attached in ticks:
        now_s += wait_s
        stood_still = wait_s > LEASE_S / 2
        alone_s = 0.0 if attached else alone_s + (0.0 if stood_still else wait_s)
        state.on_worker_message(0, wl.Alive(4, 7, "forward", 0.0), now_s, 0.0)
        ends = [
            action for action in state.on_tick(now_s, 0.0, attached=attached) if isinstance(action, EndAgent)
        ]
        assert bool(ends) == (alone_s > 60.0 and not stood_still)
        assert all(end.failed and "fleet.coordinator_lease_s" in end.reason for end in ends)
        if ends:
            break


def test_an_agent_that_never_found_a_coordinator_ends_too() -> None:
    state, now_s = warm(), 0.0
    while not any(isinstance(action, EndAgent) for action in state.on_tick(now_s, 0.0, attached=False)):
        now_s += 0.4
        state.on_worker_message(0, wl.Alive(-1, -1, "warm", 0.0), now_s, 0.0)
    assert 60.0 < now_s < 61.0


@given(st.lists(st.booleans(), min_size=60, max_size=120))
def test_saves_are_held_while_no_coordinator_has_led_for_a_lease(led: list[bool]) -> None:
    state, alone_s, on_hold = in_epoch(4, 0), 0.0, False
    state.on_tick(0.0, 0.0)
    for index, leads in enumerate(led, 1):
        alone_s = 0.0 if leads else alone_s + 0.25
        state.on_worker_message(0, wl.Alive(4, 7, "forward", 0.0), 0.25 * index, 0.0)
        sent = orders(state.on_tick(0.25 * index, 0.0, led=leads))
        due = alone_s > 10.0
        assert sent == ([(0, wl.HoldSaves(due))] if due != on_hold else []), "once for each change"
        on_hold = due


@given(st.lists(st.booleans(), min_size=60, max_size=60))
def test_a_silent_worker_is_killed_after_a_lease_if_it_does_not_work_and_after_ten_if_it_seems_to(
    works: list[bool],
) -> None:
    state, silent_s = in_epoch(4, 0), 0.0
    state.on_tick(0.0, 0.0)
    for working in works:
        silent_s += 0.25
        assert (state.silent(silent_s) == [0]) == (silent_s > LEASE_S / 2)
        actions = state.on_tick(silent_s, 0.0, working={0} if working else ())
        killed = KillProcess(0) in actions
        assert killed == (silent_s > (10 if working else 1) * LEASE_S)
        if killed:
            break


def test_an_agent_saves_its_memory_once_for_each_order_and_never_beside_its_workers() -> None:
    def order(epoch: int) -> c.SaveSnapshots:
        return c.SaveSnapshots(epoch, epoch, 7, 2, 2, ((0, 0),))

    state = warm()
    assert state.on_command(order(3), 0.0, 0.0) == [SaveMemory(order(3))]
    assert state.on_command(order(3), 0.0, 0.0) == []
    assert state.on_command(order(2), 0.0, 0.0) == []
    assert state.on_command(bind(3, 0), 0.0, 0.0) == [], "no worker enters what is being saved"
    assert state.on_command(order(4), 0.0, 0.0) == [SaveMemory(order(4))]
    assert in_epoch(5, 0).on_command(order(6), 0.0, 0.0) == []
    assert state.on_saved(order(4), committed=False) == []
    assert state.on_saved(order(4), committed=True) == [SendReport(m.Durable("node-0", 5, 4, 7))]
    refused = m.NotSaved("node-0", 5, 4, "no room")
    assert state.on_saved(order(4), committed=False, trouble="no room") == [SendReport(refused)]
