"""Reads a pack: the index at once, sections on demand, each chunk verified by its checksum.

Reads bypass the page cache (O_DIRECT) if the file system allows it. Each byte is read once per pass, so a cache would only evict other
data and count as this process's memory. The file stays open: replacing the file of that name does not affect this reader. Writes into the
open file are detected by the checksums.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from phalanx.checkpoint.format.blocks import page_aligned
from phalanx.checkpoint.format.errors import CorruptError, MissingFileError, StorageError
from phalanx.checkpoint.format.image import PAGE_BYTES, ByteArray
from phalanx.checkpoint.pack.layout import (
    CHUNK_BYTES,
    REMEDY,
    PackError,
    PackIndex,
    Section,
    decode_header,
    decode_index,
    padded_bytes,
)

_log = logging.getLogger(__name__)
_NO_DIRECT_IO = (errno.EINVAL, errno.ENOTSUP)
_MOST_INDEX_BYTES = 1 << 30


@dataclass(slots=True)
class PackFile:
    """An open pack."""

    path: Path
    index: PackIndex
    descriptor: int
    direct: bool
    """True if reads bypass the page cache."""
    _identity: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))

    def close(self) -> None:
        """Close the file; no reads are possible afterwards."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        """Close the file of a pack that nobody uses any more, such as one that was refused."""
        self.close()

    def read_chunks(self, section: int, first: int, count: int, buffer: ByteArray) -> None:
        """Fill ``buffer``, which is page-aligned at both ends, with the verified chunks ``first:first + count`` of a section.

        Raises CorruptError, StorageError, which name the file, the section and the tensors.
        """
        layout = self.index.sections[section]
        start, stop = first * CHUNK_BYTES, min((first + count) * CHUNK_BYTES, layout.nbytes)
        self._fill(layout, start, buffer[: padded_bytes(stop - start)])
        for chunk in range(first, first + count):
            low = chunk * CHUNK_BYTES
            data = buffer[low - start : min(low + CHUNK_BYTES, layout.nbytes) - start]
            if xxhash.xxh3_64_intdigest(data.data) != self.index.checksums[section][chunk]:
                raise CorruptError(
                    f"{self._location(layout, chunk)}: the bytes differ from their checksum{self._suspicion()}. {REMEDY}"
                )

    def _fill(self, section: Section, start: int, buffer: ByteArray) -> None:
        """Fill the page-aligned ``buffer`` from byte ``start`` of a section; raises CorruptError at the file's end, or
        StorageError.

        Without direct I/O, the pages are dropped from the page cache.
        """
        filled = 0
        try:
            while filled < buffer.nbytes:
                count = os.preadv(self.descriptor, [buffer.data[filled:]], section.start + start + filled)
                if count == 0 or (self.direct and count % PAGE_BYTES and filled + count < buffer.nbytes):
                    raise CorruptError(
                        f"{self._location(section, start // CHUNK_BYTES)}: the file ends within it{self._suspicion()}. {REMEDY}"
                    )
                filled += count
        except OSError as error:
            raise StorageError(
                f"{self._location(section, start // CHUNK_BYTES)}: {error.strerror} "
                f"({errno.errorcode.get(error.errno or 0, '?')}). The storage failed: check the disk or mount."
            ) from error
        if not self.direct:
            os.posix_fadvise(self.descriptor, section.start + start, buffer.nbytes, os.POSIX_FADV_DONTNEED)

    def _location(self, section: Section, chunk: int) -> str:
        """Return the file, section, chunk and first tensors, for messages."""
        low, high = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        names = [
            section.prefix + tensor.name
            for tensor in section.tensors
            if tensor.start < high and low < tensor.stop
        ]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{self.path}, {section.name}, chunk {chunk} ({shown})"

    def _suspicion(self) -> str:
        """Return a clause for messages if the file was changed since it was opened, else an empty text."""
        return (
            ""
            if _identity(self.descriptor) == self._identity
            else ", and the file was written to since it was opened"
        )


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    """Return what changes if the file is replaced or written: device, inode, size and time."""
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def is_pack(path: Path) -> bool:
    """Return True if ``path`` is a file, as a pack is and a run directory is not."""
    return path.is_file()


def open_pack(path: Path, *, direct: bool = True) -> PackFile:
    """Open a pack and check its header, index and size; the weights are read and verified later. With ``direct``, open
    it for direct I/O if the file system supports it, else log a warning.

    Raises PackError if the file is not a pack, CorruptError, FormatVersionError, MissingFileError, StorageError.
    """
    index = _read_index(path)
    flags = os.O_RDONLY | os.O_CLOEXEC
    if direct:
        try:
            opened = _try_direct(path, flags)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error
        if opened is not None:
            return PackFile(path, index, opened, True, _identity(opened))
        _log.warning(
            "%s: its file system refuses O_DIRECT: weights are read through the page cache, which is slower "
            "and counts against memory limits until it is evicted",
            path,
        )
    descriptor = os.open(path, flags)
    return PackFile(path, index, descriptor, False, _identity(descriptor))


def _try_direct(path: Path, flags: int) -> int | None:
    """Open the file for direct I/O and try a read; return None if the file system refuses it."""
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            return None
        raise
    try:
        # Some file systems accept the flag and refuse the read.
        os.preadv(descriptor, [page_aligned(PAGE_BYTES).data], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_DIRECT_IO:
            return None
        raise
    return descriptor


def _read_index(path: Path) -> PackIndex:
    """Return the verified index of a pack; no tensor is read. Raises the errors of ``open_pack``, also for a file that was cut off."""
    try:
        with path.open("rb") as file:
            start, nbytes = decode_header(file.read(PAGE_BYTES), str(path))
            size = os.fstat(file.fileno()).st_size
            if nbytes > _MOST_INDEX_BYTES or size < start + nbytes:
                raise CorruptError(
                    f"{path}: ends at byte {size:,} of {start + nbytes:,}; it was cut off or not copied to its end. {REMEDY}"
                )
            file.seek(start)
            return decode_index(file.read(nbytes), str(path))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: is missing; name a file that `phalanx pack` has written") from error
    except IsADirectoryError as error:
        raise PackError(f"{path}: is a folder; name a file that `phalanx pack` has written") from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def read_section(pack: PackFile, number: int, buffer: ByteArray | None = None) -> ByteArray:
    """Return the verified bytes of a section, in ``buffer`` or in new memory. Raises CorruptError, StorageError."""
    section = pack.index.sections[number]
    out = page_aligned(padded_bytes(section.nbytes)) if buffer is None else buffer
    for first in range(section.chunks):
        low = first * CHUNK_BYTES
        pack.read_chunks(number, first, 1, out[low : padded_bytes(min(low + CHUNK_BYTES, section.nbytes))])
    return out[: section.nbytes]


def damage(pack: PackFile, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Read the full pack, and yield a message for each chunk that is damaged or cannot be read.

    ``progress(read_bytes, total_bytes)`` is called after each section.
    """
    buffer = page_aligned(CHUNK_BYTES)
    total, read_bytes = sum(section.nbytes for section in pack.index.sections), 0
    for number, section in enumerate(pack.index.sections):
        for chunk in range(section.chunks):
            try:
                pack.read_chunks(number, chunk, 1, buffer)
            except (CorruptError, StorageError) as error:
                yield str(error)
            read_bytes += min(CHUNK_BYTES, section.nbytes - chunk * CHUNK_BYTES)
        progress(read_bytes, total)
