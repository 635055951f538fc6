"""View of one figure of all layers over the measured steps: ``/api/run/ID/layers``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.observe.events import LayerStatistics, decode
from phalanx.observe.lines import read_lines_at
from phalanx_watch.page.http import PageRequestError, Parameters
from phalanx_watch.page.runs import PageRuns, RunPlace
from phalanx_watch.series.run_series import RunSeries

USUAL_FIGURE = "residual.rms"
MOST_STEPS = 300
"""Measured steps in one response; of more, evenly spaced ones."""


def layers_view(runs: PageRuns, place: RunPlace, parameters: Parameters) -> dict[str, object]:
    """Return a figure (``column``, by default the residual stream's RMS) of each layer in each measured step.

    ``values`` has a row for each layer. A value is null where the layer lacks the figure or it was not finite; ``nonfinite`` lists
    the cells
    (row, column) of the latter. All are empty without measurements. Raises ``PageRequestError`` for an unknown figure.
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
    """Yield the measurements of a run by step, thinned to ``MOST_STEPS`` with the newest kept."""
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
