"""Retention: the checkpoints that may be deleted, and those that are copied to a store. Pure rules over step numbers.

The newest few are kept for restarts, and every n-th step permanently, for inspection or branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Rule that keeps the newest ``keep_last`` checkpoints, and permanently every step divisible by ``keep_every``.

    ``before``: for each of these steps the newest earlier checkpoint is kept too, so that a run can return to it.

    Raises ValueError if the rule would keep nothing.
    """

    keep_last: int
    keep_every: int | None = None
    before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last = {self.keep_last}: at least the newest checkpoint must be kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every = {self.keep_every}: must be at least 1, or left out")

    def expired(self, steps: Sequence[int]) -> list[int]:
        """Return the steps to delete, oldest first: all but the newest ``keep_last``, multiples of ``keep_every``, and
        the last before each of ``before``.
        """
        ordered = sorted(set(steps))
        newest = set(ordered[-self.keep_last :])
        permanent = {step for step in ordered if self.keep_every is not None and step % self.keep_every == 0}
        earlier = {
            max(candidates)
            for limit in self.before
            if (candidates := [step for step in ordered if step < limit])
        }
        return [step for step in ordered if step not in newest | permanent | earlier]


def is_copied(step: int, every_steps: int, last_step: int) -> bool:
    """Return True if ``step`` is copied to a store that takes steps divisible by ``every_steps`` (0: all). The last step always is."""
    return every_steps == 0 or step % every_steps == 0 or step == last_step
