"""Files in large checksummed blocks: writing, reading, and reading the parts of boxes that a restore plan needs.

Writing bypasses the page cache if the file system allows it (O_DIRECT): at several GB/s the cache costs more than the disk. With 8 MiB
blocks, two threads reach the device's bandwidth. The thread that writes a block computes its checksum. Reading verifies every
block, a few blocks ahead of the consumer, in a few reused buffers, so memory is bounded for any file size.
"""

import errno
import mmap
import os
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from phalanx.checkpoint.format.boxes import Box, PlannedRead
from phalanx.checkpoint.format.errors import (
    AbandonedError,
    CheckpointError,
    CorruptError,
    MissingFileError,
    StorageError,
    StorageFullError,
)
from phalanx.checkpoint.format.image import (
    PAGE_BYTES,
    ByteArray,
    ByteSpan,
    ImageEntry,
    ImageLayout,
    RawArray,
    c_strides,
    spans,
    view_of,
)
from phalanx.checkpoint.format.manifest import Manifest, checksum

BLOCK_BYTES = 8 << 20
_WRITE_THREADS, _READ_THREADS = 2, 3
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECT_IO = (errno.EINVAL, errno.ENOTSUP)
_T = TypeVar("_T")


@contextmanager
def storage_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Context that converts an OSError to the CheckpointError of ``explain``: for writing if ``needed_bytes`` is
    positive, else for reading.
    """
    try:
        yield
    except OSError as error:
        raise explain(error, path, needed_bytes) from error


def explain(error: OSError, path: Path, needed_bytes: int) -> CheckpointError:
    """Return the CheckpointError for ``error``, raised while ``path`` was written (``needed_bytes`` > 0) or read.
    Full disks and size limits give StorageFullError; a missing file AbandonedError for writes, MissingFileError for
    reads; all else StorageError.
    """
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        most = "fewer, by its file system" if limit == resource.RLIM_INFINITY else f"{limit:,} (ulimit -f)"
        return StorageFullError(
            f"{path}: {needed_bytes:,} bytes needed, and a file may have at most {most}. This checkpoint was abandoned; earlier ones, if there "
            "are any, are intact. Raise the limit, or name another folder; the next save tries again."
        )
    if error.errno in _FULL:
        return StorageFullError(
            f"{path}: no room ({error.strerror}): {needed_bytes:,} bytes needed, {_free_bytes(path):,} free{_lacking_files(path)}. "
            "This checkpoint was abandoned; earlier ones, if there are any, are intact. Free space, raise the quota, or "
            "keep fewer checkpoints; the next save tries again."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return StorageError(
            f"{path}: {error.strerror}: a process may have {most_open:,} files open (ulimit -n). Raise the limit; if their number grows with the steps "
            "(ls /proc/PID/fd), code of the run leaves files open. Earlier checkpoints, if there are any, are intact; the next save tries again."
        )
    if isinstance(error, FileNotFoundError) and needed_bytes:
        return AbandonedError(
            f"{path}: the save's folder is gone: the save was abandoned meanwhile, or swept away."
        )
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return MissingFileError(
            f"{path}: is missing, with its folder. A run that trains deletes its older checkpoints (checkpoint.keep_last): take a newer step, "
            "or keep this one by checkpoint.keep_every."
        )
    if isinstance(error, FileNotFoundError):
        return MissingFileError(f"{path}: is missing. Restore another step, or copy the file back.")
    if isinstance(error, PermissionError):
        return StorageError(f"{path}: permission denied. Grant this user access, or name another folder.")
    return StorageError(
        f"{path}: {error.strerror} ({errno.errorcode.get(error.errno or 0, '?')}). The storage failed; earlier "
        "checkpoints, if there are any, are intact. Check the disk or mount, then save again or restore from elsewhere."
    )


def _disk(path: Path) -> os.statvfs_result:
    """Return the state of the disk of ``path``, which need not exist."""
    return os.statvfs(next(parent for parent in path.parents if parent.exists()))


def _free_bytes(path: Path) -> int:
    """Return the bytes that are free on the disk of ``path``."""
    disk = _disk(path)
    return disk.f_bavail * disk.f_frsize


def _lacking_files(path: Path) -> str:
    """Return the words for a disk that has as many files as it can have, else nothing. Some file systems have no such limit."""
    disk = _disk(path)
    return (
        f", but it has all of its {disk.f_files:,} files (inodes)"
        if disk.f_files and not disk.f_favail
        else ""
    )


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raise StorageFullError if ``folder``'s file system has no room for ``needed_bytes`` more."""
    if _free_bytes(folder / "file") < needed_bytes:
        raise explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder, needed_bytes)


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """The checksum of each block, and True if the page cache was bypassed."""

    checksums: tuple[str, ...]
    direct: bool


def write_blocks(
    path: Path,
    data: ByteArray,
    *,
    block_bytes: int = BLOCK_BYTES,
    cancelled: Callable[[], bool],
) -> WrittenBlocks:
    """Write ``data`` (uint8) to a file at ``path``, replacing an existing one, durably (fsync), and return its
    blocks' checksums. Several threads write.

    Uses direct I/O if the file system and the alignment allow it; the result reports it. Raises StorageFullError,
    StorageError, or AbandonedError if ``cancelled()`` becomes true between two blocks. A failed file stays.
    """
    with storage_errors(path, data.nbytes):
        if data.ctypes.data % PAGE_BYTES == 0 and block_bytes % PAGE_BYTES == 0:
            try:
                return WrittenBlocks(_write(path, data, block_bytes, cancelled, os.O_DIRECT), True)
            except OSError as error:
                if error.errno not in _NO_DIRECT_IO:
                    raise
        return WrittenBlocks(_write(path, data, block_bytes, cancelled, 0), False)


def _write(
    path: Path, data: ByteArray, block_bytes: int, cancelled: Callable[[], bool], flag: int
) -> tuple[str, ...]:
    """Write the blocks to a new or replaced file on several threads, with ``flag`` for open(2), sync it, and return
    their checksums. Raises OSError, and AbandonedError if ``cancelled()``.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | flag, 0o644)

    def write_block(start: int) -> str:
        """Write one block, padded for direct input and output, and return its checksum. Raises ``AbandonedError`` if
        the save is cancelled.
        """
        if cancelled():
            raise AbandonedError(f"{path}: the save was cancelled")
        block = data[start : start + block_bytes]
        digest = checksum(block)
        write_all(descriptor, (_padded(block) if flag else block).data, start)
        return digest

    try:
        # Set the size first: two threads then fill a file instead of waiting for each other to extend it.
        os.ftruncate(descriptor, data.nbytes)
        with ThreadPoolExecutor(_WRITE_THREADS, "checkpoint-write") as pool:
            futures = [pool.submit(write_block, start) for start in range(0, data.nbytes, block_bytes)]
            try:
                checksums = tuple(future.result() for future in futures)
            finally:
                pool.shutdown(cancel_futures=True)
        os.ftruncate(descriptor, data.nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksums


def _padded(block: ByteArray) -> ByteArray:
    """Return ``block``, padded to a full page if necessary: direct writes require full pages."""
    if block.nbytes % PAGE_BYTES == 0:
        return block
    padded = page_aligned(-(-block.nbytes // PAGE_BYTES) * PAGE_BYTES)
    padded[: block.nbytes] = block
    return padded


def write_all(descriptor: int, data: bytes | bytearray | memoryview, start: int) -> None:
    """Write all of ``data`` at byte ``start`` of the file, whose own position does not move. Raises ``OSError``."""
    # Released at the end: an exported view would forbid changes of a buffer's length.
    with memoryview(data) as view:
        written = 0
        while written < len(view):
            written += os.pwrite(descriptor, view[written:], start + written)


def page_aligned(nbytes: int) -> ByteArray:
    """Return a new page-aligned array of zeros (uint8)."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]


def grouped(items: Iterable[_T], nbytes_of: Callable[[_T], int], most_bytes: int) -> Iterator[list[_T]]:
    """Yield consecutive items together, as many as ``most_bytes`` allow; a larger item is alone."""
    group: list[_T] = []
    size = 0
    for item in items:
        nbytes = nbytes_of(item)
        if group and size + nbytes > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file that was written in blocks, with its manifest."""

    path: Path
    manifest: Manifest

    def span_of(self, index: int) -> tuple[int, int]:
        """Return start and stop of block ``index`` in the file, in bytes."""
        start = index * self.manifest.block_bytes
        return start, min(start + self.manifest.block_bytes, self.manifest.nbytes)

    def blocks(self, numbers: Iterable[int]) -> "Iterator[ByteArray]":
        """``verified_blocks`` of this file."""
        return verified_blocks((self, number) for number in numbers)


BlockRef = tuple[BlockFile, int]
"""A file and the index of one of its blocks."""


def verified_blocks(refs: Iterable[BlockRef]) -> Iterator[ByteArray]:
    """Yield the verified bytes of each block; a block is valid until the next one is requested.

    Raises CorruptError, MissingFileError or StorageError, naming the file, the block and the tensors in it.
    """
    return read_ahead(refs, lambda block: block[0].manifest.block_bytes, _read_block, threads=_READ_THREADS)


def read_ahead(
    requests: Iterable[_T],
    size_of: Callable[[_T], int],
    read: Callable[[_T, ByteArray], int],
    *,
    threads: int,
) -> Iterator[ByteArray]:
    """Prefetch: yield for each of ``requests`` the bytes that ``read`` puts into a buffer, ``threads`` reads ahead.

    A buffer has at least ``size_of(request)`` bytes. ``read`` runs in one of ``threads`` threads and returns the
    number of bytes filled. Its errors are raised when its bytes are due. A result is valid until the next one is
    requested.
    """
    pending = iter(requests)
    with ThreadPoolExecutor(threads, "checkpoint-read") as pool:
        spare: deque[ByteArray] = deque()
        ahead: deque[tuple[Future[int], ByteArray]] = deque()

        def submit(request: _T) -> None:
            size = size_of(request)
            buffer = spare.popleft() if spare and spare[0].nbytes >= size else page_aligned(size)
            ahead.append((pool.submit(read, request, buffer), buffer))

        for request in islice(pending, threads):
            submit(request)
        while ahead:
            future, buffer = ahead.popleft()
            size = future.result()
            for request in islice(pending, 1):
                submit(request)
            yield buffer[:size]
            spare.append(buffer)


def _read_block(block: BlockRef, buffer: ByteArray) -> int:
    """Read a block into ``buffer``, verify its checksum, and return its length. Raises CorruptError, and the errors of storage."""
    file, index = block
    start, stop = file.span_of(index)
    view = buffer.data[: stop - start]
    with storage_errors(file.path):
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            read = _read_all(descriptor, view, start)
        finally:
            os.close(descriptor)
    if read < len(view):
        raise CorruptError(
            f"{_location(file, index)}: the file ends at byte {file.path.stat().st_size:,} of {file.manifest.nbytes:,}. {_REMEDY}"
        )
    if checksum(view) != file.manifest.checksums[index]:
        raise CorruptError(f"{_location(file, index)}: the bytes differ from their checksum. {_REMEDY}")
    return len(view)


_REMEDY = "Restore another step or tier, or copy the file back from an intact copy."


def _location(file: BlockFile, index: int) -> str:
    """Return the block's file, number, byte range and first tensors, for messages."""
    start, stop = file.span_of(index)
    names = ImageLayout(b"", file.manifest.entries, file.manifest.nbytes).names_in(start, stop)
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{file.path}, block {index} (bytes {start:,} to {stop:,}; {shown or 'the header'})"


def _read_all(descriptor: int, view: memoryview, start: int) -> int:
    """Fill ``view`` from byte ``start`` and return the bytes read, fewer at the end of the file."""
    total = 0
    while total < len(view):
        count = os.preadv(descriptor, [view[total:]], start + total)
        if not count:
            break
        total += count
    return total


# Parts of boxes that a restore plan reads from the checksummed blocks of an image.
#
# Every source of an image (a file, a memory segment, a peer) returns complete blocks, because only these can be verified. Here the
# requested (possibly strided) parts of boxes are cut out of the blocks. A piece ends where a block ends, so it is a view of one block;
# only an element that spans two blocks is copied. If the reads are in the image's order, every block is fetched once.


BlockReader = Callable[[Sequence[int]], Iterator[ByteArray]]
"""Function from block numbers to the verified bytes of each; a block is valid until the next one is requested."""


def read_parts(
    manifest: Manifest, reads: Sequence[PlannedRead], blocks: BlockReader
) -> Iterator[tuple[Box, RawArray]]:
    """Yield the parts that ``reads`` request from the image of ``manifest``, in pieces within a block, each with its
    box. ``blocks`` returns the bytes of numbered blocks.

    An array is a view that is valid until the next one. Each block is read once if reads are in order.
    """
    starts = {entry.box: entry.start for entry in manifest.entries}
    pieces = [
        (ImageEntry(read.source.box, starts[read.source.box]), span)
        for read in reads
        for span in spans_in_blocks(read.source.box, read.part, starts[read.source.box], manifest.block_bytes)
    ]
    numbers = [number for entry, span in pieces for number in _blocks_of(manifest, entry, span)]
    distinct = [number for number, _ in groupby(numbers)]
    window = _Window(blocks(distinct), distinct, manifest.block_bytes)
    for entry, span in pieces:
        yield (
            span.part,
            view_of(entry.box, span, window.take(entry.start + span.start, entry.start + span.stop)),
        )


def spans_in_blocks(source: Box, part: Box, start: int, block_bytes: int) -> Iterator[ByteSpan]:
    """Cut ``part`` of the stored box ``source``, which begins at byte ``start`` of its image, where blocks of the image end.

    Each piece is within one block, or is a single element. Together they are the part, in the order of their first bytes.
    Byte positions of a piece count from the start of ``source``, not of the image.
    """
    if not part.numel:
        return
    (full_span,) = spans(source, part, source.nbytes)
    if (
        part.numel == 1
        or (start + full_span.start) // block_bytes == (start + full_span.stop - 1) // block_bytes
    ):
        yield full_span
        return
    dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
    stride, rows = c_strides(source)[dim], part.shape[dim]
    row_bytes = full_span.stop - full_span.start - (rows - 1) * stride
    row = 0
    while row < rows:
        begin = start + full_span.start + row * stride
        room = block_bytes - begin % block_bytes
        count = min(rows - row, (room - row_bytes) // stride + 1) if room >= row_bytes else 1
        yield from spans_in_blocks(source, _rows(part, dim, row, count), start, block_bytes)
        row += count


def _rows(part: Box, dim: int, first: int, count: int) -> Box:
    """Return ``count`` rows of ``part`` from row ``first`` in dimension ``dim``."""
    offset, shape = list(part.offset), list(part.shape)
    offset[dim] += first
    shape[dim] = count
    return part.part(tuple(offset), tuple(shape))


def _blocks_of(manifest: Manifest, entry: ImageEntry, span: ByteSpan) -> range:
    """Return the numbers of the blocks that a span of an image touches."""
    block_bytes = manifest.block_bytes
    return range((entry.start + span.start) // block_bytes, (entry.start + span.stop - 1) // block_bytes + 1)


class _Window:
    """Sliding window over an image's blocks, from which byte ranges are assembled."""

    def __init__(self, blocks: Iterator[ByteArray], numbers: Sequence[int], block_bytes: int) -> None:
        """Assemble from ``blocks``, which yields those of ``numbers`` in this order."""
        self._blocks = blocks
        self._numbers = iter(numbers)
        self._block_bytes = block_bytes
        self._number = -1
        self._block: ByteArray | None = None

    def take(self, start: int, stop: int) -> ByteArray:
        """Return the image's bytes ``start:stop``, valid until the next call: a view within one block, else a copy.
        Starts may not go back to an earlier block.
        """
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        if first == last:
            return self._at(first)[start - first * self._block_bytes : stop - first * self._block_bytes]
        out = np.empty(stop - start, dtype=np.uint8)
        for number in range(first, last + 1):
            base = number * self._block_bytes
            low, high = max(start, base), min(stop, base + self._block_bytes)
            out[low - start : high - start] = self._at(number)[low - base : high - base]
        return out

    def _at(self, number: int) -> ByteArray:
        """Return the block ``number``; blocks are read once and in order."""
        if self._block is None or number != self._number:
            self._number, self._block = next(self._numbers), next(self._blocks)
        return self._block
