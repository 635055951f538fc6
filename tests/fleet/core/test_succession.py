"""A head that is lost is succeeded by another, and no two heads decide at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from msgspec.structs import replace

from fleet.core.test_properties import EVENTS
from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state
from phalanx.fleet.core.invariants import batch_line, check, first_line
from phalanx.fleet.core.state import UNMET, Distrust, Eligibility, FleetPhase, FleetState, RestorePoint
from phalanx.fleet.core.succession import (
    Barred,
    Candidacy,
    Claim,
    decode_claim,
    encode_claim,
    first_claim,
    has_majority,
    inherited,
    is_due,
    is_untold,
    renewed,
    stands_after_s,
    succeeding,
)
from phalanx.run.identity import FencingToken

START = FencingToken(0, "")


def claim_of(fleet: Fleet, head: str = "0") -> Claim:
    """The claim of a head on ``head`` that needs no other now."""
    return renewed(first_claim(initial_state(fleet.state.settings, 0.0), head, "a"), fleet.state, "b")


def journal(fleet: Fleet) -> list[bytes]:
    """The journal of all events that the fleet has handled."""
    first = first_line(initial_state(fleet.state.settings, 0.0))
    return [first, *(batch_line(at_s, (event,)) for at_s, event in fleet.journal)]


def led_on(claim: Claim, lines: list[bytes], fleet: Fleet) -> Fleet:
    """A fleet like ``fleet`` under the head that succeeds."""
    successor = Fleet(fleet.state.settings)
    successor.now_s = fleet.now_s + 60.0
    successor.state = inherited(claim, lines, START, successor.now_s)
    successor.handle(m.Restarted())
    return successor


# --- an epoch that was decided and not sent to any node


def decided_and_not_claimed() -> tuple[Fleet, Claim]:
    """A fleet whose head has decided on epoch 1, with the claim that it had made before."""
    fleet = running(spares=2)
    claim = claim_of(fleet)
    fleet.handle(m.DiskHolds((4,)), m.WorkerExited("1", 1, 0, 0, -9))
    fleet.park(step=3)
    return fleet, claim


def test_the_head_that_is_back_restores_what_was_saved_while_it_was_away() -> None:
    fleet, claim = decided_and_not_claimed()
    assert (fleet.state.phase, fleet.state.epoch, fleet.state.source) == (
        FleetPhase.BINDING,
        1,
        c.FromDisk(4),
    )
    assert is_untold(fleet.state, claim)
    fleet.handle(m.EpochUnsent(), m.Restarted(), m.DiskHolds((4, 70)))
    assert fleet.state.phase is FleetPhase.PARKING
    fleet.park(step=3)
    assert (fleet.state.phase, fleet.state.epoch, fleet.state.source) == (
        FleetPhase.BINDING,
        2,
        c.FromDisk(70),
    )


def test_a_head_that_fell_after_its_claim_restores_what_was_saved_while_it_was_away() -> None:
    fleet, _ = decided_and_not_claimed()
    fleet.handle(m.Restarted(), m.DiskHolds((4,)))
    assert fleet.state.phase is FleetPhase.BINDING
    fleet.handle(m.Restarted(), m.DiskHolds((4, 70)))
    assert fleet.state.phase is FleetPhase.PARKING
    fleet.park(step=3)
    assert (fleet.state.epoch, fleet.state.source) == (2, c.FromDisk(70))


def test_checkpoints_of_an_epoch_that_is_being_bound_do_not_end_it() -> None:
    fleet, _ = decided_and_not_claimed()
    fleet.handle(m.DiskHolds((4, 70)))  # its members train already, and the last Bound is on its way
    assert fleet.state.phase is FleetPhase.BINDING


def test_an_epoch_that_was_claimed_is_bound_to_its_end() -> None:
    fleet, _ = decided_and_not_claimed()
    assert not is_untold(fleet.state, claim_of(fleet))
    fleet.bind()
    assert not is_untold(fleet.state, claim_of(fleet))


# --- the claims of a head


def test_terms_are_consecutive_and_a_head_keeps_its_reign() -> None:
    fleet = running()
    first = first_claim(fleet.state, "0", "a")
    second = renewed(first, fleet.state, "b")
    third = succeeding(second, "2", "c")
    assert [(claim.term, claim.reign, claim.node) for claim in (first, second, third)] == [
        (1, 1, "0"),
        (2, 1, "0"),
        (3, 2, "2"),
    ]


def test_a_claim_has_the_facts_that_no_node_can_repeat() -> None:
    fleet = running(nodes=4, spares=2)
    fleet.handle(m.Suspect("1", "corruption", "checksums differ", trusted_step=6), m.Drain("5"), m.StopRun())
    claim = claim_of(fleet)
    assert claim.distrust == (Distrust(0, 6),)
    assert {(unfit.node, unfit.eligibility) for unfit in claim.barred} == {
        ("1", Eligibility.QUARANTINED),
        ("5", Eligibility.DRAINED),
    }
    assert (claim.stopping, claim.settings, claim.epoch) == (True, fleet.state.settings, 0)


def test_a_claim_is_due_before_an_epoch_begins_and_not_after_each_event() -> None:
    fleet = Fleet(settings(4))
    claim = first_claim(fleet.state, "0", "a")
    fleet.join("0", "1", "2", "3")
    assert fleet.state.epoch == 0
    assert is_due(claim, fleet.state)
    claim = renewed(claim, fleet.state, "b")
    fleet.bind()
    fleet.handle(m.Heartbeat("1", 1, 0, 3, m.WorkerPhase.BOUND))
    assert fleet.state.phase is FleetPhase.RUNNING
    assert not is_due(claim, fleet.state)


@pytest.mark.parametrize(
    "event",
    [
        m.StopRun(),
        m.RunFinished(0, "{}"),
        m.Suspect("1", "corruption", "checksums differ", trusted_step=3),
        m.Enlarge(6, 6, (1, 2, 3, 4, 5, 6), ()),
        m.Drain("4"),
    ],
)
def test_a_claim_is_due_before_an_event_that_must_not_be_forgotten_is_sent_to_any_node(
    event: m.CoreEvent,
) -> None:
    fleet = running()
    claim = claim_of(fleet)
    fleet.handle(event)
    assert is_due(claim, fleet.state)
    assert not is_due(renewed(claim, fleet.state, "c"), fleet.state)


def test_voters_are_named_anew_when_more_than_a_quarter_of_them_has_changed() -> None:
    fleet = running(nodes=4, spares=4)
    claim = claim_of(fleet)
    fleet.join("8", "9")
    assert not is_due(claim, fleet.state)
    fleet.join("10")
    assert is_due(claim, fleet.state)


def test_a_head_that_has_lost_most_of_its_voters_names_no_others() -> None:
    fleet = running(nodes=2, spares=4)
    claim = claim_of(fleet)
    spares = [name for name in fleet.state.nodes if name not in fleet.state.seats]
    fleet.handle(*(m.Disconnected(name, 1) for name in spares))
    beats = [m.Heartbeat(name, 1, 0, 1, m.WorkerPhase.BOUND) for name in fleet.state.seats]
    fleet.handle(*beats, m.Tick(), after_s=10.0)
    assert sum(node.alive for node in fleet.state.nodes.values()) == 2
    assert not is_due(claim, fleet.state)


def test_the_first_nodes_of_a_new_run_become_voters() -> None:
    fleet = Fleet(settings(4))
    claim = first_claim(fleet.state, "0", "a")
    fleet.join("0")
    assert is_due(claim, fleet.state)


@effort(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=20))
def test_a_claim_survives_its_file_and_names_every_member(history: list[tuple[float, m.CoreEvent]]) -> None:
    fleet = running()
    for wait_s, event in history:
        fleet.handle(event, after_s=wait_s)
    claim = claim_of(fleet)
    assert decode_claim(encode_claim(claim)) == claim
    assert not is_due(claim, fleet.state)
    assert {name for name in fleet.state.seats if fleet.state.nodes[name].alive} <= set(claim.voters)


# --- the candidates


def test_nodes_stand_one_after_the_other_and_those_without_a_vote_never() -> None:
    claim = Claim(1, 1, "h", "a", settings(3), voters=("x", "y", "h"))
    assert [stands_after_s(claim, name, 30.0) for name in ("x", "y", "h", "z")] == [30.0, 60.0, 90.0, None]


def test_nobody_stands_when_the_run_is_over_or_the_run_file_forbids_it() -> None:
    claim = Claim(1, 1, "h", "a", settings(3), voters=("x", "y", "h"))
    assert stands_after_s(claim, "x", 0.0) is None
    assert stands_after_s(replace(claim, ended=FleetPhase.FINISHED), "x", 30.0) is None


def test_another_rack_than_the_lost_heads_stands_first() -> None:
    fleet = Fleet(settings(4))
    fleet.join("0", "2", "4", "1", racks=2)  # rack 0 has three nodes, and the head
    claim = claim_of(fleet, head="0")
    assert claim.voters[0] == "1"
    assert claim.voters[-1] == "0"


@effort(deadline=None)
@given(st.sets(st.sampled_from("abcdefgh"), min_size=3), st.data())
def test_two_majorities_share_a_voter(voters: set[str], data: st.DataObject) -> None:
    claim = Claim(1, 1, min(voters), "a", settings(3), voters=tuple(sorted(voters)))
    group = data.draw(st.sets(st.sampled_from(sorted(voters))))
    assert not (has_majority(claim, group) and has_majority(claim, voters - group))


def test_in_a_fleet_of_two_the_other_node_succeeds() -> None:
    claim = Claim(1, 1, "a", "x", settings(2), voters=("b", "a"))
    assert has_majority(claim, {"b"})
    assert not has_majority(claim, {"a"})


def test_a_candidate_is_elected_by_voters_with_a_recent_heartbeat() -> None:
    candidacy = Candidacy(Claim(1, 1, "h", "a", settings(4), voters=("x", "y", "z", "h")))
    candidacy.record_heartbeat("x", 0.0)
    candidacy.record_heartbeat("stranger", 0.0)
    assert not candidacy.is_elected(1.0, lease_s=15.0)
    candidacy.record_heartbeat("y", 10.0)
    assert candidacy.is_elected(10.0, lease_s=15.0)
    assert not candidacy.is_elected(20.0, lease_s=15.0)


# --- the inheritance


def test_with_the_whole_journal_the_epoch_trains_on() -> None:
    fleet = running()
    successor = led_on(claim_of(fleet), journal(fleet), fleet)
    assert successor.state.phase is FleetPhase.RUNNING
    beats = [m.Heartbeat(name, 1, 0, 8, m.WorkerPhase.BOUND) for name in successor.state.seats]
    assert successor.handle(*beats, m.Tick(), after_s=1.0) == []
    assert (successor.state.phase, successor.state.epoch) == (FleetPhase.RUNNING, 0)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_where_the_journal_ends_before_the_claim_every_voter_gets_a_request_and_its_number_is_not_used_again(
    kept: int,
) -> None:
    fleet = running()
    seats = list(fleet.state.seats)
    successor = led_on(claim_of(fleet), journal(fleet)[:kept], fleet)
    assert successor.state.phase is FleetPhase.FORMING
    assert {node.incarnation for node in successor.state.nodes.values()} == {UNMET}
    for name in fleet.state.nodes:
        epoch = 0 if name in seats else m.NO_EPOCH
        joined = m.Joined(name, 1, 1, name, 7, epoch=epoch, bound=epoch == 0, meeting_points=(f"{name}:1",))
        deliveries = successor.handle(joined)
        assert all(not isinstance(command, c.Bind) for _, command in deliveries)
    for seat, name in enumerate(seats):
        snapshots = (m.RankSnapshot(4, seat, 7, "own", epoch=0),)
        successor.handle(m.Parked(name, 1, 0, (f"{name}:1",), snapshots))
    check(successor.state)
    assert (successor.state.phase, successor.state.epoch) == (FleetPhase.BINDING, 1)
    assert successor.state.source == RestorePoint(4, 7)
    assert not any(node.strikes for node in successor.state.nodes.values())


def test_a_journal_of_another_start_of_the_run_is_not_taken() -> None:
    fleet = running()
    state = inherited(claim_of(fleet), journal(fleet), FencingToken(4, "other"), 100.0)
    assert state.phase is FleetPhase.FORMING
    assert state.fencing == FencingToken(4, "other")


@pytest.mark.parametrize(
    "event",
    [
        m.StopRun(),
        m.Suspect("1", "corruption", "x", trusted_step=3),
        m.RunFinished(0, "{}"),
        m.Drain("4"),
        m.Enlarge(6, 6, (1, 2, 3, 4, 5, 6), ()),
    ],
)
def test_a_journal_that_lacks_facts_of_the_claim_is_not_taken(event: m.CoreEvent) -> None:
    fleet = running()
    lines = journal(fleet)
    fleet.handle(event)
    state = inherited(claim_of(fleet), lines, START, 100.0)
    assert state.phase is (FleetPhase.FINISHED if isinstance(event, m.RunFinished) else FleetPhase.FORMING)
    assert state.stopping == isinstance(event, m.StopRun)
    assert (state.distrust == ()) != isinstance(event, m.Suspect)
    assert (state.nodes["4"].eligibility is Eligibility.DRAINED) == isinstance(event, m.Drain)
    assert state.settings == fleet.state.settings


def test_who_is_barred_stays_barred_though_the_journal_is_lost() -> None:
    fleet = running(nodes=2, spares=3)
    fleet.handle(m.Suspect("4", "health", "a test"), m.Drain("3"), m.Disconnected("4", 1))
    fleet.handle(*(m.Heartbeat(str(index), 1, m.NO_EPOCH, 0, m.WorkerPhase.WARM) for index in range(4)))
    fleet.handle(m.Tick(), after_s=3.0)
    assert not fleet.state.nodes["4"].alive
    claim = claim_of(fleet)
    assert Barred("3", Eligibility.DRAINED, "drained by the operator") in claim.barred
    successor = led_on(claim, [], fleet)
    for name in "01234":
        successor.handle(m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",)))
    eligible = {name for name, node in successor.state.nodes.items() if node.eligibility is Eligibility.GOOD}
    assert eligible == set("012")


def test_a_voter_that_is_lost_with_the_head_is_not_waited_for_longer_than_its_lease() -> None:
    fleet = running(nodes=3, spares=1, lease_s=5.0)
    successor = led_on(claim_of(fleet), [], fleet)
    for name in "123":
        successor.handle(m.Joined(name, 1, 1, name, 7, meeting_points=(f"{name}:1",)))
    assert successor.state.phase is FleetPhase.FORMING
    beats = [m.Heartbeat(name, 1, m.NO_EPOCH, 0, m.WorkerPhase.WARM) for name in "123"]
    successor.handle(*beats, m.Tick(), after_s=4.0)
    successor.handle(*beats, m.Tick(), after_s=2.0)
    assert successor.state.phase is FleetPhase.BINDING
    assert "0" not in successor.state.seats


@effort(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=15),
    st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=15),
    st.floats(0, 1),
)
def test_after_any_history_and_any_loss_the_successor_keeps_the_invariants(
    history: list[tuple[float, m.CoreEvent]], later: list[tuple[float, m.CoreEvent]], part: float
) -> None:
    fleet = running()
    for wait_s, event in history:
        fleet.handle(event, after_s=wait_s)
    lines, claim = journal(fleet), claim_of(fleet)
    successor = led_on(claim, lines[: round(part * len(lines))], fleet)
    check(successor.state)
    assert successor.state.epoch >= claim.epoch
    assert isinstance(successor.state, FleetState)
    for wait_s, event in later:
        successor.handle(event, after_s=wait_s)
        check(successor.state)
