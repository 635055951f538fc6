"""All ranks' traces as one, in the Trace Event Format of Chrome, which ui.perfetto.dev opens (Google, "Trace Event Format", 2016).

Each rank is a process, each of its threads and streams a track; clocks are those of the first rank. An arrow leads from the rank that came last to a
collective to each that waited for it. The trace is bounded: what is short is left out first, of all ranks alike, and how much is said in it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.observe.recorded_step import COPY, KERNEL, RankTrace
from phalanx_watch.profile.memory import MemoryLine
from phalanx_watch.profile.waits import ClockFit, Waits

MOST_EVENTS = 250_000
"""Most ranges of a merged trace, of all ranks together: some 30 MB of text, which Perfetto opens in seconds."""
_MOST_ARROWS = 20_000


def merged(
    traces: Sequence[RankTrace],
    clocks: Mapping[int, ClockFit],
    waits: Waits,
    memory: Sequence[MemoryLine],
    *,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The merged trace as one JSON object; times in microseconds since the earliest event."""
    starts = {trace.rank: _starts(trace, clocks[trace.rank]) for trace in traces}
    origin = min((int(start.min()) for start in starts.values() if len(start)), default=0)
    share = MOST_EVENTS // max(len(traces), 1)
    events: list[dict[str, Any]] = []
    left_out = 0
    for trace in traces:
        kept = _kept(trace, share)
        left_out += len(trace.events) - len(kept)
        events += _tracks(trace)
        lengths = _lengths(trace, starts[trace.rank], clocks[trace.rank])
        events += (
            _range(trace, place, int(starts[trace.rank][place]) - origin, lengths[place]) for place in kept
        )
    events += _arrows(traces, waits, origin)
    for line in memory:
        trace = next(one for one in traces if one.rank == line.rank)
        events += _counters(line, _first_step(trace, starts[line.rank]) - origin)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {**about, "left_out_events": left_out},
    }


def packed(trace: Mapping[str, Any]) -> bytes:
    """The trace as a gzip file, the same bytes for the same trace."""
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6, mtime=0)


def _starts(trace: RankTrace, clock: ClockFit) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return clock.to_common(trace.events["begin_ns"] + int(trace.meta.get("base_unix_ns", 0)))


def _first_step(trace: RankTrace, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    for place in np.flatnonzero(trace.events["mark"] >= 0).tolist():
        mark = trace.mark(place)
        if mark is not None and mark["kind"] == "step":
            return int(starts[place])
    return int(starts.min()) if len(starts) else 0


def _lengths(
    trace: RankTrace, begin_ns: np.ndarray[tuple[int], np.dtype[np.int64]], clock: ClockFit
) -> list[int]:
    """The length of each event in common time, cut where it would outlast the one around it.

    A thread that moves to another core may read a clock that is some microseconds off, and then what is inside seems to end last; viewers
    misplace such a range.
    """
    events = trace.events
    base_ns = int(trace.meta.get("base_unix_ns", 0))
    ends = clock.to_common(events["begin_ns"] + events["ns"] + base_ns)
    lengths: list[int] = np.maximum(ends - begin_ns, 0).tolist()
    starts = begin_ns.tolist()
    open_until: dict[tuple[int, bool], list[int]] = {}
    for place in range(len(events)):
        stack = open_until.setdefault(_track(events[place]), [])
        while stack and stack[-1] <= starts[place]:
            stack.pop()
        if stack:
            lengths[place] = min(lengths[place], stack[-1] - starts[place])
        stack.append(starts[place] + lengths[place])
    return lengths


def _kept(trace: RankTrace, share: int) -> list[int]:
    events = trace.events
    if len(events) <= share:
        return list(range(len(events)))
    weight = events["ns"].astype(np.int64) + (events["mark"] >= 0) * (1 << 50)
    kept: list[int] = np.sort(np.argpartition(weight, -share)[-share:]).tolist()
    return kept


def _tracks(trace: RankTrace) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": trace.rank,
        "tid": 0,
        "args": {"name": f"rank {trace.rank}"},
    }
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": trace.rank,
        "tid": 0,
        "args": {"sort_index": trace.rank},
    }
    for thread, on_device in sorted({_track(event) for event in trace.events}):
        name = f"stream {thread - _STREAMS}" if on_device else f"thread {thread}"
        yield {"ph": "M", "name": "thread_name", "pid": trace.rank, "tid": thread, "args": {"name": name}}


_STREAMS = 1 << 20
"""Streams are numbered from here on, apart from threads."""


def _track(event: np.void) -> tuple[int, bool]:
    on_device = int(event["kind"]) in (KERNEL, COPY)
    return int(event["thread"]) + (_STREAMS if on_device else 0), on_device


def _range(trace: RankTrace, place: int, start_ns: int, length_ns: int) -> dict[str, Any]:
    event, mark = trace.events[place], trace.mark(place)
    name, category, arguments = trace.names[int(event["name"])], "operation", {}
    if mark is not None:
        category = str(mark["kind"])
        axis = f" ({mark['axis']})" if "axis" in mark else ""
        name = f"{mark.get('name', category)}{axis}"
        arguments = {key: value for key, value in mark.items() if key not in ("kind", "name", "ranks")}
    elif event["flops"] or event["bytes"]:
        arguments = {"flops": float(event["flops"]), "bytes": float(event["bytes"])}
    track, _ = _track(event)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": trace.rank,
        "tid": track,
        "ts": start_ns / 1e3,
        "dur": length_ns / 1e3,
        **({"args": arguments} if arguments else {}),
    }


def _arrows(traces: Sequence[RankTrace], waits: Waits, origin: int) -> Iterator[dict[str, Any]]:
    """Arrows from whoever came last to those who waited, the longest waits if there are too many."""
    thread = {
        (trace.rank, place): _track(trace.events[place])[0] for trace in traces for place in _marked(trace)
    }
    found = [
        (meeting.waited_ns(passage), meeting, passage)
        for meeting in waits.meetings
        for passage in meeting.passages
        if passage.rank != meeting.last
    ]
    for number, (_, meeting, passage) in enumerate(sorted(found, key=lambda one: -one[0])[:_MOST_ARROWS]):
        source = next(one for one in meeting.passages if one.rank == meeting.last)
        same = {"cat": "waits for", "name": passage.key[2], "id": number}
        tracks = (thread.get((one.rank, one.event), 0) for one in (source, passage))
        times = (meeting.last_came_ns, max(passage.left_ns - 1, meeting.last_came_ns))
        for ph, one, track, time_ns in zip("sf", (source, passage), tracks, times, strict=True):
            end = {"bp": "e"} if ph == "f" else {}
            yield {"ph": ph, **same, **end, "pid": one.rank, "tid": track, "ts": (time_ns - origin) / 1e3}


def _marked(trace: RankTrace) -> list[int]:
    return list(np.flatnonzero(trace.events["mark"] >= 0).tolist())


def _counters(line: MemoryLine, start_ns: int) -> Iterator[dict[str, Any]]:
    for place, time_s in enumerate(line.times_s):
        values = {kind: curve[place] for kind, curve in line.bytes.items()}
        yield {
            "ph": "C",
            "name": "memory of the steps (bytes)",
            "pid": line.rank,
            "tid": 0,
            "ts": start_ns / 1e3 + time_s * 1e6,
            "args": values,
        }
