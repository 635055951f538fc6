"""Copies of a run's checkpoints in an object store: made in the background from what is committed on disk, by all ranks together.

A step is offered once its save has ended. Each rank's thread waits until it is committed, copies every n-th of its files, and rank 0
commits the copy when all are there (``committed/copying.py``). Whatever fails is reported by ``poll`` and tried again with the next step
that is offered; it never raises into training. Ranks meet through disk and store alone.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.checkpoint.committed.copying import ObjectDraft, RateLimit, commit_copy, copy_share
from phalanx.checkpoint.committed.retention import Retention
from phalanx.checkpoint.format.errors import (
    AbandonedError,
    CheckpointError,
    NoSuchStepError,
    StorageError,
)
from phalanx.checkpoint.save.saver import as_checkpoint_error
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_CANCEL_S = 10.0


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """How a step's copy ended on this rank: ``nbytes`` of it were copied here. Without an ``error`` rank 0 has committed it.

    ``retention_error``: why expired copies could not be deleted.
    """

    step: int
    nbytes: int
    seconds: float
    error: CheckpointError | None = None
    retention_error: CheckpointError | None = None


class Mirror:
    """Copies checkpoints from ``disk`` to ``store`` for rank ``rank`` of ``ranks``, which all offer the same steps.

    ``attempt`` must be the same on all ranks and new after each restart. ``mib_s`` limits this rank's upload, in MiB/s; 0 is no limit.
    ``timeout_s``: how long rank 0 waits for the other ranks' files, and they for the commit on disk. ``retention``, used by rank 0, is
    applied to the store after each copy.
    """

    def __init__(
        self,
        disk: DiskTier,
        store: ObjectTier,
        rank: int,
        ranks: int,
        attempt: int,
        retention: Retention,
        *,
        mib_s: float = 0.0,
        timeout_s: float = 600.0,
    ) -> None:
        self._disk, self._store, self._rank, self._ranks = disk, store, rank, ranks
        self._tag = str(attempt)
        self._retention = retention
        self._timeout_s = timeout_s
        self._cancelled = threading.Event()
        self._limit = RateLimit(mib_s, self._cancelled.is_set)
        self._pending: list[int] = []
        """Steps that were offered, and are not known to be in the store."""
        self._offered: queue.Queue[int | None] = queue.Queue()
        self._outcomes: queue.SimpleQueue[CopyOutcome] = queue.SimpleQueue()
        # A daemon: an interpreter that exits without close() must not wait for a slow network.
        self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the copies are."""
        return self._store.store.url

    def offer(self, step: int) -> None:
        """Has ``step`` copied, whose save has ended on this rank; returns at once."""
        self._offered.put(step)

    def poll(self) -> list[CopyOutcome]:
        """The outcomes of copies that have ended since the last call, in order."""
        outcomes: list[CopyOutcome] = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until every copy so far has ended, one way or the other; return False if ``timeout_s`` passed before."""
        with self._offered.all_tasks_done:
            return self._offered.all_tasks_done.wait_for(
                lambda: not self._offered.unfinished_tasks, timeout_s
            )

    def cancel(self) -> None:
        """Gives up the copies under way, soon. The mirror can then only be closed."""
        self._cancelled.set()

    def close(self) -> None:
        """Wait for the copies under way, if they were cancelled only for so long as a store that answers takes, and stop the thread."""
        if self._thread.is_alive():
            self._offered.put(None)
            self._thread.join(_CANCEL_S if self._cancelled.is_set() else None)

    def _work(self) -> None:
        if self._rank == 0:
            try:
                self._store.sweep(self._tag)
            except CheckpointError as error:
                _log.warning("what killed uploads left in %s could not be removed: %s", self.url, error)
        while (step := self._offered.get()) is not None:
            try:
                self._copy_pending(step)
            finally:
                self._offered.task_done()
        self._offered.task_done()

    def _copy_pending(self, step: int) -> None:
        todo = sorted({*self._pending, step})
        self._pending = []
        down: CheckpointError | None = None
        for one in todo:
            # A store that has just failed for one step is not waited for again for each of the others.
            outcome = self._copied(one) if down is None else CopyOutcome(one, 0, 0.0, down)
            if outcome is None:
                continue
            self._outcomes.put(outcome)
            if outcome.error is None:
                continue
            _log.error("step %d was not copied to %s; training goes on: %s", one, self.url, outcome.error)
            down = outcome.error if isinstance(outcome.error, StorageError) else None
            if self._disk.has(one):
                self._pending.append(one)

    def _copied(self, step: int) -> CopyOutcome | None:
        """Copies this rank's share of a step; None if the store has it already."""
        began_s, nbytes, committed = time.monotonic(), 0, False
        try:
            if self._store.has(step):
                return None
            self._await_commit(step)
            committed = True
            draft = ObjectDraft(self._store, step, self._disk.index_bytes(step), self._tag)
            nbytes = copy_share(self._disk, step, draft, self._rank, self._ranks, limit=self._limit)
            if self._rank == 0:
                commit_copy(
                    self._disk,
                    step,
                    draft,
                    timeout_s=self._timeout_s,
                    cancelled=self._cancelled.is_set,
                )
        except Exception as error:
            found = as_checkpoint_error(error)
            if committed and not self._disk.has(step):
                found = AbandonedError(
                    f"step {step} was deleted from disk before it was copied: keep more steps (checkpoint.keep_last), copy fewer "
                    "(checkpoint.store_every_steps) or faster (checkpoint.store_mib_s)"
                )
            return CopyOutcome(step, nbytes, time.monotonic() - began_s, found)
        retention_error = self._retain() if self._rank == 0 else None
        return CopyOutcome(step, nbytes, time.monotonic() - began_s, None, retention_error)

    def keep_before(self, steps: Sequence[int]) -> None:
        """From the next copy on, the newest copy before each of these steps is not deleted."""
        self._retention = replace(self._retention, before=tuple(steps))

    def _await_commit(self, step: int) -> None:
        """Rank 0 commits on disk after the other ranks' saves have ended."""
        deadline_s = time.monotonic() + self._timeout_s
        while not self._disk.has(step):
            if self._cancelled.is_set():
                raise AbandonedError(f"step {step}: the copy was cancelled")
            if self._rank == 0 or time.monotonic() > deadline_s:
                raise NoSuchStepError(f"step {step} is not committed on disk, so it was not copied")
            time.sleep(_POLL_S)

    def _retain(self) -> CheckpointError | None:
        try:
            for step in self._retention.expired(self._store.steps()):
                self._store.delete(step)
        except CheckpointError as error:
            _log.warning("expired copies in %s could not be deleted: %s", self.url, error)
            return error
        return None
