"""The levels that an agent reports: what the workers of its node are in, all together, computed from them whenever somebody asks."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.fleet.core.commands import Bind
from phalanx.fleet.core.messages import NO_EPOCH, NO_STEP, Heartbeat, WorkerPhase
from phalanx.fleet.node.agent_actions import Identity, WorkerLife


def placed(workers: Sequence[WorkerLife]) -> list[WorkerLife]:
    """The workers that are in an epoch."""
    return [worker for worker in workers if worker.epoch != NO_EPOCH]


def meeting_points(workers: Sequence[WorkerLife], *, cleared: bool) -> tuple[str, ...]:
    """Where each worker would meet the others; empty words for those that are not warm, and for all of a node that is not ``cleared``."""
    return tuple(worker.meeting_point if cleared else "" for worker in workers)


def phase_of(workers: Sequence[WorkerLife], *, cleared: bool) -> WorkerPhase:
    """The phase of all workers together: that of the one that is furthest behind."""
    in_epoch = placed(workers)
    if not all(meeting_points(workers, cleared=cleared)):
        return WorkerPhase.COLD
    if not in_epoch:
        return WorkerPhase.WARM
    if any(worker.leaving for worker in in_epoch):
        return WorkerPhase.LEAVING
    return WorkerPhase.BOUND if all(worker.bound for worker in in_epoch) else WorkerPhase.BINDING


def heartbeat_of(
    identity: Identity, incarnation: int, workers: Sequence[WorkerLife], phase: WorkerPhase, *, leaving: bool
) -> Heartbeat:
    """The heartbeat of a node, with the newest epoch of its workers, and the slowest step and longest wait of those in one."""
    in_epoch = placed(workers)
    return Heartbeat(
        identity.node,
        incarnation,
        max(worker.epoch for worker in workers),
        min((worker.step for worker in in_epoch), default=NO_STEP),
        phase,
        max((worker.waiting_s for worker in in_epoch), default=0.0),
        leaving,
    )


def end_of_last_epoch(bind: Bind, *, planned: bool, ended_unix_s: float, unix_s: float) -> tuple[bool, float]:
    """Returns (planned, unix time) of the end of the last epoch that trained; time 0 if there was none.

    ``planned`` and ``ended_unix_s`` are what this node knows of it itself, the time 0 if it was not in that epoch.
    """
    if bind.left_s_ago is None:
        return planned, ended_unix_s
    told_unix_s = unix_s - bind.left_s_ago
    if not ended_unix_s:
        return bind.left_planned, told_unix_s
    return planned, min(ended_unix_s, told_unix_s)
