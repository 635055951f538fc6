"""The core under any sequence of events: it answers, keeps its invariants, and replays."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fleet.small_fleets import Fleet, running, settings
from phalanx.fleet.core import commands as c
from phalanx.fleet.core import messages as m
from phalanx.fleet.core.decide import initial_state, step
from phalanx.fleet.core.epochs.epoch_plan import deliveries
from phalanx.fleet.core.invariants import batch_line, check, first_line, mark, replay
from phalanx.fleet.core.state import FleetPhase, decode_state, encode_state

NAMES = st.sampled_from(["0", "1", "2", "3"])
LIVES, EPOCHS, STEPS = st.integers(1, 3), st.integers(-1, 4), st.integers(-1, 6)
POINTS = st.sampled_from([("a:1",), ("",), (), ("a:1", "b:2")])
HELD = st.lists(
    st.builds(
        m.RankSnapshot,
        st.integers(0, 5),
        st.integers(0, 4),
        STEPS.filter(lambda s: s >= 0),
        st.just("own"),
        st.just(1),
        EPOCHS,
    ),
    max_size=3,
).map(tuple)
DOMAINS = st.sampled_from([(), ("r0",), ("r1",), ("r1", "s2")])
EVENTS = st.one_of(
    st.builds(
        m.Joined,
        NAMES,
        LIVES,
        st.integers(1, 2),
        st.just("h"),
        st.just(1),
        DOMAINS,
        HELD,
        EPOCHS,
        st.booleans(),
        POINTS,
    ),
    st.builds(m.Ready, NAMES, LIVES, POINTS),
    st.builds(m.Heartbeat, NAMES, LIVES, EPOCHS, STEPS, st.sampled_from(m.WorkerPhase)),
    st.builds(m.WorkerExited, NAMES, LIVES, EPOCHS, st.just(0), st.just(-9)),
    st.builds(m.WorkerHung, NAMES, LIVES, EPOCHS, st.just(0), st.just(1.5)),
    st.builds(m.Broken, NAMES, LIVES, EPOCHS, st.just(0)),
    st.builds(m.Parked, NAMES, LIVES, EPOCHS, POINTS, HELD),
    st.builds(m.Bound, NAMES, LIVES, EPOCHS),
    st.builds(m.Durable, NAMES, LIVES, EPOCHS, STEPS),
    st.builds(
        m.Suspect,
        NAMES,
        st.sampled_from(["straggler", "corruption", "health", "nonfinite"]),
        st.just(""),
        st.none() | STEPS,
        st.none() | EPOCHS,
        st.lists(st.integers(0, 4), max_size=2).map(tuple),
        st.none() | STEPS,
    ),
    st.builds(m.Disconnected, NAMES, LIVES),
    st.builds(m.Drain, NAMES),
    st.builds(m.Admit, NAMES),
    st.builds(m.DiskHolds, st.lists(STEPS, max_size=3).map(tuple)),
    st.builds(
        m.Rollcall,
        st.sampled_from(["heartbeat", "parked", "bound"]),
        EPOCHS,
        STEPS,
        st.lists(STEPS, max_size=2).map(tuple),
        st.lists(NAMES, max_size=2, unique=True).map(tuple),
    ),
    st.builds(
        m.Diagnosed,
        EPOCHS,
        st.just("rank 1 is not there"),
        st.lists(st.integers(0, 4), max_size=2).map(tuple),
    ),
    st.sampled_from([m.Tick(), m.Restarted(), m.Rekeyed("a1b2", "a0b1")]),
    st.builds(m.StoodStill, st.floats(0, 60)),
)
ENDINGS = st.one_of(
    st.just(m.StopRun()),
    st.builds(m.NotSaved, NAMES, LIVES, EPOCHS, st.just("no room")),
    st.builds(m.RunFinished, EPOCHS),
    st.builds(m.Fatal, EPOCHS, NAMES, st.just("NaN"), st.sampled_from("AB"), st.booleans()),
)
HISTORIES = st.lists(st.tuples(st.floats(0, 30), EVENTS | EVENTS | EVENTS | ENDINGS), max_size=40)


def journal_of(history: list[tuple[float, m.CoreEvent]]) -> list[tuple[float, m.CoreEvent]]:
    now_s, journal = 0.0, []
    for wait_s, event in history:
        now_s += wait_s
        journal.append((now_s, event))
    return journal


@effort(max_examples=300, deadline=None)
@given(HISTORIES, st.booleans())
def test_every_event_in_every_state_has_an_answer_and_breaks_no_invariant(
    history: list[tuple[float, m.CoreEvent]], formed: bool
) -> None:
    fleet = running(nodes=3, spares=1) if formed else Fleet(settings(3))
    for wait_s, event in history:
        before = mark(fleet.state)
        deliveries = fleet.handle(event, after_s=wait_s)
        check(fleet.state, before)
        assert all(c.decode_command(m.encode(command)) == command for _, command in deliveries)


@effort(max_examples=100, deadline=None)
@given(HISTORIES)
def test_the_journal_replays_to_the_same_state_even_across_an_encoding(
    history: list[tuple[float, m.CoreEvent]],
) -> None:
    fleet = running(nodes=3, spares=1)
    for wait_s, event in history:
        fleet.handle(event, after_s=wait_s)
    lines = [batch_line(now_s, (event,)) for now_s, event in fleet.journal]
    half = len(lines) // 2
    state = replay([first_line(initial_state(fleet.state.settings, 0.0)), *lines[:half]]).state
    state = replay([first_line(state), *lines[half:]]).state
    assert encode_state(state) == encode_state(fleet.state)


@effort(max_examples=100, deadline=None)
@given(HISTORIES, EVENTS)
def test_a_message_of_an_earlier_life_changes_nothing_but_the_count(
    history: list[tuple[float, m.CoreEvent]], late: m.CoreEvent
) -> None:
    fleet = running(nodes=3, spares=1)
    for wait_s, event in history:
        fleet.handle(event, after_s=wait_s)
    if not hasattr(late, "incarnation") or fleet.state.nodes.get(late.node) is None:
        return
    late = msgspec.structs.replace(late, incarnation=0)
    before, deliveries = encode_state(fleet.state), fleet.handle(late)
    fleet.state.stale = decode_state(before).stale
    assert encode_state(fleet.state) == before
    assert not deliveries or isinstance(deliveries[0][1], c.Shutdown | c.Fence)


@effort(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8)), min_size=1, max_size=60), st.integers(0, 3))
def test_a_silent_node_is_lost_once_the_coordinator_has_listened_for_a_lease_whatever_its_turns_took(
    turns: list[tuple[float, float]], silent: int
) -> None:
    """Each turn: the coordinator stands still for so long, then reads messages for so long (an fsync is reading)."""
    fleet = running(nodes=4, spares=0, lease_s=15.0, stall_s=1e6)
    listened_s = 0.0
    for stood_s, reading_s in turns:
        pauses = [m.StoodStill(stood_s)] if stood_s else []
        beats = [m.Heartbeat(str(n), 1, 0, 3, m.WorkerPhase.BOUND) for n in range(4) if n != silent]
        fleet.handle(*pauses, *beats, m.Tick(), after_s=stood_s + reading_s)
        listened_s += reading_s
        if fleet.state.phase is not FleetPhase.RUNNING:
            break
    alive = fleet.state.nodes[str(silent)].alive
    assert alive or listened_s >= 15.0 - 1e-6, "it is not lost for a silence that was the coordinator's own"
    assert not alive or listened_s < 15.0 + 8.0
    assert all(fleet.state.nodes[str(n)].alive for n in range(4) if n != silent)


def test_the_same_event_twice_is_the_same_as_once_for_reports_of_a_level() -> None:
    fleet = running()
    fleet.handle(m.WorkerExited("0", 1, 0, 0, -9))
    for event in (m.Parked("2", 1, 0, ("2:1",), ()), m.Bound("2", 1, 0)):
        state, _ = step(fleet.state, event, fleet.now_s)
        once = decode_state(encode_state(state))
        again, orders = step(state, event, fleet.now_s)
        again.stale = once.stale
        assert encode_state(again) == encode_state(once)
        assert not list(deliveries(again, orders))
