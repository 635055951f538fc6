"""The cost of recoveries, from the events."""

from __future__ import annotations

from phalanx.observe.events import Body, Event, Message, Restored, Step
from phalanx.observe.ledger import recoveries


def step(number: int, **ledger: float) -> Step:
    named = {name.replace("__", "."): seconds for name, seconds in ledger.items()}
    return Step(number, 10, 1.0, 1.0, 1e-3, 100, 50.0, 0.5, ledger=named)


def events(*lived: tuple[int, Body]) -> list[Event]:
    return [Event(float(at), attempt, body) for at, (attempt, body) in enumerate(lived)]


def test_a_recovery_is_an_attempt_after_the_first_with_what_it_cost_before_its_first_step() -> None:
    story = events(
        (3, step(1)),
        (3, step(2)),
        (3, step(3)),
        (3, Message("warning", "node node-1 is lost")),
        (4, Restored(2, "snapshots in memory")),
        (4, step(3, fault__undetected=1.0, start__restore=0.25, step__compute=0.5)),
        (4, step(4)),
    )
    (recovery,) = recoveries(story, 3)
    assert (recovery.attempt, recovery.resumed_step, recovery.lost_steps) == (4, 2, 1)
    assert recovery.seconds == {"fault.undetected": 1.0, "start.restore": 0.25}


def test_an_epoch_that_ended_before_its_first_step_is_no_recovery_of_its_own() -> None:
    story = events((0, step(1)), (1, Restored(1, "")), (2, Restored(1, "")), (2, step(2)))
    assert [recovery.attempt for recovery in recoveries(story, 0)] == [2]


def test_attempts_of_earlier_starts_are_left_out() -> None:
    story = events((0, step(1)), (1, step(2)), (2, step(3)))
    assert [recovery.attempt for recovery in recoveries(story, 1)] == [2]
