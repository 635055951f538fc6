"""Files and folders that other processes may read, write, lock or remove at the same time.

A path may be a pipe, whose reader would wait forever for a writer, a device, or a file of any size. A reader of many runs must not hang on one
of them. So only regular files are opened, and large files are refused where a small one is expected. Links are not followed, because a link may
lead to any file of the reader's user, whose content would then be shown, exported or copied.

Sections: damaged JSON, walks of folders, temporary folders that end with their process, locks on ranges, the user's home, and small files that
survive a crash.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

MOST_SMALL_BYTES = 64 << 20
"""Larger than any record, status or run file, even for a fleet of 100,000 ranks."""


_NOT_FOLLOWED = "it is a link, which is not followed: put the file itself there"


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Return a file opened for reading, without waiting. Raises ``OSError`` if it cannot be read, or is a folder, a
    pipe or a device.

    A link is refused too, unless ``follow``: for files that a user names, and datasets whose user has linked their
    files.
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
    """Return the content of a file. Raises ``OSError`` as ``open_regular``, and for more than ``most_bytes``."""
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1)
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))


def read_named(path: Path) -> str:
    """Return the UTF-8 text of a file that a user names, which may be a link or a pipe, without a byte order mark.

    Raises ``OSError`` if it cannot be read or has more than ``MOST_SMALL_BYTES``, and ``UnicodeDecodeError``.
    """
    with path.open("rb") as file:
        content = file.read(MOST_SMALL_BYTES + 1)
    if len(content) > MOST_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_SMALL_BYTES:,} bytes", str(path))
    return content.decode("utf-8-sig")


def file_of_download(folder: Path, name: str) -> Path:
    """Return the path that ``name`` leads to in a downloaded ``folder``, with links followed. It is in the folder, or in the blobs of the
    download cache that the folder is in. The file may be missing.

    Raises ``OSError`` for a link to any other place.
    """
    # Unlike Path.resolve, realpath does not raise for circular links; reading them raises an error with the name.
    folder, file = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    # Hugging Face's cache: models--NAME/snapshots/COMMIT/config.json is a link to models--NAME/blobs/DIGEST.
    blobs = folder.parent.parent / "blobs"
    if file.is_relative_to(folder) or (folder.parent.name == "snapshots" and file.is_relative_to(blobs)):
        return file
    raise OSError(errno.ELOOP, f"it leads out of its folder: {_NOT_FOLLOWED}", str(folder / name))


def leads_out(folder: Path, inside: Path) -> bool:
    """Return True if ``folder``, which is named as a folder of ``inside``, is a link to somewhere else."""
    return not folder.resolve().is_relative_to(inside.resolve())


# Read JSON that may be damaged or malicious as values that all later code accepts.
#
# Python's parser accepts more than other programs: integers of any length, which do not fit into 64 bits, and unpaired
# surrogates, which cannot be written to files, terminals or browsers. Here, a long integer becomes a float, an unpaired
# surrogate becomes a replacement character, and deep nesting is an error.


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONG = 18
"""Number of digits of integers that always fit into 64 bits."""


def plain_json(content: bytes, *, exact: bool = False) -> Any:
    """Parse the JSON in ``content``; ``exact`` keeps integers of any size. Raises ``ValueError`` if it is invalid or too deeply nested."""
    try:
        value = (_EXACT if exact else _DECODER).decode(content.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return _paired(value) if b"\\u" in content and _SURROGATE.search(content) else value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONG else _bounded(digits)


def _bounded(digits: str) -> int | float:
    number = int(digits)  # raises ValueError for thousands of digits
    return number if -(1 << 63) <= number < 1 << 63 else float(digits)


def _paired(value: Any) -> Any:
    """Return the value with unpaired surrogates replaced in all its texts."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_paired(key): _paired(item) for key, item in value.items()}
    return [_paired(item) for item in value] if isinstance(value, list) else value


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice, of which a decoder would silently take the last."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} is there twice; keep one")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the JSON object with these pairs, as ``object_pairs_hook`` of Python's parser. Raises ``RepeatedKeyError``."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKeyError(next(key for key, count in counts.items() if count > 1))
    return table


_DECODER, _EXACT = json.JSONDecoder(parse_int=_integer), json.JSONDecoder()


# Walk a folder that other processes may change at the same time.
#
# ``Path.rglob`` raises ``FileNotFoundError`` if a folder is removed between its listing and its opening (CPython up to 3.12,
# ``pathlib._RecursiveWildcardSelector``). Two concurrent preparations, or a pruned checkpoint, would then cause a traceback.
# ``os.walk`` skips removed folders. By default it also skips folders that a faulty disk cannot list, so a count or copy would
# silently miss files; here, that is an error.


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the path of every file in ``folder`` and its folders, in no order. A missing or unreadable folder has none.

    A symbolic link to a file counts as a file; a link to a folder is not followed. A file may be gone when its path is used. Raises ``OSError`` for a
    folder that cannot be listed for another reason, such as a disk error.
    """
    for parent, _, names in os.walk(folder, onerror=_raise_unless_gone):
        for name in names:
            yield Path(parent, name)


def folders_below(folder: Path) -> Iterator[Path]:
    """Yield the path of ``folder`` and of every folder in it, in no order. Raises the errors of ``files_below``."""
    for parent, _, _ in os.walk(folder, onerror=_raise_unless_gone):
        yield Path(parent)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


# Temporary folders that do not outlive their process, even if it is killed, unless they are renamed.
#
# The process holds a lock (``flock``) on its folder, which the kernel releases when the process ends for any reason. The next
# process that creates a folder with the same prefix removes unlocked ones.


# Errors of NFS, which needs a writable descriptor for an exclusive lock (flock(2)), impossible for folders, and of file systems
# without locks.
_WITHOUT_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a new folder whose name begins with ``prefix``, locked by this process, and remove it at the end of the
    context. Abandoned folders of that prefix, not locked, are removed first. Raises ``OSError``.

    It is in ``parent``, with the permissions of new folders there; without one it is among the temporary files, and
    this user's alone.
    """
    root = parent or Path(tempfile.gettempdir())
    _sweep(root, prefix)
    with ExitStack() as cleanup:
        yield _new(root, prefix, 0o777 if parent is not None else 0o700, cleanup)


def _new(root: Path, prefix: str, mode: int, cleanup: ExitStack) -> Path:
    """Make a folder with a random name and lock it; ``cleanup`` removes and unlocks it. Tries again if another
    process has taken or removed it. Raises ``OSError`` for other errors.
    """
    while True:
        folder = root / f"{prefix}{secrets.token_hex(8)}"
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)  # before a signal can interrupt
        folder.mkdir(mode)
        try:
            cleanup.callback(os.close, _lock_folder(folder))
            return folder
        except OSError as error:
            with suppress(OSError):
                folder.rmdir()  # it is empty, and rmtree would need a descriptor
            # Another process may have removed the folder before it was locked: then create it again.
            if not isinstance(error, BlockingIOError | FileNotFoundError):
                raise


def _lock_folder(folder: Path) -> int:
    """Open and lock ``folder``, without waiting; without support for locks, only open it. Returns the descriptor.
    Raises ``OSError``: ``BlockingIOError`` if another process has the lock, ``FileNotFoundError`` if the folder is
    gone or replaced.
    """
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
    """Remove the folders below ``root`` with this prefix that no process has locked. Errors are ignored."""
    with suppress(OSError):
        for name in os.listdir(root):
            if name.startswith(prefix):
                _remove_unlocked(root / name)


def _remove_unlocked(folder: Path) -> None:
    """Remove ``folder`` and its content unless it is locked, or its file system has no locks. Errors are ignored, so
    folders of other users are left.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


# Locks on ranges of a file that exclude other processes and threads, and end with their process.
#
# They belong to an open file description (fcntl(2), F_OFD_SETLKW), so each lock opens the file again: threads with a shared
# description would not exclude each other. The kernel releases the lock when the description is closed, for any reason.


_FLOCK = "hhqqi4x"
"""``struct flock`` on 64-bit Linux: type, whence, start, length, process (which must be 0 for this kind of lock)."""


@contextmanager
def range_locked(path: Path, start: int, stop: int) -> Iterator[None]:
    """Lock bytes ``start`` to ``stop``, exclusive, of the file in the context; first wait until they are free.

    If such locks are not available (another system or file system, a removed file), nothing is locked. So use it only
    for work that may be done twice.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(path.open("r+b", 0))
            if sys.platform == "linux":
                lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLKW, lock)
        yield


# The user's home: the default location of caches and settings.


def home() -> Path:
    """Return the user's home folder. If there is none, as for an unnamed user in a container, return a temporary folder of this user."""
    try:
        return Path.home()
    except RuntimeError:
        return temporary_home()


def user_cache() -> Path:
    """Return the folder of this user's caches, which may not exist yet (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "phalanx"


@cache
def temporary_home() -> Path:
    """Return the folder ``phalanx-UID`` among the temporary files, which only this user can access; it is made if
    missing. If it is not safe, make another one for this process.
    """
    folder = Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="phalanx-"))
    # In a shared folder, another user may have created it first. Libraries are loaded from it, so it must be private.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="phalanx-"))
    return folder


# Small files that survive a crash: a reader finds the old or the new content, never a part of it.
#
# The steps are those of Pillai et al. ("All File Systems Are Not Created Equal", OSDI 2014): write a temporary file in the same
# folder, fsync it, rename it over the target, and fsync the folder. Without the first fsync, the file may be empty after a
# power cut. Without the second, the old file may return after the write was reported as complete.
#
# The code is at the bottom of the dependency order, because all packages write such files: the loss curve, run records,
# checkpoint indexes, the coordinator's journal.


_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace the file at ``path``, or create it, with ``content`` and permissions ``mode`` (less the umask). It is durable when this
    returns.

    With ``durable=False``, neither the file nor the folder is fsynced. After a power cut the file may be old or
    empty, but no process ever reads a part of it. Use it for a status that is written often, by a thread that must
    not wait for a disk.

    Processes and threads on any machines and in containers may write one path at the same time: the last rename wins.
    Raises ``OSError``; the old content is then intact, unless only the last step, the fsync of the folder, failed.
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
            error.filename = str(path)  # the error for a full disk has no name
        raise
    if durable:
        sync(path.parent)


def _temporary(path: Path) -> Path:
    """Return a new random name beside ``path`` that ``remove_temporaries`` recognizes.

    It is random because process and thread numbers can be equal in containers that share a folder.
    """
    return path.with_name(f".{path.name}.{int.from_bytes(os.urandom(7))}.tmp")


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk (fsync). Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> list[str]:
    """Remove leftovers of killed ``write_atomically`` calls in ``folder``, and return their names, sorted. Raises
    ``OSError``.

    Only the folder's owner may call it: a concurrent write would fail.
    """
    stale = sorted(name for name in os.listdir(folder) if _TEMPORARY.fullmatch(name))
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    return stale


def create_once(path: Path, content: bytes) -> bytes:
    """Create the file at ``path`` atomically if it does not exist; not synced. Returns its content, which may be from another process.

    Of several processes on any machines, one succeeds. (On a file system without links, in a race of milliseconds, the last one.) Raises ``OSError``.
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
