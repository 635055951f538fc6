"""Who waits for whom: the collectives that ranks had in common, the last to come to each, and the path that decided how long the steps took.

A collective cannot end before the last rank has come. So of its time, a rank spends what is left until then waiting for that rank, and the rest
moving bytes; the wait is charged to whoever came last. Where the last one did not record, the wait that shows is less than the true one.

The critical path is walked backwards from the latest end: on a rank until it left the last collective that somebody kept it in, then to the rank
that came last to that one, at the moment it came. Making anything shorter that is not on the path makes no step shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.profile.recorded_step import HOST, KERNEL, LAUNCH, RankTrace
from phalanx.watch.profile.clocks import ClockFit
from phalanx.watch.profile.partition import StepPieces
from phalanx.watch.profile.words import is_collective_kernel


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
