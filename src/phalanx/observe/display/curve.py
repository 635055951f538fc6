"""The loss curve of a run as one SVG file, written by hand: no plotting library, some tens of kilobytes.

Training loss is drawn twice, raw and smoothed (a centerd moving average); held-out evaluations are
points. Loss is in nats a token and depends on the tokenizer; bits a byte does not, and can be held
against a compressor. On one held-out text the two differ by a constant factor, so one set of points
serves two axes: nats on the left, bits a byte on the right, with the line that ``xz -9`` reaches. The
factor is that of the latest evaluation.

Steps done again after a restart are drawn once, from the last attempt at them; dashes mark the steps
from which attempts went on. The colors follow the reader's light or dark setting, and the file brings
its own ground, so that it can be read on any page.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from phalanx.observe.events import Evaluated, Event, Restored, RunStarted, Step
from phalanx.observe.throughput import format_count, smooth
from phalanx.run.durable import write_atomically

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

Point = tuple[float, float]


class CurveError(ValueError):
    """There is nothing to draw yet."""


@dataclass(frozen=True)
class Series:
    """What a loss curve shows. Points are (step, loss in nats a token), steps ascending."""

    run: str
    train: Sequence[Point]
    held_out: Sequence[Point]
    restarts: Sequence[int]
    tokens: int
    attempts: int
    bits_per_byte_per_nat: float | None
    xz_bits_per_byte: float | None


def draw_curve(events: Iterable[Event], path: Path) -> None:
    """Write the curve to ``path``. A reader sees the old file or the new one, never half of it.

    Raises CurveError while there is no finite loss to draw.
    """
    write_atomically(path, svg_curve(events).encode())


def svg_curve(events: Iterable[Event]) -> str:
    """The curve as an SVG document. Raises CurveError while there is no finite loss to draw."""
    return _document(gather(events))


def gather(events: Iterable[Event]) -> Series:
    """The points of the surviving line of steps: what a restart did again is in it once."""
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
    """Bits a byte for one nat a token, on this text with this tokenizer."""
    if score.bits_per_byte is None or not score.loss:
        return None
    factor = score.bits_per_byte / score.loss
    return factor if 1 / FACTOR_MAX < factor < FACTOR_MAX else None


def _finite(points: Mapping[int, float]) -> list[Point]:
    return [(step, loss) for step, loss in sorted(points.items()) if abs(loss) < LOSS_MAX]


# --- from numbers to places ---------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """What part of the plane is shown."""

    last_step: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last_step

    def y(self, loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - self.low) / (self.high - self.low)


def _frame(series: Series, smoothed: Sequence[Point]) -> Frame:
    """All of the smoothed and the held-out loss and the baseline; raw spikes beyond that are cut off."""
    shown = [loss for _, loss in [*smoothed, *series.held_out]]
    if not shown:
        raise CurveError("there is no finite loss to draw yet: the run has logged no step or evaluation")
    baseline = _baseline(series)
    shown += [] if baseline is None else [baseline]
    low, high = min(shown), max(shown)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    last = max(step for step, _ in [*smoothed, *series.held_out])
    return Frame(max(1.0, last), low - margin, high + margin)


def _baseline(series: Series) -> float | None:
    """Where xz -9 lies on the axis of nats a token."""
    if series.xz_bits_per_byte is None or series.bits_per_byte_per_nat is None:
        return None
    baseline = series.xz_bits_per_byte / series.bits_per_byte_per_nat
    return baseline if abs(baseline) < LOSS_MAX else None


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``, about so many."""
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    gap = power * next(unit for unit in (1, 2, 5, 10) if unit * power >= rough * 0.999)
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [index * gap for index in range(first, last + 1)]


def envelope(points: Sequence[Point], columns: int) -> list[Point]:
    """At most ``2 * columns`` of the points, such that the line through them covers the same ground:
    the lowest and the highest of each column."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = []
    for column in range(columns):
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def _smoothed(train: Sequence[Point]) -> list[Point]:
    losses = smooth([loss for _, loss in train], max(2, round(SMOOTHING * len(train))))
    points = [(step, loss) for (step, _), loss in zip(train, losses, strict=True)]
    every = max(1, len(points) // COLUMNS)
    return points[:-1:every] + points[-1:]


# --- from places to SVG -------------------------------------------------------------------------


def _document(series: Series) -> str:
    smoothed = _smoothed(series.train)
    frame = _frame(series, smoothed)
    parts = [
        *_axes(frame, series.bits_per_byte_per_nat),
        *_restarts(frame, series.restarts),
        f'<path class="raw" clip-path="url(#plot)" d="{_path(frame, envelope(series.train, COLUMNS))}"/>',
        *_xz(frame, series),
        f'<path class="smooth" d="{_path(frame, smoothed)}"/>',
        *(_dot(frame.x(step), frame.y(loss)) for step, loss in series.held_out),
        _text(LEFT - 38, 32, series.run or "training run", "title"),
        _text(LEFT - 38, 51, _summary(series), "small"),
        *_legend(series),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" aria-label="{_attribute("Loss curve of " + series.run)}">',
            f"<style>{_style()}</style>",
            f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" '
            f'height="{BOTTOM - TOP}"/></clipPath>',
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _axes(frame: Frame, factor: float | None) -> list[str]:
    parts = []
    for loss in nice_ticks(frame.low, frame.high, 6):
        y = frame.y(loss)
        parts.append(_line(LEFT, y, RIGHT, y, "grid"))
        parts.append(_text(LEFT - 8, y + 4, f"{loss:.4g}", anchor="end"))
    if factor is not None:
        for bits in nice_ticks(frame.low * factor, frame.high * factor, 6):
            y = frame.y(bits / factor)
            parts.append(_line(RIGHT, y, RIGHT + 4, y, "axis"))
            parts.append(_text(RIGHT + 8, y + 4, f"{bits:.4g}"))
        parts.append(_text(WIDTH - 20, TOP - 12, "bits per byte", "small", anchor="end"))
    for step in nice_ticks(0, frame.last_step, 8):
        x = frame.x(step)
        parts.append(_line(x, BOTTOM, x, BOTTOM + 4, "axis"))
        parts.append(_text(x, BOTTOM + 19, _step_label(step), anchor="middle"))
    parts.append(_line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis"))
    parts.append(_text(LEFT - 38, TOP - 12, "loss (nats per token)", "small"))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 38, "step", "small", anchor="middle"))
    return parts


def _step_label(step: float) -> str:
    return f"{step:,.0f}" if step < 100_000 else format_count(step)


def _restarts(frame: Frame, steps: Sequence[int]) -> list[str]:
    parts = []
    for step in steps:
        x = frame.x(min(step, frame.last_step))
        parts.append(_line(x, TOP, x, BOTTOM, "restart"))
        if len(steps) <= MOST_RESTART_LABELS:
            # To the left of its line past the middle, so that it never leaves the plot.
            side = -5 if x > (LEFT + RIGHT) / 2 else 5
            parts.append(_text(x + side, TOP + 12, "restart", "small", anchor="end" if side < 0 else "start"))
    return parts


def _xz(frame: Frame, series: Series) -> list[str]:
    baseline = _baseline(series)
    if baseline is None:
        return []
    y = frame.y(baseline)
    label = f"xz -9: {series.xz_bits_per_byte:.3f} bits per byte"
    return [_line(LEFT, y, RIGHT, y, "xz"), _text(RIGHT - 6, y - 6, label, "small xz-label", anchor="end")]


def _legend(series: Series) -> list[str]:
    """From the right edge to the left, on the title's line."""
    entries: list[tuple[str, Callable[[float], str]]] = []
    if series.held_out:
        entries.append(("held out", lambda x: _dot(x + 11, 28)))
    if series.train:
        entries.append(("training, smoothed", lambda x: _line(x, 28, x + 22, 28, "smooth")))
        entries.append(("training", lambda x: _line(x, 28, x + 22, 28, "raw")))
    parts, right = [], float(WIDTH - 20)
    for label, key in entries:
        left = right - 6.3 * len(label) - 28
        parts += [key(left), _text(left + 28, 32, label)]
        right = left - 18
    return parts


def _summary(series: Series) -> str:
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


def _path(frame: Frame, points: Sequence[Point]) -> str:
    places = (f"{frame.x(step):.1f},{frame.y(loss):.1f}" for step, loss in points)
    return "M" + "L".join(places) if points else ""


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_content(text)}</text>'


def _content(text: str) -> str:
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def _attribute(text: str) -> str:
    return _content(text).replace('"', "&quot;")


def _style() -> str:
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
    rules = (
        "text{{fill:{soft}}}.title{{fill:{ink}}}.ground{{fill:{ground};stroke:{frame}}}"
        ".grid{{stroke:{grid}}}.axis,.restart{{stroke:{mark}}}.raw,.smooth{{stroke:{train}}}"
        ".held{{fill:{held};stroke:{ground}}}.xz{{stroke:{xz}}}.xz-label{{fill:{xz}}}"
        ".raw{{stroke-opacity:{raw}}}"
    )
    return rules.format_map(palette)
