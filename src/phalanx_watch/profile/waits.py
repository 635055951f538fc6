"""Waits between ranks, on synchronized clocks: common collectives, the last rank to arrive at each, and the critical path.

A collective cannot end before its last rank arrives. So a rank's time in it is the wait for that rank, and then the transfer. The wait is
charged to the last rank. If the last rank did not record, the measured wait is less than the true one.

The critical path is walked backwards from the latest end: along a rank to the end of its last collective with a wait, then to the last rank of
that collective, at its arrival. Shortening anything outside the path shortens no step.

Clocks are synchronized by the barriers that all ranks pass before and after the recorded steps. No rank leaves a barrier before the last
arrives. Let each clock show the true time plus an offset. Rank a's exit minus rank b's entry is then their true difference, which is not
negative, plus a's offset minus b's. So every barrier bounds the difference of two offsets from above, and with a and b exchanged from below.
The closest bounds of many barriers leave an interval. Its middle is the estimate and half its width the error, which no message delay can
exceed (Cristian 1989, with a barrier in place of a request and its response). A clock may also run fast: if no single offset fits the barriers
before and after the recording, each side has an interval of its own, and the drift in between is linear.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.recorded_step import HOST, KERNEL, LAUNCH, RankTrace
from phalanx_watch.profile.partition import StepPieces, is_collective_kernel

# Clocks.


Times = NDArray[np.int64]


@dataclass(frozen=True)
class ClockFit:
    """Offset of a rank's clock from that of the first recorded rank."""

    at_ns: tuple[float, float]
    """Two times by this rank's clock, before and after the steps."""
    ahead_ns: tuple[float, float]
    """Offset from the first rank's clock at these times."""
    error_ns: float
    """Largest error of ``ahead_ns``; infinite if unbounded."""

    def to_common(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times of this rank's clock, in nanoseconds since the epoch, to the first rank's clock."""
        (before, after), (first, second) = self.at_ns, self.ahead_ns
        slope = (second - first) / (after - before) if after > before else 0.0
        ahead = first + slope * (times_ns - before)
        return times_ns - np.round(ahead).astype(np.int64)


def barriers(trace: RankTrace, when: str) -> tuple[Times, Times]:
    """Return when a rank entered and left the barriers "before" or "after", in order, by its own clock (ns since the epoch)."""
    place_by_number = {
        int(mark["number"]): place
        for place, number in enumerate(trace.events["mark"])
        if number >= 0
        and (mark := trace.marks[number])["kind"] == "clock"
        and mark["name"] == when
        and isinstance(mark.get("number"), int)
    }
    places = [place_by_number[number] for number in sorted(place_by_number)]
    begin = trace.events["begin_ns"][places] + int(trace.meta.get("base_unix_ns", 0))
    return begin, begin + trace.events["ns"][places]


def fit_clocks(traces: Sequence[RankTrace]) -> dict[int, ClockFit]:
    """Fit each rank's clock to that of the first of ``traces``."""
    return fitted({trace.rank: (barriers(trace, "before"), barriers(trace, "after")) for trace in traces})


def fitted(passed: Mapping[int, tuple[tuple[Times, Times], tuple[Times, Times]]]) -> dict[int, ClockFit]:
    """Return ``fit_clocks`` from barrier times: for each rank those before and after the steps, as (entered, left).

    Offsets are to the first rank's clock, as the middle of their bounds. Bounds before and after that overlap give one
    constant offset. A rank without a barrier has an infinite error.
    """
    first = next(iter(passed.values()), None)
    fits = {}
    for rank, sides in passed.items():
        assert first is not None
        bounds = [_ahead(side, reference) for side, reference in zip(sides, first, strict=True)]
        known_bounds = [bound for bound in bounds if bound[0] < np.inf]
        if not known_bounds:
            fits[rank] = ClockFit((0.0, 0.0), (0.0, 0.0), np.inf)
            continue
        most, least = min(bound[0] for bound in known_bounds), max(bound[1] for bound in known_bounds)
        if least <= most:  # no drift shows: all barriers bound the same difference
            known_bounds = [(most, least, known_bounds[0][2]), (most, least, known_bounds[-1][2])]
        (first_most, first_least, at), (last_most, last_least, later) = known_bounds[0], known_bounds[-1]
        fits[rank] = ClockFit(
            (at, later),
            ((first_most + first_least) / 2, (last_most + last_least) / 2),
            max(first_most - first_least, last_most - last_least) / 2,
        )
    return fits


def _ahead(mine: tuple[Times, Times], reference: tuple[Times, Times]) -> tuple[float, float, float]:
    """Return the most and the least offset (ns) of a clock from the reference, and the mean time by its own clock.

    Nobody leaves a barrier before all have entered it. Without common barriers the bounds are infinite, and for the
    reference 0.
    """
    count = min(len(mine[0]), len(reference[0]))
    if not count:
        return np.inf, -np.inf, 0.0
    (entered, exited), (came_there, left_there) = (
        tuple(side[:count].astype(np.int64) for side in sides) for sides in (mine, reference)
    )
    if mine is reference:  # a rank's clock has no offset to itself
        return 0.0, 0.0, float(entered.mean())
    return float((exited - came_there).min()), float((entered - left_there).max()), float(entered.mean())


# Waits.


@dataclass(frozen=True)
class Passage:
    """One rank's part in a collective or a message wait; common time, in ns since the epoch."""

    rank: int
    key: tuple[str, int, str]
    """Group, number and name: equal on all ranks of the collective."""
    axis: str
    came_ns: int
    left_ns: int
    bytes: int
    event: int
    message: bool = False
    """True for a message of the stage before or after."""


@dataclass(frozen=True)
class Meeting:
    """A collective of several recorded ranks, or a message and its wait."""

    last: int
    """The last rank to arrive."""
    last_came_ns: int
    passages: tuple[Passage, ...]

    def waited_ns(self, passage: Passage) -> int:
        """Return how long a rank waited there for the last one."""
        if passage.rank == self.last:
            return 0
        return max(0, min(self.last_came_ns, passage.left_ns) - passage.came_ns)


@dataclass
class Waits:
    """Waiting times of a profile, in seconds over all steps."""

    meetings: list[Meeting]
    charged: dict[int, dict[int, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Seconds that each rank waited for another: ``charged[late][waiting]``."""
    waited: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    """By rank and axis."""
    moved: dict[tuple[str, str], Transfer] = field(default_factory=dict)
    """By axis and group: time of collectives after all ranks had arrived."""


@dataclass
class Transfer:
    """Collectives of one group without waits, as means over the recorded ``ranks``."""

    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    each_s: list[float] = field(default_factory=list)
    """Seconds of each call."""

    @property
    def typical_s(self) -> float:
        """Median seconds of a call: on a busy machine a few calls take very long."""
        return median(self.each_s) if self.each_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the input tensors per second."""
        return self.bytes / self.seconds if self.seconds else 0.0


def passages(trace: RankTrace, clock: ClockFit, steps: Sequence[tuple[int, int, int]]) -> list[Passage]:
    """Return a rank's collectives and messages that lie within its steps, in order, in common time.

    Those on a device have the times of its kernels. Asynchronous collectives are left out: their call does not wait.
    """
    passages_of_rank, base = [], int(trace.meta.get("base_unix_ns", 0))
    on_device = _kernels(trace)
    windows = [(begin, end) for _, begin, end in steps]
    for place in np.flatnonzero(trace.events["mark"] >= 0).tolist():
        mark = trace.mark(place)
        assert mark is not None
        kind = mark["kind"]
        if kind not in ("collective", "receive", "send") or (kind == "collective" and not mark.get("waits")):
            continue
        begin = int(trace.events["begin_ns"][place])
        begin, end = on_device.get(place, (begin, begin + int(trace.events["ns"][place])))
        if not any(first <= begin and end <= last for first, last in windows):
            continue
        came_ns, left_ns = clock.to_common(np.array([begin, end]) + base).tolist()
        message = kind != "collective"
        key = str(mark.get("group")), int(mark.get("number", 0)), "message" if message else str(mark["name"])
        axis, size = str(mark.get("axis")), int(mark.get("bytes", 0))
        passages_of_rank.append(Passage(trace.rank, key, axis, came_ns, left_ns, size, place, message))
    return passages_of_rank


def _kernels(trace: RankTrace) -> dict[int, tuple[int, int]]:
    """Return the device times of the kernels that a collective's range launched, by the range's event.

    Times are the earliest begin and latest end in ns of the rank's clock. Ranges without kernels are left out.
    """
    events = trace.events
    kernels = [
        place
        for place in np.flatnonzero(events["kind"] == KERNEL).tolist()
        if is_collective_kernel(trace.names[int(events["name"][place])])
    ]
    if not kernels:
        return {}
    launched = {
        int(events["link"][place]): place
        for place in np.flatnonzero((events["kind"] == LAUNCH) | (events["kind"] == HOST)).tolist()
    }
    ranges = [
        place
        for place in np.flatnonzero(events["mark"] >= 0).tolist()
        if trace.marks[int(events["mark"][place])]["kind"] == "collective"
    ]
    kernel_times: dict[int, tuple[int, int]] = {}
    for place in kernels:
        launch = launched.get(int(events["link"][place]))
        if launch is None:
            continue
        at, thread = events["begin_ns"][launch], events["thread"][launch]
        begin = int(events["begin_ns"][place])
        end = begin + int(events["ns"][place])
        for around in ranges:
            after_begin = at - events["begin_ns"][around]
            if events["thread"][around] == thread and 0 <= after_begin <= events["ns"][around]:
                before = kernel_times.get(around, (begin, end))
                kernel_times[around] = min(before[0], begin), max(before[1], end)
    return kernel_times


def meet(all_passages: Mapping[int, Sequence[Passage]]) -> Waits:
    """Match the passages of ranks by their keys, and charge the seconds of each wait to the last rank to arrive.

    Passages of a single rank are dropped.
    """
    together: dict[tuple[str, int, str], list[Passage]] = defaultdict(list)
    for rank_passages in all_passages.values():
        for passage in rank_passages:
            together[passage.key].append(passage)
    waits = Waits([])
    for members in together.values():
        if len({member.rank for member in members}) < 2:
            continue
        last = max(members, key=lambda member: member.came_ns)
        meeting = Meeting(last.rank, last.came_ns, tuple(members))
        waits.meetings.append(meeting)
        _account(waits, meeting)
    return waits


def _account(waits: Waits, meeting: Meeting) -> None:
    """Add the waits of a meeting, charged to its last rank; of a collective, also the mean time after all had arrived, and its bytes."""
    for passage in meeting.passages:
        waited_s = meeting.waited_ns(passage) / 1e9
        if waited_s:
            waits.charged[meeting.last][passage.rank] += waited_s
            waits.waited[passage.rank, passage.axis] += waited_s
    first = meeting.passages[0]
    if not first.message:
        count = len(meeting.passages)
        transfer = waits.moved.setdefault((first.axis, first.key[0]), Transfer())
        transfer.calls += 1
        transfer.bytes += first.bytes
        moving_ns = sum(
            max(0, passage.left_ns - max(passage.came_ns, meeting.last_came_ns))
            for passage in meeting.passages
        )
        transfer.each_s.append(moving_ns / count / 1e9)
        transfer.seconds += transfer.each_s[-1]


# --- the critical path ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path on one rank; common time, ns."""

    rank: int
    begin_ns: int
    end_ns: int
    meeting: Meeting | None = None
    """The collective that moved bytes; None for the rank's own time."""


def critical_path(
    waits: Waits, all_passages: Mapping[int, Sequence[Passage]], windows: Mapping[int, tuple[int, int]]
) -> list[PathPart]:
    """Return the critical path, from the end of the recorded steps back to their start.

    From a collective it continues on the last rank to arrive. ``windows`` are the begin and end of the steps of each
    rank, in common time (ns).
    """
    if not windows:
        return []
    of_key = {passage.key: meeting for meeting in waits.meetings for passage in meeting.passages}
    ordered = {
        rank: sorted((item for item in rank_passages if item.key in of_key), key=lambda item: item.left_ns)
        for rank, rank_passages in all_passages.items()
    }
    ends = {
        rank: np.array([item.left_ns for item in rank_passages], np.int64)
        for rank, rank_passages in ordered.items()
    }
    rank = max(windows, key=lambda item: windows[item][1])
    now, parts = windows[rank][1], list[PathPart]()
    first = min(begin for begin, _ in windows.values())
    for _ in range(2 * sum(map(len, ordered.values())) + len(windows)):
        place = int(np.searchsorted(ends[rank], now, side="right")) - 1 if rank in ends else -1
        if place < 0 or ordered[rank][place].left_ns <= first:
            break
        passage = ordered[rank][place]
        meeting = of_key[passage.key]
        parts.append(PathPart(rank, passage.left_ns, now))
        arrival_ns = min(meeting.last_came_ns, passage.left_ns)
        parts.append(PathPart(rank, arrival_ns, passage.left_ns, meeting))
        # The rank that came last was not waiting before; the others waited for it.
        rank, now = meeting.last, min(arrival_ns, now - 1)
    parts.append(PathPart(rank, min(windows[rank][0], now), now))
    return [part for part in parts if part.end_ns > part.begin_ns]


def path_seconds(
    parts: Sequence[PathPart],
    partitions: Mapping[int, StepPieces],
    clocks: Mapping[int, ClockFit],
    bases: Mapping[int, int],
) -> dict[int, dict[str, float]]:
    """Return the seconds of the path by rank and category.

    Transfer time is in the category "moving bytes: AXIS" of the rank on which the path comes out of the collective.
    """
    seconds_by_rank: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in parts:
        if part.meeting is not None:
            axis = part.meeting.passages[0].axis
            seconds_by_rank[part.rank][f"moving bytes: {axis}"] += (part.end_ns - part.begin_ns) / 1e9
            continue
        for word, seconds in spent(partitions[part.rank], clocks[part.rank], bases[part.rank], part).items():
            seconds_by_rank[part.rank][word] += seconds
    return {rank: dict(words) for rank, words in seconds_by_rank.items()}


def spent(cut: StepPieces, clock: ClockFit, base_ns: int, part: PathPart) -> dict[str, float]:
    """Return a rank's seconds by category within a range of common time; categories without time are left out."""
    begin: NDArray[np.int64] = clock.to_common(cut.pieces["begin_ns"] + base_ns)
    end: NDArray[np.int64] = clock.to_common(cut.pieces["end_ns"] + base_ns)
    near = slice(
        int(np.searchsorted(end, part.begin_ns, side="right")),
        int(np.searchsorted(begin, part.end_ns, side="left")),
    )
    length = np.minimum(end[near], part.end_ns) - np.maximum(begin[near], part.begin_ns)
    totals = np.bincount(
        cut.pieces["category"][near], np.maximum(length, 0) / 1e9, minlength=len(cut.categories)
    )
    return {word: float(total) for word, total in zip(cut.categories, totals, strict=True) if total > 0}
