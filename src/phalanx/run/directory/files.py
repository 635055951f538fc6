"""Files and folders that other processes read, write, lock or remove meanwhile.

Under any name may lie a pipe, whose reader would wait for a writer that never comes, a device, or a file of any size. A reader that looks at
many runs must come to an end at each of them: what is no regular file is refused before it is read, and what is meant to be small is not
read into memory when it is not. A link may lead to any file of whoever reads, whose content then would be shown, exported or copied: it is not
followed.

Below: JSON that may be damaged, walks of folders, temporary folders that end with their process, locks on ranges, the user's home, and
small files that survive a crash.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

MOST_SMALL_BYTES = 64 << 20
"""Larger than any record, status or run file, that of a fleet of 100,000 ranks included."""


_NOT_FOLLOWED = "it is a link, which is not followed: put the file itself there"


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a file for reading, without waiting. Raises ``OSError`` if it cannot be read, or is a folder, a pipe or a device.

    A link is refused too, unless ``follow``: for files that a user names, and datasets whose user has linked their files.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(error.errno, _NOT_FOLLOWED, str(path)) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file", str(path))


def read_small(path: Path, most_bytes: int = MOST_SMALL_BYTES, *, follow: bool = False) -> bytes:
    """The content of a file. Raises ``OSError`` as ``open_regular`` does, and if the file has more than ``most_bytes``."""
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1)
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))


def file_of_download(folder: Path, name: str) -> Path:
    """Return the file that ``name`` leads to in a downloaded ``folder``: one in it, or in the blobs of the download cache that it is in.

    Raises ``OSError`` for a link to any other file.
    """
    # Unlike Path.resolve, realpath raises nothing for links in a circle, which reading then names.
    folder, file = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    # Hugging Face's cache: models--NAME/snapshots/COMMIT/config.json is a link to models--NAME/blobs/DIGEST.
    blobs = folder.parent.parent / "blobs"
    if file.is_relative_to(folder) or (folder.parent.name == "snapshots" and file.is_relative_to(blobs)):
        return file
    raise OSError(errno.ELOOP, f"it leads out of its folder: {_NOT_FOLLOWED}", str(folder / name))


def leads_out(folder: Path, inside: Path) -> bool:
    """Return True if ``folder``, which is named as a folder of ``inside``, is a link to somewhere else."""
    return not folder.resolve().is_relative_to(inside.resolve())


# JSON that may have been damaged, or made to break its reader, read as values that every later user can take.
#
# Python's own reader takes more than other programs do: whole numbers of any length, which no float and no 64-bit field holds, and halves of
# surrogate pairs, which no file, terminal or browser can be sent. A number too long becomes a float here, half a pair a replacement character,
# and nesting without end is as wrong as any other damage.


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG = 18
"""Whole numbers of so many digits fit into 64 bits, whichever they are."""


def plain_json(content: bytes, *, exact: bool = False) -> Any:
    """The value that the JSON in ``content`` holds; ``exact`` keeps whole numbers of any size. Raises ``ValueError`` if it is none, or too deep."""
    try:
        value = (_EXACT if exact else _DECODER).decode(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return _paired(value) if b"\\u" in content and _SURROGATE.search(content) else value


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONG else _bounded(digits)


def _bounded(digits: str) -> int | float:
    number = int(digits)  # of thousands of digits: a ValueError
    return number if -(1 << 63) <= number < 1 << 63 else float(digits)


def _paired(value: Any) -> Any:
    """The value with no half of a surrogate pair in any of its texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_paired(key): _paired(item) for key, item in value.items()}
    return [_paired(item) for item in value] if isinstance(value, list) else value


_DECODER, _EXACT = json.JSONDecoder(parse_int=_whole), json.JSONDecoder()


# The files and folders below a folder that other processes may change while it is walked.
#
# ``Path.rglob`` raises ``FileNotFoundError`` if a folder goes away between its listing and its opening (CPython up to 3.12,
# ``pathlib._RecursiveWildcardSelector``), so two preparations into one place, or a look at a checkpoint that is being pruned, would
# end with a traceback of nobody's fault. ``os.walk`` passes over what has gone; unasked it would also pass over a folder that a faulty disk does
# not list, and who counts or copies the files would miss some without a word.


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the path of every file in ``folder`` and its folders, in no order; a folder that is missing or may not be read holds none.

    A symbolic link to a file counts as a file; one to a folder is not followed. A file may have gone when its path is used. Raises
    ``OSError`` for a folder that cannot be listed for another reason, as after an error of its disk.
    """
    for parent, _, names in os.walk(folder, onerror=_raise_unless_gone):
        for name in names:
            yield Path(parent, name)


def folders_below(folder: Path) -> Iterator[Path]:
    """Yields the path of ``folder`` and of every folder in it, in no order. Errors are those of ``files_below``."""
    for parent, _, _ in os.walk(folder, onerror=_raise_unless_gone):
        yield Path(parent)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


# Temporary folders: one does not outlive its process, even one that is killed, unless it is renamed.
#
# Who uses it holds a lock (``flock``) on the folder, which the kernel lets go when the process has ended, however that came. Whoever makes
# the next folder of the same kind removes those that nobody holds.


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


# Locks on ranges of a file that keep out other processes and other threads alike, and end with their holder.
#
# They belong to an open file description (fcntl(2), F_OFD_SETLKW), so each is taken by a description of its own: threads that share one do not
# keep each other out. The kernel lets go when the description is closed, however its process ended.


_FLOCK = "hhqqi4x"
"""``struct flock`` on 64-bit Linux: type, whence, start, length, process (which must be 0 for this kind of lock)."""


@contextmanager
def range_locked(path: Path, start: int, stop: int) -> Iterator[None]:
    """Holds bytes ``start`` to ``stop`` of the file, once nobody else does.

    Where there are no such locks (another system or file system, a file that was removed) it is as if nobody else held them: for work that may be
    done twice.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(path.open("r+b", 0))
            if sys.platform == "linux":
                lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLKW, lock)
        yield


# The user's home: the place of caches and settings, if no variable names another.


def home() -> Path:
    """The user's home folder; a temporary folder of this user alone if there is none, as of a user without a name in a container."""
    try:
        return Path.home()
    except RuntimeError:
        return temporary_home()


@cache
def temporary_home() -> Path:
    """Return a folder for temporary files that is this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="phalanx-"))
    # In a folder that others may write to, another user may have made it first; libraries are loaded from it.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="phalanx-"))
    return folder


# Small files that survive a crash: a reader finds the old content or the new one, never half of it.
#
# The order is the usual one (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): write a temporary file in the
# same folder, fsync it, rename it over the target, fsync the folder. Without the first fsync the name may point to an empty file
# after a power cut; without the second the old file may be back although the caller was told that the new one is there.
#
# It stands on the ground floor because every floor writes such files: the loss curve, run records, checkpoint indexes, the
# coordinator's journal.


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
