"""Copies of committed checkpoints in an object store, made in the background by the processes that share a run: agents of a fleet, or ranks.

In a fleet the agents copy, not the workers that train: an agent outlives its workers and the epochs that they train in, and holds no Python lock
of theirs. A plain run has no agents, so each rank copies in a thread. Both copy what is committed on disk: there the layout of an epoch is over, and a step is
whole. (A snapshot in memory is overwritten two steps later.)

No message is needed. Each process compares the steps on disk with those in the store, and copies of each missing step the files of its
own ranks: every n-th, by the number of ranks. The process of rank 0 commits when all are there. So a takeover needs no message: the epoch after
a loss has dealt the ranks again, and with them the files; those that are in the draft already stay. Two processes that both copy a file
write the same bytes under the same key, whose folder is named after a digest of the whole step; and the commit is an object that is created
only if absent. Steps that an audit has condemned are set aside in the store before anything else is done there.
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
from phalanx.checkpoint.save.interval import Retention, is_copied
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
    """How often an uploader looks, and how long it waits, in seconds."""

    look_s: float = 1.0
    """Between two looks at the disk; for ranks, while an expected step is not there yet."""
    idle_look_s: float = 1.0
    """Between two looks at the disk while no step is expected."""
    again_s: float = 60.0
    """Until a copy that has failed is tried again, if no new step comes before."""
    others_s: float = 600.0
    """For so long the process that commits waits for others' files; then it copies them itself."""
    slice_s: float = 5.0
    """For so long the process that commits waits at a time, before it looks whether it has to copy others' files."""
    others_at_the_end_s: float = 30.0
    """The same, once the run is over."""


@dataclass(frozen=True)
class CopyRules:
    """Which steps are copied, how many copies are kept, and how fast they are made."""

    every_steps: int
    last_step: int
    kept: Retention
    mib_s: float
    """Limit of this process's upload, in MiB/s; 0 is no limit."""

    @classmethod
    def of(cls, spec: RunSpec, sharing: int = 1) -> CopyRules:
        """Return the rules of a run file, for one of ``sharing`` processes of a machine that share its limit."""
        checkpoint = spec.checkpoint
        kept = Retention(checkpoint.store_keep_last, checkpoint.store_keep_every or None)
        return cls(checkpoint.store_every_steps, spec.train.steps, kept, checkpoint.store_mib_s / sharing)


@dataclass(frozen=True)
class Condemned:
    """Steps that an audit has found corrupt: none in a run without audits."""

    after: Callable[[], int | None] = lambda: None
    """Returns the step after which copies are not to be trusted and have not been set aside. Raises OSError."""
    forget: Callable[[int], None] = lambda _: None
    """Called with that step once its copies have been set aside. Raises OSError."""


@dataclass(frozen=True)
class CopyShare:
    """The ranks of ``of`` whose files a process copies; none for a spare."""

    ranks: tuple[int, ...] = ()
    of: int = 0

    @property
    def commits(self) -> bool:
        """True for the process of rank 0."""
        return 0 in self.ranks


class StoreUploader:
    """Copies one process's share of the steps that are committed on disk, in a thread of its own; see the module.

    ``tag`` names the start of the run, the same for all processes: drafts of an earlier start are swept away in time.
    ``report`` takes events from the thread, ``log`` lines for people. ``limit`` makes the limit of ``rules.mib_s``.
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
        self._disk, self._store, self._rules, self._tag = disk, store, rules, tag
        self._report, self._log, self._times, self._condemned = report, log, times, condemned
        self._retention = rules.kept
        self._limit = limit(rules.mib_s, self._given_up)
        self._share, self._passing = CopyShare(), CopyShare()
        self._cancelled = self._swept = False
        self._last_pass: int | None = None
        """The pass that ``settle`` waits for."""
        self._requested = self._answered = 0
        """Passes over all steps that ``settle`` and ``expect`` have requested, and that have ended."""
        self._expected = _NO_STEP
        self._missing: set[int] = set()
        """Steps that the last pass was to copy, and has not seen in the store."""
        self._copied: set[tuple[str, CopyShare]] = set()
        """Drafts in which this process's share is complete."""
        self._failures: dict[int, str] = {}
        """Step (or ``_NO_STEP``, ``_DELETION``) -> its failure that was reported last."""
        self._changed = threading.Condition()
        # A daemon: a process that ends does not wait for a slow network.
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
        """Wait until this process has done its part for the steps that are on disk now; return False if ``timeout_s`` passed before.

        The next call then waits for the same.
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
        """Return the steps that the store still lacks; none for a process that does not commit, which does not know them."""
        return tuple(sorted(self._missing)) if self._share.commits else ()

    def cancel(self) -> None:
        """Give up the copies under way, soon; the thread ends."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        seen: object = None
        again_s = math.inf
        while not self._cancelled:
            requested, good, pause_s = self._requested, False, self._times.look_s
            share = self._passing = self._share
            try:
                look = (share, self._disk.steps(), self._condemned.after())
                if look != seen or requested > self._answered or time.monotonic() >= again_s:
                    seen = look
                    good = self._copy_all(share)
                    again_s = math.inf if good else time.monotonic() + self._times.again_s
                pause_s = self._pause_s()
            except Exception as error:  # a disk or a listing that fails now: the next look may be better
                self._report_failure(_NO_STEP, error)
                again_s = time.monotonic() + self._times.again_s
            with self._changed:
                self._answered = requested
                self._changed.notify_all()
                self._changed.wait_for(self._hurried, pause_s)

    def _pause_s(self) -> float:
        waits = self._expected != _NO_STEP and not self._disk.has(self._expected)
        return self._times.look_s if waits else self._times.idle_look_s

    def _hurried(self) -> bool:
        return self._cancelled or self._requested > self._answered or self._share != self._passing

    def _given_up(self) -> bool:
        """Return True if the copy under way is not needed any more: the ranks were dealt again, or the process ends."""
        return self._cancelled or self._share != self._passing

    def _copy_all(self, share: CopyShare) -> bool:
        """Copy this process's share of all steps that the store lacks; return True if nothing has failed."""
        if not share.ranks:
            return True
        tier = ObjectTier(self._store)
        if share.commits:
            self._tidy(tier)
        elif self._condemned.after() is not None:
            return False  # the process that commits sets aside first
        there = self._disk.steps()
        self._retention = replace(self._retention, before=self._spikes(there))
        on_disk = [step for step in there if self._due(step)]
        stored = tier.steps()
        not_stored = [step for step in on_disk if step not in stored]
        expired = set(self._retention.expired([*stored, *on_disk, *self._missing]))
        self._report_lost(self._missing - {*on_disk, *stored} - expired, share)
        self._missing = set(not_stored) - expired
        self._failures.pop(_NO_STEP, None)
        good, down, failure = True, False, None
        for step in sorted(self._missing):
            # A store that has just failed for one step is not waited for again for each of the others.
            failure = failure if down else self._copy(tier, step, share)
            if failure is None:
                continue
            good = False
            if self._given_up():
                break
            self._report_failure(step, failure)
            down = isinstance(failure, StorageError)
        if good and share.commits:
            self._retain(tier)
        return good

    def _due(self, step: int) -> bool:
        return is_copied(step, self._rules.every_steps, self._rules.last_step)

    def _spikes(self, on_disk: Sequence[int]) -> tuple[int, ...]:
        """Return the first steps of the newest spikes, of the newest checkpoint that can be read: the copies before these are kept, as those on disk are."""
        for step in reversed(on_disk):
            with suppress(CheckpointError):
                spikes = self._disk.extra(step).get("spikes", [])
                spans = spikes if isinstance(spikes, list) else []
                return tuple(
                    span[0] for span in spans if isinstance(span, list) and span and type(span[0]) is int
                )
        return ()

    def _same(self, tier: ObjectTier, step: int) -> bool:
        """Return True if the copy is of the step that is on disk now."""
        try:
            return tier.index_bytes(step) == self._disk.index_bytes(step)
        except NoSuchStepError:
            return True  # deleted meanwhile, here or there: the next look tells
        except CorruptError:
            return False

    def _copy(self, tier: ObjectTier, step: int, share: CopyShare) -> CheckpointError | None:
        """Copy this process's share of a step, and commit it if that is this process's part; return the error that kept it from that."""
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
        """Wait for the files of the other processes and commit the step; copy the files that they have not copied for too long."""
        began_s = time.monotonic()
        while True:
            try:
                commit_copy(self._disk, step, draft, timeout_s=self._times.slice_s, cancelled=self._given_up)
                return  # also if another has committed a copy: it has the same bits, or would have been set aside
            except AbandonedError:
                times = self._times
                patience_s = times.others_at_the_end_s if self._last_pass else times.others_s
                if self._given_up():
                    raise
                if time.monotonic() - began_s >= patience_s:
                    copied_bytes = copy_share(self._disk, step, draft, limit=self._limit)
                    self._log(f"step {step}: has brought {copied_bytes:,} bytes in the place of others")

    def _tidy(self, tier: ObjectTier) -> None:
        """Set aside condemned steps, and once in a life remove drafts of killed uploads."""
        after = self._condemned.after()
        if after is not None:
            for step in tier.steps():
                if step > after and not (self._disk.has(step) and self._same(tier, step)):
                    tier.set_aside(step)
                    self._warn(
                        f"the copy of step {step} in {self._store.url} is not to be trusted, and was set aside"
                    )
            self._condemned.forget(after)
        if not self._swept:
            tier.sweep(self._tag)
            self._swept = True

    def _retain(self, tier: ObjectTier) -> None:
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
        for step in sorted(steps) if share.commits else ():
            self._report(CheckpointFailed(step, self._store.url, _LOST.format(step)))

    def _report_failure(self, step: int, error: Exception) -> None:
        """Report why a copy has failed, once for as long as it is the same."""
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if self._failures.get(step) == text:
            return
        self._failures[step] = text
        self._log(f"step {step} was not copied to {self._store.url}: {text}")
        if step == _NO_STEP:
            self._warn(f"checkpoints are not copied to {self._store.url} now, training goes on: {text}")
        else:
            self._report(CheckpointFailed(step, self._store.url, text))

    def _warn(self, text: str) -> None:
        self._report(Message("warning", text))


class RankCopies:
    """The uploader of one rank of a plain run, whose events the training loop collects."""

    def __init__(
        self, disk: DiskTier, store: Store, rules: CopyRules, tag: str, share: CopyShare, timeout_s: float
    ) -> None:
        """Begin to copy; ``timeout_s`` is how long rank 0 waits for the other ranks' files before it copies them itself."""
        self._events: SimpleQueue[CopyEvent] = SimpleQueue()
        times = UploadTimes(idle_look_s=_IDLE_LOOK_S, others_s=timeout_s, others_at_the_end_s=timeout_s)
        self._uploader = StoreUploader(disk, store, rules, tag, self._events.put, _log.info, times)
        self._uploader.deal(share)

    def expect(self, step: int) -> None:
        """Copy ``step``, whose save has ended on this rank; returns at once."""
        self._uploader.expect(step)

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._uploader.url

    def collect(self) -> list[CopyEvent]:
        """Return the events since the last call. A failure never ends training: the next look tries again."""
        events: list[CopyEvent] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until every copy so far has ended, one way or the other; return False if ``timeout_s`` passed before."""
        return self._uploader.settle(timeout_s)

    def cancel(self) -> None:
        """Give up the copies under way, soon."""
        self._uploader.cancel()
