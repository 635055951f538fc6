"""A folder that does not outlive its process, even one that is killed, unless it is renamed.

Who uses it holds a lock (``flock``) on the folder, which the kernel lets go when the process has ended, however that came. Whoever makes
the next folder of the same kind removes those that nobody holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

# Of NFS, which needs a descriptor that can write for an exclusive lock (flock(2)), as no folder's can; and of file systems that know no locks.
_WITHOUT_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder whose name begins with ``prefix``, and remove it and abandoned ones of that prefix. Raises ``OSError``.

    It is in ``parent``, with the permissions of new folders there; without one it is among the temporary files, and this user's alone.
    """
    root = parent or Path(tempfile.gettempdir())
    _sweep(root, prefix)
    with ExitStack() as made:
        yield _new(root, prefix, 0o777 if parent is not None else 0o700, made)


def _new(root: Path, prefix: str, mode: int, made: ExitStack) -> Path:
    while True:
        folder = root / f"{prefix}{secrets.token_hex(8)}"
        made.callback(shutil.rmtree, folder, ignore_errors=True)  # before a signal can come in between
        folder.mkdir(mode)
        try:
            made.callback(os.close, _held(folder))
            return folder
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


def _sweep(root: Path, prefix: str) -> None:
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
