"""The bytes of ``ranks.bin``: what each rank of a run measured of itself, window after window of steps.

The file is a line of text that names it, then frames, each appended by one write. A frame is what all ranks measured in one window:

    head      magic, ranks, attempt, steps of the window, last step, time; a checksum of each column; a checksum of the head
    columns   one after the other, a number of each rank, in order

A number is two bytes: float16 in the column's unit, 0.05 % fine over nine decades. None is below zero, so -1 stands for "not known", and as
integers the numbers are in the order of their values: the largest of many is found without decoding any. Heads and columns begin at
multiples of 8 bytes, so that a reader that meets damage finds the next head. Checksums are XXH3 (64 bits), one for each column, since most
readers look at one column alone.

The last section finds the frames of a file.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

RANK_COLUMNS = ("compute_s", "data_wait_s", "memory_bytes", "temperature_c")
"""The columns of each rank in each window; ``RankFrame`` defines them."""
UNITS: Mapping[str, float] = {
    "compute_s": 0.125,  # 8 us to 2 h at full precision
    "data_wait_s": 0.125,
    "memory_bytes": 64.0 * 2**20,  # to 4 TiB
    "temperature_c": 1.0,
}
"""The value of a 1.0 in the file, chosen so that what is likely lies where float16 is fine."""
MOST_RANKS = 1 << 20
"""A frame that claims more is damaged."""

TITLE = f"phalanx ranks 1: {' '.join(RANK_COLUMNS)}\n".encode()
TITLE += b"\0" * (-len(TITLE) % 8)
"""The beginning of every file."""
MAGIC = b"\xf7rank1\r\n"
_FIXED = struct.Struct("<8sIIIIqd")
_SUMS = struct.Struct(f"<{len(RANK_COLUMNS)}Q")
_OWN_SUM = struct.Struct("<Q")
HEAD_BYTES = _FIXED.size + _SUMS.size + _OWN_SUM.size
UNKNOWN = int(np.float16(-1.0).view(np.int16))
"""The number that stands for "not known"."""
_MOST = float(np.finfo(np.float16).max)

Codes = NDArray[np.int16]
"""Numbers as they are in the file, float16 bits looked at as integers: in the order of the values, below zero what is not known."""


@dataclass(frozen=True)
class RankFrame:
    """Measurements of all ranks in one window of steps.

    ``columns`` has, for each name in ``RANK_COLUMNS``, a float32 array ``(ranks,)`` with NaN where a rank does not know:

    - ``compute_s``: seconds of the rank's own computing for one slot, forward and backward, without waiting for others: the mean of the
      window's steps.
    - ``data_wait_s``: seconds for which it waited for samples in a step: the mean of the window's steps.
    - ``memory_bytes``: on a GPU the most that tensors have taken so far, on a CPU the resident memory of the process, at the window's end.
    - ``temperature_c``: of its accelerator, at the window's end.
    """

    step: int
    """The last step of the window."""
    t: float
    """Unix time at the window's end."""
    attempt: int
    ranks: int
    columns: Mapping[str, NDArray[np.float32]]
    steps: int = 1
    """Steps that the frame stands for."""


class FrameHead(NamedTuple):
    """The head of a frame."""

    ranks: int
    attempt: int
    steps: int
    step: int
    t: float
    checksums: tuple[int, ...]
    """One for each column."""

    @property
    def nbytes(self) -> int:
        """The length of the whole frame."""
        return HEAD_BYTES + len(RANK_COLUMNS) * column_bytes(self.ranks)

    def column_at(self, number: int) -> int:
        """Where column ``number`` begins, from the begin of the frame."""
        return HEAD_BYTES + number * column_bytes(self.ranks)


def column_bytes(ranks: int) -> int:
    """The length of one column of a frame, filled up to whole 8 bytes."""
    return -(-2 * ranks // 8) * 8


def encode_frame(frame: RankFrame) -> bytes:
    """Return the bytes of a frame. Raises ``ValueError`` for no or too many ranks, or a column of another length."""
    if not 1 <= frame.ranks <= MOST_RANKS:
        raise ValueError(f"a frame of {frame.ranks} ranks: 1 to {MOST_RANKS} can be kept")
    columns = [encode_column(name, frame.columns[name], frame.ranks) for name in RANK_COLUMNS]
    return join_frame(frame.ranks, frame.attempt, frame.steps, frame.step, frame.t, columns)


def join_frame(ranks: int, attempt: int, steps: int, step: int, t: float, columns: list[Codes]) -> bytes:
    """Return the bytes of a frame of columns that are encoded, with their checksums."""
    padding = b"\0" * (column_bytes(ranks) - 2 * ranks)
    parts = [column.astype("<i2", copy=False).tobytes() + padding for column in columns]
    fixed = _FIXED.pack(MAGIC, ranks, attempt, steps, 0, step, t)
    head = fixed + _SUMS.pack(*(xxhash.xxh3_64_intdigest(part) for part in parts))
    return b"".join((head, _OWN_SUM.pack(xxhash.xxh3_64_intdigest(head)), *parts))


def decode_head(head: bytes) -> FrameHead | None:
    """Return the head of a frame; ``None`` if the bytes are not ``HEAD_BYTES`` long, no head, or damaged by their
    checksum.
    """
    if len(head) != HEAD_BYTES or not head.startswith(MAGIC):
        return None
    (own,) = _OWN_SUM.unpack_from(head, HEAD_BYTES - _OWN_SUM.size)
    if own != xxhash.xxh3_64_intdigest(head[: -_OWN_SUM.size]):
        return None
    _, ranks, attempt, steps, _, step, t = _FIXED.unpack_from(head)
    if not (1 <= ranks <= MOST_RANKS and step >= 0 and math.isfinite(t)):
        return None
    return FrameHead(ranks, attempt, steps, step, t, _SUMS.unpack_from(head, _FIXED.size))


def encode_column(name: str, values: NDArray[np.float32], ranks: int) -> Codes:
    """Return the numbers of one column as half-precision codes (int16) in its unit, clipped to 0 and the largest;
    NaN is unknown.

    Raises ``ValueError`` if they are not ``(ranks,)``.
    """
    if values.shape != (ranks,):
        raise ValueError(f"column {name} of a frame of {ranks} ranks has the shape {values.shape}")
    scaled = np.clip(values / np.float32(UNITS[name]), 0.0, _MOST) + np.float32(0.0)  # no minus zero
    return np.where(np.isnan(scaled), np.int16(UNKNOWN), scaled.astype(np.float16).view(np.int16))


def decode_column(name: str, codes: Codes) -> NDArray[np.float32]:
    """The values of numbers of a column, of any shape; NaN where they are not known."""
    values = codes.view(np.float16).astype(np.float32)
    return np.where((codes < 0) | ~np.isfinite(values), np.float32(np.nan), values * np.float32(UNITS[name]))


# Index the frames of a file of ranks' numbers, reading little more than their heads.
#
# The file may grow while it is read, may end in the middle of a frame, and may be damaged anywhere. Where no head is, the
# reader searches for the next one. It uses ``pread`` instead of a memory map: if a mapped file is truncated, or lost by a
# network file system, the reading process is killed (SIGBUS). Memory is bounded by the file's real size, not by sizes stated in
# it.


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
    """The file of ranks' numbers cannot be read or written; the message names it and the remedy."""


def open_for_reading(path: Path) -> int | None:
    """Open the file and return its descriptor, which the caller closes; ``None`` if there is none.

    Raises ``RankStreamError`` if it is unreadable, too large, or no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RankStreamError(f"cannot read {path}: {error.strerror}") from error
    try:
        demand_stream_file(path, descriptor)
    except RankStreamError:
        os.close(descriptor)
        raise
    return descriptor


def demand_stream_file(path: Path, descriptor: int) -> None:
    """Raise ``RankStreamError`` if the file open as ``descriptor`` is too large, or no regular file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise refusal(path, "it is no file")
    if status.st_size > MOST_FILE_BYTES:
        size = f"it has {status.st_size / 2**30:.1f} GiB"
        raise refusal(path, f"{size}, and no run writes more than {MOST_FILE_BYTES >> 30}")


def refusal(path: Path, reason: str) -> RankStreamError:
    """The error that ``path`` is no file of ranks' numbers."""
    return RankStreamError(
        f"{path} is not what a run writes there: {reason}. Move it away; the run does not need it"
    )


class FrameIndex:
    """The frames that were found in an open file so far, in the order of the file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Begin an empty index of the file open as ``descriptor``, which stays the caller's; ``path`` is for
        messages.
        """
        self.offsets: list[int] = []
        self.heads: list[FrameHead] = []
        self._path, self._descriptor = path, descriptor
        self.position = 0
        """Where the next frame is to begin: all before it is indexed."""

    def extend(self) -> None:
        """Index the complete frames that have come since the last call.

        Raises ``RankStreamError`` if this is no file of ranks' numbers, has more than 131,072 frames, or is
        damaged in more than 65,536 places, and ``OSError`` if it cannot be read.
        """
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
        """Return column ``place`` of the frame at index ``number`` as codes ``(ranks,)``; ``None`` if it is cut or
        damaged.

        ``verified``: its checksum was verified before and is skipped. Raises ``OSError``.
        """
        head = self.heads[number]
        length, offset = column_bytes(head.ranks), self.offsets[number] + head.column_at(place)
        block = os.pread(self._descriptor, length, offset)
        if len(block) < length or not (verified or xxhash.xxh3_64_intdigest(block) == head.checksums[place]):
            return None
        return np.frombuffer(block, "<i2", head.ranks)

    def _read_title(self, size: int) -> None:
        """Move to the first frame: behind the title, or to the first head of a file with a damaged title.

        Stay at 0 if only a beginning of the title is there yet. Raises ``RankStreamError`` if there is neither
        title nor head.
        """
        title = os.pread(self._descriptor, len(TITLE), 0)
        if TITLE.startswith(title):
            self.position = len(TITLE) if title == TITLE else 0
            return
        # A damaged title is ignored if frames follow it.
        head = next(_frames(self._path, self._descriptor, 0, min(size, _SEARCH_BYTES)), None)
        if head is None:
            reason = "it begins with other words, and holds no frame"
            raise refusal(self._path, f"{reason} of this version of Phalanx")
        self.position = head[0]


def unfinished(descriptor: int, position: int) -> int:
    """Where, in a file whose writer is gone, a next frame may begin: after what it left unfinished at ``position``."""
    head = decode_head(os.pread(descriptor, HEAD_BYTES, position))
    end = os.fstat(descriptor).st_size if head is None else position + head.nbytes
    return -(-end // 8) * 8


def _frames(path: Path, descriptor: int, position: int, size: int) -> Iterator[tuple[int, FrameHead]]:
    """Yield (offset, head) of the complete frames between ``position`` and ``size``; damaged places are skipped.

    Ends at a frame that is being written. Raises ``RankStreamError`` if more than ``_MOST_DAMAGED`` places are
    damaged.
    """
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
    """Return the next offset from ``position`` at which a head may begin; ``size`` if there is none."""
    magic, length = np.frombuffer(MAGIC, np.uint64), 1 << 12
    while position < size:
        block = os.pread(descriptor, length, position)
        places = np.flatnonzero(np.frombuffer(block, np.uint64, len(block) // 8) == magic)
        if len(places):
            return position + 8 * int(places[0])
        if len(block) < 8:
            break
        position += len(block) // 8 * 8
        length = min(2 * length, 1 << 20)
    return size
