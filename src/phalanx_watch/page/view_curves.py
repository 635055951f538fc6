"""Views of curves, comparisons and layers: ``/api/run/ID/curves``, ``/api/compare`` and ``/api/run/ID/layers``.

Curves are drawn over steps, tokens, FLOP or time, reduced to the resolution of a picture. A comparison shows whether
runs that must have the same bits differ, and where. Of the layers, one figure of all of them is shown over the measured steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np

from phalanx.observe.events import LayerStatistics, decode
from phalanx.observe.lines import read_lines_at
from phalanx.run.directory.paths import RunDirectoryError
from phalanx_watch.page.http import PageRequestError, Parameters
from phalanx_watch.page.runs import PageRuns, RunPlace
from phalanx_watch.runs.recorded import MOST_RUNS, compare
from phalanx_watch.series.run_series import CurveMark, RunSeries
from phalanx_watch.series.table import NAMES, Floats, Integers, Reduced, columns_of, reduce_series, rounded

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
"""Priority of marks by kind, the most important first; excess marks are dropped from the end."""


class NoSuchCurveError(ValueError):
    """An unknown curve or axis. The message lists the valid ones."""


@dataclass(frozen=True)
class PlacedMark:
    """A mark and its position on the axis; None before the first step."""

    x: float | None
    mark: CurveMark


@dataclass(frozen=True)
class Curves:
    """Curves over one axis."""

    x: Floats
    series: dict[str, Reduced]
    reduced: bool
    """True if the range has more logged steps than points."""
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
    """Return the curves ``names`` of a run over the axis ``x``, from ``first`` to ``last`` (None: no bound), in about
    ``points`` points.

    The last computation of a step counts. Beyond ``points``, each point has a range of minimum and maximum. ``time``
    is in seconds since the start of the run, ``flops`` in model FLOP, by ``flops_per_token``. Marks have places on
    the axis. Raises ``NoSuchCurveError``.
    """
    points = min(max(points, LEAST_POINTS), MOST_POINTS)
    with run.lock:
        rows = run.table.alive()
        along = _axis(run, rows, x, flops_per_token)
        inside = _inside(along, first, last)
        rows, shown = rows[inside], along[inside]
        series: dict[str, Reduced] = {}
        columns = columns_of(shown, points) if len(shown) > points else None
        for name in dict.fromkeys(names):
            y = _values(run, name, rows)
            series[name] = Reduced(y, y, y) if columns is None else reduce_series(y, columns)
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
    """Return the axis position of each row. It never decreases, even after a clock was set back or a damaged line.

    ``time`` is in seconds since the run's start, ``flops`` needs ``flops_per_token``. Raises ``NoSuchCurveError`` for
    an unknown axis, or FLOP that are not known.
    """
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
    """Return the start of the run in Unix seconds: its first start or first step, whichever is earlier; 0 without either."""
    times = [event.t for event in list(run.starts)[:1]]
    if run.table.rows:
        times.append(float(run.table.column("t")[0]))
    return min(times, default=0.0)


def _inside(along: Floats, first: float | None, last: float | None) -> slice:
    """Return the rows in the range and one more on either side, so that the line crosses the border of the picture."""
    start = 0 if first is None else int(np.searchsorted(along, first, "left"))
    end = len(along) if last is None else int(np.searchsorted(along, last, "right"))
    return slice(max(0, start - (first is not None)), max(start, end + (last is not None)))


def _values(run: RunSeries, name: str, rows: Integers) -> Floats:
    """Return a curve's value in each row, NaN where it has none.

    Raises ``NoSuchCurveError`` for an unknown curve, except that figures of memory, machine and tasks may be absent.
    """
    if name in NAMES:
        return run.table.column(name)[rows].astype(np.float64)
    sparse = run.table.sparse.get(name)
    if sparse is None:
        if name.startswith(("memory.", "machine.", "task.")):
            return np.full(len(rows), np.nan)
        listed = ", ".join((*NAMES, *sorted(run.table.sparse)))
        raise NoSuchCurveError(f"there is no curve {name[:100]!r}; there are {listed}")
    every = np.full(run.table.rows, np.nan)
    every[sparse.rows] = sparse.values
    return every[rows]


def _marks(
    run: RunSeries, along: Floats, first: float | None, last: float | None
) -> tuple[list[PlacedMark], int]:
    """Return the marks in the range, in the order of the run, and the number left out.

    Of more than ``MOST_MARKS``, the most important and newest are kept. A mark's place is that of its step or the next
    row, else of the last row; None, and all marks, if there are no rows.
    """
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


def curves_view(runs: PageRuns, place: RunPlace, parameters: Parameters) -> dict[str, object]:
    """Return the requested curves (``all`` for every one, without names the loss), reduced to the requested number of
    points.

    Adds all names and the state of reading. Raises ``PageRequestError`` for an unknown curve or a bad parameter.
    """
    run = runs.series(place)
    names = parameters.names("names", most=128) or [_USUAL]
    if names == [_ALL]:
        names = run.curve_names()
    axis: Axis = parameters.choice("x", AXES)  # type: ignore[assignment]
    try:
        reduced_curves = curves(
            run,
            names,
            axis,
            parameters.number("first"),
            parameters.number("last"),
            parameters.integer("points", 1200, 1, MOST_POINTS),
            runs.flops_per_token(place) if axis == "flops" else None,
        )
    except NoSuchCurveError as error:
        raise PageRequestError(str(error)) from None
    unread = run.unread  # the next request continues
    return answer(reduced_curves) | {
        "names": run.curve_names(),
        "unread": None if unread is None else {"read_bytes": unread[0], "size_bytes": unread[1]},
        "torn_lines": run.torn_lines,
        "dropped_lines": run.dropped_lines,
        "problem": run.problem,
    }


def answer(result: Curves) -> dict[str, object]:
    """Return curves as plain values: null for what is not finite, and fewer digits if reduced."""
    return {
        "x": rounded(result.x, 12)
        if result.reduced
        else [value if value - value == 0 else None for value in result.x.tolist()],
        "series": {
            name: _series(curve.y, curve.lo, curve.hi, result.reduced)
            for name, curve in result.series.items()
        },
        "reduced": result.reduced,
        "total": result.total,
        "marks": [{"x": placed.x, **asdict(placed.mark)} for placed in result.marks],
        "marks_left_out": result.marks_left_out,
    }


def _series(y: Floats, lo: Floats, hi: Floats, reduced: bool) -> dict[str, object]:
    line = rounded(y)
    return {"y": line, "lo": rounded(lo) if reduced else line, "hi": rounded(hi) if reduced else line}


# Comparison.


def compare_view(runs: PageRuns, parameters: Parameters) -> dict[str, object]:
    """Return the comparison of the runs with the given identifiers, in that order. Raises ``PageRequestError``."""
    places = [runs.place(identifier) for identifier in dict.fromkeys(parameters.names("ids", most=MOST_RUNS))]
    if len(places) < 2:
        raise PageRequestError(
            f"ids: give the identifiers of 2 to {MOST_RUNS} runs, with commas between them"
        )
    try:
        return compare([place.path for place in places]).to_json()
    except RunDirectoryError as error:
        raise PageRequestError(str(error)) from None


# Layers.


USUAL_FIGURE = "residual.rms"
MOST_STEPS = 300
"""Measured steps in one response; of more, evenly spaced ones."""


def layers_view(runs: PageRuns, place: RunPlace, parameters: Parameters) -> dict[str, object]:
    """Return a figure (``column``, by default the residual stream's RMS) of each layer in each measured step.

    ``values`` has a row for each layer. A value is null where the layer lacks the figure or it was not finite;
    ``nonfinite`` lists the cells (row, column) of the latter. ``left_out`` counts steps that were thinned away. All
    are empty without measurements. Raises ``PageRequestError`` for an unknown figure.
    """
    run = runs.series(place)
    bodies = list(_measurements(run))
    figures = figure_names(bodies)
    if not bodies or not figures:
        return {
            "figures": [],
            "figure": "",
            "layers": [],
            "steps": [],
            "values": [],
            "nonfinite": [],
            "left_out": 0,
        }
    figure = parameters.text("column") or (USUAL_FIGURE if USUAL_FIGURE in figures else figures[0])
    if figure not in figures:
        raise PageRequestError(f"column={figure[:100]!r}: there are {', '.join(figures)}")
    layers = bodies[-1].layers
    tables = [dict(zip(body.layers, body.figures.get(figure, ()), strict=False)) for body in bodies]
    rows = [layer for layer in layers if any(table.get(layer) is not None for table in tables)]
    cells = [[table.get(layer) for table in tables] for layer in rows]
    return {
        "figures": figures,
        "figure": figure,
        "layers": rows,
        "steps": [body.step for body in bodies],
        "values": [
            [value if value is not None and math.isfinite(value) else None for value in row] for row in cells
        ],
        "nonfinite": [
            [at, column]
            for at, row in enumerate(cells)
            for column, value in enumerate(row)
            if value is not None and not math.isfinite(value)
        ],
        "left_out": len(run.measured) - len(bodies),
    }


def figure_names(bodies: list[LayerStatistics]) -> list[str]:
    """Return the names of all figures, sorted."""
    return sorted({name for body in bodies for name in body.figures})


def exported_figures(runs: PageRuns, place: RunPlace) -> list[str]:
    """Return the names of the figures that a run has, for an exported file."""
    return figure_names(list(_measurements(runs.series(place))))


def _measurements(run: RunSeries) -> Iterator[LayerStatistics]:
    """Yield the measurements of a run by step, at most about ``MOST_STEPS`` evenly spaced ones with the newest kept.

    Lines that cannot be decoded are skipped.
    """
    with run.lock:
        steps = sorted(run.measured)
        every = max(1, math.ceil(len(steps) / MOST_STEPS))
        offsets = [run.measured[step] for step in steps[::-1][::every][::-1]]
    for line in read_lines_at(run.directory.events, offsets):
        try:
            body = decode(line).body
        except (ValueError, RecursionError):
            continue
        if isinstance(body, LayerStatistics):
            yield body
