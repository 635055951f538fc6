"""Memory that holds snapshots of ranks' state and outlives the workers that write them, within what the machine has free.

A node's agent owns the memory, its workers write into it. A *segment* is an anonymous file (memfd_create(2)): the agent
makes it, a worker inherits its descriptor, and both map it; it outlives the worker, and is freed with the last process that
has it open, however that one ends. Each worker has two segments (double buffering), so that while one is written the other is
whole; what buddies push lies in further segments, under the same rule: **the step that all ranks would roll back to is never
overwritten**.

A segment holds one snapshot: a page that says whether it is complete, the image (``format/image.py``, also a valid safetensors file),
and its *record*: run, epoch, layout, rank, step, the boxes, and a checksum of each block. Before anything is changed the first
bytes are cleared, and set again last, so that a writer killed at any moment leaves a whole snapshot or none.

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
from typing import Literal

import numpy as np
import xxhash

from phalanx.checkpoint.format.errors import CorruptError, NoSuchStepError, StorageFullError
from phalanx.checkpoint.format.image import PAGE_BYTES, ByteArray
from phalanx.checkpoint.format.manifest import Manifest, checksum, decode_manifest
from phalanx.observe.record.records import groups_of

# The memory that a process can still fill, by what the machine and its control groups (cgroups(7)) leave.

_Files = tuple[str, str, str, str]
"""The names of a group's files and fields: limit, usage, and two kinds of files' pages in ``memory.stat``."""
_FILES: dict[int, _Files] = {
    2: ("memory.max", "memory.current", "active_file", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}
"""By the version of control groups."""


def free_memory_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be filled without swapping or being killed for it: the machine's, or what the control groups leave.

    A limit may stand at this process's group or at any group above it, in either version of control groups; the tightest counts. Without
    limit where the system tells nothing (``proc`` and ``group`` are the places where Linux does).
    """
    found = [_left(folder, _FILES[version]) for folder, version in groups_of("memory", proc, group)]
    with suppress(OSError, ValueError, KeyError):
        found.append(_numbers(proc / "meminfo")["MemAvailable:"] * 1024)
    return min((free for free in found if free is not None), default=1 << 62)


def _left(folder: Path, files: _Files) -> int | None:
    """Bytes that a control group leaves; None if it sets no limit (version 2 says "max", version 1 a number beyond any memory)."""
    limit_name, usage_name, *cached_names = files
    try:
        limit = int((folder / limit_name).read_text())
        cached = _numbers(folder / "memory.stat")  # files' pages, which the kernel gives up for others
        used = int((folder / usage_name).read_text()) - sum(cached[name] for name in cached_names)
    except (OSError, ValueError, KeyError):
        return None
    return max(0, limit - used)


def _numbers(table: Path) -> dict[str, int]:
    """The first two words of each line."""
    return {line.split()[0]: int(line.split()[1]) for line in table.read_text().splitlines()}


BLOCK_BYTES = 1 << 20
"""Bytes of an image under one checksum, and the least that is read of a peer at once."""
NO_STEP = -1
_STAT_BLOCK_BYTES = 512
"""The unit of stat(2)'s count of what is filled."""
_FORMAT = 1
_COMPLETE = b"PHXSNAP1"
_HEAD = struct.Struct("<8sQQ")
_DIGEST_BYTES = 8
_LENGTHS = struct.Struct("<II")
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14


@dataclass(frozen=True, slots=True, order=True)
class SnapshotKey:
    """Identifies a snapshot: the state of rank ``rank`` of a layout of ``ranks`` ranks after step ``step``."""

    ranks: int
    rank: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.ranks}"


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A complete snapshot that this memory holds: of a worker of this node, or of a buddy."""

    key: SnapshotKey
    kind: Literal["own", "buddy"]
    nbytes: int
    epoch: int
    """In which it was taken."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a snapshot's record. ``previous`` is the step that must be kept until this snapshot is safe everywhere (-1: none)."""

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
    """The record of a snapshot: ``boxes`` is its manifest without checksums (``encode_manifest``, the same for every snapshot
    of a layout), ``digests`` the xxh3_64 of each block, 8 bytes each, little-endian. The record ends with its own checksum."""
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


def decode_record(record: bytes, where: str) -> Snapshot:
    """The inverse of ``encode_record``. ``where`` is for messages. Raises CorruptError."""
    if not _is_whole(record):
        raise CorruptError(
            f"{where}: the snapshot's record differs from its checksum; restore from another holder"
        )
    try:
        text_bytes, box_bytes = _LENGTHS.unpack_from(record)
        boxes_start = _LENGTHS.size + text_bytes
        fields = json.loads(record[_LENGTHS.size : boxes_start])
        manifest = decode_manifest(record[boxes_start : boxes_start + box_bytes], where)
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
            f"{where}: not a snapshot's record ({error!r}); restore from another holder"
        ) from error


def _is_whole(record: bytes) -> bool:
    return xxhash.xxh3_64_digest(record[:-_DIGEST_BYTES]) == record[-_DIGEST_BYTES:]


class Segment:
    """One snapshot's memory, seen from any process that has its descriptor. One process writes at a time."""

    def __init__(self, descriptor: int, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        """Takes over ``descriptor``: of a memfd, made by ``create`` here or in another process.

        ``free_bytes`` tells what memory the machine has left.
        """
        self.descriptor = descriptor
        self._free_bytes = free_bytes
        self._memory: ByteArray = np.empty(0, dtype=np.uint8)
        self._parsed: tuple[bytes, Snapshot] | None = None

    @classmethod
    def create(cls, name: str) -> "Segment":
        """A new, empty segment; ``name`` shows in /proc/PID/maps. Its descriptor is inherited only where it is passed on."""
        descriptor = os.memfd_create(f"phalanx-{name}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls(descriptor)

    @property
    def capacity_bytes(self) -> int:
        """Memory that the segment takes."""
        return os.fstat(self.descriptor).st_size

    def snapshot(self) -> Snapshot | None:
        """The record of the snapshot that lies here complete; None where there is none."""
        record = self.record()
        if record is None:
            return None
        if self._parsed is None or self._parsed[0] != record:
            self._parsed = record, decode_record(record, f"segment {self.descriptor}")
        return self._parsed[1]

    def record(self) -> bytes | None:
        """The record as bytes (see ``decode_record``); None where nothing lies here complete."""
        # Read, not mapped: a node that has no room for a mapping still knows what it holds.
        head = os.pread(self.descriptor, _HEAD.size, 0)
        magic, start, length = _HEAD.unpack(head)
        if magic != _COMPLETE or start + length > self.capacity_bytes:
            return None
        record = os.pread(self.descriptor, length, start)
        return record if _is_whole(record) else None

    def image(self, nbytes: int) -> ByteArray:
        """The image's first ``nbytes`` bytes (uint8), as a view of the memory itself."""
        return self._mapped()[PAGE_BYTES : PAGE_BYTES + nbytes]

    def begin(self, nbytes: int) -> ByteArray:
        """Invalidates what lies here and returns the memory for an image of ``nbytes`` bytes.

        Pages stay mapped from one snapshot to the next. Raises StorageFullError where there is no room, and what lies here stays."""
        self._require_room(nbytes)
        self._grow(nbytes)
        self.void()
        return self.image(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Makes room for an image of ``nbytes`` bytes and maps its pages now; what lies here stays. Raises StorageFullError."""
        self._grow(nbytes)
        self._populate(_end_of(nbytes))

    def _require_room(self, nbytes: int) -> None:
        # Told, and not left to the kernel, which would end some process when the pages are filled.
        more_bytes = _end_of(nbytes) - os.fstat(self.descriptor).st_blocks * _STAT_BLOCK_BYTES
        if more_bytes > 0 and more_bytes > (free_bytes := self._free_bytes()):
            raise StorageFullError(
                # The remedy within 200 characters, which is what a fleet keeps of why it went through a fault.
                f"no room for a snapshot: it takes {more_bytes:,} bytes more, and {free_bytes:,} are free; give the node more memory, or set "
                "fleet.snapshot_every_steps = 0 (a node holds two snapshots of each of its ranks and two of as many of others)"
            )

    def _grow(self, nbytes: int) -> None:
        before_bytes = self.capacity_bytes
        try:
            if _end_of(nbytes) > before_bytes:
                # Room for a record too, so that the mapping is not replaced under a snapshot; untouched, it costs nothing.
                os.ftruncate(self.descriptor, _end_of(nbytes) + _end_of(nbytes // 64 + (1 << 20)))
            self._mapped()
        except (OSError, OverflowError, ValueError) as error:
            os.ftruncate(self.descriptor, before_bytes)
            raise StorageFullError(
                f"no room for a snapshot of {nbytes:,} bytes ({error}); give the node more memory, or take snapshots of fewer "
                "ranks on it"
            ) from error

    def complete(self, nbytes: int, record: bytes) -> None:
        """Puts the record behind the image of ``nbytes`` bytes, which is all there, and marks the snapshot complete."""
        start = _end_of(nbytes)
        if start + len(record) > self._memory.nbytes:
            os.ftruncate(self.descriptor, _end_of(start + len(record)))
        memory = self._mapped()
        memory[start : start + len(record)] = np.frombuffer(record, dtype=np.uint8)
        # The magic bytes last: whoever sees them finds all else in place.
        head = _HEAD.pack(_COMPLETE, start, len(record))
        memory[8 : len(head)] = np.frombuffer(head[8:], dtype=np.uint8)
        memory[:8] = np.frombuffer(head[:8], dtype=np.uint8)

    def void(self) -> None:
        """Invalidates what lies here."""
        os.pwrite(self.descriptor, bytes(len(_COMPLETE)), 0)

    def close(self) -> None:
        """Closes this process's descriptor; the memory is freed when every process has."""
        self._memory = np.empty(0, dtype=np.uint8)
        os.close(self.descriptor)

    def _mapped(self) -> ByteArray:
        """All of the memory; mapped anew where it has grown since, here or in another process."""
        if self._memory.nbytes < (size := self.capacity_bytes):
            shared = mmap.mmap(self.descriptor, size)
            with suppress(OSError):  # Advice: without huge pages nothing but speed is lost.
                shared.madvise(mmap.MADV_HUGEPAGE)
            self._memory = np.frombuffer(shared, dtype=np.uint8)
        return self._memory

    def _populate(self, nbytes: int) -> None:
        memory = self._mapped()
        try:
            memory.base.obj.madvise(_MADV_POPULATE_WRITE, 0, nbytes)  # type: ignore[union-attr]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise StorageFullError(
                    f"no memory for a snapshot of {nbytes:,} bytes ({error.strerror}); give the node more, or take snapshots "
                    "of fewer ranks on it"
                ) from error
            # An older kernel: one write that changes nothing touches each page.
            pages = memory[:nbytes:PAGE_BYTES]
            np.bitwise_or(pages, 0, out=pages)


def _end_of(nbytes: int) -> int:
    """The page on which an image of ``nbytes`` bytes ends."""
    return PAGE_BYTES + -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def verified(manifest: Manifest, index: int, block: ByteArray, where: str) -> ByteArray:
    """Returns ``block`` if it has the checksum of block ``index``; else raises CorruptError, naming the holder ``where``."""
    if checksum(block) != manifest.checksums[index]:
        raise CorruptError(
            f"{where}: block {index} of the snapshot differs from its checksum (or the snapshot was replaced meanwhile). "
            "Restore from another holder."
        )
    return block


class SnapshotMemory:
    """All segments of a node, owned by its agent; safe to use from several threads."""

    def __init__(self, run: str, workers: int, *, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        """``run`` identifies the run; snapshots of another are refused. ``free_bytes`` tells how much more buddies may push now."""
        self.run = run
        self._own = tuple(
            (Segment.create(f"worker-{w}-a"), Segment.create(f"worker-{w}-b")) for w in range(workers)
        )
        self._buddies: list[Segment] = []
        self._free_bytes = free_bytes
        self._busy: dict[int, int] = {}
        self._lock = threading.Lock()

    def worker_segments(self, worker: int) -> tuple[Segment, Segment]:
        """The two segments of worker ``worker``, the same in each of its lives: pass their descriptors to its process."""
        return self._own[worker]

    def holdings(self) -> tuple[StoredSnapshot, ...]:
        """Every complete snapshot, sorted."""
        with self._lock:
            found = [(segment in self._buddies, self._held(segment)) for segment in self._segments()]
        holdings = [
            StoredSnapshot(s.key, "buddy" if pushed else "own", s.nbytes, s.epoch)
            for pushed, s in found
            if s is not None
        ]
        return tuple(sorted(holdings, key=lambda holding: (holding.key, holding.kind)))

    def holds(self, key: SnapshotKey) -> bool:
        """True if that snapshot lies here complete."""
        with self._lock:
            return any(held is not None and held.key == key for held in map(self._held, self._segments()))

    @contextmanager
    def reading(self, key: SnapshotKey) -> Iterator[tuple[Segment, Snapshot]]:
        """A snapshot that no push overwrites meanwhile. Raises NoSuchStepError where none is held."""
        with self._lock:
            segment, snapshot = self._find(key)
            self._hold(segment)
        try:
            yield segment, snapshot
        finally:
            self._let_go(segment)

    @contextmanager
    def receiving(self, key: SnapshotKey, previous: int, nbytes: int) -> Iterator[Segment]:
        """A segment for a buddy's snapshot ``key``: empty, or with what is neither of that step nor of step ``previous``.

        Raises StorageFullError where the machine has no memory left for it.
        """
        with self._lock:
            segment = self._room_for(key, previous, nbytes)
            self._hold(segment)
        try:
            yield segment
        finally:
            self._let_go(segment)

    def discard_after(self, step: int) -> None:
        """Forgets every snapshot newer than ``step``: a rollback to ``step``, while no worker of this node is in an epoch."""
        with self._lock:
            for segment in self._segments():
                held = self._held(segment)
                if held is not None and held.key.step > step:
                    segment.void()

    def close(self) -> None:
        """Frees all memory (workers that still have it open keep theirs)."""
        with self._lock:
            for segment in self._segments():
                segment.close()
            self._own, self._buddies = (), []

    def _segments(self) -> list[Segment]:
        return [*(segment for pair in self._own for segment in pair), *self._buddies]

    def _held(self, segment: Segment) -> Snapshot | None:
        snapshot = segment.snapshot()
        return snapshot if snapshot is not None and snapshot.run == self.run else None

    def _find(self, key: SnapshotKey) -> tuple[Segment, Snapshot]:
        for segment in self._segments():
            held = self._held(segment)
            if held is not None and held.key == key:
                return segment, held
        raise NoSuchStepError(f"{key} is not held here")

    def _room_for(self, key: SnapshotKey, previous: int, nbytes: int) -> Segment:
        # A segment is free if nobody reads it, and it holds neither the rollback target nor this very step.
        kept = {previous, key.step}
        free = [s for s in self._buddies if id(s) not in self._busy and _step_in(s) not in kept]
        fitting = [s for s in free if s.capacity_bytes >= nbytes]
        # The oldest first; one that is too small grows.
        segment = min(fitting or free, key=_step_in, default=None)
        more_bytes = nbytes - (segment.capacity_bytes if segment is not None else 0)
        if more_bytes > 0 and more_bytes > (free_bytes := self._free_bytes()):
            # Refused, and not left to the kernel, which would end some process when the pages are filled.
            raise StorageFullError(
                f"no room for {key}: it takes {more_bytes:,} bytes more, and {free_bytes:,} are free. Give the node more "
                "memory, or take snapshots of fewer ranks per node."
            )
        if segment is None:
            segment = Segment.create(f"buddy-{len(self._buddies)}")
            self._buddies.append(segment)
        return segment

    def _hold(self, segment: Segment) -> None:
        self._busy[id(segment)] = self._busy.get(id(segment), 0) + 1

    def _let_go(self, segment: Segment) -> None:
        with self._lock:
            self._busy[id(segment)] -= 1
            if not self._busy[id(segment)]:
                del self._busy[id(segment)]


def _step_in(segment: Segment) -> int:
    """The step held; below all others where there is none."""
    snapshot = segment.snapshot()
    return NO_STEP - 1 if snapshot is None else snapshot.key.step


def segments_from(descriptors: Sequence[int]) -> tuple[Segment, ...]:
    """The segments that a worker has inherited."""
    return tuple(map(Segment, descriptors))
