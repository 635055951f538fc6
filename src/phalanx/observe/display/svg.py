"""The parts of a chart written as SVG by hand: scales, round ticks, and the marks that are drawn on them.

A chart is text: it needs no plotting library and loads nothing, so it can be mailed, and read in ten years. A mark is the
text of one element. Its ``look`` is the attributes that color it: a class (``look_of``) where a style sheet gives light
and dark colors, as in the loss curve; or plain attributes (``fill="#4e79a7"``), as in a plan's report. A ``title`` is shown
by browsers as a tooltip.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

PlotPoint: TypeAlias = tuple[float, float]
"""x and y, as values or as pixels."""


@dataclass(frozen=True)
class Scale:
    """A linear axis: the values from ``low`` to ``high`` lie on the pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of ``value``."""
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)


def padded(values: Iterable[float], margin: float) -> tuple[float, float]:
    """Return the range of ``values``, not empty, with the share ``margin`` of it added on either side; wider than a point."""
    values = list(values)
    low, high = min(values), max(values)
    more = margin * (high - low) or 0.05 * abs(high) or 1.0
    # Between neighboring floats the margin is lost to rounding.
    return min(low - more, math.nextafter(low, -math.inf)), max(high + more, math.nextafter(high, math.inf))


def round_ticks(low: float, high: float, about: int, units: Sequence[float] = (1, 2, 5, 10)) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about ``about`` of them, one of ``units`` times a power of ten apart."""
    rough = (high - low) / max(1, about) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    gap = power * next(unit for unit in units if unit * power >= rough * 0.999)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [index * gap for index in range(first, last + 1)]


def look_of(kind: str) -> str:
    """The look of a mark that a style sheet colors by its class ``kind``."""
    return f'class="{kind}"' if kind else ""


def words(text: str) -> str:
    """``text`` as the content of an element or attribute; control characters, which XML forbids, become spaces."""
    return html.escape("".join(letter if letter.isprintable() else " " for letter in text))


def line(x1: float, y1: float, x2: float, y2: float, look: str, title: str = "") -> str:
    """A straight line."""
    return _element("line", look, f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"', _tooltip(title))


def path(points: Sequence[PlotPoint], look: str) -> str:
    """A line through ``points``, given in pixels."""
    places = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return _element("path", look, f'd="{"M" + places if points else ""}"')


def dot(x: float, y: float, radius: float, look: str, title: str = "") -> str:
    """A filled circle."""
    return _element("circle", look, f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"', _tooltip(title))


def box(x: float, y: float, width: float, height: float, look: str, title: str = "") -> str:
    """A filled rectangle, never so narrow that it vanishes."""
    sides = f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.05):.2f}" height="{height:.1f}"'
    return _element("rect", look, sides, _tooltip(title))


def label(x: float, y: float, text: str, anchor: str = "start", look: str = "") -> str:
    """A line of text whose start, middle or end (``anchor``) lies at ``x``, on the baseline ``y``."""
    return _element("text", look, f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"', words(text))


def drawing(width: float, height: float, marks: Iterable[str], *, caption: str = "") -> str:
    """The ``<svg>`` element of ``marks``. With a ``caption`` (read by screen readers) it is a document of its own."""
    own = f' aria-label="{words(caption)}" xmlns="http://www.w3.org/2000/svg"' if caption else ""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg{own} {size} role="img">' + "\n".join(marks) + "</svg>\n"


def _element(tag: str, look: str, places: str, content: str = "") -> str:
    opening = " ".join(part for part in (tag, look, places) if part)
    return f"<{opening}>{content}</{tag}>" if content else f"<{opening}/>"


def _tooltip(title: str) -> str:
    return f"<title>{words(title)}</title>" if title else ""
