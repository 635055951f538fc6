"""Views of numbers over time and side by side: ``/api/run/ID/curves`` and ``/api/compare``.

Curves are drawn over steps, tokens, operations or time, reduced to the points that a picture can show. A comparison of runs shows whether
those that must have the same bits part, and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np

from phalanx.run.directory.paths import RunDirectoryError
from phalanx_watch.page.http import Parameters, RequestError
from phalanx_watch.page.runs import Place, Runs
from phalanx_watch.runs.recorded import MOST_RUNS, compare
from phalanx_watch.series.run_series import Mark, RunSeries
from phalanx_watch.series.table import NAMES, Floats, Integers, columns_of, reduce_series, rounded

Axis = Literal["step", "tokens", "flops", "time"]
AXES: tuple[Axis, ...] = get_args(Axis)
MOST_POINTS = 5000
LEAST_POINTS = 10
MOST_MARKS = 1000
_RANK = {
    "spike": 0,
    "nonfinite": 0,
    "straggler": 1,
    "recovery": 1,
    "left": 1,
    "message": 2,
    "evaluation": 3,
    "checkpoint": 4,
}
"""What is left out last where there are too many marks, first."""


class NoSuchCurveError(ValueError):
    """A curve or an axis that no run has; the message lists those that there are."""


@dataclass(frozen=True)
class Curve:
    """The value of the line at each x, and the lowest and highest value near it."""

    y: Floats
    lo: Floats
    hi: Floats


@dataclass(frozen=True)
class PlacedMark:
    """A mark and its place on the axis; ``None`` if it has none, before the first step."""

    x: float | None
    mark: Mark


@dataclass(frozen=True)
class Curves:
    """Curves over one axis."""

    x: Floats
    series: dict[str, Curve]
    reduced: bool
    """There are more logged steps in the range than points."""
    total: int
    """Logged steps in the range."""
    marks: list[PlacedMark]
    marks_left_out: int


def curves(
    run: RunSeries,
    names: Sequence[str],
    x: Axis = "step",
    first: float | None = None,
    last: float | None = None,
    points: int = 1200,
    flops_per_token: float | None = None,
) -> Curves:
    """The curves ``names`` of a run over the axis ``x``, from ``first`` to ``last`` on it, in about ``points`` points.

    A step that was computed several times counts as it was computed last. ``time`` is in seconds since the run began, ``flops`` in
    operations of the model, by its operations a token. Raises ``NoSuchCurveError``.
    """
    points = min(max(points, LEAST_POINTS), MOST_POINTS)
    with run.lock:
        rows = run.table.alive()
        along = _axis(run, rows, x, flops_per_token)
        inside = _inside(along, first, last)
        rows, shown = rows[inside], along[inside]
        series: dict[str, Curve] = {}
        columns = columns_of(shown, points) if len(shown) > points else None
        for name in dict.fromkeys(names):
            values = _values(run, name, rows)
            if columns is None:
                series[name] = Curve(values, values, values)
            else:
                reduced = reduce_series(values, columns)
                series[name] = Curve(reduced.y, reduced.lo, reduced.hi)
        marks = _marks(run, along, first, last)
    return Curves(
        x=shown if columns is None else shown[columns.first],
        series=series,
        reduced=columns is not None,
        total=len(rows),
        marks=marks[0],
        marks_left_out=marks[1],
    )


def _axis(run: RunSeries, rows: Integers, x: Axis, flops_per_token: float | None) -> Floats:
    """The place of each row on the axis; it never goes back, whatever a clock that was set back or a damaged line says."""
    match x:
        case "step":
            return run.table.column("step")[rows].astype(np.float64)
        case "tokens" | "flops":
            if x == "flops" and not flops_per_token:
                raise NoSuchCurveError(
                    "x=flops: the operations of this run's model are not known; x=tokens is"
                )
            tokens = run.table.column("tokens")[rows].astype(np.float64)
            return np.maximum.accumulate(
                tokens * (flops_per_token if x == "flops" and flops_per_token else 1.0)
            )
        case "time":
            t = run.table.column("t")[rows].astype(np.float64)
            return np.maximum.accumulate(np.maximum(t - began(run), 0.0)) if len(t) else t
    raise NoSuchCurveError(f"x={x}: there is no such axis; there are {', '.join(AXES)}")


def began(run: RunSeries) -> float:
    """When the run began: its first start, or its first step, whichever is earlier."""
    known = [event.t for event in list(run.starts)[:1]]
    if run.table.rows:
        known.append(float(run.table.column("t")[0]))
    return min(known, default=0.0)


def _inside(along: Floats, first: float | None, last: float | None) -> slice:
    """The rows in the range, with one more on either side, so that the line leaves the picture where it should."""
    start = 0 if first is None else int(np.searchsorted(along, first, "left"))
    end = len(along) if last is None else int(np.searchsorted(along, last, "right"))
    return slice(max(0, start - (first is not None)), max(start, end + (last is not None)))


def _values(run: RunSeries, name: str, rows: Integers) -> Floats:
    if name in NAMES:
        return run.table.column(name)[rows].astype(np.float64)
    sparse = run.table.sparse.get(name)
    if sparse is None:
        if name.startswith("memory."):
            return np.full(len(rows), np.nan)
        listed = ", ".join((*NAMES, *sorted(run.table.sparse)))
        raise NoSuchCurveError(f"there is no curve {name[:100]!r}; there are {listed}")
    every = np.full(run.table.rows, np.nan)
    every[sparse.rows] = sparse.values
    return every[rows]


def _marks(
    run: RunSeries, along: Floats, first: float | None, last: float | None
) -> tuple[list[PlacedMark], int]:
    """The marks in the range, by x; of too many the weightiest are kept, and among equals the newest."""
    steps = run.table.column("step")[run.table.alive()]
    marks = list(run.marks)
    at = np.searchsorted(steps, [mark.step for mark in marks], "left")
    placed = []
    for mark, index in zip(marks, at.tolist(), strict=True):
        x = float(along[min(index, len(along) - 1)]) if len(along) else None
        if x is None or not ((first is not None and x < first) or (last is not None and x > last)):
            placed.append(PlacedMark(x, mark))
    if len(placed) <= MOST_MARKS:
        return placed, 0
    order = sorted(range(len(placed)), key=lambda n: (_RANK.get(placed[n].mark.kind, 2), -n))[:MOST_MARKS]
    return [placed[number] for number in sorted(order)], len(placed) - MOST_MARKS


# Views.


_USUAL = "loss"
_ALL = "all"


def curves_view(runs: Runs, place: Place, parameters: Parameters) -> dict[str, object]:
    """The curves that the request names (``all``: every one that the run has), reduced to the points that it asks for."""
    run = runs.series(place)
    names = parameters.names("names") or [_USUAL]
    if names == [_ALL]:
        names = run.curve_names()
    axis: Axis = parameters.choice("x", AXES)  # type: ignore[assignment]
    try:
        found = curves(
            run,
            names,
            axis,
            parameters.number("first"),
            parameters.number("last"),
            parameters.whole("points", 1200, 1, MOST_POINTS),
            runs.flops_per_token(place) if axis == "flops" else None,
        )
    except NoSuchCurveError as error:
        raise RequestError(str(error)) from None
    return answer(found) | {
        "names": run.curve_names(),
        "unread": _unread(run.unread),
        "torn_lines": run.torn_lines,
        "dropped_lines": run.dropped_lines,
        "problem": run.problem,
    }


def answer(found: Curves) -> dict[str, object]:
    """Curves as plain values."""
    return {
        "x": _plain(found.x, whole=not found.reduced),
        "series": {
            name: _series(curve.y, curve.lo, curve.hi, found.reduced) for name, curve in found.series.items()
        },
        "reduced": found.reduced,
        "total": found.total,
        "marks": [{"x": placed.x, **asdict(placed.mark)} for placed in found.marks],
        "marks_left_out": found.marks_left_out,
    }


def _series(y: Floats, lo: Floats, hi: Floats, reduced: bool) -> dict[str, object]:
    line = rounded(y)
    return {"y": line, "lo": rounded(lo) if reduced else line, "hi": rounded(hi) if reduced else line}


def _plain(x: Floats, *, whole: bool) -> list[float | None]:
    return [value if value - value == 0 else None for value in x.tolist()] if whole else rounded(x, 12)


def _unread(found: tuple[int, int] | None) -> dict[str, int] | None:
    """How far reading has come of a file that is too long to be read at once; the next request goes on."""
    return None if found is None else {"read_bytes": found[0], "size_bytes": found[1]}


# Comparison.


def compare_view(runs: Runs, parameters: Parameters) -> dict[str, object]:
    """The comparison of the runs whose identifiers are given, in that order."""
    places = [runs.place(one) for one in dict.fromkeys(parameters.names("ids", most=MOST_RUNS))]
    if len(places) < 2:
        raise RequestError(f"ids: give the identifiers of 2 to {MOST_RUNS} runs, with commas between them")
    try:
        return compare([place.path for place in places]).to_json()
    except RunDirectoryError as error:
        raise RequestError(str(error)) from None
