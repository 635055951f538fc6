"""When a worker process that has ended is started again: at once, then later and later, and not at all if it never stays.

The pauses double (exponential back-off), so that a machine without memory or disk is not worn out by starts; a worker that has stayed for
a while begins anew. What ends again and again without staying is not mended by another start, and is given up, which whoever waits is told.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartRule:
    """How patient a service is with a worker."""

    first_s: float = 0.25
    longest_s: float = 30.0
    most: int = 5
    """Ends in a row, none of them after ``stayed_s``, with which a worker is given up."""
    stayed_s: float = 5.0
    """A worker that served for so long was no failed start."""


@dataclass
class Starts:
    """The lives of one worker so far."""

    failed: int = 0
    """Ends in a row that came too soon."""
    ended: int = 0


def after_end(rule: RestartRule, starts: Starts, served_s: float) -> float | None:
    """Counts an end after ``served_s`` seconds of service (0: it never came so far).

    Returns the seconds until the next start, None if there is to be none.
    """
    starts.ended += 1
    starts.failed = 0 if served_s >= rule.stayed_s else starts.failed + 1
    if starts.failed >= rule.most:
        return None
    return min(rule.longest_s, rule.first_s * 2.0 ** max(0, starts.failed - 1))
