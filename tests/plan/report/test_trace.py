"""A step on a time line."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from phalanx.run.layout import Layout
from phalanx_plan.report.analyses import TraceEvent, perfetto, step_timeline
from phalanx_plan.step_cost.estimate import estimate
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import TrainingJob
from plan.jobs import LAYOUTS, job, planned

MORE = {
    **LAYOUTS,
    "zbv": planned(Layout(pipeline=4, shard=8, tensor=2), schedule="zbv", stages_per_rank=2, zero=2),
    "many micro-batches": planned(Layout(pipeline=2, shard=2), zero=2),
}


def case(name: str) -> tuple[TrainingJob, PlannedLayout]:
    if name in LAYOUTS:
        return job(), MORE[name]
    return job(stack="phalanx", batch=64 if name == "zbv" else 40_000, cluster="h100:64"), MORE[name]


def by_rank(events: tuple[TraceEvent, ...]) -> dict[int, list[TraceEvent]]:
    rank_events: dict[int, list[TraceEvent]] = {}
    for event in events:
        rank_events.setdefault(event.rank, []).append(event)
    return rank_events


@pytest.mark.parametrize("name", MORE)
def test_on_every_rank_the_events_follow_each_other_and_sum_to_the_step(name: str) -> None:
    work, layout = case(name)
    estimated = estimate(work, layout)
    line = step_timeline(work, estimated)
    ranks = by_rank(line.events)
    assert len(ranks) == layout.pipeline
    for events in ranks.values():
        assert events[0].begin_s == 0
        assert sum(event.end_s - event.begin_s for event in events) == pytest.approx(
            estimated.step_s, rel=1e-6
        )
        for before, after in pairwise(events):
            assert after.begin_s == pytest.approx(before.end_s, abs=1e-6 * estimated.step_s)


def test_every_micro_batch_goes_through_every_stage_forward_and_back() -> None:
    work, layout = case("dense")
    events = step_timeline(work, estimate(work, layout)).events
    seen = {(event.name, event.stage, event.micro_batch) for event in events if event.stage >= 0}
    batches = work.workload.batch // (layout.data * layout.micro_batch)
    assert seen == {(way, s, m) for way in ("forward", "backward") for s in (0, 1) for m in range(batches)}


def test_a_long_flush_is_drawn_in_part() -> None:
    work, layout = case("many micro-batches")
    events = step_timeline(work, estimate(work, layout)).events
    assert len(events) < 200_000
    assert any("micro-batches more" in event.name for event in events)


def test_the_trace_is_json_in_microseconds_with_one_thread_for_each_rank() -> None:
    work, layout = case("interleaved")
    estimated = estimate(work, layout)
    trace = json.loads(json.dumps(perfetto(work, estimated)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == set(range(4))
    length = max(event["ts"] + event["dur"] for event in events)
    assert length == pytest.approx(estimated.step_s * 1e6, rel=1e-6)
    assert all(event["dur"] >= 0 for event in events)
