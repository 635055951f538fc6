"""Checkpoints in an object store, where there is neither rename nor lock: a step is committed by one small object.

    ROOT/data/step-00000100-TAG-DIGEST/rank-00000.safetensors    the files of a step, as on disk (``disk.py``) but for its index
    ROOT/committed/00000100.json                                 the index, and in which folder of ``data`` the files are
    ROOT/damaged/00000100-NS.json                                a commit that was set aside; its files stay

The object in ``committed`` is created only if absent, as the last thing of an upload, so of several attempts at a step one commits and
no reader ever finds half of one. A folder's name holds the tag of the attempt that fills it and a digest of the index, and so of every
byte: attempts that could differ never share a key, and a stale writer cannot touch what is committed. Deleting removes the commit first.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from tempfile import gettempdir

import numpy as np

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.errors import (
    CheckpointError,
    CorruptError,
    MissingFileError,
    NoSuchStepError,
    StorageError,
    StorageFullError,
)
from phalanx.checkpoint.format.image import ByteArray, RawArray
from phalanx.checkpoint.format.manifest import Index, Manifest, checksum, decode_index, parse_object, sealed
from phalanx.checkpoint.format.restore_plan import REMOTE, Held, PlannedRead
from phalanx.checkpoint.tiers.catalogued import CatalogReader, look_through, wrong_size
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Record
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

# Blocks of a checkpoint in a store, fetched once by the ranks of one machine that all restore it.
#
# Equal ranks need equal blocks, and read them in the same order at about the same time. So a file in memory (tmpfs) of bounded size is
# enough, in which each block has one place: whoever needs a block looks there, and else fetches it and leaves it there, under a lock on the
# place. As in a dataset's cache, nothing says what a place holds but its checksum, which the checkpoint's catalog gives: a hole, another block, half of
# one are all the same, a block to be fetched. Each rank holds a shared lock on the file while it restores; the last one removes it, and
# what killed ranks have left the next restore on the machine.

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


COMMITTED, DATA, DAMAGED = "committed", "data", "damaged"
DAY_S = 24 * 3600.0
_COMMIT_VERSION = 1
_COMMIT = re.compile(r"committed/(\d{8,})\.json")
_READS_AT_ONCE = 8
_AHEAD = 2 * _READS_AT_ONCE
"""Blocks that are asked for or waiting to be taken: more than come at once, so that one that is late leaves no request unmade."""


class ObjectTier:
    """The checkpoints below the URL that ``store`` was opened with."""

    def __init__(self, store: Store, block_reads: HedgedReads | None = None) -> None:
        """``block_reads`` hedges the reads of blocks; a new one by default."""
        self.store = store
        self.name = store.url
        self.reader = CatalogReader(self, self.name, REMOTE)
        self._commit = lru_cache(maxsize=16)(self._load_commit)
        self.block_reads = block_reads or HedgedReads()
        self._shared: SharedBlocks | None = None

    # Looking

    def steps(self) -> list[int]:
        with store_errors():
            found = [_COMMIT.fullmatch(info.key) for info in self.store.list(COMMITTED)]
        return sorted(int(match[1]) for match in found if match)

    def has(self, step: int) -> bool:
        return step in self.steps()

    def index(self, step: int) -> Index:
        """The index of a committed step. Raises NoSuchStepError, CorruptError, FormatVersionError."""
        return decode_index(self.index_bytes(step), self.place(step, ""))

    def index_bytes(self, step: int) -> bytes:
        return self._commit(step)[1]

    def record(self, step: int) -> Record:
        index = self.index(step)
        return Record(index.step, index.world_size, index.extra, index.weights_sha256)

    def extra(self, step: int) -> dict[str, object]:
        return self.index(step).extra

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[Held, ...]:
        return self.reader.boxes(step, rank, needed)

    def data_bytes(self, step: int) -> int:
        """Bytes of all files of a step but its index."""
        with store_errors():
            return sum(info.nbytes for info in self.store.list(self._commit(step)[0]))

    # Reading

    def place(self, step: int, file: str) -> str:
        return f"{self.store.url}/{self._key(step, file) if file else commit_key(step)}"

    def read_file(self, step: int, file: str) -> bytes:
        with store_errors():
            return self.store.get(self._key(step, file))

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        return self.reader.read(step, reads)

    def blocks(self, step: int, manifest: Manifest, numbers: Iterable[int]) -> Iterator[ByteArray]:
        """Each block is a request of its own, several ahead of whoever takes them; it is the memory in which it came, and read-only.

        One that takes far longer than the others is asked for twice: all ranks of a fleet wait for the slowest of all their blocks.
        """
        key, shared = self._key(step, manifest.file), self._shared

        def fetch(number: int) -> ByteArray:
            start = number * manifest.block_bytes
            stop = min(start + manifest.block_bytes, manifest.nbytes)

            def ask() -> memoryview:
                with store_errors():
                    return self.block_reads.read(lambda: self.store.ranges(key, [(start, stop)]))[0]

            data = ask() if shared is None else shared.block(manifest, number, ask)
            if checksum(data) != manifest.checksums[number]:
                raise CorruptError(
                    f"{self.store.url}/{key}, block {number} (bytes {start:,} to {stop:,}): the bytes differ from their "
                    "checksum. Restore another step or from another place."
                )
            return np.frombuffer(data, np.uint8)

        todo = iter(numbers)
        with ThreadPoolExecutor(_READS_AT_ONCE, "checkpoint-fetch") as pool:
            ahead = deque(pool.submit(fetch, number) for number in islice(todo, _AHEAD))
            while ahead:
                block = ahead.popleft().result()
                ahead.extend(pool.submit(fetch, number) for number in islice(todo, 1))
                yield block

    @contextmanager
    def shared_on_this_machine(self) -> Iterator[None]:
        """Until it ends, each block is fetched by one of the ranks of this machine that read it meanwhile in this way too.

        For restores of all ranks together, none of whom ends it before all have restored.
        """
        self._shared = SharedBlocks(self.store.url)
        try:
            yield
        finally:
            self._shared.close()
            self._shared = None

    def damage(self, step: int, manifest: Manifest) -> Iterator[tuple[int, CheckpointError | None]]:
        key = self._key(step, manifest.file)
        try:
            size = self.draft_sizes(self._commit(step)[0]).get(manifest.file)
        except CheckpointError as error:
            yield 0, error
            return
        if size is None:
            yield 0, MissingFileError(f"{self.store.url}/{key}: is missing. Restore another step.")
            return
        if size != manifest.nbytes:
            yield 0, wrong_size(f"{self.store.url}/{key}", size, manifest.nbytes)
        there = len(manifest.checksums) if size >= manifest.nbytes else size // manifest.block_bytes
        yield from look_through(manifest, partial(self.blocks, step, manifest), there)

    # Writing

    def draft_folder(self, step: int, tag: str, index: bytes) -> str:
        """Where an attempt with ``tag`` puts the files of a step."""
        return f"{DATA}/step-{step:08d}-{tag}-{checksum(index)}"

    def draft_sizes(self, folder: str) -> dict[str, int]:
        """The files that are in a draft, with their sizes in bytes."""
        with store_errors():
            return {info.key.removeprefix(f"{folder}/"): info.nbytes for info in self.store.list(folder)}

    def commit(self, step: int, folder: str, index: bytes) -> bool:
        """Makes a step visible whose files are all in ``folder``; False if another attempt has committed it, which stays."""
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
        """Removes a committed step; its data go after its commit. Raises NoSuchStepError."""
        try:
            folder = self._load_commit(step)[0]
        except CorruptError:
            folder = ""  # a sweep finds its data
        self._forget(step)
        if folder:
            with store_errors():
                self.store.delete([info.key for info in self.store.list(folder)])

    def set_aside(self, step: int) -> None:
        """Takes a damaged step out of the list; its data stay, to be looked at."""
        with store_errors():
            content = self.store.get(commit_key(step))
            self.store.create(f"{DAMAGED}/{step:08d}-{time.time_ns()}.json", content)
        self._forget(step)

    def sweep(self, tag: str, *, older_than_s: float = DAY_S) -> list[str]:
        """Removes drafts of other attempts than ``tag`` that were never committed. Returns their folders.

        Only those in which nothing was written for ``older_than_s``: whoever still writes one could commit it meanwhile.
        """
        drafts: dict[str, list[Info]] = {}
        with store_errors():
            for info in self.store.list(DATA):
                drafts.setdefault("/".join(info.key.split("/")[:2]), []).append(info)
            # Read after the drafts, so that what was committed in between is seen.
            named = {
                self._named_by(info.key) for part in (COMMITTED, DAMAGED) for info in self.store.list(part)
            }
        if None in named:
            return []  # a damaged commit may name any of them
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
        """The folder of data that the commit ``key`` names; None where that cannot be read."""
        try:
            return decode_commit(self.store.get(key), key)[0]
        except MissingObjectError:
            return ""
        except CheckpointError:
            return None

    def _key(self, step: int, file: str) -> str:
        return f"{self._commit(step)[0]}/{file}"

    def _load_commit(self, step: int) -> tuple[str, bytes]:
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
        """Removes a commit, here and in the store."""
        with store_errors():
            self.store.delete([commit_key(step)])
        self._commit.cache_clear()
        self.reader = CatalogReader(self, self.name, REMOTE)


def commit_key(step: int) -> str:
    """The key of the object that commits a step."""
    return f"{COMMITTED}/{step:08d}.json"


def decode_commit(data: bytes, place: str) -> tuple[str, bytes]:
    """The folder of a step's files, and its encoded index. Raises CorruptError."""
    content = parse_object(data, place).get("content")
    if not isinstance(content, dict) or sealed(content) != data:
        raise CorruptError(f"{place}: differs from its checksum. Restore another step.")
    if content.get("version") != _COMMIT_VERSION:
        raise CorruptError(
            f"{place}: commit version {content.get('version')!r}; use the version that wrote it."
        )
    return content["data"], content["index"].encode()


def require_conditional_store(store: Store) -> None:
    """Makes sure, by trying it, that the store refuses to create what is there. Raises StorageError."""
    with store_errors():
        require_create(store, f"probe/{secrets.token_hex(8)}")


@contextmanager
def store_errors() -> Iterator[None]:
    """Turns a StoreError, which names URL and remedy, into the CheckpointError of its kind."""
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


# The checkpoint that a run begins from, in a folder or in an object store, under one name: PLACE/step-00000100.
#
# In a store there is no folder of that name; it stands for the step that is committed there, so that both kinds are pinned to one step alike.


def pinned_in_store(url: str) -> str | None:
    """The checkpoint that ``url`` means: the step that it names, or the newest now; ``None`` if the store has none.

    Raises CheckpointError where the store cannot be reached, StoreError where the URL names none.
    """
    place, step = _place_and_step(url)
    if step is None:
        step = max(ObjectTier(open_store(place)).steps(), default=None)
    return None if step is None else joined(place, step_folder(Path(), step).name)


def open_origin(start: str) -> tuple[DiskTier | ObjectTier, int]:
    """The place of the checkpoint ``start``, PLACE/step-00000100, and its step; whether it is there has not been looked at."""
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
    place, _, name = url.rstrip("/").rpartition("/")
    step = step_of(Path(name))
    return (url.rstrip("/"), None) if step is None else (place, step)
