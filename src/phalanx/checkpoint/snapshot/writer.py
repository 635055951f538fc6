"""The worker's side of snapshots: after a step, one memory copy of the state into memory that outlives the worker.

A worker has two segments (``segments.py``). It writes the one without the step that all ranks would roll back to. The training step waits
only for the copy; then a thread computes the checksums and marks the snapshot complete. On CUDA the copy runs on a side stream
(``fence()`` before weights change), and the thread waits for it.

The caller must call ``take`` only after the newest snapshot is safe on all ranks.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import xxhash

from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.image import ByteArray, ImageLayout, image_layout
from phalanx.checkpoint.format.manifest import Manifest, encode_manifest
from phalanx.checkpoint.save.staging import COPY_THREADS, ImageCopier, on_cuda, pin, unpin
from phalanx.checkpoint.snapshot.segments import (
    BLOCK_BYTES,
    NO_STEP,
    Segment,
    Snapshot,
    SnapshotKey,
    encode_record,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TakenSnapshot:
    """A snapshot, and its cost to the step: the wait for the completion of the previous one, and the copy."""

    epoch: int
    key: SnapshotKey
    nbytes: int
    waited_s: float
    copied_s: float


@dataclass(frozen=True, slots=True)
class _BoundRank:
    """The rank of this worker in the current epoch."""

    epoch: int
    ranks: int
    rank: int


class SnapshotWriter:
    """Takes snapshots of one worker's state; for one thread at a time."""

    def __init__(
        self,
        segments: Sequence[Segment],
        run: str,
        *,
        on_complete: Callable[[TakenSnapshot], None] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Use the worker's two ``segments``.

        ``on_complete`` is called, in a thread, when a snapshot is complete. Raises ValueError for another number of
        them.
        """
        if len(segments) != 2:
            raise ValueError(f"{len(segments)} segments: a worker has two, one to write and one to keep")
        self._segments = tuple(segments)
        self._run = run
        self._on_complete = on_complete
        self._block_bytes = block_bytes
        self._copier = ImageCopier()
        self._finisher = ThreadPoolExecutor(1, "snapshot-finish")
        self._hashers = ThreadPoolExecutor(COPY_THREADS, "snapshot-checksum")
        self._pending: tuple[Future[None], int, int] | None = None
        self._bound: _BoundRank | None = None
        self._protected_index: int | None = None
        self._previous = NO_STEP
        # The boxes of a rank are the same at every step.
        self._layout_of = lru_cache(maxsize=1)(image_layout)
        self._boxes: tuple[ImageLayout, int, bytes] | None = None
        self._pinned: list[ByteArray | None] = [None, None]

    def bind(self, epoch: int, ranks: int, rank: int, resumed_step: int = NO_STEP) -> None:
        """Become a rank of an epoch that begins at ``resumed_step`` (-1: from no snapshot), which must not be
        overwritten.

        This worker's snapshots of later steps are discarded, because the rollback has undone these steps. Waits for a
        snapshot that is being completed; its error is logged.
        """
        if self._pending is not None:
            (finished, _, step), self._pending = self._pending, None
            if (error := finished.exception()) is not None:
                _log.warning("the snapshot of step %d is not complete: %s", step, error)
        self._bound = _BoundRank(epoch, ranks, rank)
        self._previous, self._protected_index = resumed_step, None
        for index, segment in enumerate(self._segments):
            snapshot = segment.snapshot()
            if snapshot is not None and snapshot.key.step == resumed_step:
                self._protected_index = index
            elif snapshot is not None and snapshot.key.step > resumed_step:
                segment.void()

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Reserve both segments and map their pages now, so that the first snapshot is as fast as later ones."""
        layout = self._layout_of(tuple(shard.box for shard in shards))
        for index, segment in enumerate(self._segments):
            segment.reserve(layout.nbytes)
            self._pin(index, segment.image(layout.nbytes), shards)

    def take(self, step: int, shards: Sequence[Shard], extra: Mapping[str, object]) -> TakenSnapshot:
        """Copy the state after ``step`` into the segment that is not protected. Waits for the previous snapshot's
        completion, and blocks for one memory copy.

        Raises the error of that completion, if any; StorageFullError without memory; RuntimeError before ``bind``. A
        thread completes the snapshot. The tensors may change when this returns (on CUDA: after ``fence``).
        """
        bound = self._bound
        if bound is None:
            raise RuntimeError("a snapshot needs a rank: call bind first")
        begin = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        layout = self._layout_of(tuple(shard.box for shard in shards))
        index = 0 if self._protected_index is None else 1 - self._protected_index
        image = self._segments[index].begin(layout.nbytes)
        self._pin(index, image, shards)
        image[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        copied = self._copier.copy(layout, shards, image)
        key = SnapshotKey(bound.ranks, bound.rank, step)
        snapshot = TakenSnapshot(
            bound.epoch, key, layout.nbytes, waited - begin, time.perf_counter() - waited
        )
        sources = tuple(shards) if copied is not None else ()
        finished = self._finisher.submit(
            self._finish, index, snapshot, layout, dict(extra), self._previous, copied, sources
        )
        self._pending = finished, index, step
        return snapshot

    def wait(self) -> None:
        """Wait until the last snapshot is complete. Raises its error. A complete one is protected from then on."""
        if self._pending is not None:
            (finished, index, step), self._pending = self._pending, None
            finished.result()
            self._protected_index, self._previous = index, step

    def fence(self) -> None:
        """Order running device copies before later changes of the weights. Call it before they change. Does not block the host."""
        self._copier.fence()

    def close(self) -> None:
        """Stop the threads; the segments and their snapshots stay. Waits for a snapshot that is being completed."""
        for pool in (self._finisher, self._hashers):
            pool.shutdown()
        self._copier.close()
        for index in range(2):
            self._unpin(index)

    def _finish(
        self,
        index: int,
        taken_snapshot: TakenSnapshot,
        layout: ImageLayout,
        extra: dict[str, object],
        previous: int,
        copied: "torch.cuda.Event | None",
        _sources: tuple[Shard, ...],  # referenced so that memory that a side stream still reads is not reused
    ) -> None:
        """Wait for the copy, hash its blocks, write the record that completes the snapshot, and call ``on_complete``."""
        if copied is not None:
            copied.synchronize()
        segment = self._segments[index]
        image = segment.image(layout.nbytes)
        blocks = [
            image[start : start + self._block_bytes] for start in range(0, layout.nbytes, self._block_bytes)
        ]
        digests = np.fromiter(
            self._hashers.map(xxhash.xxh3_64_intdigest, blocks), dtype="<u8", count=len(blocks)
        )
        manifest = Manifest(taken_snapshot.key.rank, "", layout.nbytes, self._block_bytes, (), layout.entries)
        snapshot = Snapshot(self._run, taken_snapshot.epoch, taken_snapshot.key, previous, extra, manifest)
        # The part of a record that is the same for every snapshot of a layout is encoded once.
        if self._boxes is None or self._boxes[0] is not layout or self._boxes[1] != manifest.rank:
            self._boxes = layout, manifest.rank, encode_manifest(manifest)
        segment.complete(layout.nbytes, encode_record(snapshot, self._boxes[2], digests.tobytes()))
        if self._on_complete is not None:
            self._on_complete(taken_snapshot)

    def _pin(self, index: int, image: ByteArray, shards: Sequence[Shard]) -> None:
        """Pin the segment's memory for copies from a GPU, unless it is pinned or the shards are not on one."""
        pinned = self._pinned[index]
        if not on_cuda(shards) or (pinned is not None and _same_memory(pinned, image)):
            return
        self._unpin(index)
        pin(image)
        self._pinned[index] = image

    def _unpin(self, index: int) -> None:
        """Unpin the memory of segment ``index``, if it is pinned."""
        pinned = self._pinned[index]
        if pinned is not None:
            unpin(pinned)
            self._pinned[index] = None


def _same_memory(pinned: ByteArray, image: ByteArray) -> bool:
    return pinned.ctypes.data == image.ctypes.data and pinned.nbytes >= image.nbytes
