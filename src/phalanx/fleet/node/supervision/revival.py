"""The decision whether a process that has died is started again, and when.

A process that dies again and again without the run getting any further will not be saved by another start: the pauses double
(exponential back-off), and after a number of deaths it is given up. Progress is what counts, not the seconds that a process lived: on a
busy machine, one that cannot start takes long to say so.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
MOST_DEATHS = 10
"""Deaths in a row, without the run getting any further between them, after which a process is given up; the pauses take some 43 s."""


@dataclass
class Revival:
    """The deaths of one process."""

    in_vain: int = 0
    """Deaths in a row between which the run got no further."""
    first_pause_s: float = FIRST_PAUSE_S
    """Pause before the first restart; it doubles with each further death."""
    _stood_at: object = None

    def after_death(self, stands_at: object) -> float | None:
        """Counts a death. Returns the seconds to wait before the next start; None if there is to be none.

        Args:
            stands_at: Where the run stands, as any value that differs once it has got further; None if that is not known.
        """
        self.in_vain = self.in_vain + 1 if stands_at == self._stood_at else 1
        self._stood_at = stands_at
        if self.in_vain >= MOST_DEATHS:
            return None
        return min(self.first_pause_s * 2.0 ** (self.in_vain - 1), _LONGEST_PAUSE_S)
