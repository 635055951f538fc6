"""The core: how a run ends, and when it is given up."""

from __future__ import annotations

from fleet.small_fleets import running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.epochs import next_deadline_s
from phalanx.fleet.core.state import FleetPhase


def test_a_run_that_ends_before_all_are_heard_to_have_begun_has_ended() -> None:
    fleet = running(2, 0)
    fleet.hear(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.hear(m.Bound("0", 1, 1), m.RunFinished(1, "{}"))
    assert (fleet.state.phase, fleet.state.result_json) == (FleetPhase.FINISHED, "{}")


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
    assert fleet.told("0") == [c.Stop(0)]
    fleet.hear(m.RunFinished(0, '{"step": 9}'))
    assert fleet.state.phase is FleetPhase.FINISHED
    assert fleet.told("4") == [c.Shutdown("stopped")]


def test_what_the_run_itself_cannot_survive_ends_it_and_only_in_its_own_epoch() -> None:
    fleet = running()
    fleet.hear(m.Fatal(3, "0", "of another epoch"))
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.RUNNING, 1)
    fleet.hear(m.RunFinished(3, "{}"))
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.RUNNING, 2)
    fleet.hear(m.Fatal(0, "0", "loss is nan", unanimous=True))
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FAILED, "node 0: loss is nan")
    fleet.hear(m.RunFinished(0, "{}"))
    assert fleet.state.phase is FleetPhase.FAILED


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
