"""A rank's memory through the steps, and all ranks' traces as one, in Chrome's Trace Event Format (Google, 2016), which ui.perfetto.dev opens.

The profiler reports each allocation and release. The kind of a tensor follows from its lifetime. A tensor from a forward pass that lives until
the backward pass is an activation. One from a backward pass that lives longer is a gradient. One around a collective is its buffer, and one
freed within its phase a temporary. Memory before the first step (weights, the optimizer's state) was measured directly.

In the trace each rank is a process, each of its threads and streams a track, its memory a counter; clocks are those of the first rank. An arrow
leads from the last rank of a collective to each that waited for it. The size is bounded: the shortest ranges of all ranks are left out first,
and the trace has their number.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.recorded_step import COPY, KERNEL, RankTrace
from phalanx_watch.profile.partition import BACKWARD, COMM, DATA, FORWARD, OPTIMIZER, StepPieces
from phalanx_watch.profile.waits import ClockFit, Waits

# A rank's memory through the steps.

KINDS = (
    "activations",
    "gradients",
    "communication buffers",
    "optimizer work",
    "samples",
    "temporaries",
    "other",
)
_POINTS = 400
_MOST_LIVE = 12


@dataclass(frozen=True)
class LiveAllocations:
    """Allocations of one kind and layer that are alive at the peak."""

    kind: str
    layer: str
    made_by: str
    bytes: int
    count: int


@dataclass(frozen=True)
class MemoryLine:
    """The memory of one rank."""

    rank: int
    held_bytes: dict[str, int]
    """Bytes before the first step, by kind."""
    times_s: list[float]
    """Seconds since the start of the first step."""
    bytes: dict[str, list[int]]
    """Bytes by kind, in addition to ``held_bytes``."""
    peak_bytes: int
    """Peak of ``held_bytes`` and the bytes allocated in the steps together."""
    peak_s: float
    at_peak: list[LiveAllocations]


def memory_line(trace: RankTrace, cut: StepPieces) -> MemoryLine | None:
    """Return the memory of a rank in its recorded steps: curves by kind (bytes over seconds), peak, and what was live
    then.

    Memory that was there before adds to the peak only. On a GPU only its allocations count. None without a step or an
    allocation.
    """
    rows = trace.allocations
    if trace.meta.get("device") == "cuda":
        rows = rows[rows["device"] > 0]
    if not len(cut.pieces) or not len(rows):
        return None
    begin = int(cut.pieces["begin_ns"][0])
    spans = _lifetimes(rows, int(cut.pieces["end_ns"][-1]))
    if not len(spans):
        return None
    allocated = np.clip(np.searchsorted(cut.pieces["begin_ns"], spans["from"], side="right") - 1, 0, None)
    freed = np.clip(np.searchsorted(cut.pieces["begin_ns"], spans["to"], side="right") - 1, 0, None)
    kinds = _kinds(cut, allocated, freed)
    order = np.argsort(np.concatenate([spans["from"], spans["to"]]), kind="stable")
    times = np.concatenate([spans["from"], spans["to"]])[order]
    change = np.concatenate([spans["bytes"], -spans["bytes"]])[order]
    both = np.concatenate([kinds, kinds])[order]
    total = np.cumsum(change)
    peak = int(np.argmax(total))
    resident = {str(kind): int(size) for kind, size in dict(trace.meta.get("held_bytes", {})).items()}
    shown = np.unique(np.append(np.linspace(0, len(times) - 1, _POINTS).astype(int), peak))
    curves = {
        word: np.cumsum(np.where(both == number, change, 0))[shown].tolist()
        for number, word in enumerate(KINDS)
        if (kinds == number).any()
    }
    alive = (spans["from"] <= times[peak]) & (spans["to"] > times[peak])
    return MemoryLine(
        trace.rank,
        resident,
        ((times[shown] - begin) / 1e9).tolist(),
        curves,
        int(total[peak]) + sum(resident.values()),
        float((times[peak] - begin) / 1e9),
        _live(trace, cut, spans[alive], allocated[alive], kinds[alive]),
    )


def _lifetimes(rows: NDArray[np.void], end_ns: int) -> NDArray[np.void]:
    """Return (from, to, bytes) of each recorded allocation, in ns; one that is not freed lives to ``end_ns``.

    Frees of allocations from before the recording are ignored.
    """
    open_at: dict[int, tuple[int, int]] = {}
    lifetimes = []
    for t_ns, address, size, _ in rows.tolist():
        if size > 0:
            open_at[address] = t_ns, size
        elif address in open_at:
            since_ns, had = open_at.pop(address)
            lifetimes.append((since_ns, t_ns, had))
    lifetimes += [(since_ns, end_ns + 1, had) for since_ns, had in open_at.values()]
    return np.array(sorted(lifetimes), dtype=[("from", "<i8"), ("to", "<i8"), ("bytes", "<i8")])


def _kinds(cut: StepPieces, allocated: NDArray[np.intp], freed: NDArray[np.intp]) -> NDArray[np.int_]:
    """Return the kind of each allocation, an index of ``KINDS``.

    Communication, optimizer and data are by the place where it was made; others by the pass, and whether it outlived
    that.
    """
    phase, category = cut.pieces["phase"], cut.pieces["category"]

    def is_one(word: str) -> NDArray[np.bool_]:
        """Return which live allocations were made in a category that begins with ``word``."""
        matches = np.array([name.startswith(word) for name in cut.categories], bool)
        chosen: NDArray[np.bool_] = matches[category[allocated]]
        return chosen

    later = (phase[freed] != phase[allocated]) | (cut.pieces["step"][freed] != cut.pieces["step"][allocated])
    forward, backward = phase[allocated] == FORWARD, phase[allocated] == BACKWARD
    choices = [is_one(COMM), is_one(OPTIMIZER), is_one(DATA), forward & later, backward & later]
    numbers = [
        KINDS.index(word)
        for word in ("communication buffers", "optimizer work", "samples", "activations", "gradients")
    ]
    inside = np.where(forward | backward, KINDS.index("temporaries"), KINDS.index("other"))
    chosen: NDArray[np.int_] = np.select(choices, numbers, inside)
    return chosen


def _live(
    trace: RankTrace,
    cut: StepPieces,
    spans: NDArray[np.void],
    allocated: NDArray[np.intp],
    kinds: NDArray[np.int_],
) -> list[LiveAllocations]:
    """Return the ``_MOST_LIVE`` largest live allocations, added up by kind, layer and the operation that made them."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for size, piece, kind in zip(spans["bytes"].tolist(), allocated.tolist(), kinds.tolist(), strict=True):
        event = int(cut.pieces["event"][piece])
        name = "" if event < 0 else trace.names[int(trace.events["name"][event])]
        mark = None if event < 0 else trace.mark(event)
        made_by = str(mark["name"]) if mark is not None else name.removeprefix("aten::")
        row = sums[KINDS[kind], cut.layers[int(cut.pieces["layer"][piece])], made_by]
        row[0] += size
        row[1] += 1
    live = [LiveAllocations(*key, size, count) for key, (size, count) in sums.items()]
    return sorted(live, key=lambda row: -row.bytes)[:_MOST_LIVE]


# The merged trace.

MOST_EVENTS = 250_000
"""Most ranges of a merged trace, of all ranks together: about 30 MB of text, which Perfetto opens in seconds."""
_MOST_ARROWS = 20_000


def merged(
    traces: Sequence[RankTrace],
    clocks: Mapping[int, ClockFit],
    waits: Waits,
    memory: Sequence[MemoryLine],
    *,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the merged trace as one JSON object, with arrows for waits and curves of memory; times are microseconds since the first event.

    Of too many events each rank keeps an equal share of ``MOST_EVENTS``, marks first and then the longest; the number
    left out is in ``otherData``.
    """
    starts = {
        trace.rank: clocks[trace.rank].to_common(
            trace.events["begin_ns"] + int(trace.meta.get("base_unix_ns", 0))
        )
        for trace in traces
    }
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
        trace = next(candidate for candidate in traces if candidate.rank == line.rank)
        events += _counters(line, _first_step(trace, starts[line.rank]) - origin)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {**about, "left_out_events": left_out},
    }


def packed(trace: Mapping[str, Any]) -> bytes:
    """Return the trace as gzip, with the same bytes for the same trace."""
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 6, mtime=0)


def _first_step(trace: RankTrace, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return the common time in ns at which the first recorded step begins; that of the first event if there is none,
    0 without events.
    """
    for place in np.flatnonzero(trace.events["mark"] >= 0).tolist():
        mark = trace.mark(place)
        if mark is not None and mark["kind"] == "step":
            return int(starts[place])
    return int(starts.min()) if len(starts) else 0


def _lengths(
    trace: RankTrace, begin_ns: np.ndarray[tuple[int], np.dtype[np.int64]], clock: ClockFit
) -> list[int]:
    """Return the length of each event in nanoseconds of common time, cut at the end of the enclosing event.

    A thread that moves to another core may read a clock that is some microseconds off. An inner event then seems to
    end last, and viewers misplace such a range.
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
    """Return the indexes of at most ``share`` events: marks first, then the longest."""
    events = trace.events
    if len(events) <= share:
        return list(range(len(events)))
    weight = events["ns"].astype(np.int64) + (events["mark"] >= 0) * (1 << 50)
    kept: list[int] = np.sort(np.argpartition(weight, -share)[-share:]).tolist()
    return kept


def _tracks(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """Yield the metadata of a rank's process, threads and streams."""
    yield _metadata(trace, "process_name", 0, {"name": f"rank {trace.rank}"})
    yield _metadata(trace, "process_sort_index", 0, {"sort_index": trace.rank})
    for thread, on_device in sorted({_track(event) for event in trace.events}):
        name = f"stream {thread - _STREAMS}" if on_device else f"thread {thread}"
        yield _metadata(trace, "thread_name", thread, {"name": name})


def _metadata(trace: RankTrace, name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return an event that describes a rank's process, or one of its threads."""
    return {"ph": "M", "name": name, "pid": trace.rank, "tid": thread, "args": arguments}


_STREAMS = 1 << 20
"""First track number of streams, apart from threads."""


def _track(event: np.void) -> tuple[int, bool]:
    """Return the number of an event's track, and True if it is on a device."""
    on_device = int(event["kind"]) in (KERNEL, COPY)
    return int(event["thread"]) + (_STREAMS if on_device else 0), on_device


def _range(trace: RankTrace, place: int, start_ns: int, length_ns: int) -> dict[str, Any]:
    """Return the Chrome event of an event of the recording, with the arguments of its mark, or its FLOP and bytes if it has some."""
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
    """Yield arrows from the last rank of a collective to each rank that waited; the ``_MOST_ARROWS`` longest waits."""
    thread = {
        (trace.rank, place): _track(trace.events[place])[0]
        for trace in traces
        for place in np.flatnonzero(trace.events["mark"] >= 0).tolist()
    }
    arrows = [
        (meeting.waited_ns(passage), meeting, passage)
        for meeting in waits.meetings
        for passage in meeting.passages
        if passage.rank != meeting.last
    ]
    for number, (_, meeting, passage) in enumerate(
        sorted(arrows, key=lambda arrow: -arrow[0])[:_MOST_ARROWS]
    ):
        source = next(other for other in meeting.passages if other.rank == meeting.last)
        same = {"cat": "waits for", "name": passage.key[2], "id": number}
        tracks = (thread.get((side.rank, side.event), 0) for side in (source, passage))
        times = (meeting.last_came_ns, max(passage.left_ns - 1, meeting.last_came_ns))
        for ph, side, track, time_ns in zip("sf", (source, passage), tracks, times, strict=True):
            end = {"bp": "e"} if ph == "f" else {}
            yield {"ph": ph, **same, **end, "pid": side.rank, "tid": track, "ts": (time_ns - origin) / 1e3}


def _counters(line: MemoryLine, start_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the counter events of a rank's memory by kind; ``start_ns`` is the begin of its steps."""
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
