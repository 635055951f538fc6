"""Token shards: a split's token stream in flat files, read through memory maps.

A shard holds little-endian token ids and nothing else, so that any tool can read it; counts and checksums are in
``index.json`` beside it. Opening checks every file's size, which finds a copy cut short. Whatever is read was compared before
with the checksum of its block (``phalanx.data.stored.shard_writer``), so that a flipped bit is named and never handed out; ``verify``
reads everything. Of a dataset that was prepared without block sums, each shard is compared as a whole when it is mapped, unless
the dataset is too large for that (``MOST_WHOLE_BYTES``). ``phalanx.data.stored.shard_writer`` writes them.
"""

import hashlib
import mmap
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.stored.index import (
    SPLITS,
    DatasetIndex,
    ShardFile,
    digest_of_shards,
    read_index,
)
from phalanx.data.stored.shard_writer import (
    BLOCK_BYTES,
    BlockSummer,
    CheckedBlocks,
    check_whole,
    read_sums,
    sums_file,
)
from phalanx.run.directory.files import open_regular, write_atomically

# Each map and that of its sums hold a file descriptor, of which many systems give a process 1,024; trillions of tokens have more shards.
MAX_OPEN_MAPS = 256
MOST_WHOLE_BYTES = 8 << 30
"""Datasets up to this size have shards without block sums compared as a whole, at some 10 GB/s from memory, in every process."""
_READ_BYTES = 8 << 20
_ANNOUNCED = 256
"""So many batches are announced to the system before they are read, once one had to wait for the disk, and the first always; where all is in
memory, that would be a fifth of the time that reading takes."""

_TAKEN_TOGETHER = 4
"""From so many stretches of a shard on, NumPy takes them at once; fewer are copied one after the other, since to begin with it costs as much as that."""
_COPIED_BYTES = 1 << 20
"""Bytes of stored tokens that are taken together before they are widened: less than a processor's cache."""

TokenArray = NDArray[np.unsignedinteger[Any]]


class Shards(Protocol):
    """The token stream of one split, as if in one array, wherever its shards lie. Threads may share it."""

    @property
    def tokens(self) -> int: ...
    @property
    def unchecked(self) -> bool:
        """True if there are shards whose tokens are handed out without having been compared with a checksum."""
        ...

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens ``start`` to ``stop`` as stored (uint16 or uint32).

        Raises ``IndexError`` for a stretch that is not within the stream, ``DatasetError`` for one that cannot be had as it was written.
        """
        ...

    def gather(
        self, starts: NDArray[np.int64], length: int, out: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        """Writes ``length`` tokens from each of ``starts`` into that of the ``rows`` of ``out``, int64. Raises as ``read`` does."""
        ...


class TokenShards:
    """The token stream of one split in the shards of a folder. Threads may share it."""

    def __init__(
        self,
        directory: Path,
        split: str,
        index: DatasetIndex,
        *,
        max_open_maps: int = MAX_OPEN_MAPS,
        gather_bytes: int = _COPIED_BYTES,
        disk_reads: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            directory: The dataset's folder.
            split: "train" or "held_out".
            index: The dataset's index.
            max_open_maps: Shards that are mapped at once.
            gather_bytes: Bytes of stored tokens that ``gather`` copies at once.
            disk_reads: Counter of this thread's waits for the disk; by default, its major page faults.
        """
        shards = index.split(split).shards
        self.directory = directory
        self.dtype = np.dtype(index.dtype).newbyteorder("<")
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._maps: OrderedDict[int, _MappedShard] = OrderedDict()
        self._lock = threading.Lock()
        self._max_open_maps, self._gather_bytes = max_open_maps, gather_bytes
        self._disk_reads = disk_reads or _major_faults
        tokens = sum(index.split(name).tokens for name in SPLITS)
        self._whole = tokens * index.item_bytes <= MOST_WHOLE_BYTES
        self._announced_left = 1  # a run begins cold more often than not

    @classmethod
    def open(cls, directory: Path, split: str) -> Self:
        """Open the split "train" or "held_out", checking each file's size; no token is read.

        Raises ``DatasetError`` if a shard is missing or of another size.
        """
        index = read_index(directory)
        for shard in index.split(split).shards:
            _check_size(directory, shard, index.item_bytes)
        return cls(directory, split, index)

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def unchecked(self) -> bool:
        """True if there are shards without block sums that are too large to be compared as a whole: their tokens are not checked."""
        missing = (shard for shard in self._shards if not sums_file(self.directory / shard.file).exists())
        return not self._whole and next(missing, None) is not None

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens ``start`` to ``stop`` as stored (uint16 or uint32); a read-only view where they lie in one shard.

        Raises ``IndexError`` for a stretch that is not within the stream, ``DatasetError`` for one that is not what was written.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}..{stop} are not within the {self.tokens} of {self.directory}")
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces: list[TokenArray] = []
        while start < stop:
            offset, end = start - int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            mapped = self._map(number)
            mapped.require(np.array([offset]), end - start)
            pieces.append(mapped.tokens[offset : offset + end - start])
            start, number = end, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty(0, dtype=self.dtype), *pieces])

    def gather(
        self, starts: NDArray[np.int64], length: int, out: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        """Writes ``length`` tokens from each of ``starts`` into that of the ``rows`` of ``out``, int64.

        Raises ``IndexError`` for a stretch that is not within the stream, ``DatasetError`` for one that is not what was written.
        """
        if starts.size and (starts.min() < 0 or starts.max() + length > self.tokens):
            raise IndexError(
                f"{length} tokens from {starts.min()}..{starts.max()} are not within the {self.tokens}"
            )
        if not starts.size or not length:
            return
        numbers = np.searchsorted(self._starts, starts, side="right") - 1
        offsets = starts - self._starts[numbers]
        maps = {number: self._map(number) for number in sorted(set(numbers.tolist()))}
        places: dict[int, NDArray[np.intp] | slice] = {
            number: np.flatnonzero(numbers == number) if len(maps) > 1 else slice(None) for number in maps
        }
        from_disk = self._disk_reads()
        if self._announced_left:
            # Left to page faults, each sample waits for the disk alone, and drags in a hundred times its size around it.
            self._announced_left -= 1
            for number, mapped in maps.items():
                mapped.announce(offsets[places[number]], length)
        for number, mapped in maps.items():
            mapped.require(offsets[places[number]], length)
        for number, mapped in maps.items():
            self._copy(number, mapped, offsets[places[number]], length, out, rows[places[number]])
        if self._disk_reads() > from_disk:
            self._announced_left = _ANNOUNCED

    def _copy(
        self,
        number: int,
        mapped: "_MappedShard",
        offsets: NDArray[np.int64],
        length: int,
        out: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Writes ``length`` tokens from each of ``offsets`` of one shard, or on into the next, into the ``rows`` of ``out``."""
        windows = len(mapped.tokens) - length + 1  # so many stretches of this length lie in the shard
        if len(offsets) < _TAKEN_TOGETHER or int(offsets.max()) >= windows:
            for offset, row in zip(offsets.tolist(), rows.tolist(), strict=True):
                piece = mapped.tokens[offset : offset + length]
                start = int(self._starts[number]) + offset
                out[row] = piece if len(piece) == length else self.read(start, start + length)
            return
        item = mapped.tokens.itemsize
        stretches = np.ndarray((windows, length), self.dtype, mapped.tokens, strides=(item, item))
        step = max(1, self._gather_bytes // (length * item))
        for first in range(0, len(offsets), step):
            part = slice(first, first + step)
            out[rows[part]] = stretches[offsets[part]]

    def _map(self, number: int) -> "_MappedShard":
        with self._lock:
            mapped = self._maps.get(number)
            if mapped is None:
                mapped = _map_shard(self.directory, self._shards[number], self.dtype, whole=self._whole)
                self._maps[number] = mapped
                if len(self._maps) > self._max_open_maps:
                    self._maps.popitem(last=False)
            return mapped


@dataclass(frozen=True)
class _MappedShard:
    mapping: mmap.mmap
    tokens: TokenArray
    checked: CheckedBlocks

    def announce(self, offsets: NDArray[np.int64], count: int) -> None:
        """Have the system begin to read ``count`` tokens from each of ``offsets``, and return at once."""
        starts, length_bytes = offsets * self.tokens.itemsize, count * self.tokens.itemsize
        stops = np.minimum(starts + length_bytes, len(self.mapping))
        unseen = self.checked.unseen(starts, length_bytes)
        if unseen is not None:  # they are looked at by whole blocks
            starts = np.where(unseen, starts - starts % BLOCK_BYTES, starts)
            stops = np.where(
                unseen, np.minimum(-(-stops // BLOCK_BYTES) * BLOCK_BYTES, len(self.mapping)), stops
            )
        starts -= starts % mmap.PAGESIZE
        madvise, willneed = self.mapping.madvise, mmap.MADV_WILLNEED
        for start, size in zip(starts.tolist(), (stops - starts).tolist(), strict=True):
            madvise(willneed, start, size)

    def require(self, offsets: NDArray[np.int64], count: int) -> None:
        """Compare the blocks of ``count`` tokens from each of ``offsets`` that were not yet. Raises ``DatasetError``."""
        self.checked.check(offsets * self.tokens.itemsize, count * self.tokens.itemsize)


def verify(
    directory: Path,
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
    write_missing_sums: bool = False,
) -> int:
    """Read every shard of the dataset and compare it with its checksum, and its block sums with its blocks.

    Args:
        directory: The dataset's.
        on_progress: Called with (shard file, shards done, shards in all).
        write_missing_sums: Write the block sums of intact shards that have none.

    Returns:
        The number of shards that have no block sums afterwards.

    Raises:
        DatasetError: It names every bad shard.
    """
    index = read_index(directory)
    shards = [(name, shard) for name in SPLITS for shard in index.split(name).shards]
    digests = {name: hashlib.sha256() for name in SPLITS}
    bad: list[str] = []
    without_sums = 0
    for done, (name, shard) in enumerate(shards, start=1):
        _check_size(directory, shard, index.item_bytes)
        path, sums = directory / shard.file, BlockSummer()
        digest = hashlib.sha256() if shard.sha256 else digests[name]
        if _checksum(path, digest.update, sums.update) != shard.xxh3_128 or (
            shard.sha256 and digest.hexdigest() != shard.sha256
        ):
            bad.append(shard.file)
        elif sums_file(path).exists():
            read_sums(path, shard, path.stat().st_size)  # says what a torn one lacks
            with open_regular(sums_file(path), follow=True) as stored:
                content = stored.read()
            if content != sums.content(shard.xxh3_128):
                bad.append(sums_file(path).name)
        elif write_missing_sums:
            write_atomically(sums_file(path), sums.content(shard.xxh3_128))
        else:
            without_sums += 1
        if on_progress is not None:
            on_progress(shard.file, done, len(shards))
    if bad:
        raise DatasetError(
            f"{directory}: not what was written: {', '.join(bad)}; copy these files again from an intact copy, or "
            "prepare the dataset anew (block sums can be removed and made again: --write-sums)"
        )
    for name in SPLITS:
        split = index.split(name)
        own = any(shard.sha256 for shard in split.shards)
        if (digest_of_shards(split.shards) if own else digests[name].hexdigest()) != split.sha256:
            raise DatasetError(
                f"{directory}: the {name} shards are not those of the fingerprint; prepare it anew"
            )
    return without_sums


def _check_size(directory: Path, shard: ShardFile, item_bytes: int) -> None:
    path, expected_bytes = directory / shard.file, shard.tokens * item_bytes
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise DatasetError(
            f"cannot open {path}: {error.strerror}; copy it again, or prepare the dataset anew"
        ) from error
    if found_bytes != expected_bytes:
        raise DatasetError(
            f"{path} has {found_bytes} bytes instead of {expected_bytes}; copy it again from an intact copy, or "
            "prepare the dataset anew"
        )


def _map_shard(directory: Path, shard: ShardFile, dtype: np.dtype[Any], *, whole: bool) -> "_MappedShard":
    """Maps a shard. ``whole``: If it has no block sums, all of it is compared now; else none of it ever is."""
    _check_size(directory, shard, dtype.itemsize)
    path = directory / shard.file
    with open_regular(path, follow=True) as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sums = read_sums(path, shard, len(mapping))
    if sums is None and whole:
        check_whole(path, shard, mapping)
    checked = CheckedBlocks(path, shard, memoryview(mapping), sums)
    return _MappedShard(mapping, np.frombuffer(mapping, dtype=dtype), checked)


def _major_faults() -> int:
    """Page faults of this thread for which the disk was read (getrusage(2): ``ru_majflt``); 0 where the system does not say it of threads."""
    of_thread = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if of_thread is None else resource.getrusage(of_thread).ru_majflt


def _checksum(path: Path, *also: Callable[[bytes], None]) -> str:
    checksum = xxhash.xxh3_128()
    try:
        with open_regular(path, follow=True) as file:
            while block := file.read(_READ_BYTES):
                checksum.update(block)
                for take in also:
                    take(block)
    except OSError as error:
        raise DatasetError(
            f"cannot read {path}: {error}; copy it again, or prepare the dataset anew"
        ) from error
    return checksum.hexdigest()
