"""Elements of a report: figures in the unit that suits their size, HTML tables, and charts as inline SVG.

A toy run takes seconds and cents, a large one days and M$. Charts are stacked bars, a step's Gantt chart, scatter, curves and a tornado.
Each chart is a function from numbers to the text of one ``<svg>`` element, drawn with ``phalanx.observe.display.curve``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.observe.display.curve import Scale, box, dot, drawing, label, line, padded, path, round_ticks
from phalanx_plan.step_cost.estimate import Estimate


@dataclass(frozen=True)
class DisplayUnit:
    """A unit and its size in base units."""

    name: str
    size: float

    def __call__(self, value: float, digits: int = 4) -> str:
        """Format ``value``, in the base unit, as a number of this unit without its name; large numbers are written out."""
        short = f"{value / self.size:.{digits}g}"
        return f"{float(short):,.15g}" if abs(value) >= self.size else short


DAYS = (
    DisplayUnit("days", 1.0),
    DisplayUnit("hours", 1 / 24),
    DisplayUnit("minutes", 1 / 1440),
    DisplayUnit("s", 1 / 86_400),
)
"""Units of days. Here and below, the largest unit is taken of which there is at least one."""
BETWEEN = (DisplayUnit("days", 86_400.0), DisplayUnit("minutes", 60.0), DisplayUnit("s", 1.0))
"""Units of seconds between failures."""
ENERGY = (DisplayUnit("GWh", 1e6), DisplayUnit("MWh", 1e3), DisplayUnit("kWh", 1.0), DisplayUnit("Wh", 1e-3))
"""Units of kWh."""
POWER = (DisplayUnit("MW", 1e6), DisplayUnit("kW", 1e3), DisplayUnit("W", 1.0))
"""Units of W."""
CO2 = (DisplayUnit("kt", 1e6), DisplayUnit("t", 1e3), DisplayUnit("kg", 1.0), DisplayUnit("g", 1e-3))
"""Units of kg."""
DOLLARS = (DisplayUnit("M$", 1e6), DisplayUnit("$", 1.0))
"""Units of US dollars."""


def counted(number: float, digits: int = 4) -> str:
    """Format a count of parameters or tokens with T, B, M or k, as in ``8.03 B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:,.{digits}g} {unit}"
    return f"{number:,.{digits}g}"


def mfu_text(estimate: Estimate) -> str:
    """Format the MFU with attention counted in full, as most publish it; with a "c", causal scores only, if these are far fewer."""
    # With long sequences, scores that are never computed would be most of the work, and the figure would pass 100 %.
    if estimate.causal_share < _MOSTLY_ATTENTION:
        return f"{estimate.mfu_causal:.1%} c"
    return f"{estimate.mfu:.1%}"


_MOSTLY_ATTENTION = 0.75
"""Share of causal FLOP below which attention, counted in full, is more than half of all."""


def unit_for(values: Sequence[float], units: Sequence[DisplayUnit]) -> DisplayUnit:
    """Return the first of ``units``, from large to small, in which the largest of ``values`` is at least one, else the last.

    Values that are not finite are ignored; if there is no other, the first unit is returned.
    """
    most = max((abs(value) for value in values if math.isfinite(value)), default=math.inf)
    return next((unit for unit in units if most >= unit.size), units[-1])


def written(value: float, units: Sequence[DisplayUnit]) -> str:
    """Format ``value`` with its unit: ``12.3 days``."""
    unit = unit_for([value], units)
    return f"{unit(value)} {unit.name}"


_BEFORE_FIELD = re.compile(r",(?=[a-z_]+=)")


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """Return a table with a line of headings; ``kind`` is its class in the page's style sheet. Escapes all texts.

    Layouts may break after a comma.
    """
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{_BEFORE_FIELD.sub(',<wbr/>', escape(str(cell)))}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table class="{kind}"><tr>{top}</tr>{body}</table>'


# Charts.


WIDTH = 860
_LEFT, _RIGHT, _BOTTOM = 150, 20, 34
_COLORS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#b07aa1",
    "#edc948",
    "#76b7b2",
    "#9c755f",
    "#ff9da7",
    "#86bcb6",
    "#d37295",
    "#a0cbe8",
    "#bab0ac",
    "#499894",
    "#79706e",
    "#d7b5a6",
)


@dataclass(frozen=True)
class Bar:
    """A stacked bar."""

    label: str
    parts: Mapping[str, float]


@dataclass(frozen=True)
class GanttSpan:
    """A box on a time line."""

    row: int
    kind: str
    begin: float
    end: float
    title: str


@dataclass(frozen=True)
class Dot:
    """A point of a scatter chart."""

    x: float
    y: float
    title: str
    marked: bool = False


def colors(kinds: Iterable[str]) -> dict[str, str]:
    """Return a color for each kind, in order."""
    return {kind: _COLORS[number % len(_COLORS)] for number, kind in enumerate(kinds)}


def stacked_bars(bars: Sequence[Bar], unit: str, limit: float | None = None) -> str:
    """Return an SVG of horizontal stacked bars with a legend; ``limit`` is drawn as a line labeled capacity. Kinds of 0 are left out."""
    kinds = [
        kind
        for kind in dict.fromkeys(k for bar in bars for k in bar.parts)
        if any(b.parts.get(kind) for b in bars)
    ]
    color = colors(kinds)
    most = max([sum(bar.parts.values()) for bar in bars] + ([limit] if limit else []))
    scale = _scale(0, most)
    marks = []
    for row, bar in enumerate(bars):
        y, before = 8 + 22 * row, 0.0
        marks.append(label(_LEFT - 6, y + 13, bar.label, "end"))
        for kind in kinds:
            size = bar.parts.get(kind, 0.0)
            if size > 0:
                title = f"{bar.label}: {kind} {size:.4g} {unit}"
                marks.append(
                    _filled(scale(before), y, scale(before + size) - scale(before), 17, color[kind], title)
                )
            before += size
    height = 8 + 22 * len(bars)
    if limit:
        marks.append(
            line(scale(limit), 2, scale(limit), height, _stroke("#c00"), f"capacity {limit:.4g} {unit}")
        )
    return _chart(height, [*marks, *_x_axis(0, most, height, unit)], color)


def legend(color: Mapping[str, str]) -> str:
    """Return the legend of the colors."""
    items = (
        f'<span><i style="background:{value}"></i>{escape(kind)}</span>' for kind, value in color.items()
    )
    return f'<p class="legend">{"".join(items)}</p>'


def gantt(spans: Sequence[GanttSpan], rows: Sequence[str], length: float, unit: str) -> str:
    """Return an SVG of a time line of ``length`` with one row for each of ``rows``; idle spans are gray, and crowded labels left out."""
    kinds = list(dict.fromkeys(span.kind for span in spans))
    color = colors(kinds) | {kind: "#e8e8e8" for kind in kinds if kind == "idle"}
    scale, each = _scale(0, length), max(5, min(18, 460 // max(1, len(rows))))
    every = max(1, math.ceil(12 / each))
    marks = [
        label(_LEFT - 6, 4 + each * (row + 0.8), name, "end")
        for row, name in enumerate(rows)
        if row % every == 0
    ]
    for span in spans:
        x = scale(span.begin)
        marks.append(
            _filled(x, 4 + each * span.row, scale(span.end) - x, each - 1, color[span.kind], span.title)
        )
    height = 6 + each * len(rows)
    return _chart(height, [*marks, *_x_axis(0, length, height, unit)], color)


def scatter(dots: Sequence[Dot], x_unit: str, y_unit: str) -> str:
    """Return an SVG of points; marked points are larger."""
    height = 260
    x_low, x_high = padded([point.x for point in dots], 0.06)
    y_low, y_high = padded([point.y for point in dots], 0.06)
    x, y = _scale(x_low, x_high), _vertical(y_low, y_high, height)
    marks = []
    for point in sorted(dots, key=lambda point: point.marked):
        fill, radius = ("#e15759", 7) if point.marked else ("#4e79a7", 4)
        marks.append(dot(x(point.x), y(point.y), radius, f'fill="{fill}" fill-opacity="0.8"', point.title))
    axes = [*_x_axis(x_low, x_high, height, x_unit), *_y_axis(y_low, y_high, height, y_unit)]
    return _chart(height, [*marks, *axes])


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_unit: str,
    y_unit: str,
    mark: tuple[float, str] | None = None,
) -> str:
    """Return an SVG of lines over a logarithmic x axis; ``mark`` is an x with a caption, drawn if it is in range."""
    height, color = 260, colors(lines)
    points = [point for curve in lines.values() for point in curve]
    low, high = (math.log10(bound) for bound in (min(p[0] for p in points), max(p[0] for p in points)))
    y_low, y_high = padded([point[1] for point in points], 0.06)
    x, y = _scale(low, high), _vertical(y_low, y_high, height)
    marks = [
        path(
            [(x(math.log10(a)), y(b)) for a, b in curve],
            f'fill="none" stroke="{color[name]}" stroke-width="2"',
        )
        for name, curve in lines.items()
    ]
    if mark is not None and low <= math.log10(mark[0]) <= high:
        at = x(math.log10(mark[0]))
        marks += [line(at, 2, at, height, _stroke("#c00"), mark[1]), label(at + 4, 14, mark[1])]
    for power in range(math.ceil(low), math.floor(high) + 1):
        marks.append(line(x(power), 2, x(power), height, _stroke("#eee")))
        marks.append(label(x(power), height + 16, f"{10.0**power:g}", "middle"))
    marks.append(label(WIDTH - _RIGHT, height + 31, x_unit, "end"))
    return _chart(height, [*marks, *_y_axis(y_low, y_high, height, y_unit)], color)


def tornado(changes: Mapping[str, tuple[float, float]], unit: str) -> str:
    """Return an SVG of two bars for each name, symmetric around 0: the change with a figure lowered and raised."""
    most = max([abs(value) for pair in changes.values() for value in pair] + [1e-9])
    scale = _scale(-most, most)
    marks = []
    for row, (name, pair) in enumerate(changes.items()):
        y = 8 + 22 * row
        marks.append(label(_LEFT - 6, y + 13, name, "end"))
        for value, color, direction in zip(pair, ("#4e79a7", "#f28e2b"), ("lower", "higher"), strict=True):
            x = min(scale(0), scale(value))
            title = f"{name} {direction}: {value:+.2f} {unit}"
            marks.append(_filled(x, y, abs(scale(value) - scale(0)), 17, color, title))
    height = 8 + 22 * len(changes)
    return _chart(
        height, [*marks, *_x_axis(-most, most, height, unit)], {"lower": "#4e79a7", "higher": "#f28e2b"}
    )


def _chart(height: float, marks: Iterable[str], color: Mapping[str, str] | None = None) -> str:
    """Return a drawing of ``marks`` over an x axis at ``height``, with a legend if ``color`` is set."""
    return drawing(WIDTH, height + _BOTTOM, marks) + (legend(color) if color else "")


def _scale(low: float, high: float) -> Scale:
    """Return the horizontal scale of a drawing; an empty range gets length 1."""
    return Scale(low, high if high > low else low + 1, _LEFT, WIDTH - _RIGHT)


def _vertical(low: float, high: float, height: float) -> Scale:
    """Return the vertical scale of a drawing of ``height``; an empty range gets length 1."""
    return Scale(low, high if high > low else low + 1, height, 8)


def _x_axis(low: float, high: float, height: float, unit: str) -> list[str]:
    """Return the marks of a horizontal axis with ticks and its unit."""
    scale = _scale(low, high)
    marks = [line(_LEFT, height, WIDTH - _RIGHT, height, _stroke("#999"))]
    marks += [label(scale(tick), height + 16, f"{tick:.6g}", "middle") for tick in _ticks(low, high)]
    return [*marks, label(WIDTH - _RIGHT, height + 31, unit, "end")]


def _y_axis(low: float, high: float, height: float, unit: str) -> list[str]:
    """Return the marks of a vertical axis with ticks and its unit."""
    scale = _vertical(low, high, height)
    marks = [line(_LEFT, height, _LEFT, 8, _stroke("#999"))]
    marks += [label(_LEFT - 6, scale(tick) + 4, f"{tick:.6g}", "end") for tick in _ticks(low, high)]
    return [*marks, label(6, 16, unit)]


def _ticks(low: float, high: float) -> list[float]:
    return round_ticks(low, high, 6, units=(1, 2, 2.5, 5, 10))


def _filled(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return box(x, y, width, height, f'fill="{color}"', title)


def _stroke(color: str) -> str:
    return f'stroke="{color}" stroke-width="1.5"'
