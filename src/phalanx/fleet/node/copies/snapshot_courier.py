"""The ways of a node's snapshots out of its memory: to the buddy of a rank, and at the end of a run to disk.

Both wait for wires and disks, so threads carry them out, one for each worker and one for the disk, while the agent's event loop goes on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError
from phalanx.checkpoint.snapshot.data_port import SnapshotClient
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.checkpoint.snapshot.to_disk import save_snapshots
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft
from phalanx.fleet.core.commands import SaveSnapshots
from phalanx.fleet.core.messages import RankSnapshot
from phalanx.run.directory.paths import RunDirectory

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
