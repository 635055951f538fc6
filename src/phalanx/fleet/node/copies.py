"""Copies of a node's state: snapshots to the buddy of a rank and at the end of a run to disk, and checkpoints to the run's object store.

Snapshots wait for wires and disks, so threads carry them out, one for each worker and one for the disk, while the agent's event loop goes
on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError
from phalanx.checkpoint.snapshot.data_port import SnapshotClient
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.checkpoint.snapshot.to_disk import save_snapshots
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft
from phalanx.fleet.control.fleet_file import distrusted_after, forget_distrust
from phalanx.fleet.core.commands import SaveSnapshots
from phalanx.fleet.core.messages import RankSnapshot
from phalanx.observe.event_log import EventLog, EventLogError
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec

if TYPE_CHECKING:
    from phalanx.checkpoint.save.store_uploader import CopyEvent, StoreUploader


_PUSH_AGAIN_S, _LONGEST_PUSH_PAUSE_S = 0.1, 2.0
_OTHERS_WRITE_S = 600.0
"""For so long the nodes of a checkpoint wait for each other before it is given up."""


class SnapshotCourier:
    """Carries snapshots out of one node's memory."""

    def __init__(
        self,
        memory: SnapshotMemory,
        run_dir: Path,
        workers: int,
        tls: ssl.SSLContext | None,
        token: Callable[[], str],
        log: Callable[[str], None],
    ) -> None:
        """``token`` returns the run's, which may change; ``log`` takes lines for people."""
        self._memory, self._run_dir, self._tls, self._token, self._log = memory, run_dir, tls, token, log
        self._pushers = [ThreadPoolExecutor(1, f"push-{i}") for i in range(workers)]
        self._writer = ThreadPoolExecutor(2, "save")  # the next try begins while the one before gives up

    def held(self) -> tuple[RankSnapshot, ...]:
        """The snapshots that the memory holds now, as they are reported to the coordinator."""
        return tuple(
            RankSnapshot(h.key.ranks, h.key.rank, h.key.step, h.kind, h.nbytes, h.epoch)
            for h in self._memory.holdings()
        )

    async def push(self, worker: int, key: SnapshotKey, address: str, wanted: Callable[[], bool]) -> bool:
        """Streams a worker's snapshot to a buddy, again and again while it is wanted; true once it has arrived."""
        loop = asyncio.get_running_loop()
        pause_s, complaint = _PUSH_AGAIN_S, ""
        while wanted():
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
        with SnapshotClient(address, self._token(), tls=self._tls) as client:
            client.push(self._memory, key)

    async def save(self, order: SaveSnapshots, stopped: Callable[[], bool]) -> tuple[bool, str]:
        """Writes this node's share of a checkpoint. Returns true if it has committed the whole, and what kept it from its share."""
        try:
            committed = await asyncio.get_running_loop().run_in_executor(
                self._writer, self._write, order, stopped
            )
        except AbandonedError as error:
            self._log(f"step {order.step} was not saved: {error}")  # whoever could not write has said so
        except CheckpointError as error:
            self._log(f"cannot save step {order.step} from memory: {error}")
            return False, str(error)
        else:
            return committed, ""
        return False, ""

    def _write(self, order: SaveSnapshots, stopped: Callable[[], bool]) -> bool:
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
        """Ends the threads, without waiting for one that hangs in a dead peer or disk."""
        for pool in (*self._pushers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)


# This node's share of the copies of checkpoints in the run's store: dealt to it, settled, or given up.


class StoreCopies:
    """The copies that one node makes; none if the run has no store."""

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, attempt: int, log: Callable[[str], None]
    ) -> None:
        self._spec, self._directory, self._attempt, self._log = spec, directory, attempt, log
        self._uploader: StoreUploader | None = None
        self._events: EventLog | None = None
        self._hurried = asyncio.Event()

    def deal(self, ranks: tuple[int, ...], of: int) -> None:
        """From now on this node copies the files of these of ``of`` ranks."""
        if not self._spec.checkpoint.store:
            return
        # The client of stores, only where there is one.
        from phalanx.checkpoint.save.store_uploader import CopyShare

        if self._uploader is None:
            self._uploader = self._begin()
        self._uploader.deal(CopyShare(ranks, of))

    def _begin(self) -> StoreUploader:
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
        try:
            if self._events is None:
                self._events = EventLog(self._directory.events, self._attempt)
            self._events.append(event)
        except EventLogError as error:
            self._log(str(error))

    def hurry(self) -> None:
        """Gives up what is not in the store yet."""
        self._hurried.set()

    async def end(self, *, settled: bool) -> None:
        """Ends the copying; if it is to be ``settled``, with all of this node's share in the store, unless it is hurried."""
        if self._uploader is None:
            return
        if settled:
            settling = asyncio.create_task(asyncio.to_thread(self._uploader.settle))
            hurried = asyncio.create_task(self._hurried.wait())
            await asyncio.wait((settling, hurried), return_when=asyncio.FIRST_COMPLETED)
            if not settling.done():
                self._log("asked once more to end: gives up its copies to the store")
            elif missing := self._uploader.missing():
                self._log(f"not in the store: steps {', '.join(map(str, missing))}")
            hurried.cancel()
        self._uploader.cancel()
