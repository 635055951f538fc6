"""The differences of two replays as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.train.compare.observation import Compared

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
