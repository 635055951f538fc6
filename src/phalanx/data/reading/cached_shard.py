"""One shard of a dataset in an object store, cached in a sparse file: its blocks, the requests for them, and their room on the disk.

Whether the file holds a block is told by the block itself: its bytes are those of its block sum (``phalanx.data.stored.shard_writer``) or they are
not. A hole, a torn write, a flipped bit, a file that was emptied to make room are all the same, a block that has to be fetched. So there is no
table of what is there that could be wrong, nothing is forced to disk, and a process may be killed at any time. Bytes are copied out
of the file first and compared then, so that what is handed out was looked at, whatever happens to the file meanwhile.

Of several processes that miss a block at the same time, one fetches it and the others wait for it, by a lock on those bytes of the file that
ends with its holder. A process never waits for one range while it holds another.
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
from phalanx.data.stored.shard_writer import BLOCK_BYTES, read_sums, sums_file
from phalanx.run.directory.files import range_locked, write_atomically
from phalanx.store.store import MissingObjectError, ShortObjectError, Store

# Room on the disk: all cached datasets of one folder together stay below a limit.
#
# Which blocks go is of no consequence to what is read, since whoever finds one missing, or emptied while it looked, asks the store for it
# again. So nobody is asked: whoever has written a part of the limit looks at all shards of the cache, and empties those that nobody has written
# to for longest. An emptied file keeps its name and its open descriptors; only its bytes are gone.

_KEPT = 0.9
"""Part of the limit that is left in use after blocks were dropped, so that this does not happen with every write."""
_LOOKS = 32
"""Times that the shards are looked at while as much is written as the limit allows."""
_UNIT_BYTES = 512
"""Unit of ``st_blocks`` (POSIX leaves it open; on Linux it is 512 whatever the file system's block)."""


class Room:
    """The limit of the cached datasets below ``root``. Threads and processes may share it."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._unseen_bytes = limit_bytes  # so that a cache that was left too large is looked at first of all
        self._lock = threading.Lock()

    def wrote(self, nbytes: int) -> None:
        """Counts what was written to a cache, and drops blocks where the limit is passed."""
        with self._lock:
            self._unseen_bytes += nbytes
            if self._unseen_bytes < self._limit_bytes // _LOOKS:
                return
            self._unseen_bytes = 0
        self.drop()

    def drop(self) -> None:
        """Empties the shards written to longest ago until the rest is well below the limit, if all are above it."""
        with suppress(
            OSError
        ):  # a cache that cannot be looked at is one that cannot be kept small, and no more than that
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another is at it
                self._drop()
            finally:
                os.close(descriptor)

    def _drop(self) -> None:
        shards = []
        for path in self._root.glob("*/*.bin"):
            found = path.stat()
            shards.append((found.st_mtime_ns, found.st_blocks * _UNIT_BYTES, path))
        held_bytes = sum(nbytes for _, nbytes, _ in shards)
        if held_bytes <= self._limit_bytes:
            return
        for _, nbytes, path in sorted(shards):
            if held_bytes <= _KEPT * self._limit_bytes:
                return
            os.truncate(path, 0)
            held_bytes -= nbytes


# Requests under way: a few threads that fetch first the blocks that a caller waits for, then those that will be needed, in that order.
#
# The threads are daemons and hold nothing, so that a process ends without waiting for a store that does not answer.

_AT_ONCE = 32
"""Requests under way. By Little's law that is 320 samples/s from a store that takes 100 ms for each; a rank needs a few."""

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """What ``call`` returns or raises, made at once in a daemon thread of its own."""
    future: Future[T] = Future()

    def make() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # it is raised in whoever waits
            future.set_exception(error)

    threading.Thread(target=make, name="data-request", daemon=True).start()
    return future


class Requests:
    """A pool of threads with two queues. Threads may share it."""

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._most_threads = at_once
        self._threads = 0
        self._idle = 0
        self._urgent: deque[Callable[[], None]] = deque()
        self._ahead: deque[Callable[[], None]] = deque()
        self._waiting: dict[Future[Any], float] = {}
        """What is waited for, and since when, oldest first."""
        self._changed = threading.Condition()

    def results(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What the calls return, in their order; all of them go before anything that is only read ahead.

        Raises what the first that fails raises, and ``DatasetError`` if ``give_up`` is called meanwhile.
        """
        futures = [self._urgently(call) for call in calls]
        try:
            return [future.result() for future in futures]
        finally:
            with self._changed:
                for future in futures:
                    self._waiting.pop(future, None)

    def ahead(self, call: Callable[[], object]) -> None:
        """Has ``call`` made once nothing is waited for, after those that were given before. What it raises is dropped."""

        def quietly() -> None:
            with suppress(Exception):  # whoever comes to need it asks again, and is told
                call()

        self._enqueue(self._ahead, quietly)

    def give_up(self) -> None:
        """Ends the waiting of all who wait for ``results`` now, and forgets what would be read ahead."""
        with self._changed:
            self._ahead.clear()
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(DatasetError("reading was ended before the store had answered"))

    def waiting_s(self) -> float:
        """Seconds for which somebody has waited for ``results``; 0 if nobody does."""
        with self._changed:
            return max((time.monotonic() - since_s for since_s in self._waiting.values()), default=0.0)

    def _urgently(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def make() -> None:
            if future.done():  # given up
                return
            try:
                result = call()
            except BaseException as error:  # it is raised in whoever waits
                with suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with suppress(InvalidStateError):
                    future.set_result(result)

        with self._changed:
            self._waiting[future] = time.monotonic()
        self._enqueue(self._urgent, make)
        return future

    def _enqueue(self, queue: deque[Callable[[], None]], call: Callable[[], None]) -> None:
        with self._changed:
            queue.append(call)
            if len(self._urgent) + len(self._ahead) > self._idle and self._threads < self._most_threads:
                self._threads += 1
                threading.Thread(target=self._work, name="data-request", daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._urgent or self._ahead)
                self._idle -= 1
                call = (self._urgent or self._ahead).popleft()
            call()


@dataclass
class Traffic:
    """What was read of cached datasets by this process. Threads share it."""

    asked_bytes: int = 0
    """Bytes of samples that were read, in whole blocks."""
    fetched_bytes: int = 0
    """Bytes that came from the store, of these and of what was read ahead."""
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def asked(self, nbytes: int) -> None:
        with self.lock:
            self.asked_bytes += nbytes

    def fetched(self, nbytes: int) -> None:
        with self.lock:
            self.fetched_bytes += nbytes
            self.requests += 1


class CachedShard:
    """A token shard below a store's URL, and its sparse file in ``folder``. Threads may share it."""

    def __init__(self, folder: Path, shard: ShardFile, nbytes: int, room: Room, traffic: Traffic) -> None:
        """Raises ``DatasetError`` if the cache cannot be written."""
        self._path = folder / shard.file
        self._shard = shard
        self._nbytes = nbytes
        self._room = room
        self._traffic = traffic
        try:
            self._sums = self._sums_here()
            self._file = os.fdopen(
                os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", 0
            )
        except OSError as error:
            raise DatasetError(
                f"cannot write the cache {self._path} ({error.strerror}): make room there, or give another folder in data.cache"
            ) from error

    def held(self, start: int, stop: int) -> memoryview | None:
        """The bytes ``start`` to ``stop`` of the shard if the cache has all their blocks, else ``None``."""
        if self._sums is None:
            return None
        first = start - start % BLOCK_BYTES
        data = os.pread(self._file.fileno(), self._end(stop) - first, first)
        if not self._intact(first, data, stop, self._sums):
            return None
        return memoryview(data)[start - first : stop - first]

    def fetched(self, start: int, stop: int, store: Store) -> memoryview:
        """The bytes ``start`` to ``stop``, from ``store`` unless another has brought them meanwhile; the cache has them afterwards.

        Raises ``DatasetError`` if the store has other bytes than were written, ``StoreError`` if it does not give them.
        """
        first, end = start - start % BLOCK_BYTES, self._end(stop)
        with range_locked(self._path, first, end):  # without it there may be a second request
            self._sums = self._sums_here() if self._sums is None else self._sums
            found = self.held(start, stop)
            if found is not None:
                return found
            data = self._from_store(first, end, store)
            # The cache is a convenience: what cannot be kept is asked for again.
            with suppress(OSError):
                os.pwrite(self._file.fileno(), data, first)
                self._room.wrote(len(data))
        return data[start - first : stop - first]

    def _from_store(self, first: int, end: int, store: Store) -> memoryview:
        sums = self._sums
        # The first time two requests, of which neither waits for the other: at a run's begin each sample is of another shard.
        coming = in_background(partial(self._sums_of, store)) if sums is None else None
        for last_try in (False, True):  # a bit may have flipped on the way
            try:
                (data,) = store.ranges(self._shard.file, [(first, end)])
            except (MissingObjectError, ShortObjectError) as error:
                raise DatasetError(f"{error}; {_REMEDY}") from error
            self._traffic.fetched(len(data))
            if sums is None:
                assert coming is not None
                sums = self._sums = coming.result()
            if self._intact(first, data, end, sums):
                return data
            if last_try:
                sums_file(self._path).unlink(missing_ok=True)
                sums = self._sums = self._sums_of(store)
                if self._intact(first, data, end, sums):
                    return data
        raise DatasetError(
            f"{store.url}/{self._shard.file}: bytes {first} to {end} are not what was written, or its block sums are not, and nothing of them "
            f"was trained on; {_REMEDY}"
        )

    @staticmethod
    def _intact(first: int, data: bytes | memoryview, stop: int, all_sums: NDArray[np.uint64]) -> bool:
        """True if ``data``, the shard's bytes from ``first`` on, are those of its block sums as far as ``stop``."""
        if len(data) < stop - first:
            return False
        view, digest = memoryview(data), xxhash.xxh3_64_intdigest
        sums = all_sums[first // BLOCK_BYTES : -(-stop // BLOCK_BYTES)].tolist()
        return all(
            digest(view[place : place + BLOCK_BYTES]) == expected
            for place, expected in zip(range(0, len(view), BLOCK_BYTES), sums, strict=True)
        )

    def _end(self, stop: int) -> int:
        """The end of the block that holds the byte before ``stop``."""
        return min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, self._nbytes)

    def _sums_here(self) -> NDArray[np.uint64] | None:
        """The shard's block sums, if the cache has them."""
        with suppress(DatasetError):  # torn, or of another shard
            found = read_sums(self._path, self._shard, self._nbytes)
            if found is not None:
                return np.array(found)  # in memory: a map of a file that is cut afterwards ends the process
        return None

    def _sums_of(self, store: Store) -> NDArray[np.uint64]:
        """The shard's block sums, from the store and into the cache. Raises ``DatasetError``, ``StoreError``."""
        name = sums_file(self._path).name
        try:
            content = store.get(name)
        except MissingObjectError as error:
            raise DatasetError(
                f"{store.url}/{name} is not there, and without block sums nothing that is read can be checked: write them where the dataset "
                f"was prepared, `phalanx data verify FOLDER --write-sums`, and {_REMEDY}"
            ) from error
        write_atomically(sums_file(self._path), content, durable=False)
        found = self._sums_here()
        if found is not None:
            return found
        raise DatasetError(
            f"{store.url}/{name} holds no block sums of {self._shard.file} as the index has it; {_REMEDY}"
        )


_REMEDY = "copy the dataset there again from an intact one (`phalanx data copy FOLDER URL`)"
