"""Which copies of the state in memory may go. Pure rules over step numbers, for the workers of a run and for the simulator.

A snapshot may go when a newer one is safe, that is when every rank's own copy of it and its buddy's are complete: then
some common step is held at any moment, and at most the steps since then are lost. (Checkpoints on disk follow the rule of
``checkpoint.retention``.)
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.fleet.core.messages import HeldSnapshot


def droppable(held: Iterable[HeldSnapshot], safe_step: int) -> tuple[HeldSnapshot, ...]:
    """The snapshots that a node may overwrite, once all ranks' copies of ``safe_step`` are known to be complete."""
    return tuple(holding for holding in held if holding.step < safe_step)


def may_begin(newest_step: int, safe_step: int) -> bool:
    """Whether a rank with two buffers may begin a snapshot: only when its newest one is safe everywhere."""
    return newest_step <= safe_step
