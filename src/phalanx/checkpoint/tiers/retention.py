"""Which checkpoints may go: a pure rule over step numbers.

The newest few are kept to restart from, and every so-many steps one for good, to look back at or branch from.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `keep_last` checkpoints, every step divisible by `keep_every`, and the protected ones."""

    keep_last: int
    keep_every: int | None = None
    protect: frozenset[int] = frozenset()

    def expired(self, steps: Sequence[int]) -> list[int]:
        """The steps that this rule lets go."""
        return expired(steps, keep_last=self.keep_last, keep_every=self.keep_every, protect=self.protect)


def expired(
    steps: Sequence[int], *, keep_last: int, keep_every: int | None, protect: AbstractSet[int] = frozenset()
) -> list[int]:
    """The steps to delete, oldest first. Raises ValueError where the rule would keep nothing."""
    if keep_last < 1:
        raise ValueError(f"keep_last = {keep_last}: at least the newest checkpoint must be kept")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every = {keep_every}: must be at least 1, or left out")
    ordered = sorted(set(steps))
    newest = set(ordered[-keep_last:])
    for_good = {step for step in ordered if keep_every is not None and step % keep_every == 0}
    return [step for step in ordered if step not in newest | for_good | protect]
