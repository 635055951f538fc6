"""Retention of snapshots in memory: pure rules over step numbers, shared by the workers of a run and the simulator.

A snapshot may be dropped once a newer one is safe, that is, once every rank's own copy and its buddy's copy of the newer
one are complete. Then all ranks hold some common step at any moment, and a fault loses at most the steps since then.
(``phalanx.checkpoint.save.interval`` has the rule for checkpoints on disk.)
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.fleet.core.messages import RankSnapshot


def droppable(held: Iterable[RankSnapshot], safe_step: int) -> tuple[RankSnapshot, ...]:
    """The snapshots that a node may overwrite, once all ranks' copies of ``safe_step`` are known to be complete."""
    return tuple(holding for holding in held if holding.step < safe_step)


def may_begin(newest_step: int, safe_step: int) -> bool:
    """True if a rank with two buffers may begin a snapshot: only when its newest one is safe on all ranks."""
    return newest_step <= safe_step
