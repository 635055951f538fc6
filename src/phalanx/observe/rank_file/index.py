"""Finds the frames of a file of ranks' numbers, without reading more of it than their heads.

The file may grow while it is read, may end in the middle of a frame, and may be damaged anywhere: where no head stands, the next one is looked
for. It is read by ``pread``, not through a memory map: a map of a file that somebody cuts short, or that a network file system has lost, ends
the process that looks at it. Whatever the file claims, the memory taken is bounded by what is really there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from phalanx.observe.rank_file.format import (
    HEAD_BYTES,
    MAGIC,
    TITLE,
    Codes,
    FrameHead,
    column_bytes,
    decode_head,
)

MOST_FILE_BYTES = 4 << 30
"""Larger than any file that a run writes, even while it is coarsened."""
MOST_INDEXED = 1 << 17
"""More frames than any file that a run writes has."""
_MOST_DAMAGED = 1 << 16
"""So many false heads are no accident, and each costs a search."""
_BLOCK_BYTES = 1 << 16
_SEARCH_BYTES = 16 << 20
"""In a file without a title the first frame is looked for so far; the largest frame fits twice."""


class RankStreamError(Exception):
    """The file of ranks' numbers cannot be read or written; the message names it and says what to do."""


def open_for_reading(path: Path) -> int | None:
    """Opens the file and returns its descriptor; ``None`` if there is none. Raises ``RankStreamError``."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # a pipe would else be waited for
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RankStreamError(f"cannot read {path}: {error.strerror}") from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= MOST_FILE_BYTES:
        return descriptor
    os.close(descriptor)
    size = f"it has {found.st_size / 2**30:.1f} GiB, and no run writes more than {MOST_FILE_BYTES >> 30}"
    raise refusal(path, size if stat.S_ISREG(found.st_mode) else "it is no file")


def refusal(path: Path, why: str) -> RankStreamError:
    """The error that ``path`` is no file of ranks' numbers."""
    return RankStreamError(
        f"{path} is not what a run writes there: {why}. Move it away; the run does not need it"
    )


class FrameIndex:
    """The frames that were found in an open file so far, in the order of the file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.offsets: list[int] = []
        self.heads: list[FrameHead] = []
        self._path, self._descriptor = path, descriptor
        self.position = 0
        """Where the next frame is to begin: all before it is indexed."""

    def extend(self) -> None:
        """Looks for frames that have come since the last call. Raises ``RankStreamError`` if this is no file of ranks' numbers."""
        size = os.fstat(self._descriptor).st_size
        if self.position == 0:
            self._read_title(size)
        for offset, head in _frames(self._path, self._descriptor, self.position, size):
            if len(self.heads) == MOST_INDEXED:
                raise refusal(self._path, f"it has more than {MOST_INDEXED:,} frames")
            self.offsets.append(offset)
            self.heads.append(head)
            self.position = offset + head.nbytes

    def codes(self, number: int, place: int, *, verified: bool = False) -> Codes | None:
        """Column ``place`` of the frame at index ``number`` as it is in the file; ``None`` if it is damaged.

        ``verified``: its checksum was found right before. Raises ``OSError``.
        """
        head = self.heads[number]
        length, offset = column_bytes(head.ranks), self.offsets[number] + head.column_at(place)
        found = os.pread(self._descriptor, length, offset)
        if len(found) < length or not (verified or xxhash.xxh3_64_intdigest(found) == head.checksums[place]):
            return None
        return np.frombuffer(found, "<i2", head.ranks)

    def _read_title(self, size: int) -> None:
        title = os.pread(self._descriptor, len(TITLE), 0)
        if TITLE.startswith(title):
            self.position = len(TITLE) if title == TITLE else 0
            return
        # A damaged title costs nothing, if frames follow it.
        found = next(_frames(self._path, self._descriptor, 0, min(size, _SEARCH_BYTES)), None)
        if found is None:
            why = "it begins with other words, and holds no frame"
            raise refusal(self._path, f"{why} of this version of Phalanx")
        self.position = found[0]


def unfinished(descriptor: int, position: int) -> int:
    """Where, in a file whose writer is gone, a next frame may begin: after what it left unfinished at ``position``."""
    head = decode_head(os.pread(descriptor, HEAD_BYTES, position))
    end = os.fstat(descriptor).st_size if head is None else position + head.nbytes
    return -(-end // 8) * 8


def _frames(path: Path, descriptor: int, position: int, size: int) -> Iterator[tuple[int, FrameHead]]:
    """The frames that lie whole between ``position`` and ``size``, each with its offset."""
    block, block_at, damaged = b"", 0, 0
    while position + HEAD_BYTES <= size:
        if not block_at <= position <= block_at + len(block) - HEAD_BYTES:
            block, block_at = os.pread(descriptor, _BLOCK_BYTES, position), position
        start = position - block_at
        head = decode_head(block[start : start + HEAD_BYTES])
        if head is None:
            damaged += 1
            if damaged > _MOST_DAMAGED:
                raise refusal(path, f"it is damaged in more than {_MOST_DAMAGED:,} places")
            position = _next_magic(descriptor, position + 8, size)
        elif position + head.nbytes <= size:
            yield position, head
            position += head.nbytes
        else:
            return  # it is being written


def _next_magic(descriptor: int, position: int, size: int) -> int:
    """The next place from ``position`` at which a head may begin; ``size`` if there is none."""
    magic, length = np.frombuffer(MAGIC, np.uint64), 1 << 12
    while position < size:
        block = os.pread(descriptor, length, position)
        found = np.flatnonzero(np.frombuffer(block, np.uint64, len(block) // 8) == magic)
        if len(found):
            return position + 8 * int(found[0])
        if len(block) < 8:
            break
        position += len(block) // 8 * 8
        length = min(2 * length, 1 << 20)
    return size
