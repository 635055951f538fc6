"""A temporary folder that does not outlive its process, even one that is killed.

Who uses it holds a lock (``flock``) on the folder, which the kernel lets go when the process has ended, however that came. Whoever makes
the next folder of the same kind removes those that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
        # Between making it and locking it, another's sweep may have taken it: then it is made once more.
        descriptor = _locked(folder)
        if descriptor is not None:
            return folder, descriptor


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of ``folder``; ``None`` if another does, or if the folder has gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(folder).st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sweep(prefix: str) -> None:
    root = Path(tempfile.gettempdir())
    with suppress(OSError):
        for name in os.listdir(root):
            if not name.startswith(prefix):
                continue
            descriptor = _locked(root / name)
            if descriptor is not None:
                shutil.rmtree(root / name, ignore_errors=True)  # others' it cannot remove, and leaves
                os.close(descriptor)
