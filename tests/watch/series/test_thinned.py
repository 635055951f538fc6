"""The few events that a run's accounts are made of give the accounts of all events."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.recorded import crashed_run, step
from phalanx.observe.event_log import read_events
from phalanx.observe.events import (
    CheckpointSaved,
    EpochLeft,
    Evaluating,
    Event,
    Finished,
    NonFinite,
    Restored,
    RunStarted,
    Stopped,
)
from phalanx.observe.goodput import attempt_accounts, goodput
from phalanx.observe.ledger import recoveries
from phalanx_watch.series.run_series import RunSeries, thinned_events
from watch.made_runs import write_events


@st.composite
def lives(draw: st.DrawFn) -> list[Event]:
    """Runs with checkpoints, skipped steps, restarts that go back or begin again, logs of every k-th step, attempts without a ledger."""
    events: list[Event] = []
    t, done, saved = 1.0e9, 0, [0]
    for attempt in range(draw(st.integers(1, 4))):
        t += draw(st.sampled_from([0.0, 3.0, 500.0]))
        ledger = {"start.process": 4.0, "step.compute": 0.0, "step.data_wait": 0.0, "ckpt.blocking": 0.0}
        has_ledger, every = draw(st.integers(0, 9)) > 0, draw(st.sampled_from([1, 1, 3]))
        events.append(Event(t, attempt, RunStarted("x", 100, ranks=2)))
        if attempt:
            back = draw(st.sampled_from([*saved, max(0, done - 1), 0]))
            if back or draw(st.booleans()):
                events.append(Event(t, attempt, Restored(back, "disk")))
            done = back
        for _ in range(draw(st.integers(0, 15))):
            done += every
            t += 1.5
            ledger["step.compute"] += 1.25 * every
            ledger["step.data_wait"] += 0.125
            if draw(st.integers(0, 9)) == 0:
                events.append(Event(t, attempt, NonFinite(done, "loss", skipped=True)))
            body = step(done, 100, ledger=dict(ledger) if has_ledger else {}, step_s=1.25)
            events.append(Event(t, attempt, body))
            if draw(st.integers(0, 4)) == 0:
                saved.append(done)
                ledger["ckpt.blocking"] += 0.5
                events.append(Event(t, attempt, CheckpointSaved(done, "x")))
        if draw(st.integers(0, 4)) == 0:
            t += 7.0
            events.append(Event(t, attempt, Evaluating(done, 1, 9)))
        ending = draw(st.sampled_from(["none", "none", "stopped", "left"]))
        if ending == "stopped":
            events.append(Event(t + 1, attempt, Stopped(done, "asked", dict(ledger) if has_ledger else {})))
        if ending == "left":
            events.append(Event(t + 1, 0, EpochLeft(attempt, "node a: gone")))
    if draw(st.booleans()):
        events.append(Event(t + 2, attempt, Finished({})))
    return events


def _thinned(run_dir: Path) -> list[Event]:
    run = RunSeries(run_dir)
    run.refresh()
    return thinned_events(run)


@settings(max_examples=150, deadline=None)
@given(lives())
def test_accounts_of_the_kept_events_are_those_of_all(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    write_events(run_dir, events)
    kept = _thinned(run_dir)
    assert goodput(kept) == goodput(events)
    assert attempt_accounts(kept) == attempt_accounts(events)
    first = events[0].attempt
    assert recoveries(kept, first) == recoveries(events, first)


def test_few_events_of_many_steps_are_kept(tmp_path: Path) -> None:
    ledger = {"step.compute": 0.0}
    events = [Event(1e9, 0, RunStarted("x", 5000))]
    for number in range(1, 5001):
        ledger["step.compute"] += 1.0
        events.append(Event(1e9 + number, 0, step(number, 5000, ledger=dict(ledger))))
    write_events(tmp_path, events)
    kept = _thinned(tmp_path)
    assert len(kept) < 10
    assert goodput(kept) == goodput(events)


def test_each_attempt_has_its_own_account_and_together_they_are_the_whole(tmp_path: Path) -> None:
    file = write_events(tmp_path, crashed_run())
    accounts = attempt_accounts(read_events(file))
    total = goodput(read_events(file))
    assert sum(sum(account.buckets_ns.values()) for account in accounts) == total.total_ns
    assert [
        (account.attempt, account.ranks, account.first_step, account.last_step, account.reason)
        for account in accounts
    ] == [
        (0, 2, 1, 25, ""),
        (1, 2, 21, 40, "finished"),
    ]
