"""Checkpoint retention: which checkpoints may be deleted, a pure rule over step numbers.

The newest few are kept to restart from, and every so-many steps one for good, to look back at or branch from.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Keeps the newest ``keep_last`` checkpoints, and every step divisible by ``keep_every`` for good.

    ``before``: steps of which the newest checkpoint that comes earlier is kept as well, so that one can go back to it.

    Raises ValueError where the rule would keep nothing.
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
        """The steps to delete, oldest first."""
        ordered = sorted(set(steps))
        newest = set(ordered[-self.keep_last :])
        for_good = {step for step in ordered if self.keep_every is not None and step % self.keep_every == 0}
        earlier = {max(found) for one in self.before if (found := [step for step in ordered if step < one])}
        return [step for step in ordered if step not in newest | for_good | earlier]


def is_copied(step: int, every_steps: int, last_step: int) -> bool:
    """True if a saved ``step`` is copied to a store that takes those divisible by ``every_steps`` (0: all); the run's last one always is."""
    return every_steps == 0 or step % every_steps == 0 or step == last_step
