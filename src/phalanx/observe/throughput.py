"""Throughput and time left of a run, and numbers formatted for people.

Step times have outliers (a checkpoint, a page fault, a neighbor), so the typical step is the median
of the recent ones; what evaluations and checkpoints add is put back by the share of time spent in steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

RECENT_STEPS = 50


def typical(values: Sequence[float], recent: int = RECENT_STEPS) -> float | None:
    """The median of the last ``recent`` finite values; None if there is none."""
    finite = [value for value in values[-recent:] if math.isfinite(value)]
    return median(finite) if finite else None


def time_left_s(steps_left: int, step_s: Sequence[float], step_share: float = 1.0) -> float | None:
    """Return the seconds for ``steps_left`` steps of the typical recent time ``step_s``; None without any step
    time.

    ``step_share`` in (0, 1] is the part of wall time spent in steps: 0.5 doubles the estimate. Raises
    ``ValueError`` for another value.
    """
    if not 0 < step_share <= 1:
        raise ValueError(f"{step_share=} is no share of wall time: it must be above 0 and at most 1")
    step = typical(step_s)
    return None if step is None else max(0, steps_left) * step / step_share


def smooth(values: Sequence[float], half_span: int) -> list[float]:
    """Return the mean of each value and up to ``half_span`` neighbors on either side; all values must be finite.

    Centered, so that it does not lag behind a falling loss as an exponential average does. Near the start both
    sides shrink alike; near the end only the later side does.
    """
    sums = [0.0, *accumulate(values)]
    result = []
    for index in range(len(values)):
        first = index - min(half_span, index)
        last = min(len(values), index + min(half_span, index) + 1)
        result.append((sums[last] - sums[first]) / (last - first))
    return result


def format_duration(seconds: float | None) -> str:
    """Format seconds as ``4.2 s``, ``3:07``, ``2:03:09`` or ``5 d 02 h``; a dash for the unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    total_s = round(seconds)
    if total_s >= 2 * 86_400:
        days, rest = divmod(total_s, 86_400)
        return f"{days} d {rest // 3600:02d} h"
    hours, minutes = total_s // 3600, total_s // 60 % 60
    return f"{hours}:{minutes:02d}:{total_s % 60:02d}" if hours else f"{minutes}:{total_s % 60:02d}"


def format_count(number: float) -> str:
    """Format a number with three digits and a letter: 999, 12.3 k, 4.56 M, 7.89 G, 1.20 T. Not finite: "nan",
    "inf".
    """
    if not math.isfinite(number):
        return str(number)
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        # 999 950 and more would round to 1000 k: it is 1.00 M.
        if abs(number) >= 0.9995 * 10**power and abs(number) >= 1000:
            return f"{_three_digits(number / 10**power)} {letter}"
    return f"{number:.0f}" if float(number).is_integer() else _three_digits(number)


def format_bytes(size_bytes: float) -> str:
    """Format a size in powers of 1024: 512 B, 1.50 KiB, 12.1 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.0f}" if size >= 99.95 else f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"


# Robust standard deviation: a few outliers do not change it.
#
# 1.4826 times the median absolute deviation estimates the standard deviation of normal noise (Rousseeuw and Croux,
# "Alternatives to the Median Absolute Deviation", JASA 88, 1993). Loss spikes, stragglers and throughput are all judged by it.


MAD_TO_DEVIATION = 1.4826


def usual_deviation(values: Sequence[float], middle: float) -> float:
    """The standard deviation of ``values`` about ``middle``, by their median absolute deviation; of finite numbers, at least one."""
    return MAD_TO_DEVIATION * median(abs(value - middle) for value in values)
