"""Scheduling of a step's rows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.traffic.scheduler import (
    RequestProgress,
    ScheduledRows,
    SchedulerOutput,
    schedule,
    youngest,
)

REQUESTS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=12).map(
    lambda pairs: [
        RequestProgress(str(i), computed, computed + remaining)
        for i, (computed, remaining) in enumerate(pairs)
    ]
)


def counts_of(output: SchedulerOutput) -> dict[str, int]:
    """The rows of each request."""
    return {request.id: request.end - request.begin for request in output.requests}


@given(REQUESTS, st.integers(1, 256))
def test_a_step_fills_its_rows_with_no_more_than_there_is_to_compute(
    requests: list[RequestProgress], rows: int
) -> None:
    output = schedule(requests, rows)
    counts = counts_of(output)
    remaining = {request.id: request.length - request.computed for request in requests}
    assert all(0 < count <= remaining[name] for name, count in counts.items())
    assert sum(counts.values()) == output.rows == min(rows, sum(remaining.values()))
    computed = {request.id: request.computed for request in requests}
    assert all(request.begin == computed[request.id] for request in output.requests)


@given(REQUESTS, st.integers(12, 256))
def test_whoever_decodes_takes_part_before_any_prompt(requests: list[RequestProgress], rows: int) -> None:
    counts = counts_of(schedule(requests, rows))
    assert all(counts.get(request.id) == 1 for request in requests if request.remaining == 1)


@given(REQUESTS, st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(1, 40))
def test_a_draft_takes_no_row_of_a_next_token_and_comes_before_prompts(
    requests: list[RequestProgress], drafted: list[int], rows: int
) -> None:
    drafting = [replace(request, drafted=number) for request, number in zip(requests, drafted, strict=False)]
    output = schedule(drafting, rows)
    counts = counts_of(output)
    assert sum(counts.values()) <= rows
    for request in drafting:
        if request.remaining > 1:
            assert counts.get(request.id, 0) <= request.remaining
        elif counts.get(request.id, 0) > 1:
            assert all(counts.get(other.id) for other in drafting if other.remaining == 1)
            assert counts[request.id] <= 1 + request.drafted
    lengths = {request.id: request.length for request in drafting}
    assert all(request.drafted == max(0, request.end - lengths[request.id]) for request in output.requests)


def test_rows_without_drafts_end_with_the_text() -> None:
    (rows,) = schedule([RequestProgress("a", 8, 9, drafted=3)], 3).requests
    assert rows == ScheduledRows("a", 8, 11, drafted=2)
    assert rows.without_drafts() == ScheduledRows("a", 8, 9)


def test_the_request_that_came_last_gives_its_pages_up() -> None:
    assert youngest([RequestProgress("a", 0, 9), RequestProgress("b", 0, 2)]) == "b"
