"""Asynchronous checkpointing: the training step pays one memory copy, a background thread does the rest.

``save`` stages this rank's share and returns. A background thread writes it to the tier, and collects other ranks' shares if that is this
rank's part (``Tier.collect``). On rank 0 it also commits the step and deletes expired ones. Ranks meet only through the tier, without
collectives. So a save cannot disturb the trainer's communication, and a dead peer costs a timeout of rank 0's background thread. ``poll``
reports failed saves; they never raise into the training loop.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.checkpoint.committed.restore import Copies, Shard
from phalanx.checkpoint.format.boxes import Box, share_of
from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError
from phalanx.checkpoint.save.save_schedule import Retention
from phalanx.checkpoint.save.staging import StagedImage, StagingBuffers
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, Tier, always

_log = logging.getLogger(__name__)

SaveStatus = Literal["committed", "written", "existed", "failed"]


@dataclass(frozen=True, slots=True)
class SaveReceipt:
    """Cost of a ``save`` to the training step: ``stall_s`` in total, with ``waited_s`` for a buffer and ``copied_s`` for the copy.

    ``staged`` is False if the step was already committed and nothing was done.
    """

    step: int
    staged: bool
    nbytes: int
    stall_s: float
    waited_s: float = 0.0
    copied_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """Outcome of a save. Rank 0 reports "committed", other ranks "written": their share is durable.

    "existed": the step was committed before. "failed": see ``error``; training and older checkpoints are unaffected. ``deleted``: the expired
    steps that were deleted; ``retention_error`` is the reason if deletion failed.
    """

    step: int
    status: SaveStatus
    nbytes: int
    """Bytes of all ranks for a committed checkpoint, else those of this rank's share."""
    seconds: float
    error: CheckpointError | None = None
    deleted: tuple[int, ...] = ()
    retention_error: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    draft: Draft
    staged: StagedImage
    record: StepRecord
    required: tuple[Box, ...]


class AsyncSaver:
    """Saves checkpoints of a job of ``world_size`` ranks, of which this one is ``rank``, to ``tier``.

    ``replica`` of ``replicas`` equal ranks: all of them have the same plain shards (with default ``copies``), and each writes its share.
    ``attempt`` must be the same on all ranks and new after each restart or rollback. ``timeout_s`` limits the wait for other ranks' shares.
    ``buffers``: with 1 a save waits while the previous one is being written, 2 take twice the host memory and avoid that. Rank 0 applies
    ``retention`` after each commit. ``authorize`` is called on rank 0 before anything is committed or removed. It raises a CheckpointError if
    this job may no longer change the tier. On rank 0 the constructor sweeps away the unfinished drafts of other attempts.
    """

    def __init__(
        self,
        tier: Tier,
        rank: int,
        world_size: int,
        replica: int = 0,
        replicas: int = 1,
        attempt: int = 0,
        *,
        timeout_s: float = 600.0,
        buffers: int = 1,
        retention: Retention | None = None,
        authorize: Callable[[], None] = always,
    ) -> None:
        """Start the thread that writes. Rank 0 also authorizes itself and removes drafts of other attempts.

        Raises ValueError for a rank out of range, and on rank 0 the errors of ``authorize`` and of the tier.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        self._tier = tier
        self._rank = rank
        self._world_size = world_size
        self._copies = Copies(replica, replicas)
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._retention = retention
        self._authorize = authorize
        self._staging = StagingBuffers(buffers=buffers)
        self._share: tuple[tuple[tuple[Box, Copies], ...], list[tuple[int, Box]]] | None = None
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._outcomes: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._closed = False
        if rank == 0:
            authorize()
            tier.sweep(attempt)
        # A daemon thread: an interpreter that exits without close() must not wait for a slow disk. The draft is abandoned.
        self._thread = threading.Thread(target=self._work, name="checkpoint-save", daemon=True)
        self._thread.start()

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Allocate the staging buffers now rather than in the first save."""
        self._staging.prepare(self._own(shards))

    def save(
        self,
        step: int,
        shards: Sequence[Shard],
        extra: Mapping[str, object],
    ) -> SaveReceipt:
        """Stage this rank's share of ``shards`` for ``step`` and return; every rank calls this with its own shards.

        ``extra`` is small JSON, copied at once; rank 0's is stored. The tensors may change as soon as this returns (on
        CUDA: after ``fence``). Raises TypeError if ``extra`` is not JSON, RuntimeError after ``close``. A step that is
        already committed is skipped. Blocks until a staging buffer is free and the copy is made; a thread then writes.
        """
        if self._closed:
            raise RuntimeError(f"save of step {step}: the saver is closed")
        begin = time.perf_counter()
        # On the critical path: extra by way of JSON (a copy, and a check), then one memory copy of this rank's share.
        record = StepRecord(step, self._world_size, json.loads(json.dumps(dict(extra))))
        if self._tier.has(step):
            _log.info("step %d is committed already; nothing to save", step)
            self._outcomes.put(SaveOutcome(step, "existed", 0, 0.0))
            return SaveReceipt(step, False, 0, time.perf_counter() - begin)
        staged = self._staging.stage(self._own(shards))
        # A tensor of rank 0 that is in no rank's share makes the commit fail.
        required = tuple(shard.box for shard in shards)
        self._jobs.put(_Job(Draft(step, self._attempt), staged, record, required))
        stall_s = time.perf_counter() - begin
        return SaveReceipt(step, True, staged.image.layout.nbytes, stall_s, staged.waited_s, staged.copied_s)

    def keep_before(self, steps: Sequence[int]) -> None:
        """Keep the newest checkpoint before each of these steps, from the next commit on."""
        if self._retention is not None:
            self._retention = replace(self._retention, before=tuple(steps))

    def fence(self) -> None:
        """Order the copies from the GPU before later changes of the weights. Call it before the optimizer changes them. No effect on CPU."""
        self._staging.fence()

    def poll(self) -> list[SaveOutcome]:
        """Return the outcomes of saves that have ended since the last call, in order."""
        outcomes: list[SaveOutcome] = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def wait(self) -> None:
        """Wait until every save so far has ended, successfully or not."""
        self._jobs.join()

    def cancel(self) -> None:
        """Abandon the current saves, soon; they end as "failed". The saver can then only be closed."""
        self._closed = True
        self._cancelled.set()

    def close(self) -> None:
        """Wait for the current saves and stop the thread. Calls after the first do nothing."""
        self._closed = True
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            self._staging.close()

    def _own(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return this rank's share of the write: of each box that several ranks have, the part that this rank writes,
        as a view. Cached by boxes.
        """
        key = tuple((shard.box, shard.copies) for shard in shards)
        if self._share is None or self._share[0] != key:
            self._share = key, _own_boxes(shards, self._copies)
        return [
            shards[index]
            if shards[index].box == box
            else replace(shards[index], box=box, tensor=shards[index].part(box))
            for index, box in self._share[1]
        ]

    def _work(self) -> None:
        """Write the queued saves in order until ``close``, and queue their outcomes."""
        while (job := self._jobs.get()) is not None:
            try:
                self._outcomes.put(self._finish(job))
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _finish(self, job: _Job) -> SaveOutcome:
        """Write this rank's image and, on rank 0, also after its failure, commit the save and delete expired steps.
        Return the outcome, with the bytes of all ranks if committed; errors are logged.
        """
        begin = time.perf_counter()
        nbytes = job.staged.image.layout.nbytes
        # In the background: every rank writes its share; rank 0 then waits for the others', commits, and deletes old steps.
        error = self._write(job) or self._collect(job)
        if self._rank == 0:
            # Also after its own failure: the commit then abandons the draft at once.
            committed = self._commit(job)
            if isinstance(committed, CheckpointError):
                error = error or committed
            else:
                nbytes = committed
        seconds = time.perf_counter() - begin
        if error is not None:
            _log.error("checkpoint of step %d failed; training continues: %s", job.draft.step, error)
            return SaveOutcome(job.draft.step, "failed", nbytes, seconds, error)
        if self._rank != 0:
            return SaveOutcome(job.draft.step, "written", nbytes, seconds)
        deleted, retention_error = self._retain()
        return SaveOutcome(job.draft.step, "committed", nbytes, seconds, None, deleted, retention_error)

    def _write(self, job: _Job) -> CheckpointError | None:
        """Write the staged image and release its buffer. Return None, or the error.

        An error is recorded in the draft for the other ranks, unless the save was abandoned.
        """
        try:
            self._tier.write(job.draft, self._rank, job.staged.wait(), cancelled=self._cancelled.is_set)
        except Exception as error:
            return self._report(job.draft, as_checkpoint_error(error))
        finally:
            self._staging.release(job.staged)
        return None

    def _collect(self, job: _Job) -> CheckpointError | None:
        """Collect the catalog of the ranks that this one leads, if any. Return None, or the error, of any kind, as CheckpointError."""
        try:
            self._tier.collect(
                job.draft,
                self._rank,
                self._world_size,
                timeout_s=self._timeout_s,
                cancelled=self._cancelled.is_set,
            )
        except Exception as error:
            return as_checkpoint_error(error)
        return None

    def _report(self, draft: Draft, error: CheckpointError) -> CheckpointError:
        """Record in the draft that this rank's share failed, unless the save was abandoned; return the error."""
        if isinstance(error, AbandonedError):
            return error
        try:
            self._tier.fail(draft, self._rank, str(error))
        except CheckpointError as report_error:
            # Rank 0 then detects it by its timeout.
            _log.warning("rank %d could not report that its share failed: %s", self._rank, report_error)
        return error

    def _commit(self, job: _Job) -> int | CheckpointError:
        """Commit the step, after waiting for all ranks; return the bytes of all ranks, or the error, of any kind, as CheckpointError."""
        try:
            return self._tier.commit(
                job.draft,
                job.record,
                timeout_s=self._timeout_s,
                required=job.required,
                authorize=self._authorize,
                cancelled=self._cancelled.is_set,
            )
        except Exception as error:
            return as_checkpoint_error(error)

    def _retain(self) -> tuple[tuple[int, ...], CheckpointError | None]:
        """Delete expired steps after a check that this run may still write. Return the deleted steps, and the error, also of the check, which
        is logged and not raised."""
        deleted: list[int] = []
        try:
            self._authorize()
            for step in self._retention.expired(self._tier.steps()) if self._retention else ():
                self._tier.delete(step)
                deleted.append(step)
        except Exception as error:
            _log.warning("expired checkpoints could not be deleted: %s", error)
            return tuple(deleted), as_checkpoint_error(error)
        return tuple(deleted), None


def as_checkpoint_error(error: Exception) -> CheckpointError:
    """Return the error itself if it is a CheckpointError, else one that names it and has it as its cause."""
    if isinstance(error, CheckpointError):
        return error
    unexpected = CheckpointError(f"unexpected {type(error).__name__}: {error}")
    unexpected.__cause__ = error
    return unexpected


def _own_boxes(shards: Sequence[Shard], default: Copies) -> list[tuple[int, Box]]:
    """Return the boxes that this rank writes, its share among the ranks with the same copies, each with the index of its source shard."""
    by_copies: dict[Copies, list[int]] = {}
    for index, shard in enumerate(shards):
        copies = default if shard.copies == Copies() else shard.copies
        by_copies.setdefault(copies, []).append(index)
    own: list[tuple[int, Box]] = []
    for copies, members in by_copies.items():
        by_name: dict[str, list[int]] = {}
        for index in members:
            by_name.setdefault(shards[index].box.name, []).append(index)
        for box in share_of([shards[index].box for index in members], copies.index, copies.count):
            source = next(index for index in by_name[box.name] if shards[index].box.contains(box))
            own.append((source, box))
    return own
