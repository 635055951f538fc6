"""Copies of committed checkpoints in an object store, made in the background by the processes of a run: agents of a fleet, or ranks.

In a fleet the agents copy, not the workers that train. An agent outlives its workers and their epochs, and does not hold their Python
lock. A plain run has no agents, so each rank copies in a thread. Both copy steps that are committed on disk, because these are complete and
independent of an epoch's layout. (A snapshot in memory is overwritten two steps later.)

No messages are needed. Each process compares the steps on disk with those in the store. For each missing step it copies the files of its
own ranks: every n-th, by the number of ranks. The process of rank 0 commits when all are there. After a loss, the next epoch assigns the
ranks again, and with them the files; files already in the draft stay. Two processes that both copy a file write the same bytes under the
same key, because the folder is named after a digest of the full step. The commit is an object that is created only if absent. Steps that an
audit has condemned are set aside in the store first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue

from phalanx.checkpoint.committed.copying import ObjectDraft, RateLimit, commit_copy, copy_share
from phalanx.checkpoint.format.errors import (
    AbandonedError,
    CheckpointError,
    CorruptError,
    NoSuchStepError,
    StorageError,
)
from phalanx.checkpoint.save.save_schedule import Retention, is_copied
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Message
from phalanx.run.spec import RunSpec
from phalanx.store.store import Store

CopyEvent = CheckpointCopied | CheckpointFailed | Message
_log = logging.getLogger(__name__)
_NO_STEP, _DELETION = -1, -2
_IDLE_LOOK_S = 60.0
_LOST = (
    "step {} was deleted from disk before it was copied: keep more steps (checkpoint.keep_last), copy fewer "
    "(checkpoint.store_every_steps) or faster (checkpoint.store_mib_s)"
)


@dataclass(frozen=True)
class UploadTimes:
    """Polling intervals and timeouts of an uploader, in seconds."""

    look_s: float = 1.0
    """Interval between checks of the disk; for ranks, while an expected step is missing."""
    idle_look_s: float = 1.0
    """Interval between checks of the disk while no step is expected."""
    again_s: float = 60.0
    """Time until a failed copy is retried, if there is no new step before."""
    others_s: float = 600.0
    """Time for which the committing process waits for other processes' files, before it copies them itself."""
    slice_s: float = 5.0
    """Length of one wait of the committing process, after which it checks whether to copy other processes' files."""
    others_at_the_end_s: float = 30.0
    """The same as ``others_s``, after the run has ended."""


@dataclass(frozen=True)
class CopyRules:
    """Steps that are copied, number of copies that are kept, and the rate limit."""

    every_steps: int
    last_step: int
    retention: Retention
    mib_s: float
    """Limit of this process's upload, in MiB/s; 0 is no limit."""

    @classmethod
    def of(cls, spec: RunSpec, sharing: int = 1) -> CopyRules:
        """Return the rules of a run file, for one of ``sharing`` processes of a machine that share its limit."""
        checkpoint = spec.checkpoint
        retention = Retention(checkpoint.store_keep_last, checkpoint.store_keep_every or None)
        return cls(
            checkpoint.store_every_steps, spec.train.steps, retention, checkpoint.store_mib_s / sharing
        )


@dataclass(frozen=True)
class Condemned:
    """Steps that an audit has found corrupt; none in a run without audits."""

    after: Callable[[], int | None] = lambda: None
    """Return the step after which copies are untrusted and not set aside yet. Raises OSError."""
    forget: Callable[[int], None] = lambda _: None
    """Called with that step once its copies have been set aside. Raises OSError."""


@dataclass(frozen=True)
class CopyShare:
    """The ranks, out of ``of``, whose files a process copies; none for a spare."""

    ranks: tuple[int, ...] = ()
    of: int = 0

    @property
    def commits(self) -> bool:
        """True for the process of rank 0."""
        return 0 in self.ranks


class StoreUploader:
    """Copies one process's share of the steps that are committed on disk, in a thread; see the module.

    ``tag`` names the start of the run, the same for all processes; drafts of earlier starts are swept away. ``report`` receives events from the
    thread, ``log`` receives text. ``limit`` makes the rate limit of ``rules.mib_s``.
    """

    def __init__(
        self,
        disk: DiskTier,
        store: Store,
        rules: CopyRules,
        tag: str,
        report: Callable[[CopyEvent], None],
        log: Callable[[str], None],
        times: UploadTimes,
        condemned: Condemned = Condemned(),
        limit: Callable[[float, Callable[[], bool]], RateLimit] = RateLimit,
    ) -> None:
        """Start the daemon thread that copies steps from ``disk`` to ``store`` by ``rules``; it has no share until
        ``deal``.

        ``tag`` names this attempt's drafts. ``report`` receives events and ``log`` lines, both in the thread. Steps
        of ``condemned`` are set aside.
        """
        self._disk, self._store, self._rules, self._tag = disk, store, rules, tag
        self._report, self._log, self._times, self._condemned = report, log, times, condemned
        self._retention = rules.retention
        self._limit = limit(rules.mib_s, self._is_superseded)
        self._share, self._passing = CopyShare(), CopyShare()
        self._cancelled = self._swept = False
        self._last_pass: int | None = None
        """The pass that ``settle`` waits for."""
        self._requested = self._answered = 0
        """Numbers of requested and of finished passes over all steps (``settle``, ``expect``)."""
        self._expected = _NO_STEP
        self._missing: set[int] = set()
        """Steps that the last pass had to copy, and did not find in the store."""
        self._copied: set[tuple[str, CopyShare]] = set()
        """Drafts in which this process's share is complete."""
        self._failures: dict[int, str] = {}
        """Step (or ``_NO_STEP``, ``_DELETION``) -> its last reported failure."""
        self._changed = threading.Condition()
        # A daemon thread: a process that ends does not wait for a slow network.
        self._thread = threading.Thread(target=self._work, name="store-upload", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._store.url

    # --- the owner -----------------------------------------------------------------------------

    def deal(self, share: CopyShare) -> None:
        """Take over the share of a new epoch; returns at once."""
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def expect(self, step: int) -> None:
        """Look at the disk more often until ``step`` is committed there; returns at once."""
        with self._changed:
            self._expected = step
            self._requested += 1
            self._changed.notify_all()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until this process has tried to copy its share of the steps that are on disk now. Return False if
        ``timeout_s`` passed before.

        The next call then waits for the same steps. True also if copies failed (see ``missing``) or the uploader is cancelled.
        """
        with self._changed:
            if self._last_pass is None:
                self._requested += 1
                self._last_pass = self._requested
                self._changed.notify_all()
            last_pass = self._last_pass
            is_over = self._changed.wait_for(
                lambda: self._answered >= last_pass or self._cancelled, timeout_s
            )
            if is_over:
                self._last_pass = None
            return is_over

    def missing(self) -> tuple[int, ...]:
        """Return the steps that the store still lacks; empty for a process that does not commit."""
        return tuple(sorted(self._missing)) if self._share.commits else ()

    def cancel(self) -> None:
        """Abandon the current copies, soon; the thread ends."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        """Copy steps to the store in a loop until cancelled: when the disk or the rank's share has changed, on
        request, and again after failures, which are reported.
        """
        last_look: object = None
        retry_s = math.inf
        while not self._cancelled:
            requested, good, pause_s = self._requested, False, self._times.look_s
            share = self._passing = self._share
            try:
                look = (share, self._disk.steps(), self._condemned.after())
                if look != last_look or requested > self._answered or time.monotonic() >= retry_s:
                    last_look = look
                    good = self._copy_all(share)
                    retry_s = math.inf if good else time.monotonic() + self._times.again_s
                # The next look at the disk is sooner while a step is expected.
                waits = self._expected != _NO_STEP and not self._disk.has(self._expected)
                pause_s = self._times.look_s if waits else self._times.idle_look_s
            except Exception as error:  # the disk or a listing failed; retry later
                self._report_failure(_NO_STEP, error)
                retry_s = time.monotonic() + self._times.again_s
            with self._changed:
                self._answered = requested
                self._changed.notify_all()
                self._changed.wait_for(self._hurried, pause_s)

    def _hurried(self) -> bool:
        return self._cancelled or self._requested > self._answered or self._share != self._passing

    def _is_superseded(self) -> bool:
        """Return True if the current copy is no longer needed: the ranks were assigned again, or the process ends."""
        return self._cancelled or self._share != self._passing

    def _copy_all(self, share: CopyShare) -> bool:
        """Copy this process's share of all steps that the store lacks; return True if nothing has failed.

        Failures, and steps that are lost before they were copied, are reported. After a storage error the remaining
        steps wait. With ``share.commits``, also sets aside condemned steps, and deletes expired ones if nothing has
        failed. Without it, returns False until condemned steps are set aside. Without ranks, does nothing.
        """
        if not share.ranks:
            return True
        tier = ObjectTier(self._store)
        if share.commits:
            self._tidy(tier)
        elif self._condemned.after() is not None:
            return False  # the process that commits sets aside first
        committed = self._disk.steps()
        self._retention = replace(self._retention, before=self._spikes(committed))
        on_disk = [
            step for step in committed if is_copied(step, self._rules.every_steps, self._rules.last_step)
        ]
        stored = tier.steps()
        not_stored = [step for step in on_disk if step not in stored]
        expired = set(self._retention.expired([*stored, *on_disk, *self._missing]))
        self._report_lost(self._missing - {*on_disk, *stored} - expired, share)
        self._missing = set(not_stored) - expired
        self._failures.pop(_NO_STEP, None)
        good, store_failed, failure = True, False, None
        for step in sorted(self._missing):
            # After a storage failure, the remaining steps are not tried: each would wait for the store again.
            failure = failure if store_failed else self._copy(tier, step, share)
            if failure is None:
                continue
            good = False
            if self._is_superseded():
                break
            self._report_failure(step, failure)
            store_failed = isinstance(failure, StorageError)
        if good and share.commits:
            self._retain(tier)
        return good

    def _spikes(self, on_disk: Sequence[int]) -> tuple[int, ...]:
        """Return the first steps of the newest spikes, from the newest readable checkpoint of ``on_disk``; none if it
        has none. As on disk, the copies before these are kept.
        """
        for step in reversed(on_disk):
            with suppress(CheckpointError):
                spikes = self._disk.extra(step).get("spikes", [])
                spans = spikes if isinstance(spikes, list) else []
                return tuple(
                    span[0] for span in spans if isinstance(span, list) and span and type(span[0]) is int
                )
        return ()

    def _same(self, tier: ObjectTier, step: int) -> bool:
        """Return True if the store's copy of ``step`` has the same index as the step that is on disk now. Also True
        if one was deleted meanwhile; False if one is damaged.
        """
        try:
            return tier.index_bytes(step) == self._disk.index_bytes(step)
        except NoSuchStepError:
            return True  # deleted meanwhile on one side; the next pass checks again
        except CorruptError:
            return False

    def _copy(self, tier: ObjectTier, step: int, share: CopyShare) -> CheckpointError | None:
        """Copy this process's share of a step, and commit it if this is the committing process; return the error, if
        any.

        A commit is reported. After a failure the next call copies the share again, except images that the draft has
        in full size.
        """
        began_s, draft = time.monotonic(), None
        try:
            draft = ObjectDraft(tier, step, self._disk.index_bytes(step), self._tag)
            if (draft.folder, share) not in self._copied:
                for rank in share.ranks:
                    copy_share(self._disk, step, draft, rank, share.of, limit=self._limit)
                self._copied.add((draft.folder, share))
            if share.commits:
                self._commit(step, draft)
        except CheckpointError as error:
            if draft is not None:
                self._copied.discard((draft.folder, share))
            return error if self._disk.has(step) else AbandonedError(_LOST.format(step))
        self._log(f"step {step}: its files are in {self._store.url}")
        if share.commits:
            self._missing.discard(step)
            self._failures.pop(step, None)
            self._report(CheckpointCopied(step, self._store.url, time.monotonic() - began_s))
        return None

    def _commit(self, step: int, draft: ObjectDraft) -> None:
        """Wait for the files of the other processes and commit the step.

        After a timeout, copy the missing files, and log that. Raises AbandonedError if the upload is cancelled.
        """
        began_s = time.monotonic()
        while True:
            try:
                commit_copy(
                    self._disk, step, draft, timeout_s=self._times.slice_s, cancelled=self._is_superseded
                )
                return  # also if another process has committed a copy, which has the same bits
            except AbandonedError:
                times = self._times
                patience_s = times.others_at_the_end_s if self._last_pass else times.others_s
                if self._is_superseded():
                    raise
                if time.monotonic() - began_s >= patience_s:
                    copied_bytes = copy_share(self._disk, step, draft, limit=self._limit)
                    self._log(f"step {step}: copied {copied_bytes:,} bytes of other processes")

    def _tidy(self, tier: ObjectTier) -> None:
        """If an audit condemned steps, set aside the store's later steps that are not those now on disk, with a
        warning each. Once per process, remove drafts of killed uploads.
        """
        after = self._condemned.after()
        if after is not None:
            for step in tier.steps():
                if step > after and not (self._disk.has(step) and self._same(tier, step)):
                    tier.set_aside(step)
                    self._warn(
                        f"the copy of step {step} in {self._store.url} is untrusted, and was set aside"
                    )
            self._condemned.forget(after)
        if not self._swept:
            tier.sweep(self._tag)
            self._swept = True

    def _retain(self, tier: ObjectTier) -> None:
        """Delete expired steps from the store; an equal failure is reported only once in a row."""
        try:
            for step in self._retention.expired(tier.steps()):
                with suppress(NoSuchStepError):  # another has deleted it
                    tier.delete(step)
        except CheckpointError as error:
            if self._failures.get(_DELETION) != str(error):
                self._failures[_DELETION] = str(error)
                self._warn(f"expired checkpoints in {self._store.url} could not be deleted: {error}")
        else:
            self._failures.pop(_DELETION, None)

    # --- reports -------------------------------------------------------------------------------

    def _report_lost(self, steps: set[int], share: CopyShare) -> None:
        """Report steps that vanished before they were copied, by the process that commits."""
        for step in sorted(steps) if share.commits else ():
            self._report_failure(step, AbandonedError(_LOST.format(step)))

    def _report_failure(self, step: int, error: Exception) -> None:
        """Log a failed copy and report it as an event, once for as long as the failure is the same."""
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if self._failures.get(step) == text:
            return
        self._failures[step] = text
        self._log(f"step {step} was not copied to {self._store.url}: {text}")
        if step == _NO_STEP:
            self._warn(f"checkpoints are not copied to {self._store.url} now, training continues: {text}")
        else:
            self._report(CheckpointFailed(step, self._store.url, text))

    def _warn(self, text: str) -> None:
        self._report(Message("warning", text))


class RankCopies(StoreUploader):
    """Uploader of one rank of a plain run; the training loop collects its events."""

    def __init__(
        self, disk: DiskTier, store: Store, rules: CopyRules, tag: str, share: CopyShare, timeout_s: float
    ) -> None:
        """Start copying ``share`` in a thread.

        Rank 0 waits ``timeout_s`` for the other ranks' files before it copies them itself.
        """
        self._events: SimpleQueue[CopyEvent] = SimpleQueue()
        times = UploadTimes(idle_look_s=_IDLE_LOOK_S, others_s=timeout_s, others_at_the_end_s=timeout_s)
        super().__init__(disk, store, rules, tag, self._events.put, _log.info, times)
        self.deal(share)

    def collect(self) -> list[CopyEvent]:
        """Return the events since the last call. A failure never ends training; the copy is retried."""
        events: list[CopyEvent] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events
