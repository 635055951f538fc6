"""Ranks that wait for ranks, on clocks brought together: common collectives, the last rank to come to each, and the critical path.

A collective cannot end before the last rank has come. So of its time, a rank spends what is left until then waiting for that rank, and the rest
moving bytes; the wait is charged to whoever came last. Where the last one did not record, the wait that shows is less than the true one.

The critical path is walked backwards from the latest end: on a rank until it left the last collective that somebody kept it in, then to the rank
that came last to that one, at the moment it came. Making anything shorter that is not on the path makes no step shorter.

Clocks are brought together by the barriers that all ranks passed before and after the recorded steps.
No rank leaves a barrier before the last has come. With clocks that show the true time plus an offset, rank a's time of leaving less rank b's
time of coming is at least their true difference, which cannot be negative, plus the offset of a less that of b: so every barrier bounds the
difference of two offsets from above, and with a and b exchanged from below. The closest bounds of many barriers leave an interval; its middle
is taken and half its width is the error, which no delay of a message can exceed (Cristian 1989, with a barrier in place of a question and
its answer). A clock may also run fast: where no one difference fits the barriers before and after the recording, each side has an interval of
its own, and in between the clock is taken to gain evenly.
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
    """A rank's clock against that of the first rank that recorded."""

    at_ns: tuple[float, float]
    """Two moments by this rank's clock, before and after the steps."""
    ahead_ns: tuple[float, float]
    """By how much it was ahead of the first rank's clock then."""
    error_ns: float
    """The most by which ``ahead_ns`` can be wrong; infinite if nothing bounds it."""

    def to_common(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times by this rank's clock, in nanoseconds since the epoch, as the first rank's clock would show them."""
        (before, after), (first, second) = self.at_ns, self.ahead_ns
        slope = (second - first) / (after - before) if after > before else 0.0
        ahead = first + slope * (times_ns - before)
        return times_ns - np.round(ahead).astype(np.int64)


def barriers(trace: RankTrace, when: str) -> tuple[Times, Times]:
    """When a rank came to the barriers "before" or "after", in order, and when it left them, by its own clock (ns since the epoch)."""
    found = {
        int(mark["number"]): place
        for place, number in enumerate(trace.events["mark"])
        if number >= 0
        and (mark := trace.marks[number])["kind"] == "clock"
        and mark["name"] == when
        and isinstance(mark.get("number"), int)
    }
    places = [found[number] for number in sorted(found)]
    begin = trace.events["begin_ns"][places] + int(trace.meta.get("base_unix_ns", 0))
    return begin, begin + trace.events["ns"][places]


def fit_clocks(traces: Sequence[RankTrace]) -> dict[int, ClockFit]:
    """The fit of each rank's clock to that of the first of ``traces``."""
    return fitted({trace.rank: (barriers(trace, "before"), barriers(trace, "after")) for trace in traces})


def fitted(passed: Mapping[int, tuple[tuple[Times, Times], tuple[Times, Times]]]) -> dict[int, ClockFit]:
    """``fit_clocks`` of the barriers that ranks passed: for each rank those before and those after, as (coming, leaving)."""
    first = next(iter(passed.values()), None)
    found = {}
    for rank, sides in passed.items():
        assert first is not None
        bounds = [_ahead(side, reference) for side, reference in zip(sides, first, strict=True)]
        known = [bound for bound in bounds if bound[0] < np.inf]
        if not known:
            found[rank] = ClockFit((0.0, 0.0), (0.0, 0.0), np.inf)
            continue
        most, least = min(bound[0] for bound in known), max(bound[1] for bound in known)
        if least <= most:  # no drift shows: all barriers bound the same difference
            known = [(most, least, known[0][2]), (most, least, known[-1][2])]
        (first_most, first_least, at), (last_most, last_least, later) = known[0], known[-1]
        found[rank] = ClockFit(
            (at, later),
            ((first_most + first_least) / 2, (last_most + last_least) / 2),
            max(first_most - first_least, last_most - last_least) / 2,
        )
    return found


def _ahead(mine: tuple[Times, Times], reference: tuple[Times, Times]) -> tuple[float, float, float]:
    """The most and the least by which a clock can be ahead of the reference, and when by its own time."""
    count = min(len(mine[0]), len(reference[0]))
    if not count:
        return np.inf, -np.inf, 0.0
    (came, left), (came_there, left_there) = (
        tuple(side[:count].astype(np.int64) for side in sides) for sides in (mine, reference)
    )
    if mine is reference:  # of a rank against itself nothing is open
        return 0.0, 0.0, float(came.mean())
    return float((left - came_there).min()), float((came - left_there).max()), float(came.mean())


# Waits.


@dataclass(frozen=True)
class Passage:
    """One rank's way through one collective, or through waiting for a message; common time, in ns since the epoch."""

    rank: int
    key: tuple[str, int, str]
    """Group, number and name: the same on all ranks of the collective."""
    axis: str
    came_ns: int
    left_ns: int
    bytes: int
    event: int
    message: bool = False
    """True for what comes from the stage before or after."""


@dataclass(frozen=True)
class Meeting:
    """A collective that several of the recorded ranks were in, or a message and the wait for it."""

    last: int
    """The rank that came last."""
    last_came_ns: int
    passages: tuple[Passage, ...]

    def waited_ns(self, passage: Passage) -> int:
        """How long this rank waited there for the last one."""
        if passage.rank == self.last:
            return 0
        return max(0, min(self.last_came_ns, passage.left_ns) - passage.came_ns)


@dataclass
class Waits:
    """All waiting of a profile, in seconds over all steps."""

    meetings: list[Meeting]
    charged: dict[int, dict[int, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """How long each rank waited for a rank: ``charged[late][waiting]``."""
    waited: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    """By rank and axis."""
    moved: dict[tuple[str, str], Transfer] = field(default_factory=dict)
    """By axis and group: what collectives took when everybody was there."""


@dataclass
class Transfer:
    """The collectives of one group, without waiting; of ``ranks`` that recorded, on average."""

    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    each_s: list[float] = field(default_factory=list)
    """The wait in each call."""

    @property
    def typical_s(self) -> float:
        """The median wait in a call: on a busy machine a few calls take very long."""
        return median(self.each_s) if self.each_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the tensors given to the collectives, a second."""
        return self.bytes / self.seconds if self.seconds else 0.0


def passages(trace: RankTrace, clock: ClockFit, steps: Sequence[tuple[int, int, int]]) -> list[Passage]:
    """A rank's ways through collectives and messages within its steps, in order."""
    found, base = [], int(trace.meta.get("base_unix_ns", 0))
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
        common = clock.to_common(np.array([begin, end]) + base)
        message = kind != "collective"
        name = "message" if message else str(mark["name"])
        key = str(mark.get("group")), int(mark.get("number", 0)), name
        found.append(
            Passage(
                trace.rank,
                key,
                str(mark.get("axis")),
                int(common[0]),
                int(common[1]),
                int(mark.get("bytes", 0)),
                place,
                message,
            )
        )
    return found


def _kernels(trace: RankTrace) -> dict[int, tuple[int, int]]:
    """When the kernels ran that a collective's range has queued on a device, by the range's event."""
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
    found: dict[int, tuple[int, int]] = {}
    for place in kernels:
        launch = launched.get(int(events["link"][place]))
        if launch is None:
            continue
        at, thread = events["begin_ns"][launch], events["thread"][launch]
        for around in ranges:
            if (
                events["thread"][around] == thread
                and 0 <= at - events["begin_ns"][around] <= events["ns"][around]
            ):
                begin, end = (
                    int(events["begin_ns"][place]),
                    int(events["begin_ns"][place] + events["ns"][place]),
                )
                before = found.get(around, (begin, end))
                found[around] = min(before[0], begin), max(before[1], end)
    return found


def meet(all_passages: Mapping[int, Sequence[Passage]]) -> Waits:
    """Matches the passages of ranks, and charges each wait to whoever came last."""
    together: dict[tuple[str, int, str], list[Passage]] = defaultdict(list)
    for one in all_passages.values():
        for passage in one:
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
    """A stretch of the critical path on one rank; common time, ns."""

    rank: int
    begin_ns: int
    end_ns: int
    meeting: Meeting | None = None
    """What bytes moved in; ``None`` where the rank was by itself."""


def critical_path(
    waits: Waits, all_passages: Mapping[int, Sequence[Passage]], windows: Mapping[int, tuple[int, int]]
) -> list[PathPart]:
    """The path, from the last moment of the recorded steps back to the first.

    ``windows`` are the begin and end of the steps of each rank, in common time.
    """
    if not windows:
        return []
    of_key = {passage.key: meeting for meeting in waits.meetings for passage in meeting.passages}
    ordered = {
        rank: sorted((one for one in found if one.key in of_key), key=lambda one: one.left_ns)
        for rank, found in all_passages.items()
    }
    ends = {rank: np.array([one.left_ns for one in found], np.int64) for rank, found in ordered.items()}
    rank = max(windows, key=lambda one: windows[one][1])
    now, parts = windows[rank][1], list[PathPart]()
    first = min(begin for begin, _ in windows.values())
    for _ in range(2 * sum(map(len, ordered.values())) + len(windows)):
        place = int(np.searchsorted(ends[rank], now, side="right")) - 1 if rank in ends else -1
        if place < 0 or ordered[rank][place].left_ns <= first:
            break
        passage = ordered[rank][place]
        meeting = of_key[passage.key]
        parts.append(PathPart(rank, passage.left_ns, now))
        came = min(meeting.last_came_ns, passage.left_ns)
        parts.append(PathPart(rank, came, passage.left_ns, meeting))
        # One that came last went on by itself before; others were kept waiting by it.
        rank, now = meeting.last, min(came, now - 1)
    parts.append(PathPart(rank, min(windows[rank][0], now), now))
    return [part for part in parts if part.end_ns > part.begin_ns]


def path_seconds(
    parts: Sequence[PathPart],
    partitions: Mapping[int, StepPieces],
    clocks: Mapping[int, ClockFit],
    bases: Mapping[int, int],
) -> dict[int, dict[str, float]]:
    """Seconds of the path by rank and by what they were spent on; bytes on their way belong to the rank that came last."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in parts:
        if part.meeting is not None:
            axis = part.meeting.passages[0].axis
            found[part.rank][f"moving bytes: {axis}"] += (part.end_ns - part.begin_ns) / 1e9
            continue
        for word, seconds in spent(partitions[part.rank], clocks[part.rank], bases[part.rank], part).items():
            found[part.rank][word] += seconds
    return {rank: dict(words) for rank, words in found.items()}


def spent(cut: StepPieces, clock: ClockFit, base_ns: int, part: PathPart) -> dict[str, float]:
    """What a rank spent a stretch of common time on, in seconds."""
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
