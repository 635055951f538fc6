"""How far numbers usually are from the middle of them, by a measure that a few wild ones do not move.

1.4826 times the median absolute deviation estimates the standard deviation of normal noise (Rousseeuw and Croux, "Alternatives to the Median Absolute
Deviation", JASA 88, 1993). Loss spikes, stragglers and throughput are all judged by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MAD_TO_DEVIATION = 1.4826


def usual_deviation(values: Sequence[float], middle: float) -> float:
    """The standard deviation of ``values`` about ``middle``, by their median absolute deviation; of finite numbers, at least one."""
    return MAD_TO_DEVIATION * median(abs(one - middle) for one in values)
