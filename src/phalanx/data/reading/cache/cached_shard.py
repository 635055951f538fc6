"""One shard of a dataset in an object store, of which a sparse file on this machine holds the blocks that were asked for.

Whether the file holds a block is told by the block itself: its bytes are those of its block sum (``phalanx.data.stored.block_sums``) or they are
not. A hole, a torn write, a flipped bit, a file that was emptied to make room are all the same, a block that has to be fetched. So there is no
table of what is there that could be wrong, nothing is forced to disk, and a process may be killed at any time. Bytes are copied out
of the file first and compared then, so that what is handed out was looked at, whatever happens to the file meanwhile.

Of several processes that miss a block at the same time, one fetches it and the others wait for it, by a lock on those bytes of the file that
ends with its holder. A process never waits for one range while it holds another.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.reading.cache.requests import in_background
from phalanx.data.reading.cache.room import Room
from phalanx.data.stored.block_sums import BLOCK_BYTES, read_sums, sums_file
from phalanx.data.stored.index import ShardFile
from phalanx.run.directory.files import range_locked, write_atomically
from phalanx.store.store import MissingObjectError, ShortObjectError, Store


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
