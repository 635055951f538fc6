"""Append frames to a file of ranks' numbers, and keep the file from growing without end.

A frame is one write to a file opened for appending, so that what was written survives a kill of the process. What a kill or a full disk left
unfinished is filled up with zeros before the next frame: readers see a frame whose checksums are wrong there, and continue.

When the file has grown to ``most_bytes`` or ``most_frames``, its older half is coarsened: each two neighboring frames of the same attempt
become one, which has the larger of both numbers, as a cell of a heat map has. So a run of any length keeps its whole history, finer the newer it
is, and a slow spell does not vanish. The coarsened file is made beside the old one and replaces it, so readers see the one or the other.

The last section writes from a thread of its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from phalanx.observe import rank_file

MOST_BYTES = 1 << 30
"""Size from which the file is coarsened: of 100,000 ranks some 1,340 frames, a day and a half of windows of 100 s."""
MOST_FRAMES = 20_000
"""The same as a number of frames, for the readers' sake: a run of eight ranks would need months to fill the bytes."""
_WORTH_IT = 0.875
"""A coarsened file has at most this part of the bound, if need be without the oldest frames, so that it is not coarsened again soon."""

_MOST_STEPS = (1 << 32) - 1
"""The largest value that a head can hold."""


class RankStreamWriter:
    """The writer of a run's file. One process of a run holds one; not for several threads at once.

    Args:
        path: The file; it is made if there is none, and gone on with otherwise.
        hurry: Called now and then while the file is coarsened, which takes seconds at its full size; True leaves it as it is.

    Raises:
        RankStreamError: The file cannot be opened, or holds something else; from every method.
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int = MOST_BYTES,
        most_frames: int = MOST_FRAMES,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the file ``path``, making it if it is missing. One that is no stream is first renamed to ``.damaged``.

        Raises ``RankStreamError`` if it cannot be opened, ``OSError`` if it cannot be renamed.

        Beyond ``most_bytes`` or ``most_frames`` it is coarsened; not while ``hurry()`` is True.
        """
        self.path = path
        self._most_bytes, self._most_frames, self._hurry = most_bytes, most_frames, hurry
        self._bytes_at, self._frames_at = most_bytes, most_frames
        self._descriptor = -1
        self._next = self._frames = 0
        """Where the next frame begins, and how many there are before it."""
        self._open()

    def append(self, frame: rank_file.RankFrame) -> None:
        """Write one frame, and coarsen the file if it is beyond its bounds. A file that was replaced is opened
        again.

        Raises ``ValueError`` for a frame that cannot be encoded, and ``RankStreamError`` if it cannot be
        written: earlier frames are intact. Opening a replaced file raises as ``__init__``.
        """
        data = rank_file.encode_frame(frame)
        if self._replaced():
            self.close()
            self._open()
        self._write(data)
        self._frames += 1
        if self._next > self._bytes_at or self._frames > self._frames_at:
            self._coarsen()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Open the file for appending, making it if need be. One that is no stream is first renamed to
        ``.damaged``.

        Raises ``RankStreamError`` if it cannot be opened, ``OSError`` if it cannot be renamed.
        """
        try:
            self._open_as_it_is()
        except rank_file.RankStreamError:
            if self._descriptor < 0:
                raise
            self.close()  # it is no stream, but may be valuable, so it is renamed
            self.path.replace(self.path.with_name(f"{self.path.name}.damaged"))
            self._open_as_it_is()

    def _open_as_it_is(self) -> None:
        """Open the file, making it if it is missing, complete its title, and find where the next frame begins: behind
        the last whole frame, and behind a torn one if there is one. Raises ``RankStreamError``.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(self.path, flags, 0o644)
            missing = len(rank_file.TITLE) - os.fstat(self._descriptor).st_size
            if missing > 0:
                os.write(self._descriptor, rank_file.TITLE[-missing:])
            index = self._indexed()
            self._frames = len(index.heads)
            self._next = rank_file.unfinished(self._descriptor, max(index.position, len(rank_file.TITLE)))
        except OSError as error:
            self.close()
            raise self._unwritten(error.strerror or "") from error

    def _indexed(self) -> rank_file.FrameIndex:
        """Return the index of the open file. Raises ``RankStreamError`` if it is no file of ranks' numbers, ``OSError``
        if it cannot be read.
        """
        rank_file.demand_stream_file(self.path, self._descriptor)
        index = rank_file.FrameIndex(self.path, self._descriptor)
        index.extend()
        return index

    def _replaced(self) -> bool:
        """Return True if the name leads to another file or none: another rank took over, or somebody removed it."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return True

    def _write(self, data: bytes) -> None:
        """Write a frame at an aligned offset, after zeros in place of a torn one.

        Raises ``RankStreamError`` if not all of it could be written, or the file is beyond twice its bound.
        """
        try:
            size = os.fstat(self._descriptor).st_size
            begin = max(self._next, _whole(size))  # another process may have written here before it was ended
            if begin > 2 * self._most_bytes:
                raise self._unwritten(f"it could not be coarsened, and has {begin:,} bytes")
            os.write(self._descriptor, b"\0" * (begin - size) + data)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise self._unwritten(error.strerror or "") from error
        # If the frame's head was written, the next write begins after the full frame; without a complete head there is no
        # frame.
        self._next = begin + len(data) if size >= begin + rank_file.HEAD_BYTES else max(begin, _whole(size))
        if size < begin + len(data):
            raise self._unwritten("the disk is full")

    def _unwritten(self, reason: str) -> rank_file.RankStreamError:
        return rank_file.RankStreamError(
            f"cannot write {self.path}: {reason}; what was written before is intact"
        )

    # --- bounds ---

    def _coarsen(self) -> None:
        """Replace the file by a coarser, smaller one, and open that. If it fails, or ``hurry`` stops it, retry
        after it has grown by an eighth of its bounds. Never raises: all frames are written already.
        """
        beside = self.path.with_name(f"{self.path.name}.new")
        try:
            with beside.open("wb") as file:
                is_complete = self._write_coarsened(self._indexed(), file)
            if is_complete:
                beside.replace(self.path)
                self.close()
                self._open()
        except (OSError, rank_file.RankStreamError):
            is_complete = False
        if not is_complete:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        self._bytes_at = self._most_bytes if is_complete else self._next + self._most_bytes // 8
        self._frames_at = self._most_frames if is_complete else self._frames + self._most_frames // 8

    def _write_coarsened(self, index: rank_file.FrameIndex, file: BinaryIO) -> bool:
        """Write title and coarsened frames of ``index`` to ``file``. Return False as soon as ``hurry()`` is True."""
        file.write(rank_file.TITLE)
        for group in coarser(index.heads, _WORTH_IT * self._most_bytes, _WORTH_IT * self._most_frames):
            if self._hurry():
                return False
            last = index.heads[group[-1]]
            columns = [_largest(index, group, place) for place in range(len(rank_file.RANK_COLUMNS))]
            steps = min(_MOST_STEPS, sum(index.heads[number].steps for number in group))
            file.write(rank_file.join_frame(last.ranks, last.attempt, steps, last.step, last.t, columns))
        return True


def coarser(heads: Sequence[rank_file.FrameHead], most_bytes: float, most_frames: float) -> list[range]:
    """Return the groups of frames that become one.

    In the older half, two neighbors of the same attempt and number of ranks are a pair; every other frame is alone.

    The oldest are left out if there would still be more than ``most_bytes`` or ``most_frames``; the newest never.
    """
    groups, number, half = list[range](), 0, len(heads) // 2
    while number < len(heads):
        pair = number < half and _alike(*heads[number : number + 2])
        groups.append(range(number, number + 1 + pair))
        number = groups[-1].stop
    sizes = list(accumulate(heads[group[-1]].nbytes for group in reversed(groups)))
    fitting = [
        size for size in sizes[: max(1, int(most_frames))] if len(rank_file.TITLE) + size <= most_bytes
    ]
    return groups[len(groups) - max(1, len(fitting)) :]


def _alike(head: rank_file.FrameHead, other: rank_file.FrameHead) -> bool:
    return (head.ranks, head.attempt) == (other.ranks, other.attempt)


def _largest(index: rank_file.FrameIndex, group: range, place: int) -> rank_file.Codes:
    """Return the codes of column ``place``: of each rank the largest in the frames of ``group``; damaged columns
    are ignored.
    """
    most = np.full(index.heads[group[-1]].ranks, rank_file.UNKNOWN, np.int16)
    for number in group:
        codes = index.codes(number, place)
        if codes is not None:
            np.maximum(most, codes, out=most)
    return most


def _whole(position: int) -> int:
    """The next multiple of 8 bytes."""
    return -(-position // 8) * 8


# Write the ranks' numbers from a thread of its own, so that no disk can delay a step.
#
# A write to a shared file system, or the coarsening of a full file, may take seconds. Meanwhile frames wait in a short queue.
# If it is full, frames are dropped, and the next call of ``record`` returns a warning.


_QUEUE_FRAMES = 32
"""Frames that wait to be written: some 50 MB with 100,000 ranks."""
_CLOSE_TIMEOUT_S = 5.0


class RankRecorder:
    """Recorder of frames in the file ``path`` in the order of ``record``; it never raises or waits for a disk."""

    def __init__(self, path: Path) -> None:
        """Set up the recorder; nothing is opened before the first frame."""
        self._path = path
        self._queue: queue.Queue[rank_file.RankFrame | None] = queue.Queue(_QUEUE_FRAMES)
        self._ending = threading.Event()
        self._trouble = ""
        self._is_reported = False
        self._thread: threading.Thread | None = None

    def record(self, frame: rank_file.RankFrame) -> str:
        """Queue a frame for the writing thread, which the first call starts; a full queue drops the frame.

        Return a warning the first time that frames were lost, else "".
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ranks.bin", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(frame)
        except queue.Full:
            self._trouble = f"{self._path} is written too slowly"
        return self._warning()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> str:
        """Write what is queued, waiting at most twice ``timeout_s``, and end the thread; return a warning as
        ``record`` does.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            with suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
                thread.join(timeout_s)
            if thread.is_alive():  # it hangs; the daemon thread is abandoned
                self._trouble = f"{self._path} is written too slowly"
        return self._warning()

    def _warning(self) -> str:
        """Return the trouble as a warning, once; else ""."""
        if not self._trouble or self._is_reported:
            return ""
        self._is_reported = True
        return f"{self._trouble}; training continues, and some of the ranks' numbers will be missing"

    def _work(self) -> None:
        """Write the queued frames until the end is queued. An error becomes the trouble, and later frames are tried."""
        writer: RankStreamWriter | None = None
        while (frame := self._queue.get()) is not None:
            try:
                if writer is None:
                    writer = RankStreamWriter(self._path, hurry=self._ending.is_set)
                writer.append(frame)
            except (rank_file.RankStreamError, OSError, ValueError) as error:
                self._trouble = str(error)
        if writer is not None:
            writer.close()
