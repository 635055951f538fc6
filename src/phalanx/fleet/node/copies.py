"""Copies of a node's state: snapshots to the buddy of a rank and at the end of a run to disk, and checkpoints
to the run's object store.

Copies wait for networks and disks, so threads make them, one for each worker and one for the disk. The
agent's event loop continues meanwhile.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError
from phalanx.checkpoint.format.image import Image, ImageLayout
from phalanx.checkpoint.snapshot.data_port import SnapshotClient
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory, verified
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, Tier, never
from phalanx.fleet.control.fleet_file import distrusted_after, forget_distrust
from phalanx.fleet.core.commands import SaveSnapshots
from phalanx.fleet.core.messages import RankSnapshot
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from phalanx.checkpoint.save.store_uploader import CopyEvent, StoreUploader

# Snapshots in memory written as a checkpoint, by the agents that have them and without any worker.
#
# A snapshot's image and a rank's file of a checkpoint are the same bytes (``format/image.py``), so this is a copy. Each block is verified
# by the checksum that was taken with the snapshot. Several nodes write shares of one checkpoint. They meet only in the draft, as ranks do,
# and the node with state 0 commits it.


def save_snapshots(
    memory: SnapshotMemory,
    tier: Tier,
    draft: Draft,
    share: Sequence[tuple[SnapshotKey, int]],
    states: int,
    *,
    timeout_s: float,
    cancelled: Callable[[], bool] = never,
) -> bool:
    """Write a node's share of a checkpoint of ``states`` different states; return True if it has also committed it.

    ``share`` has the snapshots, each with the number of its state; the node with number 0 commits once all are
    written. ``draft`` has an attempt number that was not used before. Raises ``AbandonedError`` if another node
    failed or is later than ``timeout_s``, or ``cancelled()``. Raises ``CheckpointError`` if this node's memory or
    disk fails, which the draft passes to the others.
    """
    extra: dict[str, object] | None = None
    for key, number in share:
        try:
            step_extra = _write(memory, tier, draft, key, number, cancelled)
        except CheckpointError as error:
            tier.fail(draft, number, str(error))
            raise
        extra = step_extra if number == 0 else extra
    for _, number in share:
        tier.collect(draft, number, states, timeout_s=timeout_s, cancelled=cancelled)
    if extra is None:
        return False
    tier.commit(draft, StepRecord(draft.step, states, extra), timeout_s=timeout_s, cancelled=cancelled)
    return True


def _write(
    memory: SnapshotMemory,
    tier: Tier,
    draft: Draft,
    key: SnapshotKey,
    number: int,
    cancelled: Callable[[], bool],
) -> dict[str, object]:
    """Verify one snapshot's checksums and write it as the file of state ``number``; return its ``extra``, equal in
    all of a step.

    Raises ``CheckpointError``.
    """
    with memory.reading(key) as (segment, snapshot):
        manifest = snapshot.manifest
        image = segment.image(manifest.nbytes)
        for index, start in enumerate(range(0, manifest.nbytes, manifest.block_bytes)):
            verified(manifest, index, image[start : start + manifest.block_bytes], f"{key} in own memory")
        # The header is a part of the image already.
        layout = ImageLayout(b"", manifest.entries, manifest.nbytes)
        tier.write(draft, number, Image(layout, image), cancelled=cancelled)
        return snapshot.extra


_PUSH_AGAIN_S, _LONGEST_PUSH_PAUSE_S = 0.1, 2.0
_OTHERS_WRITE_S = 600.0
"""Time for which the nodes of a checkpoint wait for each other before it is given up."""


class SnapshotCourier:
    """Copies snapshots out of one node's memory."""

    def __init__(
        self,
        memory: SnapshotMemory,
        run_dir: Path,
        workers: int,
        tls: ssl.SSLContext | None,
        token: Callable[[], str],
        log: Callable[[str], None],
    ) -> None:
        """Set up the threads. ``token`` returns the run's present token; ``log`` takes lines for people."""
        self._memory, self._run_dir, self._tls, self._token, self._log = memory, run_dir, tls, token, log
        self._pushers = [ThreadPoolExecutor(1, f"push-{i}") for i in range(workers)]
        self._writer = ThreadPoolExecutor(2, "save")  # The next try begins while the previous one gives up.

    def snapshots(self) -> tuple[RankSnapshot, ...]:
        """Return the present snapshots in memory, as reported to the coordinator."""
        return tuple(
            RankSnapshot(h.key.ranks, h.key.rank, h.key.step, h.kind, h.nbytes, h.epoch)
            for h in self._memory.holdings()
        )

    async def push(self, worker: int, key: SnapshotKey, address: str, is_wanted: Callable[[], bool]) -> bool:
        """Stream a worker's snapshot to a buddy, and retry while ``is_wanted()``. Return True once it has arrived,
        else False.

        Pauses double from 0.1 s to 2 s. A ``CheckpointError`` is logged unless it repeats the last one.
        """
        loop = asyncio.get_running_loop()
        pause_s, complaint = _PUSH_AGAIN_S, ""
        while is_wanted():
            try:
                await loop.run_in_executor(self._pushers[worker], self._stream, address, key)
            except CheckpointError as error:
                if str(error) != complaint:
                    self._log(f"{key} has not reached its buddy: {error}")
                complaint = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PUSH_PAUSE_S)
            else:
                return True
        return False

    def _stream(self, address: str, key: SnapshotKey) -> None:
        """Push a snapshot to the node at ``address``."""
        with SnapshotClient(address, self._token(), tls=self._tls) as client:
            client.push(self._memory, key)

    async def save(self, order: SaveSnapshots, stopped: Callable[[], bool]) -> tuple[bool, str]:
        """Write this node's share of a checkpoint in a thread. Return (committed, error).

        True if it has committed the complete checkpoint. The error is that of its own share; (False, "") if it was
        abandoned, which is logged.
        """
        try:
            committed = await asyncio.get_running_loop().run_in_executor(
                self._writer, self._write, order, stopped
            )
        except AbandonedError as error:
            self._log(
                f"step {order.step} was not saved: {error}"
            )  # The node that could not write has reported that.
        except CheckpointError as error:
            self._log(f"cannot save step {order.step} from memory: {error}")
            return False, str(error)
        else:
            return committed, ""
        return False, ""

    def _write(self, order: SaveSnapshots, stopped: Callable[[], bool]) -> bool:
        """Write this node's share of the snapshots as a checkpoint; return True if that committed it. Raises as
        ``save_snapshots`` does.
        """
        share = [(SnapshotKey(order.ranks, rank, order.step), state) for rank, state in order.share]
        return save_snapshots(
            self._memory,
            DiskTier(RunDirectory(self._run_dir).checkpoints),
            Draft(order.step, order.attempt),
            share,
            order.states,
            timeout_s=_OTHERS_WRITE_S,
            cancelled=stopped,
        )

    def close(self) -> None:
        """End the threads, without waiting for one that hangs in a dead peer or disk."""
        for pool in (*self._pushers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)


# This node's share of the copies of checkpoints in the run's store: assigned to it, settled, or given up.


class StoreCopies:
    """The copies that one node makes; none if the run has no store."""

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, attempt: int, log: Callable[[str], None]
    ) -> None:
        """Set up the copies; the uploader starts at the first ``deal``."""
        self._spec, self._directory, self._attempt, self._log = spec, directory, attempt, log
        self._uploader: StoreUploader | None = None
        self._events: EventLog | None = None
        self._hurried = asyncio.Event()

    def deal(self, ranks: tuple[int, ...], of: int) -> None:
        """From now on copy the files of these of ``of`` ranks to the run's store, in a thread that the first call
        starts.

        Without a store, do nothing. The first call raises ``StoreError`` if the store cannot be opened.
        """
        if not self._spec.checkpoint.store:
            return
        # The client of stores is imported only if there is one.
        from phalanx.checkpoint.save.store_uploader import CopyShare

        if self._uploader is None:
            self._uploader = self._begin()
        self._uploader.deal(CopyShare(ranks, of))

    def _begin(self) -> StoreUploader:
        """Start the uploader to the run's store. Raises ``StoreError``."""
        from phalanx.checkpoint.save.store_uploader import Condemned, CopyRules, StoreUploader, UploadTimes
        from phalanx.checkpoint.tiers.disk import DiskTier
        from phalanx.store.open_store import open_store

        checkpoint, directory = self._spec.checkpoint, self._directory
        return StoreUploader(
            DiskTier(directory.checkpoints),
            open_store(checkpoint.store),
            CopyRules.of(self._spec),
            f"fleet{self._attempt}",
            self._append,
            self._log,
            UploadTimes(others_s=checkpoint.timeout_s),
            Condemned(partial(distrusted_after, directory), partial(forget_distrust, directory)),
        )

    def _append(self, event: CopyEvent) -> None:
        """Append an event to the run's stream; a failure is logged."""
        try:
            if self._events is None:
                self._events = EventLog(self._directory.events, self._attempt)
            self._events.append(event)
        except EventLogError as error:
            self._log(str(error))

    def hurry(self) -> None:
        """Give up copies that are not in the store yet."""
        self._hurried.set()

    async def end(self, *, settled: bool) -> None:
        """End the copying. If ``settled``, first finish this node's share and log missing steps, unless ``hurry``
        is called.
        """
        if self._uploader is None:
            return
        if settled:
            settling = asyncio.create_task(asyncio.to_thread(self._uploader.settle))
            hurried = asyncio.create_task(self._hurried.wait())
            await asyncio.wait((settling, hurried), return_when=asyncio.FIRST_COMPLETED)
            if not settling.done():
                self._log("second request to end: gives up its copies to the store")
            elif missing := self._uploader.missing():
                self._log(f"not in the store: steps {', '.join(map(str, missing))}")
            hurried.cancel()
        self._uploader.cancel()
