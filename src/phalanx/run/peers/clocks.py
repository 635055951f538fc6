"""Whose clock is wrong, if the clocks of several machines do not agree with one of them: that one's, where all others are apart from it alike.

Clocks go wrong one by one; that several do by the same seconds, and none stays right, has one cause far more often than several.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIKE_S = 15.0
"""Offsets that differ by less are one offset: each is measured with the delay of its own message."""
_NAMED = 3
"""Hosts that are named; the others are counted."""


def own_clock_is_wrong(ahead_s: Mapping[str, float], agreeing: int, own: str) -> str:
    """Why the clock of ``own`` is the wrong one; empty if it may be right.

    Args:
        ahead_s: Host -> seconds by which its clock is ahead of that of ``own`` (negative: behind), for the hosts that are too far apart.
        agreeing: The number of other hosts whose clocks agree with it.
        own: The machine that has compared the clocks, as a user calls it.
    """
    offsets = sorted(ahead_s.values())
    if len(offsets) < 2 or len(offsets) <= agreeing or offsets[-1] - offsets[0] > ALIKE_S:
        return ""
    middle = offsets[len(offsets) // 2]
    names = sorted(ahead_s)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    beside = f"; it agrees with {agreeing}" if agreeing else "; it agrees with none"
    return (
        f"the clocks of {len(names)} hosts ({', '.join(names[:_NAMED])}{more}) are {abs(middle):.0f} s {'ahead of' if middle > 0 else 'behind'} "
        f"that of {own}, all alike{beside}: the clock of {own} is the wrong one, set it there (chrony, ntpd)"
    )
