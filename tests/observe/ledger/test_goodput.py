"""Goodput is the time of the steps that the final weights descend from."""

from hypothesis import given
from hypothesis import strategies as st

from observe.recorded import crashed_run, step
from phalanx.observe.events import (
    Body,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    EpochLeft,
    Event,
    Finished,
    Restored,
    RunStarted,
    Step,
)
from phalanx.observe.goodput import format_goodput, goodput
from phalanx.observe.ledger import NS_PER_S


def s(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def test_a_crash_costs_the_steps_since_the_checkpoint_and_the_time_between() -> None:
    result = goodput(crashed_run())
    # 40 steps were kept, one of which was skipped; 21 to 25 were done twice.
    assert result.committed_ns == s(39)
    assert result.nonfinite_ns == s(1)
    assert result.rollback_ns == s(5)
    assert result.pending_ns == 0
    assert result.gap_ns == s(30)
    assert result.attempts == 2
    # 45 s of steps, 4 evaluations and checkpoints of 1 s in all, two starts of 4 s.
    assert result.total_ns == s(45 + 4 + 8)
    assert result.goodput == 39 / 57


def test_steps_that_no_checkpoint_covers_yet_are_pending() -> None:
    killed_at_25 = [event for event in crashed_run() if event.attempt == 0]
    result = goodput(killed_at_25)
    assert result.committed_ns == s(19)
    assert result.pending_ns == s(5)
    assert result.goodput_if_kept > result.goodput


def test_a_second_attempt_that_restores_nothing_discards_the_first() -> None:
    events = [Event(float(t), 0, step(t, 9)) for t in range(1, 6)]
    events += [Event(float(t + 10), 1, step(t, 9)) for t in range(1, 3)]
    result = goodput(events)
    assert result.rollback_ns == s(5)
    assert result.pending_ns == s(2)


def test_a_second_attempt_that_dies_before_its_first_step_discards_nothing() -> None:
    events = [event for event in crashed_run() if event.attempt == 0]
    events.append(Event(events[-1].t + 10, 1, RunStarted("tiny", 40)))
    assert goodput(events).rollback_ns == 0


def test_a_rollback_within_an_attempt_discards_too() -> None:
    bodies: list[Body] = [
        step(1, 9),
        step(2, 9),
        CheckpointSaved(2, "2"),
        step(3, 9),
        Restored(2, "2"),
        step(3, 9),
    ]
    result = goodput(Event(float(t), 0, body) for t, body in enumerate(bodies))
    assert (result.committed_ns, result.rollback_ns, result.pending_ns) == (s(2), s(1), s(1))


def test_events_of_a_coordinator_after_the_ranks_have_ended_lengthen_no_attempt() -> None:
    lived = [Event(float(t), 0, step(t, 9)) for t in range(1, 4)]
    left = Event(60.0, 0, EpochLeft(0, "node node-1 fell silent"))
    assert goodput([*lived, left]) == goodput(lived)


def test_an_event_for_several_steps_is_divided_among_them() -> None:
    bodies: list[Body] = [
        step(10, 30, ledger={"step.compute": 10.0}),
        CheckpointSaved(15, "15"),
        step(20, 30, ledger={"step.compute": 20.0}),
    ]
    result = goodput(Event(float(t), 0, body) for t, body in enumerate(bodies))
    assert (result.committed_ns, result.pending_ns) == (s(15), s(5))


def test_waiting_for_samples_is_no_step_and_what_was_waited_in_lost_steps_is_lost_with_them() -> None:
    def until(number: int, waited_s: float) -> Step:
        return step(number, 9, ledger={"step.compute": float(number), "step.data_wait": waited_s})

    bodies: list[Body] = [until(1, 2.0), until(2, 6.0), CheckpointSaved(2, "2"), until(4, 9.0)]
    result = goodput(Event(20.0 + t, 0, body) for t, body in enumerate(bodies))
    assert (result.committed_ns, result.pending_ns, result.waiting_ns) == (s(2), s(2), s(9))
    assert result.goodput == 2 / 13
    bodies += [Restored(2, "2"), step(3, 9, ledger={"step.compute": 5.0, "step.data_wait": 9.5})]
    result = goodput(Event(20.0 + t, 0, body) for t, body in enumerate(bodies))
    assert (result.committed_ns, result.pending_ns, result.waiting_ns) == (s(2), s(1), s(6.5))
    assert result.rollback_ns == s(2 + 3)


def test_what_came_after_the_last_ledger_is_unattributed() -> None:
    events = [
        Event(10.0, 0, step(1, 9, ledger={"step.compute": 1.0})),
        Event(13.0, 0, CheckpointSaved(1, "1")),
    ]
    assert goodput(events).buckets_ns == {"step.compute": s(1), "unattributed": s(3)}


def test_a_run_without_events_has_no_goodput() -> None:
    result = goodput([])
    assert (result.goodput, result.total_ns, result.attempts) == (0.0, 0, 0)


SECONDS = st.integers(0, 10**7).map(lambda us: us / 1e6)


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Any number of attempts, each from some earlier step, with checkpoints where they happen to be."""
    events: list[Event] = []
    t, reached = 1e9, 0
    for attempt in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, reached))
        t += draw(SECONDS)
        start_s = draw(SECONDS)
        ledger = {"start.process": start_s, "step.compute": 0.0, "step.data_wait": 0.0, "eval": 0.0}
        t += start_s
        events.append(Event(t, attempt, RunStarted("x", 99)))
        if at:
            events.append(Event(t, attempt, Restored(at, "y")))
        for number in range(at + 1, at + 1 + draw(st.integers(0, 5))):
            for name in ("step.compute", "step.data_wait", "eval"):
                spent = draw(SECONDS)
                ledger[name] += spent
                t += spent
            events.append(Event(t, attempt, step(number, 99, ledger=dict(ledger))))
            reached = number
            if draw(st.booleans()):
                events.append(Event(t, attempt, CheckpointSaved(number, "y")))
    if draw(st.booleans()):
        events.append(Event(t, attempt, Finished({})))
    return events


@given(histories())
def test_every_nanosecond_in_a_step_has_one_outcome(events: list[Event]) -> None:
    result = goodput(events)
    in_steps = sum(value for name, value in result.buckets_ns.items() if name.startswith("step."))
    outcomes = (result.committed_ns, result.pending_ns, result.rollback_ns, result.nonfinite_ns)
    assert sum(outcomes) + result.waiting_ns == in_steps
    assert min(*outcomes, result.waiting_ns) >= 0


@given(histories())
def test_held_time_and_gaps_make_up_the_wall_time_from_first_to_last(events: list[Event]) -> None:
    result = goodput(events)
    first = [event for event in events if event.attempt == 0]
    started_s = first[-1].t - goodput(first).total_ns / NS_PER_S
    wall_s = events[-1].t - started_s
    # Event times are unix seconds in a double, good to a quarter of a microsecond.
    assert abs((result.total_ns + result.gap_ns) / NS_PER_S - wall_s) < 1e-5


@given(histories())
def test_attempts_may_come_in_any_order(events: list[Event]) -> None:
    by_attempt = sorted(events, key=lambda event: -event.attempt)
    assert goodput(by_attempt) == goodput(events)


def test_the_report_names_the_headline_and_the_outcomes() -> None:
    report = format_goodput(goodput(crashed_run()))
    assert "goodput 68.4 %" in report
    assert "discarded.rollback" in report
    assert "start.process" in report


def test_copies_that_an_agent_reports_under_its_own_attempt_are_no_time_of_that_attempt() -> None:
    def step(number: int) -> Step:
        return Step(number, 4, 1.0, 1.0, 0.1, 1, 1.0, 1.0, None, None)

    trained = [
        Event(t, attempt, step(number))
        for number, (t, attempt) in enumerate([(1.0, 0), (2.0, 0), (5.0, 1), (6.0, 1)], 1)
    ]
    copies = [
        Event(5.5, 0, CheckpointCopied(2, "s3://b/p")),
        Event(9.0, 0, CheckpointFailed(4, "s3://b/p", "down")),
    ]
    assert goodput([*trained, *copies]) == goodput(trained)
