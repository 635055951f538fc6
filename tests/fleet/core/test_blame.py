"""The core: a failure that one node reports of the run is that node's own fault until another node reports the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fleet.small_fleets import Fleet, running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.state import Eligibility, FleetPhase, RestorePoint


def nan(fleet: Fleet, step: int, *ranks: int) -> None:
    """All members report that ``step`` is not finite, with these ranks' losses among the causes, and leave the epoch."""
    epoch = fleet.state.epoch
    for name in list(fleet.state.seats):
        fleet.handle(m.Suspect(name, "nonfinite", "loss of slot 3", epoch=epoch, ranks=ranks, step=step))
    fleet.park(step=step - 1)


def binds(fleet: Fleet) -> dict[str, c.Bind]:
    return {to: command for to, command in fleet.sent if isinstance(command, c.Bind)}


def reach(fleet: Fleet, step: int) -> None:
    fleet.bind()
    for name in list(fleet.state.seats):
        fleet.handle(m.Heartbeat(name, 1, fleet.state.epoch, step, m.WorkerPhase.BOUND))


def quarantined(fleet: Fleet) -> set[str]:
    return {name for name, node in fleet.state.nodes.items() if node.eligibility is Eligibility.QUARANTINED}


# --- the run cannot go on -----------------------------------------------------------------------------


def test_a_node_that_reports_that_the_run_cannot_go_on_is_replaced_and_the_run_goes_on() -> None:
    fleet = running()
    seat = fleet.state.seats.index("1")
    fleet.handle(m.Fatal(0, "1", "other data at data.path", "RunDirectoryError"))
    fleet.park()
    assert (fleet.state.phase, quarantined(fleet)) == (FleetPhase.BINDING, {"1"})
    assert fleet.state.seats[seat] == "4"
    assert "other data" in fleet.state.nodes["1"].reason


def test_the_run_ends_when_a_second_node_reports_the_same() -> None:
    fleet = running()
    fleet.handle(m.Fatal(0, "1", "cannot read it", "DataError"))
    fleet.park()
    fleet.bind()
    fleet.handle(m.Fatal(1, "1", "cannot read it", "DataError"))  # it is no member any more
    assert fleet.state.phase is not FleetPhase.RUNNING
    fleet = running()
    fleet.handle(
        m.Fatal(0, "1", "cannot read it", "DataError"), m.Fatal(0, "2", "cannot read that", "DataError")
    )
    assert fleet.state.phase is FleetPhase.FAILED
    assert fleet.state.reason == "node 2: cannot read that (node 1 reported the same)"


def test_what_others_could_do_after_all_counts_against_a_node_and_not_for_the_next() -> None:
    fleet = running()
    reach(fleet, 5)
    fleet.handle(m.Fatal(0, "1", "cannot read it", "DataError"))
    fleet.park()
    reach(fleet, 6)
    fleet.handle(m.Fatal(1, "2", "cannot read it", "DataError"))
    assert fleet.state.phase is FleetPhase.PARKING
    assert quarantined(fleet) == {"1", "2"}


@effort(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("AB")), max_size=6), st.integers(1, 4))
def test_a_run_fails_only_if_two_nodes_agree_or_it_cannot_do_without_the_one(
    reports: list[tuple[int, str]], min_nodes: int
) -> None:
    fleet = running(min_nodes=min_nodes)
    by_kind: dict[str, set[int]] = {"A": set(), "B": set()}
    for node, kind in reports:
        fleet.handle(m.Fatal(fleet.state.epoch, str(node), "no", kind))
        if fleet.state.phase is FleetPhase.FAILED:
            good = sum(candidate.eligibility is Eligibility.GOOD for candidate in fleet.state.nodes.values())
            assert by_kind[kind] - {node} or good - 1 < min_nodes or node > 4
            return
        by_kind[kind].add(node)
        fleet.park()
        fleet.bind()


# --- a step is not finite -----------------------------------------------------------------------------


def test_a_node_whose_loss_alone_is_not_finite_is_left_out_while_the_step_is_computed_again() -> None:
    fleet = running()
    victim = fleet.state.seats[2]
    nan(fleet, 6, 2)
    assert fleet.state.seats[2] == "4"
    assert {bind.nonfinite_step for bind in binds(fleet).values()} == {None}
    assert fleet.state.step == 5
    reach(fleet, 6)
    assert quarantined(fleet) == {victim}
    assert any("this one was at fault" in note.text and note.node == victim for note in fleet.state.incidents)
    assert (
        fleet.state.nodes[victim].reason
        == "step 6 is finite where other nodes compute it: this one was at fault"
    )
    assert fleet.state.recoveries == 1


def test_of_the_reports_that_a_step_is_not_finite_the_first_counts_and_the_others_are_stale() -> None:
    fleet = running()
    nan(fleet, 6, 2)
    assert (fleet.state.recoveries, fleet.state.stale) == (1, 3)


def test_a_step_that_is_not_finite_elsewhere_either_is_the_runs_and_its_first_node_is_let_in_again() -> None:
    fleet = running()
    nan(fleet, 6, 2)
    fleet.bind()
    nan(fleet, 6, 2)
    assert quarantined(fleet) == set()
    assert {bind.nonfinite_step for bind in binds(fleet).values()} == {6}
    reach(fleet, 6)
    nan(fleet, 7, 2)
    assert {bind.nonfinite_step for bind in binds(fleet).values()} == {None}, (
        "another step is another question"
    )


def test_a_node_blamed_for_a_step_is_let_in_again_if_an_earlier_step_fails_before_that_could_be_computed_without_it() -> (
    None
):
    fleet = running()
    nan(fleet, 6, 2)
    assert quarantined(fleet) != set()
    # Older state was restored, and a step before the one in question fails for the remaining nodes.
    fleet.bind()
    nan(fleet, 5, 0, 1, 3)
    assert quarantined(fleet) == set(), "nothing is known of it now; at step 6 it would be blamed again"
    fleet.bind()
    nan(fleet, 5, 0, 1, 3)
    reach(fleet, 5)
    nan(fleet, 6, 2)
    assert len(quarantined(fleet)) == 1


def test_where_nobody_in_particular_is_to_blame_every_rank_is_computed_by_another_node() -> None:
    for ranks in ((), (0, 1, 3), (0, 1, 2, 3)):
        fleet = running()
        before = list(fleet.state.seats)
        nan(fleet, 6, *ranks)
        assert all(now != then for now, then in zip(fleet.state.seats, before, strict=True))
        assert sorted(fleet.state.seats) == sorted(before)
        assert quarantined(fleet) == set()
        fleet.bind()
        nan(fleet, 6, *ranks)
        assert {bind.nonfinite_step for bind in binds(fleet).values()} == {6}


def test_a_fleet_of_one_node_computes_the_step_again_by_itself() -> None:
    fleet = running(nodes=1, spares=0)
    nan(fleet, 6, 0)
    assert (fleet.state.phase, fleet.state.seats) == (FleetPhase.BINDING, ["0"])
    fleet.bind()
    nan(fleet, 6, 0)
    assert binds(fleet)["0"].nonfinite_step == 6


@effort(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(6, 8), st.lists(st.integers(0, 4), max_size=2)), max_size=6))
def test_no_step_is_called_the_runs_own_unless_two_epochs_in_a_row_found_it_so(
    doubts: list[tuple[int, list[int]]],
) -> None:
    fleet = running()
    last = None
    for step, ranks in doubts:
        nan(fleet, step, *ranks)
        nonfinite_steps = {bind.nonfinite_step for bind in binds(fleet).values()}
        assert nonfinite_steps <= {None, step}
        assert (step in nonfinite_steps) <= (last == step)
        last = step
        fleet.bind()


def test_nobody_is_found_at_fault_for_a_step_that_the_next_epoch_skips() -> None:
    fleet = running()
    # A machine that was away comes back with the state of an epoch that had got further.
    snapshots = tuple(m.RankSnapshot(4, rank, 20, "own", 1, epoch=0) for rank in range(4))
    fleet.handle(m.Joined("9", 1, 1, "9", 7, snapshots=snapshots, meeting_points=("9:1",)))
    nan(fleet, 8, 1)
    assert fleet.state.source == RestorePoint(4, 20)
    assert quarantined(fleet) == set()
    assert "there is no evidence against this node" in fleet.state.incidents[-1].text
    reach(fleet, 21)
    assert fleet.state.doubt is None
    assert not any("at fault" in incident.text for incident in fleet.state.incidents)


def test_a_blamed_node_that_an_operator_has_drained_stays_drained_when_the_doubt_is_withdrawn() -> None:
    fleet = running()
    victim = fleet.state.seats[1]
    snapshots = tuple(m.RankSnapshot(4, rank, 20, "own", 1, epoch=0) for rank in range(4))
    fleet.handle(m.Joined("9", 1, 1, "9", 7, snapshots=snapshots, meeting_points=("9:1",)))
    fleet.handle(m.Suspect(victim, "nonfinite", epoch=0, ranks=(1,), step=8), m.Drain(victim))
    fleet.park(step=7)
    assert fleet.state.source == RestorePoint(4, 20)
    assert fleet.state.nodes[victim].eligibility is Eligibility.DRAINED


@pytest.mark.parametrize("step", [6, 5], ids=["the same step", "an earlier step"])
def test_a_blamed_node_that_an_operator_has_drained_stays_drained_when_a_step_fails_without_it(
    step: int,
) -> None:
    fleet = running()
    victim = fleet.state.seats[2]
    nan(fleet, 6, 2)
    fleet.handle(m.Drain(victim))
    fleet.bind()
    nan(fleet, step, 0, 1, 3)
    assert fleet.state.nodes[victim].eligibility is Eligibility.DRAINED


def test_a_blamed_node_that_an_operator_has_drained_keeps_that_reason_when_it_is_proven_at_fault() -> None:
    fleet = running()
    victim = fleet.state.seats[2]
    nan(fleet, 6, 2)
    fleet.handle(m.Drain(victim))
    reach(fleet, 6)
    assert fleet.state.nodes[victim].reason == "drained by the operator"
