"""Draws a heat map of ranks in plain text: one line for each group of ranks, time to the right, a taller bar for a larger number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from phalanx.observe.rank_stream import HeatMap

_BARS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_MOST_WIDE = 4
"""Characters of one bar, where there are few."""
_LEAST_RANGE = 0.1
"""A range of numbers narrower than this part of their median is drawn as if it were so wide: noise shall not look like news."""


def text_map(picture: HeatMap, unit: float, width: int) -> Iterator[str]:
    """The lines of ``picture``: what a bar stands for, then its rows, ``width`` wide if need be. Numbers are shown in ``unit``."""
    known = picture.values[~np.isnan(picture.values)]
    if not known.size:
        yield "nothing is known"
        return
    low, high = _range(known)
    yield f"{_BARS[0]} {low / unit:.3g}   {_BARS[-1]} {high / unit:.3g}   {_UNKNOWN} not known"
    labels = [_label(picture, row) for row in range(len(picture.row_ranks))]
    margin, columns = max(map(len, labels)), len(picture.column_steps)
    wide = max(1, min(_MOST_WIDE, width // columns))
    for label, values in zip(labels, picture.values, strict=True):
        yield f"{label:>{margin}} {''.join(wide * _bar(value, low, high) for value in values.tolist())}"
    first, last = (f"{picture.column_steps[end]:,}" for end in (0, -1))
    left = wide * columns - len(last)
    yield f"{'step':>{margin}} {first if left > len(first) else '':<{max(0, left)}}{last}"


def _range(known: NDArray[np.float32]) -> tuple[float, float]:
    low, middle, high = (float(np.quantile(known, share)) for share in (0.0, 0.5, 1.0))
    return low, max(high, low + _LEAST_RANGE * middle)


def _label(picture: HeatMap, row: int) -> str:
    first = int(picture.row_ranks[row])
    after = int(picture.row_ranks[row + 1]) if row + 1 < len(picture.row_ranks) else picture.ranks
    return f"{first}" if after == first + 1 else f"{first}-{after - 1}"


def _bar(value: float, low: float, high: float) -> str:
    if np.isnan(value):
        return _UNKNOWN
    share = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
