"""Brings the clocks of ranks together by the barriers that all passed before and after the recorded steps.

No rank leaves a barrier before the last has come. With clocks that show the true time plus an offset, rank a's time of leaving less rank b's
time of coming is at least their true difference, which cannot be negative, plus the offset of a less that of b: so every barrier bounds the
difference of two offsets from above, and with a and b exchanged from below. The closest bounds of many barriers leave an interval; its middle
is taken and half its width is the error, which no delay of a message can exceed (Cristian 1989, with a barrier in place of a question and
its answer). A clock may also run fast: where no one difference fits the barriers before and after the recording, each side has an interval of
its own, and in between the clock is taken to gain evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.profile.recorded_step import RankTrace

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
