"""How a node's workers enter an epoch: the coordinator's ``Bind``, translated into what each worker is told. Pure functions."""

from __future__ import annotations

from phalanx.fleet.core.commands import Bind, FromDisk, FromMemory, Resume
from phalanx.fleet.node import worker_link
from phalanx.hardware.local.network import join_address


def buddy_addresses(bind: Bind) -> dict[int, str]:
    """By rank, the address of the node that keeps the second copy of its snapshots in the epoch of ``bind``."""
    return {rank: join_address(b.host, b.data_port) for b in bind.buddies if b.data_port for rank in b.ranks}


def join_epoch(
    bind: Bind, rank: int, token: str, *, planned: bool, ended_unix_s: float
) -> worker_link.JoinEpoch:
    """The message by which a worker joins the epoch of ``bind`` as ``rank``.

    Args:
        bind: The coordinator's command.
        rank: One of this node's.
        token: The run's token under which the ranks of the epoch meet.
        planned: The last epoch that trained was not ended by a fault.
        ended_unix_s: When that one ended; 0 if there was none.
    """
    return worker_link.JoinEpoch(
        epoch=bind.epoch,
        attempt=bind.attempt,
        rank=rank,
        ranks=bind.ranks,
        meeting_point=bind.meeting_point,
        resume=_restore_from(bind.resume, first=rank == bind.places[0][1]),
        planned=planned,
        detected_unix_s=ended_unix_s,
        nonfinite_step=bind.nonfinite_step,
        token=token,
    )


def _restore_from(resume: Resume, *, first: bool) -> worker_link.RestoreFrom:
    """Translates the state that an epoch begins with into the worker link's message; the node's ``first`` rank speaks for its share."""
    if isinstance(resume, FromDisk):
        return worker_link.RestoreFrom(disk_step=resume.step)
    if not isinstance(resume, FromMemory):
        return worker_link.RestoreFrom()
    told = resume.holders if first or not resume.shared else ()
    holders = tuple(
        worker_link.SnapshotAddress(rank, join_address(h.host, h.data_port)) for h in told for rank in h.ranks
    )
    return worker_link.RestoreFrom(
        step=resume.step, ranks=resume.ranks, holders=holders, shared=resume.shared
    )
