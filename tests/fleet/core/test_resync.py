"""A state that contradicts itself is detected, and rebuilt from the descriptions of the nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from msgspec.structs import replace

from fleet.core.test_properties import EVENTS
from fleet.small_fleets import Fleet, running
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import step
from phalanx.fleet.core.epochs.epoch_plan import deliveries
from phalanx.fleet.core.invariants import BrokenInvariant, StateMark, check, mark, resync
from phalanx.fleet.core.state import (
    Eligibility,
    FleetPhase,
    FleetState,
    RestorePoint,
    decode_state,
    encode_state,
)


def two_nodes_on_one_seat(state: FleetState) -> None:
    state.seats[1] = state.seats[0]


def seats_exchanged(state: FleetState) -> None:
    state.seats[0], state.seats[1] = state.seats[1], state.seats[0]


def a_seat_wrongly_vacant(state: FleetState) -> None:
    state.vacant.add(2)


def a_member_called_a_spare(state: FleetState) -> None:
    state.spares.add(state.seats[0])


def a_ring_with_one_buddy(state: FleetState) -> None:
    state.ring = [0] * len(state.ring)


def waiting_while_running(state: FleetState) -> None:
    state.awaiting = {state.seats[0]}


def an_earlier_epoch(state: FleetState) -> None:
    state.epoch -= 1


def fewer_ranks_than_seats(state: FleetState) -> None:
    state.ranks = 1


BREAKS = [
    two_nodes_on_one_seat,
    seats_exchanged,
    a_seat_wrongly_vacant,
    a_member_called_a_spare,
    a_ring_with_one_buddy,
    waiting_while_running,
    an_earlier_epoch,
    fewer_ranks_than_seats,
]


def broken(fleet: Fleet, how: Callable[[FleetState], None]) -> StateMark:
    """Breaks a fleet's state; returns the mark of the state before."""
    before = mark(fleet.state)
    how(fleet.state)
    with pytest.raises(BrokenInvariant):
        check(fleet.state, before)
    return before


def resynced(fleet: Fleet, before: StateMark, reason: str = "a test") -> None:
    fleet.state, orders = resync(fleet.state, before, reason)
    fleet.sent = list(deliveries(fleet.state, orders))
    check(fleet.state, before)


def joined(fleet: Fleet, name: str, epoch: int = m.NO_EPOCH) -> m.Joined:
    """A node's description of itself, as it answers ``TellAll``."""
    return m.Joined(
        name,
        fleet.incarnation(name),
        1,
        name,
        7,
        (f"rack{int(name) % 2}",),
        epoch=epoch,
        bound=epoch != m.NO_EPOCH,
        meeting_points=(f"{name}:1",),
    )


def answer_all(fleet: Fleet, epoch: int, at_step: int) -> None:
    """Each living node describes itself, gets the order to leave the epoch that it was in, and does."""
    ranks, names = 4, ["0", "2", "1", "3"]
    for name in [name for name in fleet.state.nodes if fleet.state.nodes[name].alive]:
        member = name in names
        fleet.handle(joined(fleet, name, epoch if member else m.NO_EPOCH))
        if member:
            assert any(
                isinstance(command, c.Park) and command.epoch == epoch for command in fleet.commands_to(name)
            )
            snapshots = (m.RankSnapshot(ranks, names.index(name), at_step, "own", epoch=epoch),)
            fleet.handle(m.Parked(name, fleet.incarnation(name), epoch, (f"{name}:1",), snapshots))


@pytest.mark.parametrize("how", BREAKS)
def test_a_contradictory_state_leads_to_a_new_epoch_from_memory(how: Callable[[FleetState], None]) -> None:
    fleet = running()
    assert fleet.state.seats == ["0", "2", "1", "3"]
    resynced(fleet, broken(fleet, how))
    assert {name for name, command in fleet.sent if command == c.TellAll()} == set("01234")
    assert fleet.state.phase is FleetPhase.FORMING
    answer_all(fleet, epoch=0, at_step=7)
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.epoch == 1
    assert fleet.state.source == RestorePoint(4, 7)
    fleet.bind()
    check(fleet.state)
    assert fleet.state.phase is FleetPhase.RUNNING
    assert any("contradicted itself" in incident.text for incident in fleet.state.incidents)


def test_no_node_gets_a_rank_before_it_has_reported_that_it_is_in_no_epoch() -> None:
    fleet = running(min_nodes=1)
    resynced(fleet, broken(fleet, seats_exchanged))
    for name in "0123":
        fleet.handle(m.Heartbeat(name, 1, 0, 3, m.WorkerPhase.BOUND), m.Tick(), after_s=3.0)
        assert c.TellAll() in fleet.commands_to(name)
    assert fleet.state.phase in (FleetPhase.FORMING, FleetPhase.WAITING)
    assert not fleet.state.seats
    assert not fleet.state.spares


def test_what_nodes_cannot_repeat_is_kept() -> None:
    fleet = running(nodes=4, spares=2)
    fleet.handle(m.DiskHolds((3, 9)), m.Drain("5"), m.Disconnected("4", 1))
    fleet.handle(m.Tick(), after_s=5.0)
    fleet.handle(m.Suspect("1", "corruption", trusted_step=6))
    kept = decode_state(encode_state(fleet.state))
    resynced(fleet, broken(fleet, a_member_called_a_spare))
    state = fleet.state
    assert not state.nodes["4"].alive
    assert [type(command) for _, command in fleet.handle(m.Ready("4", 1, ("4:1",)))] == [c.Fence]
    assert {name: node.eligibility for name, node in state.nodes.items()} == {
        name: node.eligibility for name, node in kept.nodes.items()
    }
    assert state.nodes["1"].eligibility is Eligibility.QUARANTINED
    assert (state.distrust, state.durable, state.condemned) == (kept.distrust, [3], [9])
    assert state.seen_epoch >= kept.epoch


def test_a_run_that_is_over_stays_over() -> None:
    fleet = running()
    fleet.handle(m.RunFinished(0, '{"step": 9}'))
    before = mark(fleet.state)
    fleet.state.phase = FleetPhase.RUNNING
    resynced(fleet, before)
    assert (fleet.state.phase, fleet.sent) == (FleetPhase.FINISHED, [])
    assert fleet.state.result_json == '{"step": 9}'


def test_a_contradiction_that_comes_back_at_once_ends_the_run_with_its_text() -> None:
    fleet = running(max_tries=3)
    for _ in range(4):
        resynced(fleet, mark(fleet.state), "two nodes on one rank")
    assert fleet.state.phase is FleetPhase.FAILED
    assert "two nodes on one rank" in fleet.state.reason
    assert {name for name, command in fleet.sent if isinstance(command, c.Shutdown)} == set("01234")


def test_the_next_epoch_waits_until_every_member_has_parked_though_others_would_do() -> None:
    fleet = running(nodes=2, spares=2)
    seats = list(fleet.state.seats)
    others = [name for name in fleet.state.nodes if name not in seats]
    resynced(fleet, broken(fleet, a_member_called_a_spare))
    for name in others:
        fleet.handle(joined(fleet, name))
    assert fleet.state.phase is FleetPhase.FORMING
    for name in seats:
        fleet.handle(joined(fleet, name, epoch=0))
        snapshots = (m.RankSnapshot(2, seats.index(name), 7, "own", epoch=0),)
        fleet.handle(m.Parked(name, fleet.incarnation(name), 0, (f"{name}:1",), snapshots))
    assert fleet.state.phase is FleetPhase.BINDING
    assert fleet.state.source == RestorePoint(2, 7)


def test_a_node_that_never_answers_is_waited_for_no_longer_than_a_new_run_waits() -> None:
    fleet = running(nodes=2, spares=2)
    seats = list(fleet.state.seats)
    resynced(fleet, broken(fleet, a_member_called_a_spare))
    answering = [name for name in fleet.state.nodes if name != seats[0]]
    for name in answering:
        fleet.handle(joined(fleet, name))
    for _ in range(int(fleet.state.settings.form_s) + 2):
        beats = [m.Heartbeat(name, 1, m.NO_EPOCH, 0, m.WorkerPhase.WARM) for name in answering]
        silent = m.Heartbeat(seats[0], 1, 0, 7, m.WorkerPhase.BOUND)
        fleet.handle(*beats, silent, m.Tick(), after_s=1.0)
    assert fleet.state.phase is FleetPhase.BINDING
    assert seats[0] not in fleet.state.seats


def test_a_stop_that_was_requested_waits_for_the_state_in_memory_and_saves_it() -> None:
    fleet = running()
    fleet.handle(m.StopRun())
    resynced(fleet, broken(fleet, a_seat_wrongly_vacant))
    fleet.handle(m.Tick(), after_s=1.0)
    assert fleet.state.phase is FleetPhase.FORMING
    answer_all(fleet, epoch=0, at_step=7)
    assert fleet.state.phase is FleetPhase.SAVING
    assert {name for name, command in fleet.sent if isinstance(command, c.SaveSnapshots)} == set("0123")
    fleet.handle(m.Durable("0", 1, fleet.state.epoch, 7))
    assert fleet.state.phase is FleetPhase.FINISHED


def test_a_run_that_ended_in_the_contradictory_turn_stays_ended_and_its_nodes_are_shut_down() -> None:
    fleet = running()
    before = mark(fleet.state)
    fleet.handle(m.RunFinished(0, '{"step": 9}'))
    resynced(fleet, before)
    assert fleet.state.phase is FleetPhase.FINISHED
    assert {name for name, command in fleet.sent if isinstance(command, c.Shutdown)} == set("01234")


def test_the_epoch_that_a_contradiction_ends_is_reported_as_left() -> None:
    fleet = running()
    resynced(fleet, broken(fleet, a_seat_wrongly_vacant))
    assert [incident.ended_epoch for incident in fleet.state.incidents][-1]


@effort(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=20),
    st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=20),
    st.sampled_from(BREAKS),
)
def test_after_any_history_it_keeps_its_invariants_and_answers_every_event(
    history: list[tuple[float, m.CoreEvent]],
    later: list[tuple[float, m.CoreEvent]],
    how: Callable[[FleetState], None],
) -> None:
    fleet = running()
    for wait_s, event in history:
        fleet.handle(event, after_s=wait_s)
    before = mark(fleet.state)
    if len(fleet.state.seats) > 2:
        how(fleet.state)
    resynced(fleet, before)
    assert decode_state(encode_state(fleet.state)) == fleet.state
    for wait_s, event in later:
        before = mark(fleet.state)
        fleet.handle(event, after_s=wait_s)
        check(fleet.state, before)


def test_the_mark_of_the_state_before_counts_where_the_epoch_was_what_broke() -> None:
    fleet = running()
    fleet.state = replace(fleet.state, epoch=7)
    resynced(fleet, broken(fleet, an_earlier_epoch))
    assert fleet.state.seen_epoch == 7
    state, _ = step(fleet.state, m.Tick(), 1e3)
    assert state.epoch == 7
