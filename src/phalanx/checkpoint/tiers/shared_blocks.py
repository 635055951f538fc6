"""Blocks of a checkpoint in a store, fetched once by the ranks of one machine that all restore it.

Equal ranks need equal blocks, and read them in the same order at about the same time. So a file in memory (tmpfs) of bounded size is
enough, in which each block has one place: whoever needs a block looks there, and else fetches it and leaves it there, under a lock on the
place. As in a dataset's cache, nothing says what a place holds but its checksum, which the checkpoint's catalog gives: a hole, another block, half of
one are all the same, a block to be fetched. Each rank holds a shared lock on the file while it restores; the last one removes it, and
what killed ranks have left the next restore on the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from phalanx.checkpoint.format.manifest import Manifest, checksum
from phalanx.run.directory.files import range_locked

_MOST_BYTES = 2 << 30
_SHARE_OF_FREE = 0.25
"""Part of the free room of the file system that the file may take."""
_SIZE_LOCK = 1 << 60
"""The byte, behind any block, whose lock is for the file's size."""


class SharedBlocks:
    """The blocks that ranks of this machine have fetched from ``place`` lately. Threads may share it; close it when all have restored."""

    def __init__(self, place: str, folder: Path | None = None, most_bytes: int = _MOST_BYTES) -> None:
        folder = memory_folder() if folder is None else folder
        prefix = f"phalanx-restore-{os.getuid()}-"
        self._path = folder / f"{prefix}{hashlib.sha256(place.encode()).hexdigest()[:32]}"
        self._descriptor = -1
        # Without the file each rank fetches for itself.
        with suppress(OSError):
            for left in folder.glob(f"{prefix}*"):
                with suppress(OSError):  # another removes it
                    _remove_unless_held(left)
            self._descriptor = _opened(self._path)
            found = os.statvfs(folder)
            most_bytes = min(most_bytes, int(found.f_bavail * found.f_frsize * _SHARE_OF_FREE))
            most_bytes = _agreed_bytes(self._path, self._descriptor, most_bytes)
        self._most_bytes = most_bytes

    def block(self, manifest: Manifest, number: int, fetch: Callable[[], memoryview]) -> memoryview:
        """A block of an image: as another rank has left it here, or what ``fetch`` returns, which must be checked still."""
        places = self._most_bytes // manifest.block_bytes
        if self._descriptor < 0 or not places:
            return fetch()
        # Those that follow each other in an image have places beside each other, so that none drives out one that was just fetched.
        start = (zlib.crc32(manifest.file.encode()) + number) % places * manifest.block_bytes
        nbytes = min(manifest.block_bytes, manifest.nbytes - number * manifest.block_bytes)
        with range_locked(self._path, start, start + manifest.block_bytes):
            with suppress(OSError):
                found = os.pread(self._descriptor, nbytes, start)
                if checksum(found) == manifest.checksums[number]:
                    return memoryview(found)
            data = fetch()
            with suppress(OSError):  # no room: the others fetch it too
                os.pwrite(self._descriptor, data, start)
        return data

    def close(self) -> None:
        """Lets go of the file, and removes it if nobody else holds it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with suppress(OSError):
                _remove_unless_held(self._path)


def memory_folder() -> Path:
    """A folder in memory, if this system has one that can be written."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(gettempdir())


def _opened(path: Path) -> int:
    """The file at ``path``, held; made if it is not there. Raises ``OSError`` also where it is another user's."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Before the lock: another user who holds one on a file of this name would be waited for without end.
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:  # else it was removed in between
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _agreed_bytes(path: Path, descriptor: int, most_bytes: int) -> int:
    """The size of the file, which is what the first of its ranks finds room for: by another size, a rank would look for blocks at other places."""
    with range_locked(path, _SIZE_LOCK, _SIZE_LOCK + 1):
        if not os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, most_bytes)  # a hole: it takes room as blocks are left in it
        return os.fstat(descriptor).st_size


def _remove_unless_held(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)
