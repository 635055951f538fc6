"""Small files that survive a crash: a reader finds the old content or the new one, never half of it.

The order is the usual one (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): write a temporary file in the
same folder, fsync it, rename it over the target, fsync the folder. Without the first fsync the name may point to an empty file
after a power cut; without the second the old file may be back although the caller was told that the new one is there.

It stands on the ground floor because every floor writes such files: the loss curve, run records, checkpoint indexes, the
coordinator's journal.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replaces the file at ``path`` (or makes it, with permissions ``mode``), durable when this returns.

    With ``durable=False`` neither the file nor the folder is fsynced: after a power cut the file may be old or empty, but no
    process ever reads half of it. This is for a status that is written again soon, by a thread that must not wait for a disk.

    Several processes and threads of any machines and containers may write one path at once: the last rename wins. Raises ``OSError``; the old content is
    intact then, unless the last step, the fsync of the folder, is what failed.
    """
    temporary = _temporary(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # of a full disk the system speaks without a name
        raise
    if durable:
        sync(path.parent)


def _temporary(path: Path) -> Path:
    """A new name beside ``path``, of the form that ``remove_temporaries`` knows. Containers that share a folder number their processes and threads alike, so it is drawn."""
    return path.with_name(f".{path.name}.{int.from_bytes(os.urandom(7))}.tmp")


def sync(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> list[str]:
    """Removes what ``write_atomically`` left in ``folder`` when its process was killed, and returns the names.

    For whoever owns the folder: a write under way elsewhere would fail.
    """
    stale = sorted(name for name in os.listdir(folder) if _TEMPORARY.fullmatch(name))
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    return stale


def create_once(path: Path, content: bytes) -> bytes:
    """Makes the file at ``path`` if nobody has, whole from the first moment; returns what is in it, one's own or another's.

    Of several processes on any machines, one succeeds. (On a file system without links, in a race of milliseconds, the last.) Raises
    ``OSError``.
    """
    temporary = _temporary(path)
    try:
        temporary.write_bytes(content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:
            if not path.exists():
                os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.read_bytes()
