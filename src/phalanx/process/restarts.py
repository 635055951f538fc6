"""Decides whether a process that has died is started again, and when.

A process that dies again and again without useful work is not helped by another start. The pauses double (exponential back-off), so that a
machine without memory or disk is not worn out by starts, and after a number of deaths in a row the process is given up. Progress counts, not
the time for which a process lived: on a busy machine, a process that cannot start takes long to fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_DEATHS = 10
"""Deaths in vain in a row after which a process is given up, unless its policy has another number; the pauses take some 43 s."""
_MOST_DOUBLINGS = 60


@dataclass(frozen=True)
class RestartPolicy:
    """Patience with a process that dies."""

    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    most_deaths: int | None = MOST_DEATHS
    """Deaths in vain in a row after which the process is given up; None: never."""

    def pause_s(self, in_vain: int) -> float | None:
        """Return the seconds to wait after ``in_vain`` deaths in a row: doubling from ``first_pause_s`` up to
        ``longest_pause_s``; None if the process is given up.
        """
        if self.most_deaths is not None and in_vain >= self.most_deaths:
            return None
        return min(
            self.longest_pause_s, self.first_pause_s * 2.0 ** min(max(0, in_vain - 1), _MOST_DOUBLINGS)
        )


@dataclass
class Restarts:
    """The deaths of one process."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    in_vain: int = 0
    """Deaths in a row without progress between them."""
    _standing: object = None

    def after_death(self, standing: object = None, *, was_useful: bool = False) -> float | None:
        """Count a death. Return the seconds to wait before the next start, None if there is to be none.

        ``standing`` is the position of the work, any value that changes with progress: the first death at a
        position begins a new row. ``was_useful``: the process worked for long enough; the death ends the row and is
        not counted.
        """
        if standing != self._standing:
            self.in_vain, self._standing = 0, standing
        self.in_vain = 0 if was_useful else self.in_vain + 1
        return self.policy.pause_s(self.in_vain)
