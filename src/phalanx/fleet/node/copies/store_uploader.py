"""Copies of a fleet's checkpoints in an object store, made by the agents and not by the workers that train.

An agent outlives its workers and the epochs that they train in, holds no Python lock of theirs, and so has the time that an upload takes. It
copies what is committed on disk: there the layout of an epoch is over, a step is whole whoever has computed it, and a node that comes later
can go on with a copy that a lost one had begun. (A snapshot in memory is overwritten two steps later, or would have to be held back from that.)

Nobody is told what to copy. Each agent compares the steps on disk with those in the store, and brings of each that is wanted the files of its
own ranks: every n-th, by the number of ranks. Whoever holds rank 0 commits when all are there. So a takeover needs no message: the epoch after
a loss has dealt the ranks anew, and with them the files; those that are in the draft already stay. Two agents that both take a file for theirs
write the same bytes under the same key, whose folder is named after a digest of the whole step; and the commit is an object that is created
only if absent. What is no longer to be trusted on disk (``distrust.py``) is set aside in the store before anything else is done there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from phalanx.checkpoint.committed.copying import ObjectDraft, RateLimit, commit_copy, copy_share
from phalanx.checkpoint.committed.retention import Retention, is_copied
from phalanx.checkpoint.format.errors import (
    AbandonedError,
    CheckpointError,
    CorruptError,
    NoSuchStepError,
    StorageError,
)
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.fleet.control.distrust import distrusted_after, forget_distrust
from phalanx.fleet.core.messages import NO_STEP
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.observe.events import CheckpointCopied, CheckpointFailed, Message
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.store.open_store import open_store
from phalanx.store.store import Store

_LOST = (
    "step {} was deleted from disk before it was copied: keep more steps (checkpoint.keep_last), copy fewer "
    "(checkpoint.store_every_steps) or faster (checkpoint.store_mib_s)"
)


@dataclass(frozen=True)
class UploadTimes:
    """How often an agent looks, and how long it waits, in seconds."""

    look_s: float = 1.0
    """Between two looks at the disk."""
    again_s: float = 60.0
    """Until a copy that has failed is tried again, if no new step comes before."""
    others_s: float = 600.0
    """For so long the agent that commits waits for others' files; then it brings them itself."""
    slice_s: float = 5.0
    """For so long the agent that commits waits at a time, before it looks whether it has to bring others' files."""
    others_at_the_end_s: float = 30.0
    """The same, once the run is over."""


@dataclass(frozen=True)
class CopyShare:
    """The ranks of ``of`` whose files a node brings; none for a spare."""

    ranks: tuple[int, ...] = ()
    of: int = 0

    @property
    def commits(self) -> bool:
        """True on the node of rank 0."""
        return 0 in self.ranks


def uploader_of(
    spec: RunSpec, directory: RunDirectory, attempt: int, log: Callable[[str], None]
) -> StoreUploader:
    """The uploader of an agent, for ``checkpoint.store`` of its run."""
    return StoreUploader(
        spec,
        directory,
        attempt,
        open_store(spec.checkpoint.store),
        log,
        UploadTimes(others_s=spec.checkpoint.timeout_s),
    )


class StoreUploader:
    """Copies one node's share of what is committed on disk, in a thread of its own; see the module.

    ``attempt`` is that of the fleet's start, the same on all nodes: what an earlier start has left unfinished is swept away in time.
    ``limit`` makes the limit of ``checkpoint.store_mib_s``.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        attempt: int,
        store: Store,
        log: Callable[[str], None],
        times: UploadTimes,
        limit: Callable[[float, Callable[[], bool]], RateLimit] = RateLimit,
    ) -> None:
        checkpoint = spec.checkpoint
        self._checkpoint, self._last_step = checkpoint, spec.train.steps
        self._directory, self._attempt, self._store, self._log = directory, attempt, store, log
        self._times = times
        self._disk = DiskTier(directory.checkpoints)
        self._retention = Retention(checkpoint.store_keep_last, checkpoint.store_keep_every or None)
        self._limit = limit(checkpoint.store_mib_s, self._given_up)
        self._share, self._passing = CopyShare(), CopyShare()
        self._settling = self._cancelled = self._swept = False
        self._asked = self._answered = 0
        """Passes over all steps that ``settle`` has asked for, and that have ended."""
        self._missing: set[int] = set()
        """Steps that the last pass has found wanted, and has not seen to be in the store."""
        self._brought: set[tuple[str, CopyShare]] = set()
        """Drafts in which this node's share is complete."""
        self._told: dict[int, str] = {}
        """Step -> the failure of its copy that was told last."""
        self._events: EventLog | None = None
        self._changed = threading.Condition()
        # A daemon: an agent that ends does not wait for a slow network.
        self._thread = threading.Thread(target=self._work, name="store-upload", daemon=True)
        self._thread.start()

    # --- the agent -----------------------------------------------------------------------------

    def deal(self, share: CopyShare) -> None:
        """Takes over the share of a new epoch; returns at once."""
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def settle(self) -> tuple[int, ...]:
        """Waits until this node has done what it can for the steps that are on disk now; returns those that are missing in the store.

        Only the node that commits knows them; of another, it returns none.
        """
        with self._changed:
            self._settling = True
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered >= asked or self._cancelled)
        return tuple(sorted(self._missing)) if self._share.commits else ()

    def cancel(self) -> None:
        """Gives up what is under way, soon; the thread ends."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # --- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        seen: object = None
        again_s = math.inf
        while not self._cancelled:
            asked, good = self._asked, False
            try:
                look = (self._share, self._disk.steps(), distrusted_after(self._directory))
                if look != seen or asked > self._answered or time.monotonic() >= again_s:
                    seen = look
                    self._passing = self._share
                    good = self._copy_all(self._passing)
                    again_s = math.inf if good else time.monotonic() + self._times.again_s
            except Exception as error:  # a disk or a listing that fails now: the next look may be better
                self._tell_failure(NO_STEP, error)
                again_s = time.monotonic() + self._times.again_s
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
                self._changed.wait_for(self._hurried, self._times.look_s)

    def _hurried(self) -> bool:
        return self._cancelled or self._asked > self._answered or self._share != self._passing

    def _given_up(self) -> bool:
        """True if what is under way is not wanted any more: the ranks were dealt anew, or the agent ends."""
        return self._cancelled or self._share != self._passing

    def _copy_all(self, share: CopyShare) -> bool:
        """Brings this node's share of all steps that are wanted in the store; true if nothing has failed."""
        if not share.ranks:
            return True
        tier = ObjectTier(self._store)
        if share.commits:
            self._tidy(tier)
        elif distrusted_after(self._directory) is not None:
            return False  # the node that commits sets aside first
        there = self._disk.steps()
        self._retention = replace(self._retention, before=self._spikes(there))
        on_disk = [step for step in there if self._due(step)]
        stored = tier.steps()
        wanted = [step for step in on_disk if step not in stored]
        expired = set(self._retention.expired([*stored, *on_disk, *self._missing]))
        self._tell_lost(self._missing - {*on_disk, *stored} - expired, share)
        self._missing = set(wanted) - expired
        self._forget_told(NO_STEP)
        good = True
        for step in sorted(self._missing):
            error = self._copy(tier, step, share)
            if error is None:
                continue
            good = False
            if self._given_up():
                break
            self._tell_failure(step, error)
            if isinstance(error, StorageError):
                break  # a store that has just failed for one step is not waited for again for each of the others
        if good and share.commits:
            self._retain(tier)
        return good

    def _due(self, step: int) -> bool:
        return is_copied(step, self._checkpoint.store_every_steps, self._last_step)

    def _spikes(self, on_disk: Sequence[int]) -> tuple[int, ...]:
        """First steps of the newest spikes, as the newest checkpoint that can be read tells them: the copies before these are kept, as those on disk are."""
        for step in reversed(on_disk):
            with suppress(CheckpointError):
                found = self._disk.extra(step).get("spikes", [])
                stretches = found if isinstance(found, list) else []
                return tuple(
                    one[0] for one in stretches if isinstance(one, list) and one and type(one[0]) is int
                )
        return ()

    def _same(self, tier: ObjectTier, step: int) -> bool:
        """True if the copy is of what is on disk now."""
        try:
            return tier.index_bytes(step) == self._disk.index_bytes(step)
        except NoSuchStepError:
            return True  # deleted meanwhile, here or there: the next look tells
        except CorruptError:
            return False

    def _copy(self, tier: ObjectTier, step: int, share: CopyShare) -> CheckpointError | None:
        """Brings this node's share of a step, and commits it where that is this node's part; returns what has kept it from that."""
        began_s = time.monotonic()
        try:
            draft = ObjectDraft(tier, step, self._disk.index_bytes(step), f"fleet{self._attempt}")
            if (draft.folder, share) not in self._brought:
                for rank in share.ranks:
                    copy_share(self._disk, step, draft, rank, share.of, limit=self._limit)
                self._brought.add((draft.folder, share))
            if share.commits:
                self._commit(step, draft)
        except CheckpointError as error:
            if self._disk.has(step):
                self._brought.discard((draft.folder, share))
                return error
            return AbandonedError(_LOST.format(step))
        self._log(f"step {step}: its files are in {self._store.url}")
        if share.commits:
            self._missing.discard(step)
            self._forget_told(step)
            self._tell(CheckpointCopied(step, self._store.url, time.monotonic() - began_s))
        return None

    def _commit(self, step: int, draft: ObjectDraft) -> None:
        """Waits for the files of the other nodes and commits the step; brings what they have not brought for too long."""
        began_s = time.monotonic()
        while True:
            try:
                commit_copy(self._disk, step, draft, timeout_s=self._times.slice_s, cancelled=self._given_up)
                return  # also if another has committed a copy: it has the same bits, or would have been set aside
            except AbandonedError:
                times = self._times
                patience_s = times.others_at_the_end_s if self._settling else times.others_s
                if self._given_up():
                    raise
                if time.monotonic() - began_s >= patience_s:
                    copied_bytes = copy_share(self._disk, step, draft, limit=self._limit)
                    self._log(f"step {step}: has brought {copied_bytes:,} bytes in the place of other nodes")

    def _tidy(self, tier: ObjectTier) -> None:
        """Sets aside what is not to be trusted any more, and once in a life removes what killed uploads have left."""
        after = distrusted_after(self._directory)
        if after is not None:
            for step in tier.steps():
                if step > after and not (self._disk.has(step) and self._same(tier, step)):
                    tier.set_aside(step)
                    self._warn(
                        f"the copy of step {step} in {self._store.url} is not to be trusted, and was set aside"
                    )
            forget_distrust(self._directory, after)
        if not self._swept:
            tier.sweep(f"fleet{self._attempt}")
            self._swept = True

    def _retain(self, tier: ObjectTier) -> None:
        try:
            for step in self._retention.expired(tier.steps()):
                with suppress(NoSuchStepError):  # another has deleted it
                    tier.delete(step)
        except CheckpointError as error:
            self._warn(f"expired checkpoints in {self._store.url} could not be deleted: {error}")

    # --- telling -------------------------------------------------------------------------------

    def _tell_lost(self, steps: set[int], share: CopyShare) -> None:
        for step in sorted(steps) if share.commits else ():
            self._tell(CheckpointFailed(step, self._store.url, _LOST.format(step)))

    def _tell_failure(self, step: int, error: Exception) -> None:
        """Tells why a copy has failed, once for as long as it is the same."""
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if self._told.get(step) == text:
            return
        self._told[step] = text
        self._log(f"step {step} was not copied to {self._store.url}: {text}")
        if step == NO_STEP:
            self._warn(f"checkpoints are not copied to {self._store.url} now, training goes on: {text}")
        else:
            self._tell(CheckpointFailed(step, self._store.url, text))

    def _forget_told(self, step: int) -> None:
        self._told.pop(step, None)

    def _warn(self, text: str) -> None:
        self._tell(Message("warning", text))

    def _tell(self, body: CheckpointCopied | CheckpointFailed | Message) -> None:
        try:
            if self._events is None:
                self._events = EventLog(self._directory.events, self._attempt)
            self._events.append(body)
        except EventLogError as error:
            self._log(str(error))
