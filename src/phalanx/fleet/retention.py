"""Which copies of the state may go: snapshots in memory, and checkpoints on disk. Pure rules over step numbers.

A snapshot may go when a newer one is safe, that is when every rank's own copy of it and its buddy's are complete: then
some common step is held at any moment, and at most the steps since then are lost. Checkpoints on disk follow the
rule of ``checkpoint.retention``, and what a recovery may need is protected from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.checkpoint.retention import expired
from phalanx.fleet.messages import Holding
from phalanx.fleet.state import FleetState


def droppable(held: Iterable[Holding], safe_step: int) -> tuple[Holding, ...]:
    """The snapshots that a node may overwrite, once all ranks' copies of ``safe_step`` are known to be complete."""
    return tuple(holding for holding in held if holding.step < safe_step)


def may_begin(newest_step: int, safe_step: int) -> bool:
    """Whether a rank with two buffers may begin a snapshot: only when its newest one is safe everywhere."""
    return newest_step <= safe_step


def checkpoints_to_delete(
    state: FleetState, *, keep_last: int, keep_every: int | None, audited_step: int | None = None
) -> list[int]:
    """Committed checkpoints that may be deleted, oldest first.

    With audits, the newest checkpoint of an audited step is kept: a rollback after a silent corruption ends there.
    Raises ValueError as ``checkpoint.retention.expired`` does.
    """
    protect = {step for step in state.durable if audited_step is not None and step <= audited_step}
    return expired(
        state.durable,
        keep_last=keep_last,
        keep_every=keep_every,
        protect=frozenset({max(protect)} if protect else ()),
    )
