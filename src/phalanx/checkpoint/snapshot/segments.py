"""Memory for snapshots of ranks' state that outlives the workers that write them, within the machine's free memory.

A node's agent owns the memory, its workers write into it. A *segment* is an anonymous file (memfd_create(2)). The agent makes it, a worker
inherits its descriptor, and both map it. It outlives the worker, and is freed with the last process that has it open. Each worker has two
segments (double buffering), so that one is complete while the other is written. Snapshots of buddies are in further segments, under the
same rule: **the step that all ranks would roll back to is never overwritten**.

A segment has one snapshot: a page with a completion mark, the image (``format/image.py``, also a valid safetensors file), and its
*record*. The record has run, epoch, layout, rank, step, the boxes, and a checksum of each block. Before any change the first bytes are cleared, and they
are set again last. So a writer killed at any moment leaves a complete snapshot or none.

No torch: this is the agent's side; ``writer.py`` is the worker's. Sources: Gemini (Wang et al., SOSP 2023,
https://doi.org/10.1145/3600006.3613145) for snapshots in the memory of peers.
"""

import errno
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import xxhash
from msgspec import Meta

from phalanx.checkpoint.format.errors import CorruptError, NoSuchStepError, StorageFullError
from phalanx.checkpoint.format.image import PAGE_BYTES, ByteArray
from phalanx.checkpoint.format.manifest import Manifest, checksum, decode_manifest
from phalanx.observe.record.records import groups_of

# The memory that a process can use, and still use, by the limits of the machine and its control groups (cgroups(7)).

_Files = tuple[str, str, str, str]
"""Names of a group's files and fields: limit, usage, and two kinds of files' pages in ``memory.stat``."""
_FILES: dict[int, _Files] = {
    2: ("memory.max", "memory.current", "active_file", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}
"""File names by the version of control groups."""


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that can be filled without swapping or an out-of-memory kill, by the machine and the control
    groups.

    A limit may be set at this process's group or at any group above it, in either version of control groups; the
    tightest applies. 2^62 if the system reports no limit (``proc`` and ``group`` are Linux's folders for it).
    """
    limits = [
        _remaining_bytes(folder, _FILES[version]) for folder, version in groups_of("memory", proc, group)
    ]
    with suppress(OSError, ValueError, KeyError):
        limits.append(_numbers(proc / "meminfo")["MemAvailable:"] * 1024)
    return min((free for free in limits if free is not None), default=1 << 62)


def total_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the machine's memory, or the tightest limit of this process's control groups if that is less; 2^62 if the system reports
    neither (``proc`` and ``group`` are Linux's folders for it)."""
    totals = []
    for folder, version in groups_of("memory", proc, group):
        with suppress(OSError, ValueError):  # version 2 writes "max" for no limit
            totals.append(int((folder / _FILES[version][0]).read_text()))
    with suppress(OSError, ValueError, KeyError):
        totals.append(_numbers(proc / "meminfo")["MemTotal:"] * 1024)
    return min(totals, default=1 << 62)


def _remaining_bytes(folder: Path, files: _Files) -> int | None:
    """Return the bytes that a control group has left, counting its page cache as free, at least 0. None without a
    limit or if ``files`` cannot be read (version 2 has "max", version 1 a huge number).
    """
    limit_name, usage_name, *cached_names = files
    try:
        limit = int((folder / limit_name).read_text())
        cached = _numbers(folder / "memory.stat")  # page cache, which the kernel can reclaim
        used = int((folder / usage_name).read_text()) - sum(cached[name] for name in cached_names)
    except (OSError, ValueError, KeyError):
        return None
    return max(0, limit - used)


def _numbers(table: Path) -> dict[str, int]:
    """Return the first two words of each line as name and number."""
    return {line.split()[0]: int(line.split()[1]) for line in table.read_text().splitlines()}


BLOCK_BYTES = 1 << 20
"""Bytes of an image per checksum, and the smallest read from a peer."""
NO_STEP = -1
_STAT_BLOCK_BYTES = 512
"""Unit of stat(2)'s count of allocated blocks."""
_FORMAT = 1
_COMPLETE = b"PHXSNAP1"
_HEAD = struct.Struct("<8sQQ")
_DIGEST_BYTES = 8
_LENGTHS = struct.Struct("<II")
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14


WireCount = Annotated[int, Meta(ge=0, lt=2**53)]


@dataclass(frozen=True, slots=True, order=True)
class SnapshotKey:
    """Key of a snapshot, also in messages: the state of rank ``rank`` of a layout of ``ranks`` ranks after step ``step``."""

    ranks: WireCount
    rank: WireCount
    step: WireCount

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.ranks}"


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A complete snapshot in this memory, of a worker of this node or of a buddy."""

    key: SnapshotKey
    kind: Literal["own", "buddy"]
    nbytes: int
    epoch: int
    """The epoch in which it was taken."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Content of a snapshot's record. ``previous`` is the step that must be kept until this snapshot is safe everywhere (-1: none)."""

    run: str
    epoch: int
    key: SnapshotKey
    previous: int
    extra: dict[str, object]
    manifest: Manifest

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes


def encode_record(snapshot: Snapshot, boxes: bytes, digests: bytes) -> bytes:
    """Encode the record of a snapshot; it ends with its own checksum.

    ``boxes`` is its manifest without checksums (``encode_manifest``, the same for every snapshot of a layout). ``digests`` are the xxh3_64 of
    each block, 8 bytes each, little-endian.
    """
    key = snapshot.key
    text = json.dumps(
        {
            "format": _FORMAT,
            "run": snapshot.run,
            "epoch": snapshot.epoch,
            "ranks": key.ranks,
            "rank": key.rank,
            "step": key.step,
            "previous": snapshot.previous,
            "extra": snapshot.extra,
        },
        separators=(",", ":"),
    ).encode()
    body = _LENGTHS.pack(len(text), len(boxes)) + text + boxes + digests
    return body + xxhash.xxh3_64_digest(body)


def decode_record(record: bytes, location: str) -> Snapshot:
    """Return the snapshot that ``encode_record`` encoded, with the checksums of its blocks. ``location`` is for
    messages. Raises CorruptError if a byte was changed, or for another format.
    """
    if not _is_whole(record):
        raise CorruptError(
            f"{location}: the snapshot's record differs from its checksum; restore from another holder"
        )
    try:
        text_bytes, box_bytes = _LENGTHS.unpack_from(record)
        boxes_start = _LENGTHS.size + text_bytes
        fields = json.loads(record[_LENGTHS.size : boxes_start])
        manifest = decode_manifest(record[boxes_start : boxes_start + box_bytes], location)
        digests = np.frombuffer(record[boxes_start + box_bytes : -_DIGEST_BYTES], dtype="<u8")
        if fields["format"] != _FORMAT or len(digests) != -(-manifest.nbytes // manifest.block_bytes):
            raise ValueError("another format, or blocks without checksums")
        key = SnapshotKey(fields["ranks"], fields["rank"], fields["step"])
        checksums = tuple(f"{digest:016x}" for digest in digests.tolist())
        return Snapshot(
            fields["run"],
            fields["epoch"],
            key,
            fields["previous"],
            fields["extra"],
            replace(manifest, checksums=checksums),
        )
    except (KeyError, TypeError, ValueError, struct.error, ArithmeticError) as error:
        raise CorruptError(
            f"{location}: not a snapshot's record ({error!r}); restore from another holder"
        ) from error


def _is_whole(record: bytes) -> bool:
    return xxhash.xxh3_64_digest(record[:-_DIGEST_BYTES]) == record[-_DIGEST_BYTES:]


class Segment:
    """Memory of one snapshot, used by any process that has its descriptor. One process writes at a time."""

    def __init__(self, descriptor: int, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        """Take over ``descriptor`` of a memfd, made by ``create`` here or in another process.

        ``free_bytes`` returns the machine's free memory.
        """
        self.descriptor = descriptor
        self._free_bytes = free_bytes
        self._memory: ByteArray = np.empty(0, dtype=np.uint8)
        self._parsed: tuple[bytes, Snapshot] | None = None

    @classmethod
    def create(cls, name: str) -> "Segment":
        """Make a new, empty segment; ``name`` appears in /proc/PID/maps. Its descriptor is inherited only if passed on."""
        descriptor = os.memfd_create(f"phalanx-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @property
    def capacity_bytes(self) -> int:
        """Size of the segment."""
        return os.fstat(self.descriptor).st_size

    def snapshot(self) -> Snapshot | None:
        """Return the complete snapshot in this segment, as its record describes it. Parsed once per record.

        None if there is none, or if its record does not match its own checksum.
        """
        record = self.record()
        if record is None:
            return None
        if self._parsed is None or self._parsed[0] != record:
            self._parsed = record, decode_record(record, f"segment {self.descriptor}")
        return self._parsed[1]

    def record(self) -> bytes | None:
        """Return a copy of the encoded record (see ``decode_record``), verified by its own checksum.

        None if the checksum does not match, or if there is no complete snapshot.
        """
        # Read, not mapped, so that it works on a node without memory for a mapping.
        head = os.pread(self.descriptor, _HEAD.size, 0)
        magic, start, length = _HEAD.unpack(head)
        if magic != _COMPLETE or start + length > self.capacity_bytes:
            return None
        record = os.pread(self.descriptor, length, start)
        return record if _is_whole(record) else None

    def image(self, nbytes: int) -> ByteArray:
        """Return the image's first ``nbytes`` bytes (uint8), as a view of the memory."""
        return self._mapped()[PAGE_BYTES : PAGE_BYTES + nbytes]

    def begin(self, nbytes: int) -> ByteArray:
        """Invalidate the snapshot and return the memory for an image of ``nbytes`` bytes.

        Pages stay mapped from one snapshot to the next. Raises StorageFullError if there is no room; then the old snapshot stays.
        """
        # Checked here, because the kernel would kill some process when the pages are filled.
        more_bytes = _end_of(nbytes) - os.fstat(self.descriptor).st_blocks * _STAT_BLOCK_BYTES
        if more_bytes > 0 and more_bytes > (free_bytes := self._free_bytes()):
            raise StorageFullError(
                # The remedy is within the first 200 characters, which a fleet keeps of the reason for a fault.
                f"no room for a snapshot: it needs {more_bytes:,} bytes more, and {free_bytes:,} are free; give the node more memory, or set "
                "fleet.snapshot_every_steps = 0 (a node has two snapshots of each of its ranks and two of as many others)"
            )
        self._grow(nbytes)
        self.void()
        return self.image(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make room for an image of ``nbytes`` bytes and map its pages; the snapshot stays. Raises StorageFullError."""
        self._grow(nbytes)
        self._populate(_end_of(nbytes))

    def _grow(self, nbytes: int) -> None:
        """Enlarge the segment to hold an image of ``nbytes`` bytes and a record, and map it. Raises StorageFullError."""
        if _end_of(nbytes) > self.capacity_bytes:
            # Room for a record too, so that the mapping is not replaced under a snapshot; untouched, it costs nothing.
            self._resize(nbytes, _end_of(nbytes) + _end_of(nbytes // 64 + (1 << 20)))
        else:
            self._resize(nbytes, 0)

    def _resize(self, nbytes: int, total_bytes: int) -> None:
        """Enlarge the segment to ``total_bytes`` if it is smaller, for an image of ``nbytes`` bytes, and map it. Raises
        StorageFullError, and then restores its size.
        """
        before_bytes = self.capacity_bytes
        try:
            if total_bytes > before_bytes:
                os.ftruncate(self.descriptor, total_bytes)
            self._mapped()
        except (OSError, OverflowError, ValueError) as error:
            os.ftruncate(self.descriptor, before_bytes)
            raise StorageFullError(
                f"no room for a snapshot of {nbytes:,} bytes ({error}); give the node more memory, or take snapshots of fewer "
                "ranks on it"
            ) from error

    def complete(self, nbytes: int, record: bytes) -> None:
        """Write ``record`` behind the complete image of ``nbytes`` bytes, and mark the snapshot complete, last.

        Grows the segment if the record does not fit. Raises StorageFullError if it cannot grow.
        """
        start = _end_of(nbytes)
        self._resize(nbytes, _end_of(start - PAGE_BYTES + len(record)))
        memory = self._mapped()
        memory[start : start + len(record)] = np.frombuffer(record, dtype=np.uint8)
        # The magic bytes are written last: a reader that sees them finds everything else in place.
        head = _HEAD.pack(_COMPLETE, start, len(record))
        memory[8 : len(head)] = np.frombuffer(head[8:], dtype=np.uint8)
        memory[:8] = np.frombuffer(head[:8], dtype=np.uint8)

    def void(self) -> None:
        """Invalidate the snapshot."""
        os.pwrite(self.descriptor, bytes(len(_COMPLETE)), 0)

    def close(self) -> None:
        """Close this process's descriptor; the memory is freed after every process has closed its own."""
        self._memory = np.empty(0, dtype=np.uint8)
        os.close(self.descriptor)

    def _mapped(self) -> ByteArray:
        """Return all of the memory; map it again if it has grown since, in any process."""
        if self._memory.nbytes < (size := self.capacity_bytes):
            shared = mmap.mmap(self.descriptor, size)
            with suppress(OSError):  # Advice: without huge pages only speed is lost.
                shared.madvise(mmap.MADV_HUGEPAGE)
            self._memory = np.frombuffer(shared, dtype=np.uint8)
        return self._memory

    def _populate(self, nbytes: int) -> None:
        """Make the system back the first ``nbytes`` with memory now, writable, without changing them; raises
        StorageFullError without memory.
        """
        memory = self._mapped()
        try:
            memory.base.obj.madvise(_MADV_POPULATE_WRITE, 0, nbytes)  # type: ignore[union-attr]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise StorageFullError(
                    f"no memory for a snapshot of {nbytes:,} bytes ({error.strerror}); give the node more, or take snapshots "
                    "of fewer ranks on it"
                ) from error
            # An older kernel: touch each page with a write that changes nothing.
            pages = memory[:nbytes:PAGE_BYTES]
            np.bitwise_or(pages, 0, out=pages)


def _end_of(nbytes: int) -> int:
    """Return the end, in full pages, of an image of ``nbytes`` bytes."""
    return PAGE_BYTES + -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def verified(manifest: Manifest, index: int, block: ByteArray, location: str) -> ByteArray:
    """Return ``block`` if it has the checksum of block ``index``; else raise CorruptError, naming the holder ``location``."""
    if checksum(block) != manifest.checksums[index]:
        raise CorruptError(
            f"{location}: block {index} of the snapshot differs from its checksum (or the snapshot was replaced meanwhile). "
            "Restore from another holder."
        )
    return block


class SnapshotMemory:
    """All segments of a node, owned by its agent; thread-safe."""

    def __init__(self, run: str, workers: int, *, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        """Create two segments for each of ``workers``. The server refuses pushes of runs other than ``run``.
        ``free_bytes`` returns how many bytes more buddies may push now.
        """
        self.run = run
        self._own = tuple(
            (Segment.create(f"worker-{w}-a"), Segment.create(f"worker-{w}-b")) for w in range(workers)
        )
        self._buddies: list[Segment] = []
        self._free_bytes = free_bytes
        self._busy: dict[int, int] = {}
        self._lock = threading.Lock()

    def worker_segments(self, worker: int) -> tuple[Segment, Segment]:
        """Return the two segments of worker ``worker``, the same after each restart: pass their descriptors to its process."""
        return self._own[worker]

    def holdings(self) -> tuple[StoredSnapshot, ...]:
        """Return every complete snapshot's key, kind ("own" or "buddy"), size in bytes and epoch, sorted."""
        with self._lock:
            snapshots = [
                (segment in self._buddies, self._snapshot_in(segment)) for segment in self._segments()
            ]
        holdings = [
            StoredSnapshot(s.key, "buddy" if pushed else "own", s.nbytes, s.epoch)
            for pushed, s in snapshots
            if s is not None
        ]
        return tuple(sorted(holdings, key=lambda holding: (holding.key, holding.kind)))

    def holds(self, key: SnapshotKey) -> bool:
        """Return True if that snapshot is here, complete."""
        with self._lock:
            return any(
                snapshot is not None and snapshot.key == key
                for snapshot in map(self._snapshot_in, self._segments())
            )

    @contextmanager
    def reading(self, key: SnapshotKey) -> Iterator[tuple[Segment, Snapshot]]:
        """Context with a snapshot and its segment, that no push overwrites meanwhile. Raises NoSuchStepError if it is not here."""
        with self._lock:
            segment, snapshot = self._find(key)
            self._mark_busy(segment)
        try:
            yield segment, snapshot
        finally:
            self._release(segment)

    @contextmanager
    def receiving(self, key: SnapshotKey, previous: int, nbytes: int) -> Iterator[Segment]:
        """Context with a segment for a buddy's snapshot ``key``, which nobody else uses meanwhile.

        It may be smaller than ``nbytes`` and contain an older snapshot, neither this step nor step ``previous``, until its
        ``begin``. Raises StorageFullError if the machine has no memory for it.
        """
        with self._lock:
            segment = self._room_for(key, previous, nbytes)
            self._mark_busy(segment)
        try:
            yield segment
        finally:
            self._release(segment)

    def discard_after(self, step: int) -> None:
        """Discard every snapshot newer than ``step``: a rollback to ``step``, while no worker of this node is in an epoch."""
        with self._lock:
            for segment in self._segments():
                snapshot = self._snapshot_in(segment)
                if snapshot is not None and snapshot.key.step > step:
                    segment.void()

    def close(self) -> None:
        """Close all segments, which frees their memory; workers that still have one open keep it."""
        with self._lock:
            for segment in self._segments():
                segment.close()
            self._own, self._buddies = (), []

    def _segments(self) -> list[Segment]:
        return [*(segment for pair in self._own for segment in pair), *self._buddies]

    def _snapshot_in(self, segment: Segment) -> Snapshot | None:
        """Return a segment's snapshot; ``None`` if it has none of this run."""
        snapshot = segment.snapshot()
        return snapshot if snapshot is not None and snapshot.run == self.run else None

    def _find(self, key: SnapshotKey) -> tuple[Segment, Snapshot]:
        """Return the segment with a snapshot, and the snapshot; raises NoSuchStepError."""
        for segment in self._segments():
            snapshot = self._snapshot_in(segment)
            if snapshot is not None and snapshot.key == key:
                return segment, snapshot
        raise NoSuchStepError(f"{key} is not in this memory")

    def _room_for(self, key: SnapshotKey, previous: int, nbytes: int) -> Segment:
        """Return a segment of the buddies that is not in use and has neither the step of ``key`` nor ``previous``;
        else a new one.

        Of several, those that are large enough come first, then the one with the oldest step. Raises
        StorageFullError.
        """
        # A segment is free if it has no reader, and contains neither the rollback target nor this step.
        protected_steps = {previous, key.step}
        free = [s for s in self._buddies if id(s) not in self._busy and _step_in(s) not in protected_steps]
        fitting = [s for s in free if s.capacity_bytes >= nbytes]
        # The oldest first; one that is too small grows.
        segment = min(fitting or free, key=_step_in, default=None)
        more_bytes = nbytes - (segment.capacity_bytes if segment is not None else 0)
        if more_bytes > 0 and more_bytes > (free_bytes := self._free_bytes()):
            # Refused here, because the kernel would kill some process when the pages are filled.
            raise StorageFullError(
                f"no room for {key}: it needs {more_bytes:,} bytes more, and {free_bytes:,} are free. Give the node more "
                "memory, or take snapshots of fewer ranks per node."
            )
        if segment is None:
            segment = Segment.create(f"buddy-{len(self._buddies)}")
            self._buddies.append(segment)
        return segment

    def _mark_busy(self, segment: Segment) -> None:
        self._busy[id(segment)] = self._busy.get(id(segment), 0) + 1

    def _release(self, segment: Segment) -> None:
        """Mark the segment as unused by this reader or writer."""
        with self._lock:
            self._busy[id(segment)] -= 1
            if not self._busy[id(segment)]:
                del self._busy[id(segment)]


def _step_in(segment: Segment) -> int:
    """Return the step of the snapshot in the segment; below all others if there is none."""
    snapshot = segment.snapshot()
    return NO_STEP - 1 if snapshot is None else snapshot.key.step


def segments_from(descriptors: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments that a worker has inherited; no program that it starts inherits them from it."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return tuple(map(Segment, descriptors))
