"""A temporary folder that does not outlive its process, even one that is killed.

Who uses it holds a lock (``flock``) on the folder, which the kernel lets go when the process has ended, however that came. Whoever makes
the next folder of the same kind removes those that nobody holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Of NFS, which needs a descriptor that can write for an exclusive lock (flock(2)), as no folder's can; and of file systems that know no locks.
_WITHOUT_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held_folder(prefix: str) -> Iterator[Path]:
    """Yields a new folder among the temporary files whose name begins with ``prefix``, and removes it and abandoned ones of that prefix. Raises ``OSError``."""
    _sweep(prefix)
    folder, descriptor = _new(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _new(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            return folder, _held(folder)
        except OSError as error:
            with suppress(OSError):
                folder.rmdir()  # nothing is in it, and anything else would need a descriptor
            # Between making it and locking it, another's sweep may have taken it: then it is made once more.
            if not isinstance(error, BlockingIOError | FileNotFoundError):
                raise


def _held(folder: Path) -> int:
    """A descriptor that holds the lock of ``folder``; where folders have no locks, which nobody sweeps then, a plain one. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        if os.fstat(descriptor).st_ino != os.stat(folder).st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(prefix: str) -> None:
    root = Path(tempfile.gettempdir())
    with suppress(OSError):
        for name in os.listdir(root):
            if name.startswith(prefix):
                _take(root / name)


def _take(folder: Path) -> None:
    """Removes ``folder`` if nobody holds it. Others' it cannot remove, and leaves."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
