"""Admission: who is sent away, with which time, and that the prediction is right where service is steady."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.http.admission import AdmittedLoad, Demand, Measured, pages_of, retry_after
from phalanx_serve.http.limits import Limits
from phalanx_serve.http.protocol import RefusedError
from phalanx_serve.http.request import LengthLimit

DEMANDS = st.builds(Demand, st.integers(1, 50), st.integers(1, 500), st.integers(1, 5000))
PACES = st.just(0.0) | st.floats(0.01, 1000)
MEASURED = st.builds(
    Measured,
    st.integers(0, 500),
    st.integers(0, 5000),
    st.integers(0, 4000),
    st.integers(0, 100_000),
    PACES,
    PACES,
)


@given(DEMANDS, MEASURED, st.integers(1, 300), st.floats(0, 100))
def test_an_idle_gateway_admits_and_a_full_one_says_when(
    demand: Demand, measured: Measured, most: int, wait_s: float
) -> None:
    wait = retry_after(Limits(requests=most, wait_s=wait_s), measured, demand)
    full = measured.texts + demand.texts > most or measured.wait_s(demand) > wait_s
    assert (wait > 0) == (measured.texts > 0 and full)
    assert 0 <= wait <= 600


@given(DEMANDS, MEASURED)
def test_more_pages_never_make_a_request_wait_longer(demand: Demand, measured: Measured) -> None:
    fewer = Measured(**(vars(measured) | {"pages": max(1, measured.pages)}))
    more = Measured(**(vars(measured) | {"pages": fewer.pages + 10}))
    assert more.wait_s(demand) <= fewer.wait_s(demand)


def test_a_request_that_finds_room_does_not_wait_however_many_are_computed() -> None:
    busy = Measured(texts=200, pages_needed=900, pages=1000, pages_per_s=0.1)
    assert busy.wait_s(Demand(1, 100, 10)) == 0
    assert busy.wait_s(Demand(1, 105, 10)) == pytest.approx(50)


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_predicted_wait_is_that_of_a_steady_service(at_once: int) -> None:
    # A worker with room for ``at_once`` texts of ten pages, each of which takes 2 s; twenty more wait.
    work, text = AdmittedLoad(), Demand(1, 10, 100)
    waiting = at_once + 20
    for _ in range(waiting):
        work.began(text, 0.0)
    now = 0.0
    for _ in range(15):
        now += 2.0
        for _ in range(at_once):
            work.read(100, now)
            work.ended(text, now)
            work.began(text, now)
    measured = work.measured(10 * at_once, now)
    read = Measured(**(vars(measured) | {"unread_tokens": 0}))
    # A newcomer starts when 21 texts have ended, at_once of them every two seconds.
    assert read.wait_s(text) == pytest.approx(21 * 2 / at_once, rel=1e-6)


@given(st.lists(st.tuples(st.sampled_from(["began", "ended", "left"]), st.floats(0, 10)), max_size=40))
def test_whatever_happens_nothing_is_left_when_all_have_ended(events: list[tuple[str, float]]) -> None:
    work, demand, now, going = AdmittedLoad(), Demand(2, 3, 10), 0.0, 0
    for kind, passed in events:
        now += passed
        if kind == "began":
            work.began(demand, now)
            going += 1
        elif going:
            work.left_unread(10) if kind == "left" else work.read(10, now)
            work.ended(demand, now)
            going -= 1
    for _ in range(going):
        work.left_unread(10)
        work.ended(demand, now)
    measured = work.measured(0, now)
    assert (measured.texts, measured.pages_needed, measured.unread_tokens) == (0, 0, 0)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(2, 1000), st.integers(0, 12))
def test_a_text_is_refused_exactly_where_context_or_pages_do_not_hold_it(
    prompt: int, new: int, context: int, pages: int
) -> None:
    room = LengthLimit(context, pages)
    fits = prompt + new <= context and (not pages or pages_of(prompt + new) <= pages)
    if fits:
        room.require(prompt, new, "prompt")
        return
    with pytest.raises(RefusedError, match=f"prompt of {prompt} tokens") as error:
        room.require(prompt, new, "prompt")
    assert str(context if prompt + new > context else pages) in str(error.value)
