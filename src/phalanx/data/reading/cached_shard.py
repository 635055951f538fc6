"""One shard of a dataset in an object store, cached in a sparse file: its blocks, the requests for them, and the cache's size limit.

A block is cached if its bytes match its block sum (``phalanx.data.stored.shard_writer``). A hole, a torn write, a flipped bit and a file that was
emptied for room are all treated as a missing block. So no table of cached blocks is needed, nothing is synced to disk, and a process may be killed at
any time. Bytes are copied out of the file and then compared, so that the returned bytes are verified even if the file changes.

If several processes miss a block at the same time, one fetches it and the others wait. A lock on the block's bytes in the file coordinates them; it
ends with its process. A process never waits for one range while it holds another.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.stored.index import ShardFile
from phalanx.data.stored.shard_writer import BLOCK_BYTES, parse_sums, sums_file
from phalanx.process.background import in_background, settle
from phalanx.run.directory.files import range_locked, write_atomically
from phalanx.store.store import MissingObjectError, ShortObjectError, Store

# Cache size: all cached datasets of one folder stay below a limit.
#
# Dropping a block is always safe, because a reader that finds it missing requests it again. So no coordination is needed. A
# process that has written a fraction of the limit checks all shards of the cache, and empties those with the oldest writes. An
# emptied file keeps its name and open descriptors; only its bytes are gone.

_KEPT_FRACTION = 0.9
"""Fraction of the limit in use after blocks are dropped, so that not every write drops blocks."""
_CHECKS = 32
"""Number of checks of the cache's size while the limit's bytes are written."""
_UNIT_BYTES = 512
"""Unit of ``st_blocks``: not defined by POSIX, but always 512 on Linux."""


class Room:
    """The size limit of the cached datasets below ``root``. Thread-safe and process-safe."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._unseen_bytes = limit_bytes  # so that the first write checks the cache
        self._lock = threading.Lock()

    def wrote(self, nbytes: int) -> None:
        """Count bytes written to a cache; after each fraction of the limit, drop blocks if the limit is exceeded."""
        with self._lock:
            self._unseen_bytes += nbytes
            if self._unseen_bytes < self._limit_bytes // _CHECKS:
                return
            self._unseen_bytes = 0
        self.drop()

    def drop(self) -> None:
        """If the cache exceeds the limit, empty the shards with the oldest writes until it is well below.

        Does nothing while another process does so, or if the folder cannot be read.
        """
        with suppress(OSError):  # if the cache cannot be inspected, only its size is not limited
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(
                    descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # fails if another process is dropping blocks
                self._drop()
            finally:
                os.close(descriptor)

    def _drop(self) -> None:
        """If more than the limit is in use, truncate shards, those with the oldest writes first, until at most
        ``_KEPT_FRACTION`` of it is.
        """
        shards = []
        for path in self._root.glob("*/*.bin"):
            status = path.stat()
            shards.append((status.st_mtime_ns, status.st_blocks * _UNIT_BYTES, path))
        used_bytes = sum(nbytes for _, nbytes, _ in shards)
        if used_bytes <= self._limit_bytes:
            return
        for _, nbytes, path in sorted(shards):
            if used_bytes <= _KEPT_FRACTION * self._limit_bytes:
                return
            os.truncate(path, 0)
            used_bytes -= nbytes


def fetched_bytes(nbytes: int) -> int:
    """Return how many bytes a read of ``nbytes`` fetches in the mean: whole blocks, of which its ends touch one more."""
    return nbytes + BLOCK_BYTES


def most_ahead_bytes(read_ahead_bytes: int, limit_bytes: int) -> int:
    """Return how far one process reads ahead: at most a quarter of the cache.

    Reading ahead writes the newest blocks. If they filled the cache, blocks would be dropped before they are used, and fetched again.
    """
    return min(read_ahead_bytes, limit_bytes // 4)


# Requests: a few threads that fetch the blocks a caller waits for first, then those to read ahead, in order.
#
# The threads are daemons and hold no resources, so that a process ends without waiting for a store that does not respond.

_AT_ONCE = 32
"""Number of parallel requests. By Little's law, that is 320 samples/s from a store with 100 ms latency. A rank needs a few."""

THREAD = "data-request"
"""Name of the threads."""

T = TypeVar("T")


class Requests:
    """A pool of threads with two queues. Thread-safe."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        """Run at most ``at_once`` calls at a time; threads start as they are needed."""
        self._most_threads = at_once
        self._threads = 0
        self._idle = 0
        self._urgent: deque[Callable[[], None]] = deque()
        self._ahead: deque[Callable[[], None]] = deque()
        self._waiting: dict[Future[Any], float] = {}
        """Futures in use and the start times of their waits, oldest first."""
        self._changed = threading.Condition()

    def results(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of the calls in order. The calls run before all read-ahead calls.

        Raises the first exception of a call, or ``DatasetError`` if ``give_up`` is called. The calls run in threads of
        this pool.
        """
        futures = [self._urgently(call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            with self._changed:
                for future in futures:
                    self._waiting.pop(future, None)

    def ahead(self, call: Callable[[], object]) -> None:
        """Queue ``call`` to run when nothing urgent is queued, after earlier read-ahead calls. Its exceptions are ignored."""

        def quietly() -> None:
            with suppress(Exception):  # a later request for the data raises the error
                call()

        self._enqueue(self._ahead, quietly)

    def give_up(self) -> None:
        """End all current waits for ``results`` with an error, and drop the read-ahead calls."""
        with self._changed:
            self._ahead.clear()
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(DatasetError("reading was ended before the store had answered"))

    def waiting_s(self) -> float:
        """Return the longest current wait for ``results`` in seconds; 0 if there is none."""
        with self._changed:
            return max((time.monotonic() - since_s for since_s in self._waiting.values()), default=0.0)

    def _urgently(self, call: Callable[[], T]) -> Future[T]:
        """Queue ``call`` before all read-ahead calls, and return its future, which ``give_up`` can fail."""
        future: Future[T] = Future()
        with self._changed:
            self._waiting[future] = time.monotonic()
        self._enqueue(self._urgent, partial(settle, future, call))
        return future

    def _enqueue(self, queue: deque[Callable[[], None]], call: Callable[[], None]) -> None:
        """Queue ``call``, and start another thread if all are busy and the limit is not reached."""
        with self._changed:
            queue.append(call)
            if len(self._urgent) + len(self._ahead) > self._idle and self._threads < self._most_threads:
                self._threads += 1
                threading.Thread(target=self._work, name=THREAD, daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        """Run queued calls forever, urgent ones first."""
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._urgent or self._ahead)
                self._idle -= 1
                call = (self._urgent or self._ahead).popleft()
            call()


@dataclass
class CacheTraffic:
    """Bytes that this process read from cached datasets. Thread-safe."""

    asked_bytes: int = 0
    """Bytes of samples that were read."""
    fetched_bytes: int = 0
    """Bytes that came from the store, including read-ahead."""
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_requested(self, nbytes: int) -> None:
        with self.lock:
            self.asked_bytes += nbytes

    def fetched(self, nbytes: int) -> None:
        with self.lock:
            self.fetched_bytes += nbytes
            self.requests += 1


class CachedShard:
    """A token shard below a store's URL, and its sparse file in ``folder``. Thread-safe."""

    def __init__(
        self, folder: Path, shard: ShardFile, nbytes: int, room: Room, traffic: CacheTraffic
    ) -> None:
        """Open or create the shard's sparse file in ``folder``. Raises ``DatasetError`` if the cache cannot be written."""
        self._path = folder / shard.file
        self._shard = shard
        self._nbytes = nbytes
        self._room = room
        self._traffic = traffic
        try:
            self._sums = self._cached_sums()
            self._file = os.fdopen(
                os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", 0
            )
        except OSError as error:
            raise DatasetError(
                f"cannot write the cache {self._path} ({error.strerror}): make room there, or give another folder in data.cache"
            ) from error

    def held(self, start: int, stop: int) -> memoryview | None:
        """Return bytes ``start`` to ``stop`` of the shard if all their blocks are cached, else ``None``.

        Verifies the blocks; damaged and unreadable ones count as missing.
        """
        if self._sums is None:
            return None
        first = start - start % BLOCK_BYTES
        try:
            data = os.pread(self._file.fileno(), self._end(stop) - first, first)
        except OSError:
            return None
        if not self._intact(first, data, stop, self._sums):
            return None
        return memoryview(data)[start - first : stop - first]

    def fetched(self, start: int, stop: int, store: Store) -> memoryview:
        """Return bytes ``start`` to ``stop``, from ``store`` unless another process has cached them. They are verified,
        and cached unless the disk is full.

        Raises ``DatasetError`` if the store has different bytes, ``StoreError`` if it does not return them.
        """
        first, end = start - start % BLOCK_BYTES, self._end(stop)
        with range_locked(self._path, first, end):  # without the lock, there may be a second request
            self._sums = self._cached_sums() if self._sums is None else self._sums
            cached = self.held(start, stop)
            if cached is not None:
                return cached
            data = self._from_store(first, end, store)
            # The cache is optional: a block that cannot be written is requested again.
            with suppress(OSError):
                os.pwrite(self._file.fileno(), data, first)
                self._room.wrote(len(data))
        return data[start - first : stop - first]

    def _from_store(self, first: int, end: int, store: Store) -> memoryview:
        """Return bytes ``first`` to ``end`` from the store, verified. Damaged ones are requested again, and then
        compared with new block sums, in case the cached ones are damaged.

        Raises ``DatasetError`` if the object is missing, or its bytes do not match.
        """
        sums = self._sums
        # The first time, block sums are requested in parallel: at the start of a run, each sample is from another shard.
        requested_sums = in_background(partial(self._sums_of, store), THREAD) if sums is None else None
        for last_try in (False, True):  # a bit may have flipped in transit
            try:
                (data,) = store.ranges(self._shard.file, [(first, end)])
            except (MissingObjectError, ShortObjectError) as error:
                raise DatasetError(f"{error}; {_REMEDY}") from error
            self._traffic.fetched(len(data))
            if sums is None:
                assert requested_sums is not None
                sums = self._sums = requested_sums.result()
            if self._intact(first, data, end, sums):
                return data
            if last_try:
                sums = self._sums = self._sums_of(store)
                if self._intact(first, data, end, sums):
                    return data
        raise DatasetError(
            f"{store.url}/{self._shard.file}: bytes {first} to {end} are not what was written, or its block sums are not, and nothing of them "
            f"was trained on; {_REMEDY}"
        )

    @staticmethod
    def _intact(first: int, data: bytes | memoryview, stop: int, all_sums: NDArray[np.uint64]) -> bool:
        """Return True if ``data``, the shard's bytes from ``first`` on, matches the block sums up to ``stop``."""
        if len(data) < stop - first:
            return False
        view, digest = memoryview(data), xxhash.xxh3_64_intdigest
        sums = all_sums[first // BLOCK_BYTES : -(-stop // BLOCK_BYTES)].tolist()
        return all(
            digest(view[offset : offset + BLOCK_BYTES]) == expected
            for offset, expected in zip(range(0, len(view), BLOCK_BYTES), sums, strict=True)
        )

    def _end(self, stop: int) -> int:
        """Return the end of the block with the byte before ``stop``."""
        return min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._nbytes)

    def _cached_sums(self) -> NDArray[np.uint64] | None:
        """Return the shard's block sums if they are cached and intact, else ``None``. Damaged and unreadable ones count
        as missing.
        """
        with suppress(OSError):
            # In memory: a truncated mapped file would crash the process.
            return parse_sums(sums_file(self._path).read_bytes(), self._shard, self._nbytes)
        return None

    def _sums_of(self, store: Store) -> NDArray[np.uint64]:
        """Fetch the shard's block sums from the store, cache them unless the disk is full, and return them. Raises
        ``DatasetError`` if they are missing or of another shard, and ``StoreError``.
        """
        name = sums_file(self._path).name
        try:
            content = store.get(name)
        except MissingObjectError as error:
            raise DatasetError(
                f"{store.url}/{name} is not there, and without block sums nothing that is read can be checked: write them where the dataset "
                f"was prepared, `phalanx data verify FOLDER --write-sums`, and {_REMEDY}"
            ) from error
        sums = parse_sums(content, self._shard, self._nbytes)
        if sums is not None:
            with suppress(OSError):  # like a block, they are requested again
                write_atomically(sums_file(self._path), content, durable=False)
            return sums
        raise DatasetError(
            f"{store.url}/{name} holds no block sums of {self._shard.file} as the index has it; {_REMEDY}"
        )


_REMEDY = "copy the dataset there again from an intact one (`phalanx data copy FOLDER URL`)"
