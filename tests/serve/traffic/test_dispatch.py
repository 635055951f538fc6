"""The router under any sequence of events: it answers, keeps its invariants, and its clients hear every token once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_serve.traffic import events
from phalanx_serve.traffic.dispatch import DispatchSettings, RouterState, step
from phalanx_serve.traffic.events import Ended, PromptScored, Request, Token
from phalanx_serve.traffic.pools import Pool, PoolSettings
from phalanx_serve.traffic.simulated_worker import page_names
from phalanx_serve.traffic.simulated_world import check

SAME = events.WorkerIdentity("weights", "numerics")
WORKERS, LIVES, JOBS = st.integers(0, 3), st.integers(1, 3), st.integers(1, 12)
REQUESTS = st.builds(
    Request, st.sampled_from("abc"), st.just(tuple(range(130))), st.integers(1, 3), generated=st.just(())
)
TOLD = st.one_of(
    st.builds(Token, st.just(""), st.integers(0, 3), st.integers(0, 9)),
    st.builds(PromptScored, st.just(""), st.just((0.5,) * 131)),
    st.builds(Ended, st.just(""), st.sampled_from(["stop", "length", "cancelled", "error"])),
)
EVENTS = st.one_of(
    st.builds(
        events.WorkerJoined, WORKERS, LIVES, st.just(SAME), st.sampled_from(["prefill", "decode", "both"])
    ),
    st.builds(events.Beat, WORKERS, LIVES, st.integers(0, 3), st.lists(JOBS, max_size=3).map(tuple)),
    st.builds(events.Left, WORKERS, LIVES),
    st.builds(events.RequestSubmitted, REQUESTS, st.integers(0, 2)),
    st.builds(events.Abandoned, st.sampled_from("abc")),
    st.builds(events.OutputReceived, WORKERS, LIVES, JOBS, TOLD),
    st.builds(events.DrainWorker, WORKERS),
    st.builds(events.AdmitWorker, WORKERS),
    st.just(events.ClockTick()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.3, 3.0, 40.0])), max_size=40))
def test_any_events_keep_the_invariants_and_tell_tokens_in_order(
    pairs: list[tuple[events.Event, float]],
) -> None:
    state, now_s = RouterState(page_names, DispatchSettings(audit_share=1.0)), 0.0
    heard: dict[str, int] = {}
    for event, seconds in pairs:
        now_s += seconds
        if isinstance(event, events.RequestSubmitted) and event.request.id not in state.entries:
            heard[event.request.id] = event.seen
        state, commands = step(state, event, now_s)
        check(state)
        for command in commands:
            if isinstance(command, events.DeliverOutput) and isinstance(command.output, Token):
                assert command.output.index == heard[command.output.request]
                heard[command.output.request] += 1


def joined(*roles: events.Role) -> RouterState:
    state = RouterState(page_names, DispatchSettings(), Pool(PoolSettings()))
    for number, role in enumerate(roles):
        state, _ = step(state, events.WorkerJoined(number, number + 1, SAME, role), 0.0)
    return state


def runs(commands: list[events.Command]) -> list[events.ComputeJob]:
    return [command for command in commands if isinstance(command, events.ComputeJob)]


def test_a_prompt_is_computed_by_the_prefill_worker_and_its_pages_are_pulled_by_the_decode_worker() -> None:
    state = joined("prefill", "decode")
    state, commands = step(state, events.RequestSubmitted(Request("a", tuple(range(200)), 5)), 0.0)
    (run,) = runs(commands)
    assert (run.worker, run.offer, run.request.max_tokens) == (0, True, 1)
    state, _ = step(state, events.OutputReceived(0, 1, run.job, Token("", 0, 7)), 0.1)
    state, commands = step(state, events.OutputReceived(0, 1, run.job, Ended("", "length")), 0.1)
    (then,) = runs(commands)
    assert (then.worker, then.source, then.source_job, len(then.pages)) == (1, 0, run.job, 3)
    assert (then.request.generated, then.request.max_tokens) == ((7,), 5)


def test_a_dead_workers_request_goes_on_elsewhere_with_the_tokens_that_left() -> None:
    state = joined("both", "both")
    state, commands = step(state, events.RequestSubmitted(Request("a", (1, 2), 5)), 0.0)
    first = runs(commands)[0]
    state, _ = step(state, events.OutputReceived(0, 1, first.job, Token("", 0, 7)), 0.1)
    state, commands = step(state, events.Left(0, 1), 0.2)
    (run,) = runs(commands)
    assert (run.worker, run.request.generated) == (1, (7,))
    _, commands = step(state, events.OutputReceived(0, 1, first.job, Token("", 1, 8)), 0.3)
    assert commands == []


def test_a_worker_with_other_weights_is_refused_and_told_what_to_do() -> None:
    state = joined("both")
    _, commands = step(state, events.WorkerJoined(1, 9, events.WorkerIdentity("others", "numerics")), 1.0)
    (refusal,) = commands
    assert isinstance(refusal, events.Refuse)
    assert "others" in refusal.reason
    assert "same weights" in refusal.reason


def test_a_request_that_kills_every_worker_is_given_up() -> None:
    state = joined("both")
    state, _ = step(state, events.RequestSubmitted(Request("a", (1, 2), 5)), 0.0)
    last: list[events.Command] = []
    for life in range(1, 10):
        state, last = step(state, events.Left(0, life), float(life))
        if any(isinstance(command, events.DeliverOutput) for command in last):
            break
        state, _ = step(state, events.WorkerJoined(0, life + 1, SAME), float(life))
    (told,) = [c.output for c in last if isinstance(c, events.DeliverOutput)]
    assert isinstance(told, Ended)
    assert told.outcome == "error"
