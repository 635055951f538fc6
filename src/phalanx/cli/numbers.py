"""Numbers, sizes, ages and the differences of two replays, as text for people."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.train.compare.observation import Compared


def share(value: float) -> str:
    """A fraction in percent."""
    return f"{value:.1%}"


def utilization(value: float) -> str:
    """MFU in percent, marked where it is above the peak that it is a share of: that was measured when the run began, and the machine
    was busier then."""
    return share(value) + ("!" if value > 1 else "")


ABOVE_PEAK = "mfu!: above the measured peak, so other work slowed that measurement when the run began"


def age(seconds: float) -> str:
    """A span of time back from now, to its largest unit."""
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def moment(unix_s: float) -> str:
    """A point in time by the clock of this machine, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def size(count: int) -> str:
    """A number of bytes in the unit in which it has one to three digits before the point."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"


# Differences of two replays as lines of text.

MOST = 8
"""Tensors and modules that are listed; the rest are counted."""


def number_text(value: float | None) -> str:
    """A number with all of its bits, in decimals and in hexadecimal."""
    return "none" if value is None else f"{value!r} ({float(value).hex()})"


def left_out_lines(compared: Compared) -> Iterator[str]:
    """Yield a line for the modules that two replays could not be compared in, if any."""
    # A module in lanes is called once for each, and may have several results; a reader wants to know which module.
    names = list(
        dict.fromkeys(re.sub(r"( \(call \d+\))?(\[\d+\])?$", "", name) for name in compared.left_out)
    )
    if names:
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        yield f"not compared, because the layouts cut it differently: {', '.join(names[:MOST])}{more}"
