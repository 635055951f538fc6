"""Checkpoints in an object store, without rename or lock: a step is committed by one small object.

    ROOT/data/step-00000100-TAG-DIGEST/rank-00000.safetensors    the files of a step, as on disk (``disk.py``), without its index
    ROOT/committed/00000100.json                                 the index, and the folder of ``data`` with the files
    ROOT/damaged/00000100-NS.json                                a commit that was set aside; its files stay

The object in ``committed`` is created only if absent, as the last step of an upload. So one of several attempts commits, and no reader
ever sees a partial step. A folder's name contains the tag of its attempt and a digest of the index, and so of every byte. Attempts that
could differ never share a key, and a stale writer cannot modify a committed step. Deletion removes the commit first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from tempfile import gettempdir

import numpy as np

from phalanx.checkpoint.format.boxes import REMOTE
from phalanx.checkpoint.format.errors import (
    CheckpointError,
    CorruptError,
    MissingFileError,
    NoSuchStepError,
    StorageError,
    StorageFullError,
)
from phalanx.checkpoint.format.image import ByteArray
from phalanx.checkpoint.format.manifest import Manifest, checksum, parse_object, sealed
from phalanx.checkpoint.tiers.catalogued import CataloguedTier
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.run.directory.files import range_locked
from phalanx.run.directory.paths import step_folder, step_of
from phalanx.store.open_store import is_url, joined, open_store
from phalanx.store.store import (
    ExistsError,
    FullError,
    HedgedReads,
    Info,
    MissingObjectError,
    ShortObjectError,
    Store,
    StoreError,
    require_create,
)

# Blocks of a checkpoint in a store, fetched once for all ranks of a machine that restore it.
#
# Equal ranks need equal blocks, and read them in the same order at about the same time. So a file in memory (tmpfs) of bounded size
# suffices as a cache, in which each block has one position. A rank reads the block there, or fetches it and writes it there, under a lock
# on the position. The content is identified only by the checksum from the checkpoint's catalog. A hole, another block and a partial block
# all fail it, and the block is fetched. Each rank has a shared lock on the file while it restores; the last one removes it. The next
# restore on the machine removes the files of killed ranks.

_MOST_BYTES = 2 << 30
_SHARE_OF_FREE = 0.25
"""Fraction of the file system's free space that the file may use."""
_SIZE_LOCK = 1 << 60
"""Byte beyond any block, whose lock protects the file's size."""


class SharedBlocks:
    """Recently fetched blocks of ``place``, shared by the ranks of this machine. Thread-safe; close it when all have restored."""

    def __init__(self, place: str, folder: Path | None = None, most_bytes: int = _MOST_BYTES) -> None:
        """Open the cache file for the store ``place`` in shared memory (or ``folder``), of at most ``most_bytes`` and
        a share of the free space. Remove this user's cache files that no process uses.

        If that fails, for example for lack of permission, every block is fetched.
        """
        folder = memory_folder() if folder is None else folder
        prefix = f"phalanx-restore-{os.getuid()}-"
        self._path = folder / f"{prefix}{hashlib.sha256(place.encode()).hexdigest()[:32]}"
        self._descriptor = -1
        # Without the file each rank fetches all blocks.
        with suppress(OSError):
            for leftover in folder.glob(f"{prefix}*"):
                with suppress(OSError):  # another removes it
                    _remove_unless_held(leftover)
            self._descriptor = _open_locked(self._path)
            stat = os.statvfs(folder)
            most_bytes = min(most_bytes, int(stat.f_bavail * stat.f_frsize * _SHARE_OF_FREE))
            most_bytes = _size_set_once(self._path, self._descriptor, most_bytes)
        self._most_bytes = most_bytes

    def block(self, manifest: Manifest, number: int, fetch: Callable[[], memoryview]) -> memoryview:
        """Return a block of an image from the cache if its checksum is right, else the result of ``fetch``, which is
        not verified.

        It is cached afterwards; other processes that want the same place wait meanwhile. Without a cache, it is only
        fetched.
        """
        slots = self._most_bytes // manifest.block_bytes
        if self._descriptor < 0 or not slots:
            return fetch()
        # Successive blocks of an image have successive positions, so that none evicts one that was just fetched.
        start = (zlib.crc32(manifest.file.encode()) + number) % slots * manifest.block_bytes
        nbytes = min(manifest.block_bytes, manifest.nbytes - number * manifest.block_bytes)
        with range_locked(self._path, start, start + manifest.block_bytes):
            with suppress(OSError):
                cached = os.pread(self._descriptor, nbytes, start)
                if checksum(cached) == manifest.checksums[number]:
                    return memoryview(cached)
            data = fetch()
            with suppress(OSError):  # no room: the others fetch it too
                os.pwrite(self._descriptor, data, start)
        return data

    def close(self) -> None:
        """Release the file, and remove it if no other process uses it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with suppress(OSError):
                _remove_unless_held(self._path)


def memory_folder() -> Path:
    """Return a writable folder in memory, or the temporary folder if this system has none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(gettempdir())


def _open_locked(path: Path) -> int:
    """Open the file at ``path`` with a shared lock; create it if missing. Raises ``OSError`` also if another user owns it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Checked before locking: another user's lock on a file of this name could block forever.
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:  # else it was removed in between
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _size_set_once(path: Path, descriptor: int, most_bytes: int) -> int:
    """Set the size of an empty file to ``most_bytes``, under a lock; return the size in bytes that the first rank has set.

    All ranks use this size, since it determines the positions of blocks in the file.
    """
    with range_locked(path, _SIZE_LOCK, _SIZE_LOCK + 1):
        if not os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, most_bytes)  # a hole, which takes space as blocks are written
        return os.fstat(descriptor).st_size


def _remove_unless_held(path: Path) -> None:
    """Remove the file unless a process has it locked. Raises ``OSError`` if it is missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)


COMMITTED, DATA, DAMAGED = "committed", "data", "damaged"
DAY_S = 24 * 3600.0
_COMMIT_VERSION = 1
_COMMIT = re.compile(r"committed/(\d{8,})\.json")
_READS_AT_ONCE = 8
_AHEAD = 2 * _READS_AT_ONCE
"""Blocks in flight or waiting to be consumed: more than the concurrent reads, so that one slow block does not delay requests."""


class ObjectTier(CataloguedTier):
    """The checkpoints below the URL of ``store``."""

    def __init__(self, store: Store, block_reads: HedgedReads | None = None) -> None:
        """Open the tier; ``block_reads`` hedges the reads of blocks, by default a new one."""
        super().__init__(store.url, REMOTE)
        self.store = store
        self._commit = lru_cache(maxsize=16)(self._load_commit)
        self.block_reads = block_reads or HedgedReads()
        self._shared: SharedBlocks | None = None

    # Listing

    def steps(self) -> list[int]:
        with store_errors():
            matches = [_COMMIT.fullmatch(info.key) for info in self.store.list(COMMITTED)]
        return sorted(int(match[1]) for match in matches if match)

    def has(self, step: int) -> bool:
        return step in self.steps()

    def index_bytes(self, step: int) -> bytes:
        return self._commit(step)[1]

    def data_bytes(self, step: int) -> int:
        """Return the bytes of all files of a step except its index."""
        with store_errors():
            return sum(info.nbytes for info in self.store.list(self._commit(step)[0]))

    # Reading

    def place(self, step: int, file: str) -> str:
        return f"{self.store.url}/{self._key(step, file) if file else commit_key(step)}"

    def read_file(self, step: int, file: str) -> bytes:
        with store_errors():
            return self.store.get(self._key(step, file))

    def blocks(self, step: int, manifest: Manifest, numbers: Iterable[int]) -> Iterator[ByteArray]:
        """Yield blocks, each from a separate request, several ahead of the consumer. A block is the received memory,
        and read-only.

        A block that takes far longer than the others is requested twice: all ranks of a fleet wait for the slowest of
        all their blocks. Raises CorruptError for a block that does not match its checksum.
        """
        key, shared = self._key(step, manifest.file), self._shared

        def fetch(number: int) -> ByteArray:
            """Return a verified block, of other processes of this machine or of the store. Raises CorruptError."""
            start = number * manifest.block_bytes
            stop = min(start + manifest.block_bytes, manifest.nbytes)

            def read_range() -> memoryview:
                with store_errors():
                    return self.block_reads.read(lambda: self.store.ranges(key, [(start, stop)]))[0]

            data = read_range() if shared is None else shared.block(manifest, number, read_range)
            if checksum(data) != manifest.checksums[number]:
                raise CorruptError(
                    f"{self.store.url}/{key}, block {number} (bytes {start:,} to {stop:,}): the bytes differ from their "
                    "checksum. Restore another step or from another place."
                )
            return np.frombuffer(data, np.uint8)

        pending = iter(numbers)
        with ThreadPoolExecutor(_READS_AT_ONCE, "checkpoint-fetch") as pool:
            ahead = deque(pool.submit(fetch, number) for number in islice(pending, _AHEAD))
            while ahead:
                block = ahead.popleft().result()
                ahead.extend(pool.submit(fetch, number) for number in islice(pending, 1))
                yield block

    @contextmanager
    def shared_on_this_machine(self) -> Iterator[None]:
        """Context in which each block is fetched once for all ranks of this machine in the same context.

        For restores of all ranks together; no rank may leave it before all have restored.
        """
        self._shared = SharedBlocks(self.store.url)
        try:
            yield
        finally:
            self._shared.close()
            self._shared = None

    def image_bytes(self, step: int, file: str) -> int:
        size = self.draft_sizes(self._commit(step)[0]).get(file)
        if size is None:
            raise MissingFileError(f"{self.place(step, file)}: is missing. Restore another step.")
        return size

    # Writing

    def draft_folder(self, step: int, tag: str, index: bytes) -> str:
        """Return the folder for the files of a step of the attempt ``tag``."""
        return f"{DATA}/step-{step:08d}-{tag}-{checksum(index)}"

    def draft_sizes(self, folder: str) -> dict[str, int]:
        """Return the files in a draft, with their sizes in bytes."""
        with store_errors():
            return {info.key.removeprefix(f"{folder}/"): info.nbytes for info in self.store.list(folder)}

    def commit(self, step: int, folder: str, index: bytes) -> bool:
        """Make a step visible whose files are all in ``folder``; return False if another attempt has committed it, which stays."""
        content = {"version": _COMMIT_VERSION, "data": folder, "index": index.decode()}
        try:
            with store_errors():
                self.store.create(commit_key(step), sealed(content))
        except StorageError as error:
            if isinstance(error.__cause__, ExistsError):
                return False
            raise
        return True

    # Removing

    def delete(self, step: int) -> None:
        """Remove a committed step: first its commit, then its data. The data of a damaged commit stays. Raises NoSuchStepError."""
        try:
            folder = self._load_commit(step)[0]
        except CorruptError:
            folder = ""  # a sweep finds its data
        self._forget(step)
        if folder:
            with store_errors():
                self.store.delete([info.key for info in self.store.list(folder)])

    def set_aside(self, step: int) -> None:
        """Remove a damaged step from the list; its data stays for inspection."""
        with store_errors():
            content = self.store.get(commit_key(step))
            self.store.create(f"{DAMAGED}/{step:08d}-{time.time_ns()}.json", content)
        self._forget(step)

    def sweep(self, tag: str, *, older_than_s: float = DAY_S) -> list[str]:
        """Remove uncommitted drafts of attempts other than ``tag``. Return their folders.

        Only drafts without a write for ``older_than_s`` are removed: an active writer could still commit. Removes
        nothing if a commit cannot be read.
        """
        drafts: dict[str, list[Info]] = {}
        with store_errors():
            for info in self.store.list(DATA):
                drafts.setdefault("/".join(info.key.split("/")[:2]), []).append(info)
            # Read after the drafts, so that commits in between are seen.
            named = {
                self._named_by(info.key) for part in (COMMITTED, DAMAGED) for info in self.store.list(part)
            }
        if None in named:
            return []  # a damaged commit may refer to any of them
        old = [
            folder
            for folder, infos in drafts.items()
            if folder not in named and re.fullmatch(rf"data/step-\d+-{re.escape(tag)}-\w+", folder) is None
            if time.time() - max(info.modified.timestamp() for info in infos) >= older_than_s
        ]
        with store_errors():
            self.store.delete(info.key for folder in old for info in drafts[folder])
        return old

    def _named_by(self, key: str) -> str | None:
        """Return the folder of data in the commit ``key``; None if the commit cannot be read. Empty if the commit is gone."""
        try:
            return decode_commit(self.store.get(key), key)[0]
        except MissingObjectError:
            return ""
        except CheckpointError:
            return None

    def _key(self, step: int, file: str) -> str:
        return f"{self._commit(step)[0]}/{file}"

    def _load_commit(self, step: int) -> tuple[str, bytes]:
        """Read a commit: the folder of its files, and its encoded index. Raises NoSuchStepError, CorruptError."""
        key = commit_key(step)
        with store_errors():
            try:
                content = self.store.get(key)
            except MissingObjectError:
                steps = self.steps()
                raise NoSuchStepError(
                    f"step {step} is not in the store {self.store.url}; there are {steps or 'none'}"
                ) from None
        return decode_commit(content, f"{self.store.url}/{key}")

    def _forget(self, step: int) -> None:
        """Delete the commit of ``step`` from the store, and clear all caches. The data stay."""
        with store_errors():
            self.store.delete([commit_key(step)])
        self._commit.cache_clear()
        self.forget_catalogs()


def commit_key(step: int) -> str:
    """Return the key of the object that commits a step."""
    return f"{COMMITTED}/{step:08d}.json"


def decode_commit(data: bytes, place: str) -> tuple[str, bytes]:
    """Return the folder of a step's files, and its encoded index. Raises CorruptError."""
    content = parse_object(data, place).get("content")
    if not isinstance(content, dict) or sealed(content) != data:
        raise CorruptError(f"{place}: differs from its checksum. Restore another step.")
    if content.get("version") != _COMMIT_VERSION:
        raise CorruptError(
            f"{place}: commit version {content.get('version')!r}; use the version that wrote it."
        )
    return content["data"], content["index"].encode()


def require_conditional_store(store: Store) -> None:
    """Check, by trying it, that the store refuses to create an existing object. Raises StorageError."""
    with store_errors():
        require_create(store, f"probe/{secrets.token_hex(8)}")


@contextmanager
def store_errors() -> Iterator[None]:
    """Convert a StoreError, which has the URL and the remedy, to a CheckpointError.

    A missing object becomes MissingFileError, a short one CorruptError, a full store StorageFullError, all else
    StorageError.
    """
    try:
        yield
    except MissingObjectError as error:
        raise MissingFileError(f"{error}. Restore another step, or from another place.") from error
    except ShortObjectError as error:
        raise CorruptError(f"{error}. Restore another step, or from another place.") from error
    except FullError as error:
        raise StorageFullError(str(error)) from error
    except StoreError as error:
        raise StorageError(str(error)) from error


# The checkpoint that a run starts from, in a folder or in an object store, under one name: PLACE/step-00000100.
#
# A store has no folder of that name; it means the step that is committed there, so that both kinds are pinned to a step in the same way.


def pinned_in_store(url: str) -> str | None:
    """Return the checkpoint that ``url`` means: the step that it names, or the newest now; ``None`` if the store has none.

    Raises CheckpointError if the store cannot be reached, StoreError if the URL names none.
    """
    place, step = _place_and_step(url)
    if step is None:
        step = max(ObjectTier(open_store(place)).steps(), default=None)
    return None if step is None else joined(place, step_folder(Path(), step).name)


def open_origin(start: str) -> tuple[DiskTier | ObjectTier, int]:
    """Return the tier of the checkpoint ``start``, PLACE/step-00000100, and its step, without checking that it
    exists.

    An ObjectTier for any URL, ``file://`` included; a DiskTier for a path, whose folder PLACE is created if it is
    missing. Raises ValueError without a step, StorageError for a folder that cannot be made, and the errors of
    ``open_store``.
    """
    if is_url(start):
        place, step = _place_and_step(start)
        tier: DiskTier | ObjectTier = ObjectTier(open_store(place))
    else:
        step = step_of(Path(start))
        tier = DiskTier(Path(start).parent)
    if step is None:
        raise ValueError(f"{start} is not pinned to a step")
    return tier, step


def _place_and_step(url: str) -> tuple[str, int | None]:
    """Return the store's URL and the step of a URL, which may end with a step's folder."""
    place, _, name = url.rstrip("/").rpartition("/")
    step = step_of(Path(name))
    return (url.rstrip("/"), None) if step is None else (place, step)
