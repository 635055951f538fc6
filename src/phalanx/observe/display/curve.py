"""Draw the loss curve of a run as one SVG file of some tens of kilobytes.

Training loss is drawn twice, raw and smoothed (a centered moving average); held-out evaluations are
points. Loss is in nats a token and depends on the tokenizer; bits a byte does not, and can be held
against a compressor. On one held-out text the two differ by a constant factor, so one set of points
serves two axes: nats on the left, bits a byte on the right, with the line that ``xz -9`` reaches. The
factor is that of the latest evaluation.

Steps done again after a restart are drawn once, from the last attempt at them; dashes mark the steps
from which attempts went on. The colors follow the reader's light or dark setting, and the file brings
its own ground, so that it can be read on any page.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from phalanx.observe.event_log import EventLogError, read_events
from phalanx.observe.events import Evaluated, Event, Restored, RunStarted, Step
from phalanx.observe.throughput import format_count, smooth
from phalanx.run.directory.files import write_atomically

# Charts as hand-written SVG: scales, round ticks, and marks.
#
# A chart is text, needs no plotting library and loads nothing, so it can be mailed and still opens after years. A mark is the
# text of one SVG element. Its ``look`` is the attributes that color it: a class (``look_of``) if a style sheet has light and
# dark colors, as for the loss curve, or plain attributes (``fill="#4e79a7"``), as in a plan's report. Browsers show a ``title``
# as a tooltip.

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
    """Return (low, high) of ``values`` with the share ``margin`` of the range added on either side; always low <
    high.

    ``values`` must not be empty. Equal values get 5 % of their size, or 1 around 0.
    """
    values = list(values)
    low, high = min(values), max(values)
    more = margin * (high - low) or 0.05 * abs(high) or 1.0
    # Between neighboring floats the margin is lost to rounding.
    return min(low - more, math.nextafter(low, -math.inf)), max(high + more, math.nextafter(high, math.inf))


def round_ticks(low: float, high: float, about: int, units: Sequence[float] = (1, 2, 5, 10)) -> list[float]:
    """Return the multiples from ``low`` to ``high`` of a round gap, one of ``units`` times a power of ten: at most
    about ``about``.
    """
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


WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 58, 802, 92, 388
"""The edges of the plot itself."""
SMOOTHING = 0.01
"""The moving average takes this share of the training points from either side."""
COLUMNS = 500
"""At most so many columns of raw loss, each with its lowest and highest value."""
MOST_RESTART_LABELS = 4
LOSS_MAX, FACTOR_MAX = 1e9, 1e3
"""Beyond these a number is no loss and no ratio of units, but a run gone wrong: it is not drawn."""

SMALL, AXIS = look_of("small"), look_of("axis")

LIGHT = {
    "ground": "#ffffff",
    "frame": "#dcdcd6",
    "grid": "#eeeeea",
    "ink": "#1b1b1a",
    "soft": "#66655f",
    "train": "#2f6fd0",
    "held": "#d1590b",
    "mark": "#96948b",
    "xz": "#16825d",
    "raw": "0.35",
}
DARK = {
    "ground": "#16181c",
    "frame": "#32353b",
    "grid": "#25282d",
    "ink": "#ececea",
    "soft": "#a9a8a1",
    "train": "#6ba4f8",
    "held": "#f29a52",
    "mark": "#7d7c75",
    "xz": "#45bd91",
    "raw": "0.5",
}


class CurveError(ValueError):
    """There is nothing to draw yet."""


@dataclass(frozen=True)
class Series:
    """The data of a loss curve. Points are (step, loss in nats a token), steps ascending."""

    run: str
    train: Sequence[PlotPoint]
    held_out: Sequence[PlotPoint]
    restarts: Sequence[int]
    tokens: int
    attempts: int
    bits_per_byte_per_nat: float | None
    xz_bits_per_byte: float | None


def draw_curve(events: Iterable[Event], path: Path) -> None:
    """Write the curve to ``path``. A reader sees the old file or the new one, never half of it.

    Raises CurveError while there is no finite loss to draw, and ``OSError``.
    """
    write_atomically(path, svg_curve(events).encode())


def svg_curve(events: Iterable[Event]) -> str:
    """The curve as an SVG document. Raises CurveError while there is no finite loss to draw."""
    return _document(gather(events))


def gather(events: Iterable[Event]) -> Series:
    """Return the points of the surviving line of steps: after a restore, later points are dropped until computed
    again.

    Losses that are not finite are left out. Events must be in order.
    """
    train: dict[int, float] = {}
    held_out: dict[int, Evaluated] = {}
    restarts: list[int] = []
    run, tokens, attempts, factor, xz = "", 0, 0, None, None
    for event in events:
        attempts = max(attempts, event.attempt + 1)
        match event.body:
            case RunStarted() as body:
                run, xz = body.run, body.xz_bits_per_byte or xz
            case Restored(step=step):
                train = {at: loss for at, loss in train.items() if at <= step}
                held_out = {at: score for at, score in held_out.items() if at <= step}
                restarts += [step] if event.attempt else []
            case Step() as body:
                train[body.step] = body.loss
                tokens = body.tokens
            case Evaluated() as body:
                held_out[body.step] = body
                factor = _factor(body) or factor
    return Series(
        run=run,
        train=_finite(train),
        held_out=_finite({step: score.loss for step, score in held_out.items()}),
        restarts=sorted(set(restarts)),
        tokens=tokens,
        attempts=attempts,
        bits_per_byte_per_nat=factor,
        xz_bits_per_byte=xz,
    )


def _factor(score: Evaluated) -> float | None:
    """Return bits per byte for one nat per token, on this text with this tokenizer; ``None`` if it is unknown or
    implausible.
    """
    if score.bits_per_byte is None or not score.loss:
        return None
    factor = score.bits_per_byte / score.loss
    return factor if 1 / FACTOR_MAX < factor < FACTOR_MAX else None


def _finite(points: Mapping[int, float]) -> list[PlotPoint]:
    return [(step, loss) for step, loss in sorted(points.items()) if abs(loss) < LOSS_MAX]


# --- from numbers to pixels ----------------------------------------------------------------------


@dataclass(frozen=True)
class Axes:
    """The axis of steps and the axis of loss, in nats a token."""

    x: Scale
    y: Scale

    def place(self, points: Sequence[PlotPoint]) -> list[PlotPoint]:
        """The pixels of ``points`` (step, loss)."""
        return [(self.x(step), self.y(loss)) for step, loss in points]


def _axes_of(series: Series, smoothed: Sequence[PlotPoint]) -> Axes:
    """Return axes with all of the smoothed and the held-out loss and the baseline; raw spikes beyond that are cut off.

    Raises ``CurveError`` without a finite loss.
    """
    points = [*smoothed, *series.held_out]
    if not points:
        raise CurveError("there is no finite loss to draw yet: the run has logged no step or evaluation")
    shown, baseline = [loss for _, loss in points], _baseline(series)
    shown += [] if baseline is None else [baseline]
    last_step = max(1.0, *(step for step, _ in points))
    return Axes(Scale(0, last_step, LEFT, RIGHT), Scale(*padded(shown, 0.05), BOTTOM, TOP))


def _baseline(series: Series) -> float | None:
    """Return the loss of ``xz -9`` on the held-out text in nats per token; ``None`` if it is not known, or too
    large to draw.
    """
    if series.xz_bits_per_byte is None or series.bits_per_byte_per_nat is None:
        return None
    baseline = series.xz_bits_per_byte / series.bits_per_byte_per_nat
    return baseline if abs(baseline) < LOSS_MAX else None


def envelope(points: Sequence[PlotPoint], columns: int) -> list[PlotPoint]:
    """Return at most ``2 * columns`` of the points: the lowest and the highest of each of ``columns`` equal shares,
    in order.

    The line through them covers the same area. Few points are returned as they are.
    """
    if len(points) <= 2 * columns:
        return list(points)
    kept = []
    for column in range(columns):
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def _smoothed(train: Sequence[PlotPoint]) -> list[PlotPoint]:
    """Return the points with smoothed losses (a centered average over a share of them), thinned to about
    ``COLUMNS``.

    The last point is kept.
    """
    losses = smooth([loss for _, loss in train], max(2, round(SMOOTHING * len(train))))
    points = [(step, loss) for (step, _), loss in zip(train, losses, strict=True)]
    every = max(1, len(points) // COLUMNS)
    return points[:-1:every] + points[-1:]


# --- from pixels to SVG --------------------------------------------------------------------------


def _document(series: Series) -> str:
    """Return the drawing of a run's losses as an SVG document. Raises ``CurveError`` without a finite loss."""
    smoothed = _smoothed(series.train)
    axes = _axes_of(series, smoothed)
    raw = axes.place(envelope(series.train, COLUMNS))
    marks = [
        f"<style>{_style()}</style>",
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/></clipPath>',
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        *_grid(axes, series.bits_per_byte_per_nat),
        *_restarts(axes, series.restarts),
        path(raw, 'class="raw" clip-path="url(#plot)"'),
        *_xz(axes, series),
        path(axes.place(smoothed), look_of("smooth")),
        *(dot(x, y, 4, look_of("held")) for x, y in axes.place(series.held_out)),
        label(LEFT - 38, 32, series.run or "training run", look=look_of("title")),
        label(LEFT - 38, 51, _summary(series), look=SMALL),
        *_legend(series),
    ]
    return drawing(WIDTH, HEIGHT, marks, caption="Loss curve of " + series.run)


def _grid(axes: Axes, factor: float | None) -> list[str]:
    """Return the lines and labels of the axes: loss in nats on the left, bits per byte on the right if ``factor`` is known, steps
    below."""
    marks = []
    for loss in round_ticks(axes.y.low, axes.y.high, 6):
        y = axes.y(loss)
        marks += [
            line(LEFT, y, RIGHT, y, look_of("grid")),
            label(LEFT - 8, y + 4, f"{loss:.4g}", "end"),
        ]
    if factor is not None:
        for bits in round_ticks(axes.y.low * factor, axes.y.high * factor, 6):
            y = axes.y(bits / factor)
            marks += [line(RIGHT, y, RIGHT + 4, y, AXIS), label(RIGHT + 8, y + 4, f"{bits:.4g}")]
        marks.append(label(WIDTH - 20, TOP - 12, "bits per byte", "end", SMALL))
    for step in round_ticks(0, axes.x.high, 8):
        x = axes.x(step)
        name = f"{step:,.0f}" if step < 100_000 else format_count(step)
        marks += [line(x, BOTTOM, x, BOTTOM + 4, AXIS), label(x, BOTTOM + 19, name, "middle")]
    return [
        *marks,
        line(LEFT, BOTTOM, RIGHT, BOTTOM, AXIS),
        label(LEFT - 38, TOP - 12, "loss (nats per token)", look=SMALL),
        label((LEFT + RIGHT) / 2, BOTTOM + 38, "step", "middle", SMALL),
    ]


def _restarts(axes: Axes, steps: Sequence[int]) -> list[str]:
    """Return a vertical line for each restart step; with labels only if there are few."""
    marks = []
    for step in steps:
        x = axes.x(min(step, axes.x.high))
        marks.append(line(x, TOP, x, BOTTOM, look_of("restart")))
        if len(steps) <= MOST_RESTART_LABELS:
            # To the left of its line past the middle, so that it never leaves the plot.
            left = x > (LEFT + RIGHT) / 2
            marks.append(
                label(x - 5 if left else x + 5, TOP + 12, "restart", "end" if left else "start", SMALL)
            )
    return marks


def _xz(axes: Axes, series: Series) -> list[str]:
    """Return the line of the baseline of ``xz -9``; empty if it is not known."""
    baseline = _baseline(series)
    if baseline is None:
        return []
    y = axes.y(baseline)
    name = f"xz -9: {series.xz_bits_per_byte:.3f} bits per byte"
    return [
        line(LEFT, y, RIGHT, y, look_of("xz")),
        label(RIGHT - 6, y - 6, name, "end", look_of("small xz-label")),
    ]


def _legend(series: Series) -> list[str]:
    """Return the legend's marks on the title's line, from the right edge to the left; kinds without points are left
    out.
    """
    entries: list[tuple[str, Callable[[float], str]]] = []
    if series.held_out:
        entries.append(("held out", lambda x: dot(x + 11, 28, 4, look_of("held"))))
    if series.train:
        entries.append(("training, smoothed", lambda x: line(x, 28, x + 22, 28, look_of("smooth"))))
        entries.append(("training", lambda x: line(x, 28, x + 22, 28, look_of("raw"))))
    marks, right = [], float(WIDTH - 20)
    for name, key in entries:
        left = right - 6.3 * len(name) - 28
        marks += [key(left), label(left + 28, 32, name)]
        right = left - 18
    return marks


def _summary(series: Series) -> str:
    """Return the text under the title: steps, tokens, attempts if several, and last held-out loss. Needs at least
    one point.
    """
    last_step = max(step for step, _ in [*series.train, *series.held_out])
    parts = [f"{last_step:,.0f} steps"]
    parts += [f"{format_count(series.tokens)} tokens"] if series.tokens else []
    parts += [f"{series.attempts} attempts"] if series.attempts > 1 else []
    if series.held_out:
        loss = series.held_out[-1][1]
        factor = series.bits_per_byte_per_nat
        bits = "" if factor is None else f" = {loss * factor:.3f} bits per byte"
        parts.append(f"held out at the end: {loss:.3f} nats per token{bits}")
    return "  ·  ".join(parts)


def _style() -> str:
    """Return the CSS of the drawing, with the dark colors for a dark scheme."""
    # Plain colors, not CSS variables, which many viewers outside browsers do not know.
    layout = (
        'text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}'
        ".title{font-size:16px;font-weight:600}.small{font-size:11px}"
        ".raw{fill:none;stroke-linejoin:round}"
        ".smooth{fill:none;stroke-width:2;stroke-linejoin:round}"
        ".held{stroke-width:1.5}.xz{stroke-width:1.5;stroke-dasharray:7 4}.restart{stroke-dasharray:3 4}"
    )
    return f"{layout}{_colors(LIGHT)}@media (prefers-color-scheme:dark){{{_colors(DARK)}}}"


def _colors(palette: Mapping[str, str]) -> str:
    """Return the CSS rules of a palette: names of roles to colors."""
    rules = (
        "text{{fill:{soft}}}.title{{fill:{ink}}}.ground{{fill:{ground};stroke:{frame}}}"
        ".grid{{stroke:{grid}}}.axis,.restart{{stroke:{mark}}}.raw,.smooth{{stroke:{train}}}"
        ".held{{fill:{held};stroke:{ground}}}.xz{{stroke:{xz}}}.xz-label{{fill:{xz}}}"
        ".raw{{stroke-opacity:{raw}}}"
    )
    return rules.format_map(palette)


# Redraw a run's loss curve while its events are shown, within a small share of one processor.
#
# A drawing reads all events from the file, so its cost grows with the run. The pause before the next one is a multiple of the
# time that the last one took. The process that shows the run draws; ranks do not.


EVERY_S = 30.0
SHARE = 0.02
"""The largest share of the time that is spent on drawing."""


def draw_run(file: Path, curve: Path) -> None:
    """Draw the run in the event file ``file`` to ``curve``; do nothing if it cannot be drawn."""
    with suppress(CurveError, EventLogError, OSError):
        draw_curve(read_events(file), curve)


def keep_drawn(
    events: Iterable[Event],
    file: Path,
    curve: Path,
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[Path, Path], None] = draw_run,
) -> Iterator[Event]:
    """Yield ``events``, and after a step at intervals call ``draw(file, curve)``, which draws the run's event file.

    The interval is at least ``EVERY_S``, longer if drawing is slow. If it has drawn at all, it draws once more at
    the end, since the run itself may have drawn before. Errors of ``draw`` are raised.
    """
    due_s, drawn = clock() + EVERY_S, False
    for event in events:
        yield event
        if isinstance(event.body, Step) and clock() >= due_s:
            began_s, drawn = clock(), True
            draw(file, curve)
            now_s = clock()
            due_s = now_s + max(EVERY_S, (now_s - began_s) / SHARE)
    if drawn:
        draw(file, curve)
