"""The pieces of a step: no moment twice, none left out, each with what it was spent on; on a CPU and on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.recorded_step import ALLOCATION, COPY, EVENT, HOST, KERNEL, LAUNCH, RankTrace
from phalanx_watch.profile.partition import partition
from phalanx_watch.profile.summary import analyze

Row = tuple[str, int, int, int, dict[str, Any]]
"""Name or mark, kind, begin, end, further columns."""


def trace_of(rows: list[Row], marks: dict[str, dict[str, Any]], **meta: Any) -> RankTrace:
    """A trace of ranges; those whose name is a mark's are that mark."""
    names = sorted({name for name, *_ in rows})
    events = np.zeros(len(rows), EVENT)
    events["mark"], events["seq"] = -1, -1
    for place, (name, kind, begin, end, more) in enumerate(rows):
        event = events[place]
        event["name"], event["kind"], event["begin_ns"], event["ns"] = (
            names.index(name),
            kind,
            begin,
            end - begin,
        )
        event["thread"] = 1 if kind in (HOST, LAUNCH) else 7
        if name in marks:
            event["mark"] = list(marks).index(name)
        for column, value in more.items():
            event[column] = value
    events = events[np.lexsort((-events["ns"], events["begin_ns"]))]
    return RankTrace(
        0, {"base_unix_ns": 0, **meta}, names, list(marks.values()), events, np.zeros(0, ALLOCATION)
    )


MARKS: dict[str, dict[str, Any]] = {
    "step": {"kind": "step", "name": "step 1", "step": 1},
    "compute": {"kind": "bucket", "name": "step.compute"},
    "data": {"kind": "bucket", "name": "step.data_wait"},
    "update": {"kind": "bucket", "name": "step.optimizer"},
    "layer": {"kind": "module", "name": "layer 0"},
    "backward": {"kind": "work", "name": "backward"},
    "exchange": {"kind": "collective", "name": "all_reduce", "axis": "shard", "waits": True},
}


def nanoseconds(trace: RankTrace) -> dict[str, int]:
    return {word: round(1e9 * seconds) for word, seconds in partition(trace).seconds().items()}


def test_a_moment_belongs_to_the_innermost_range() -> None:
    trace = trace_of(
        [
            ("step", HOST, 0, 1000, {}),
            ("compute", HOST, 100, 900, {}),
            ("data", HOST, 100, 150, {}),
            ("layer", HOST, 200, 400, {}),
            ("aten::mm", HOST, 210, 300, {"flops": 5, "bytes": 2}),
            ("aten::copy_", HOST, 300, 320, {"bytes": 2}),
            ("exchange", HOST, 500, 700, {}),
            ("c10d::allreduce_", HOST, 510, 520, {}),
            ("update", HOST, 800, 900, {}),
            ("aten::add", HOST, 810, 890, {"bytes": 2}),
        ],
        MARKS,
    )
    assert nanoseconds(trace) == {
        "host gap between steps": 200,
        "host gap inside steps": 340,
        "data wait": 50,
        "compute": 90,
        "copies": 20,
        "communication: shard": 200,
        "optimizer": 100,
    }


def test_a_rank_without_a_full_step_is_left_out_with_a_note() -> None:
    complete = trace_of([("step", HOST, 0, 100, {}), ("compute", HOST, 0, 90, {})], MARKS)
    empty = replace(trace_of([("compute", HOST, 0, 90, {})], MARKS), rank=3)
    summary = analyze("name", [complete, empty], {}, None).summary
    assert summary["ranks"] == [0]
    assert summary["notes"] == ["left out are ranks without a full step: 3"]


def test_an_operation_of_the_backward_pass_belongs_to_the_layer_of_its_forward_one() -> None:
    trace = trace_of(
        [
            ("step", HOST, 0, 1000, {}),
            ("layer", HOST, 100, 200, {}),
            ("aten::mm", HOST, 110, 190, {"seq": 4, "bytes": 1}),
            ("backward", HOST, 300, 800, {}),
            ("autograd::engine::evaluate_function: MmBackward0", HOST, 400, 600, {"seq": 4}),
            ("aten::mul", HOST, 410, 590, {"bytes": 1}),
        ],
        MARKS,
    )
    cut = partition(trace)
    layer = cut.layers.index("layer 0")
    mine = cut.pieces[cut.pieces["layer"] == layer]
    spent = {
        int(piece["phase"]): int(piece["end_ns"] - piece["begin_ns"])
        for piece in mine
        if piece["event"] in (2, 5)
    }
    assert spent == {1: 80, 2: 180}


def test_on_a_device_communication_is_exposed_where_nothing_computes_and_idle_time_is_the_hosts() -> None:
    trace = trace_of(
        [
            ("step", HOST, 0, 1000, {}),
            ("compute", HOST, 0, 900, {}),
            ("aten::mm", HOST, 10, 20, {"link": 1}),
            ("cudaLaunchKernel", LAUNCH, 12, 14, {"link": 11}),
            ("exchange", HOST, 30, 60, {}),
            ("cudaLaunchKernel", LAUNCH, 40, 50, {"link": 12}),
            ("gemm", KERNEL, 100, 300, {"link": 11}),
            ("ncclDevKernel_AllReduce", KERNEL, 200, 500, {"link": 12}),
            ("Memcpy DtoH", COPY, 450, 550, {"link": 0}),
        ],
        MARKS,
        device="cuda",
    )
    assert nanoseconds(trace) == {
        "compute": 200,
        "communication: shard": 200,
        "copies": 50,
        "host gap inside steps": 450,
        "host gap between steps": 100,
    }


@st.composite
def nested(draw: st.DrawFn) -> list[Row]:
    """Ranges within ranges, as one thread makes them."""
    rows: list[Row] = [("step", HOST, 0, 1000, {})]
    words = ["compute", "data", "update", "layer", "backward", "exchange", "aten::mm", "aten::copy_", "Node"]

    def fill(begin: int, end: int, depth: int) -> None:
        now = begin
        while depth and now < end and draw(st.booleans()):
            first = draw(st.integers(now, end))
            last = draw(st.integers(first, end))
            rows.append((draw(st.sampled_from(words)), HOST, first, last, {"bytes": draw(st.integers(0, 1))}))
            fill(first, last, depth - 1)
            now = last

    fill(0, 1000, 4)
    return rows


@given(rows=nested())
def test_pieces_follow_each_other_without_a_gap_and_sum_to_the_step(rows: list[Row]) -> None:
    cut = partition(trace_of(rows, MARKS))
    pieces = cut.pieces
    assert pieces["begin_ns"][0] == 0
    assert pieces["end_ns"][-1] == 1000
    assert (pieces["begin_ns"][1:] == pieces["end_ns"][:-1]).all()
    assert (pieces["end_ns"] > pieces["begin_ns"]).all()
    assert sum(cut.seconds().values()) == pytest.approx(1e-6)
