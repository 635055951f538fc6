"""The core: how a run ends, and when it is given up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.epochs.faults import next_deadline_s
from phalanx.fleet.core.invariants import check, mark, resync
from phalanx.fleet.core.settings import Formation
from phalanx.fleet.core.state import FleetPhase
from phalanx.run.identity import FencingToken


def test_a_run_that_ends_before_all_have_reported_their_begin_has_ended() -> None:
    fleet = running(2, 0)
    fleet.handle(m.Broken("0", 1, 0, 0))
    fleet.park()
    fleet.handle(m.Bound("0", 1, 1), m.RunFinished(1, "{}"))
    assert (fleet.state.phase, fleet.state.result_json) == (FleetPhase.FINISHED, "{}")


def test_a_run_that_fails_at_the_same_step_for_ever_is_given_up() -> None:
    fleet = running(nodes=2, spares=0, max_tries=3)
    for _ in range(5):
        fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0, "illegal instruction"))
        fleet.park(step=5)
        fleet.bind()
    fleet.handle(m.DiskHolds((5,)))
    assert fleet.state.phase is FleetPhase.FAILED
    assert "illegal instruction" in fleet.state.reason


def test_faults_that_follow_each_other_without_a_step_are_given_more_and_more_time_to_pass() -> None:
    fleet = running(2, 0, max_tries=50)
    waited_s = []
    for _ in range(12):
        epoch, begin_s = fleet.state.epoch, fleet.now_s
        fleet.handle(m.Broken("0", 1, epoch, 0, "connection reset"))
        fleet.park()
        while fleet.state.epoch == epoch:
            due_s = next_deadline_s(fleet.state)
            fleet.handle(m.Tick(), after_s=max(due_s - fleet.now_s, 0.01))
        waited_s.append(fleet.now_s - begin_s)
        fleet.bind()
    assert waited_s[:4] == [0.0] * 4
    assert waited_s == sorted(waited_s)
    assert waited_s[-1] > 10 * waited_s[5] > 0


def test_a_stop_lets_the_run_save_and_end() -> None:
    fleet = running()
    fleet.handle(m.StopRun())
    assert fleet.commands_to("0") == [c.Stop(0)]
    fleet.handle(m.RunFinished(0, '{"step": 9}'))
    assert fleet.state.phase is FleetPhase.FINISHED
    assert fleet.commands_to("4") == [c.Shutdown("stopped")]


def test_what_the_run_itself_cannot_survive_ends_it_and_only_in_its_own_epoch() -> None:
    fleet = running()
    fleet.handle(m.Fatal(3, "0", "of another epoch"))
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.RUNNING, 1)
    fleet.handle(m.RunFinished(3, "{}"))
    assert (fleet.state.phase, fleet.state.stale) == (FleetPhase.RUNNING, 2)
    fleet.handle(m.Fatal(0, "0", "loss is nan", unanimous=True))
    assert (fleet.state.phase, fleet.state.reason) == (FleetPhase.FAILED, "node 0: loss is nan")
    fleet.handle(m.RunFinished(0, "{}"))
    assert fleet.state.phase is FleetPhase.FAILED


def test_only_steps_beyond_the_furthest_one_are_progress_unless_ground_was_lost() -> None:
    fleet = running(nodes=2, spares=0)

    def reach(step: int) -> int:
        for name in fleet.state.seats:
            fleet.handle(m.Heartbeat(name, 1, fleet.state.epoch, step, m.WorkerPhase.BOUND))
        return fleet.state.tries

    def fail(snapshot: int) -> None:
        fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0))
        fleet.park(step=snapshot)
        fleet.bind()

    reach(9)
    fail(snapshot=5)
    assert [reach(7), reach(9), reach(10)] == [1, 1, 0]
    fail(snapshot=9)
    fail(snapshot=6)  # behind step 9, which was restored before
    assert [fleet.state.tries, reach(7)] == [2, 0]


# --- steps that only memory holds -----------------------------------------------------------------


def all_barred(seed: int = 0, step: int = 7, **changes: Any) -> Fleet:
    """A fleet of four that waits: each node is drained or quarantined, one perhaps lost; memory holds ``step``."""
    chance = random.Random(seed)
    fleet = running(4, spares=0, **changes)
    beats = [m.Heartbeat(name, 1, 0, step, m.WorkerPhase.BOUND) for name in fleet.state.seats]
    fleet.handle(*beats)
    lost = chance.choice([None, *fleet.state.seats])
    for name in fleet.state.seats:
        barred: list[m.CoreEvent] = [m.Drain(name), m.Suspect(name, "health", "dust")]
        fleet.handle(chance.choice(barred))
    if lost is not None:
        fleet.handle(m.Broken("0", 1, 0, 0), m.Disconnected(lost, 1), m.Tick(), after_s=2.0)
    fleet.park(step=step)
    assert fleet.state.phase is FleetPhase.WAITING
    return fleet


def orders_to_save(fleet: Fleet) -> dict[str, c.SaveSnapshots]:
    return {name: command for name, command in fleet.sent if isinstance(command, c.SaveSnapshots)}


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 2]))
def test_a_fleet_that_is_stopped_while_it_waits_has_each_state_written_once_by_a_node_that_holds_it(
    seed: int, shard_ranks: int
) -> None:
    fleet = all_barred(seed, formation=Formation(1, (4,), shard_ranks=shard_ranks))
    fleet.handle(m.StopRun())
    orders, formation = orders_to_save(fleet), fleet.state.settings.formation
    assert fleet.state.phase is FleetPhase.SAVING
    assert sorted(state for order in orders.values() for _, state in order.share) == list(
        range(formation.keys(4))
    )
    for name, order in orders.items():
        assert (order.step, order.ranks, order.states) == (7, 4, formation.keys(4))
        ranks = {snapshot.rank for snapshot in fleet.state.nodes[name].snapshots if snapshot.step == 7}
        for rank, state in order.share:
            assert rank in ranks
            assert formation.key(4, rank) == state
    fleet.handle(m.Durable("0", 1, fleet.state.epoch, 7), m.DiskHolds((7,)))
    assert fleet.state.phase is FleetPhase.FINISHED
    assert fleet.state.reason.endswith("step 7 was saved from the memory of the nodes")


@effort(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(["refuses", "dies", "returns"]), max_size=8))
def test_as_long_as_memory_holds_every_state_it_is_saved_by_others_and_else_the_lost_steps_are_reported(
    seed: int, troubles: list[str]
) -> None:
    fleet, chance = all_barred(seed), random.Random(seed)
    fleet.handle(m.StopRun())
    for trouble in troubles:
        if fleet.state.phase is not FleetPhase.SAVING:
            break
        name = chance.choice(sorted(fleet.state.writing))
        if trouble == "refuses":
            fleet.handle(m.NotSaved(name, fleet.incarnation(name), fleet.state.epoch, "damaged"))
        elif trouble == "dies":
            fleet.handle(m.Disconnected(name, fleet.incarnation(name)), m.Tick())
            fleet.handle(m.Tick(), after_s=3.0)
        else:
            fleet.join(name, incarnation=fleet.incarnation(name) + 1)
        check(fleet.state)
    is_complete = {
        snapshot.rank for node in fleet.state.nodes.values() if node.alive for snapshot in node.snapshots
    } >= set(range(4))
    assert (fleet.state.phase is FleetPhase.SAVING) == is_complete
    if is_complete:
        fleet.handle(m.DiskHolds((7,)))
    else:
        assert "steps 1 to 7 are not on disk, and will be computed again" in fleet.state.reason
    assert fleet.state.phase is FleetPhase.FINISHED


def test_each_try_to_save_has_the_next_epoch_number_and_late_reports_of_an_earlier_try_are_stale() -> None:
    fleet = running(4, spares=0)
    fleet.handle(*(m.Drain(name) for name in fleet.state.seats))
    fleet.park(step=7)
    fleet.handle(m.StopRun())
    assert (fleet.state.phase, fleet.state.epoch) == (FleetPhase.SAVING, 1)
    fleet.handle(m.NotSaved("0", 1, 1, "no space left"))
    assert (fleet.state.phase, fleet.state.epoch) == (FleetPhase.SAVING, 2)
    fleet.handle(m.NotSaved("1", 1, 1, "no space left"))
    assert (fleet.state.epoch, fleet.state.stale) == (2, 1)
    assert fleet.state.nodes["1"].snapshots, "the node may be able to write its share of the second try"


def test_an_order_to_save_that_was_lost_is_repeated() -> None:
    fleet = all_barred()
    fleet.handle(m.StopRun())
    orders = orders_to_save(fleet)
    for name, order in orders.items():
        fleet.handle(m.Heartbeat(name, fleet.incarnation(name), m.NO_EPOCH, m.NO_STEP, m.WorkerPhase.WARM))
        assert orders_to_save(fleet) == {name: order}


def test_a_fleet_whose_nodes_do_not_save_in_time_ends_and_names_the_lost_steps() -> None:
    fleet = all_barred(lease_s=1e9)
    fleet.handle(m.Durable("0", 1, 0, 4), m.StopRun())
    fleet.handle(m.Tick(), after_s=601.0)
    assert fleet.state.phase is FleetPhase.FINISHED
    assert "did not save their memory within 600 s; steps 5 to 7 are not on disk" in fleet.state.reason


@pytest.mark.parametrize("durable", [True, False])
def test_a_run_that_is_given_up_is_saved_first_unless_the_disk_has_it_all(durable: bool) -> None:
    fleet = running(nodes=2, spares=0, max_tries=2)
    for _ in range(4):
        fleet.handle(m.Broken("0", 1, fleet.state.epoch, 0, "illegal instruction"))
        fleet.handle(*([m.Durable("0", 1, 0, 5)] if durable else []))
        fleet.park(step=5)
        fleet.bind()
    assert (fleet.state.phase is FleetPhase.FAILED) is durable
    fleet.handle(m.DiskHolds((5,)))
    assert fleet.state.phase is FleetPhase.FAILED


# --- a fleet that is stopped while it forms anew -----------------------------------------------------


def forming_anew(nodes: int = 4) -> Fleet:
    """The fleet of a run's second start, without a journal: agents of the first one hold ``step 7`` and are still dialing."""
    fleet = Fleet(settings(nodes, lease_s=1e9))
    fleet.state = initial_state(fleet.state.settings, 0.0, FencingToken(1, ""))
    return fleet


def dials(
    name: str, step: int | None = 7, ranks: int = 4, *, spare: bool = False, incarnation: int = 1
) -> m.Joined:
    """An agent attaches, with the snapshot of ``step`` of the rank that has its name, or with an empty memory."""
    snapshots = () if step is None else (m.RankSnapshot(ranks, int(name), step, "own", epoch=3),)
    return m.Joined(
        name,
        incarnation,
        1,
        name,
        7,
        ("rack0",),
        meeting_points=(f"{name}:1",),
        snapshots=snapshots,
        started_as_spare=spare,
    )


@given(
    st.permutations(["0", "1", "2", "3"]),
    st.lists(st.sampled_from(["4", "5", "6"]), unique=True),
    st.integers(0, 3),
    st.floats(0, 9.9),
)
def test_a_fleet_that_is_stopped_while_it_forms_anew_saves_what_agents_that_still_dial_hold(
    members: list[str], spares: list[str], before: int, over_s: float
) -> None:
    fleet = forming_anew()
    fleet.handle(*(dials(name, None, spare=True) for name in spares), *map(dials, members[:before]))
    fleet.handle(m.StopRun())
    for name in members[before:]:
        assert fleet.state.phase is FleetPhase.FORMING
        fleet.handle(m.Tick(), dials(name), after_s=over_s / 4)
        check(fleet.state)
    assert fleet.state.phase is FleetPhase.SAVING
    assert len({rank for order in orders_to_save(fleet).values() for rank, _ in order.share}) == 4
    fleet.handle(m.DiskHolds((7,)))
    assert fleet.state.phase is FleetPhase.FINISHED


@given(st.sets(st.sampled_from(["0", "1", "2", "3"]), max_size=3))
def test_agents_that_never_dial_are_waited_for_no_longer_than_nodes_of_a_new_run(dialing: set[str]) -> None:
    fleet = forming_anew()
    fleet.handle(m.StopRun(), *map(dials, sorted(dialing)))
    fleet.handle(m.Tick(), after_s=fleet.state.settings.form_s - 0.1)
    assert fleet.state.phase is FleetPhase.FORMING
    assert next_deadline_s(fleet.state) <= fleet.state.settings.form_s
    fleet.handle(m.Tick(), after_s=0.2)
    assert fleet.state.phase is FleetPhase.FINISHED


def test_a_stop_waits_for_nobody_where_nothing_was_computed_or_all_have_described_an_empty_memory() -> None:
    fleet = Fleet(settings(4))
    fleet.handle(m.StopRun())
    assert fleet.state.phase is FleetPhase.FINISHED
    fleet = forming_anew()
    fleet.handle(m.StopRun(), *(dials(name, None) for name in "0123"))
    assert fleet.state.phase is FleetPhase.FINISHED


def asked_anew(nodes_are_known: bool) -> Fleet:
    """A fleet whose journal was damaged, and that waits: its four nodes are fenced, or the lines that spoke of them are gone."""
    fleet = running(4, spares=0)
    if nodes_are_known:
        fleet.handle(*(m.Disconnected(name, 1) for name in fleet.state.seats))
        fleet.handle(m.Tick(), after_s=4.0 * fleet.state.settings.confirm_s)
    else:
        fleet.state.nodes = {}
    fleet.state, _ = resync(fleet.state, mark(fleet.state), "line 3")
    fleet.handle(m.Tick())
    assert fleet.state.phase is FleetPhase.WAITING
    return fleet


@given(st.booleans(), st.permutations(["0", "1", "2", "3"]), st.floats(0, 9.9), st.integers(0, 3))
def test_a_stop_after_a_damaged_journal_waits_for_agents_that_still_dial_although_no_node_is_known_to_live(
    nodes_are_known: bool, names: list[str], over_s: float, drained: int
) -> None:
    fleet = asked_anew(nodes_are_known)
    fleet.handle(m.StopRun())
    for name in names:
        assert fleet.state.phase is FleetPhase.WAITING
        fleet.handle(m.Tick(), dials(name, incarnation=2), after_s=over_s / 4)
        if names.index(name) < drained:
            fleet.handle(m.Drain(name))
        check(fleet.state)
    assert fleet.state.phase is FleetPhase.SAVING
    assert len({rank for order in orders_to_save(fleet).values() for rank, _ in order.share}) == 4
    fleet.handle(m.DiskHolds((7,)))
    assert fleet.state.phase is FleetPhase.FINISHED


@given(st.booleans(), st.sets(st.sampled_from(["0", "1", "2", "3"]), max_size=3), st.floats(0, 5))
def test_after_a_damaged_journal_a_stop_waits_until_agents_have_had_form_s_since_the_request_to_them_and_no_longer(
    nodes_are_known: bool, dialing: set[str], before_s: float
) -> None:
    fleet = asked_anew(nodes_are_known)
    requested_s, form_s = fleet.now_s, fleet.state.settings.form_s
    fleet.handle(m.Tick(), after_s=before_s)
    fleet.handle(m.StopRun(), *(dials(name, incarnation=2) for name in sorted(dialing)))
    fleet.handle(m.Tick(), after_s=form_s - before_s - 0.1)
    assert fleet.state.phase is FleetPhase.WAITING
    assert next_deadline_s(fleet.state) <= requested_s + form_s
    fleet.handle(m.Tick(), after_s=0.2)
    assert fleet.state.phase is FleetPhase.FINISHED
    fleet = asked_anew(nodes_are_known)
    fleet.handle(m.Tick(), after_s=form_s + before_s)
    fleet.handle(m.StopRun())
    assert fleet.state.phase is FleetPhase.FINISHED


def test_a_run_whose_whole_journal_is_lost_has_begun_for_all_that_is_known() -> None:
    fleet = Fleet(settings(4))
    fleet.state, _ = resync(fleet.state, mark(fleet.state), "line 1")
    fleet.handle(m.StopRun(), *(dials(name) for name in "012"))
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.handle(dials("3"))
    assert fleet.state.phase is FleetPhase.SAVING


def test_a_stop_waits_for_members_that_still_dial_although_as_many_spares_with_an_empty_memory_are_there() -> (
    None
):
    fleet = forming_anew()
    fleet.handle(m.StopRun(), *(dials(name, None, spare=True) for name in "4567"))
    assert fleet.state.phase is FleetPhase.FORMING
    fleet.handle(*map(dials, "0123"))
    assert fleet.state.phase is FleetPhase.SAVING


def test_a_second_stop_ends_a_fleet_at_once_that_waits_for_agents_that_still_dial() -> None:
    fleet = forming_anew()
    fleet.handle(m.StopRun(), m.StopRun())
    assert fleet.state.phase is FleetPhase.FINISHED


def test_a_stop_that_must_save_may_be_requested_any_number_of_times() -> None:
    fleet = forming_anew()
    fleet.handle(*[m.StopRun(never_at_once=True)] * 3)
    assert fleet.state.stopping
    assert fleet.state.phase is not FleetPhase.FINISHED
    fleet.handle(m.StopRun())
    assert fleet.state.phase is FleetPhase.FINISHED
