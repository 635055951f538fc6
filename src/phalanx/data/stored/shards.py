"""Token shards: a split's token stream in flat files, read through memory maps.

A shard contains only little-endian token ids, so any tool can read it. Counts and checksums are in ``index.json``. Opening checks all file sizes,
which detects truncated copies. Tokens are verified against their block sums (``phalanx.data.stored.shard_writer``) before they are returned, so a flipped
bit raises an error. ``verify`` reads all files. In a dataset without block sums, each shard is verified completely when it is mapped, unless the
dataset is too large (``MOST_WHOLE_BYTES``). ``phalanx.data.stored.shard_writer`` writes shards.
"""

import hashlib
import mmap
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.stored import shard_writer
from phalanx.data.stored.index import (
    SPLITS,
    DatasetIndex,
    ShardFile,
    digest_of_shards,
    read_index,
)
from phalanx.run.directory.files import open_regular, write_atomically

# Each map and that of its sums use a file descriptor. Many systems limit a process to 1,024, and trillions of tokens have more shards.
MAX_OPEN_MAPS = 256
MOST_WHOLE_BYTES = 8 << 30
"""Maximum size of a dataset whose shards without block sums are verified completely in every process, at about 10 GB/s from memory."""
_READ_BYTES = 8 << 20
_ANNOUNCED = 256
"""Number of batches announced to the system in advance after one had to wait for the disk. The first batch is always announced.
If all data are in memory, announcing would take a fifth of the reading time."""

_TAKEN_TOGETHER = 4
"""Minimum number of ranges of a shard for one NumPy gather. Fewer are copied one by one, because a gather has a fixed cost."""
_COPIED_BYTES = 1 << 20
"""Bytes of stored tokens gathered at once before they are widened: less than a processor's cache."""

TokenArray = NDArray[np.unsignedinteger[Any]]


class TokenShards:
    """The token stream of one split in the shards of a folder. Thread-safe."""

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
        """Read ``split`` of the dataset in ``directory``; no shard is mapped yet. At most ``max_open_maps`` shards
        are mapped at a time, and ``gather`` copies ``gather_bytes`` of stored tokens at once.

        ``disk_reads`` counts this thread's waits for the disk; by default, its major page faults.
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
        self._verify_complete = tokens * index.item_bytes <= MOST_WHOLE_BYTES
        self._announcements_left = 1  # a run usually starts with a cold cache

    @classmethod
    def open(cls, directory: Path, split: str) -> Self:
        """Open the split "train" or "held_out" and check its file sizes. No tokens are read.

        Raises ``DatasetError`` if a shard is missing or has another size.
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
        """Return True if there are shards without block sums that are too large to be verified completely."""
        missing = (
            shard
            for shard in self._shards
            if not shard_writer.sums_file(self.directory / shard.file).exists()
        )
        return not self._verify_complete and next(missing, None) is not None

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens ``start`` to ``stop`` as stored (uint16 or uint32); a read-only view if they are in one shard.

        Raises ``IndexError`` for a range outside the stream, ``DatasetError`` for damaged tokens.
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
        """Write ``length`` tokens from each of ``starts`` into the corresponding one of ``rows`` of ``out``, int64.

        Raises ``IndexError`` for a range outside the stream, ``DatasetError`` for damaged tokens. Reads ahead from disk
        after calls that had to wait for it. Does nothing for no starts, or no length.
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
        selections: dict[int, NDArray[np.intp] | slice] = {
            number: np.flatnonzero(numbers == number) if len(maps) > 1 else slice(None) for number in maps
        }
        reads_before = self._disk_reads()
        if self._announcements_left:
            # With page faults, each sample would wait for the disk separately, and read ahead a hundred times its size.
            self._announcements_left -= 1
            for number, mapped in maps.items():
                mapped.announce(offsets[selections[number]], length)
        for number, mapped in maps.items():
            mapped.require(offsets[selections[number]], length)
        for number, mapped in maps.items():
            self._copy(number, mapped, offsets[selections[number]], length, out, rows[selections[number]])
        if self._disk_reads() > reads_before:
            self._announcements_left = _ANNOUNCED

    def _copy(
        self,
        number: int,
        mapped: "_MappedShard",
        offsets: NDArray[np.int64],
        length: int,
        out: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Write ``length`` tokens from each of ``offsets`` of one shard, continuing in the next, into the ``rows`` of ``out``.

        The caller has verified the tokens within this shard; those of the next are verified here.
        """
        windows = len(mapped.tokens) - length + 1  # number of ranges of this length in the shard
        if len(offsets) < _TAKEN_TOGETHER or int(offsets.max()) >= windows:
            for offset, row in zip(offsets.tolist(), rows.tolist(), strict=True):
                piece = mapped.tokens[offset : offset + length]
                start = int(self._starts[number]) + offset
                out[row] = piece if len(piece) == length else self.read(start, start + length)
            return
        item = mapped.tokens.itemsize
        windows_view = np.ndarray((windows, length), self.dtype, mapped.tokens, strides=(item, item))
        step = max(1, self._gather_bytes // (length * item))
        for first in range(0, len(offsets), step):
            part = slice(first, first + step)
            out[rows[part]] = windows_view[offsets[part]]

    def _map(self, number: int) -> "_MappedShard":
        """Return the shard, mapped if necessary; the oldest map is dropped if too many are open."""
        with self._lock:
            mapped = self._maps.get(number)
            if mapped is None:
                mapped = _map_shard(
                    self.directory, self._shards[number], self.dtype, verify_complete=self._verify_complete
                )
                self._maps[number] = mapped
                if len(self._maps) > self._max_open_maps:
                    self._maps.popitem(last=False)
            return mapped


@dataclass(frozen=True)
class _MappedShard:
    mapping: mmap.mmap
    tokens: TokenArray
    checked: shard_writer.CheckedBlocks

    def announce(self, offsets: NDArray[np.int64], count: int) -> None:
        """Make the system start reading ``count`` tokens from each of ``offsets``, in complete blocks where they are
        not verified yet. Returns at once.
        """
        starts, length_bytes = offsets * self.tokens.itemsize, count * self.tokens.itemsize
        stops = np.minimum(starts + length_bytes, len(self.mapping))
        unseen = self.checked.unseen(starts, length_bytes)
        if unseen is not None:  # verification reads complete blocks
            starts = np.where(unseen, starts - starts % shard_writer.BLOCK_BYTES, starts)
            stops = np.where(
                unseen,
                np.minimum(
                    -(-stops // shard_writer.BLOCK_BYTES) * shard_writer.BLOCK_BYTES, len(self.mapping)
                ),
                stops,
            )
        starts -= starts % mmap.PAGESIZE
        madvise, willneed = self.mapping.madvise, mmap.MADV_WILLNEED
        for start, size in zip(starts.tolist(), (stops - starts).tolist(), strict=True):
            madvise(willneed, start, size)

    def require(self, offsets: NDArray[np.int64], count: int) -> None:
        """Verify unverified blocks of ``count`` tokens from each of ``offsets``. Raises ``DatasetError``."""
        self.checked.check(offsets * self.tokens.itemsize, count * self.tokens.itemsize)


def verify(
    directory: Path,
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
    write_missing_sums: bool = False,
) -> int:
    """Verify all shards of the dataset against their checksums and block sums.

    Raises at once for a shard that is missing or of another size, and for block sums that are cut short or of other
    bytes. Other damage is collected. The splits' fingerprints are compared last.

    Args:
        directory: The dataset's folder.
        on_progress: Called with (shard file, shards done, total shards).
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
    for number, (name, shard) in enumerate(shards, start=1):
        _check_size(directory, shard, index.item_bytes)
        path, sums = directory / shard.file, shard_writer.BlockSummer()
        digest = hashlib.sha256() if shard.sha256 else digests[name]
        if _checksum(path, digest.update, sums.update) != shard.xxh3_128 or (
            shard.sha256 and digest.hexdigest() != shard.sha256
        ):
            bad.append(shard.file)
        elif shard_writer.sums_file(path).exists():
            shard_writer.read_sums(path, shard, path.stat().st_size)  # raises for a truncated file
            with open_regular(shard_writer.sums_file(path), follow=True) as stored:
                content = stored.read()
            if content != sums.content(shard.xxh3_128):
                bad.append(shard_writer.sums_file(path).name)
        elif write_missing_sums:
            write_atomically(shard_writer.sums_file(path), sums.content(shard.xxh3_128))
        else:
            without_sums += 1
        if on_progress is not None:
            on_progress(shard.file, number, len(shards))
    if bad:
        raise DatasetError(
            f"{directory}: not what was written: {', '.join(bad)}; copy these files again from an intact copy, or "
            "prepare the dataset again (block sums can be removed and made again: --write-sums)"
        )
    for name in SPLITS:
        split = index.split(name)
        has_digests = any(shard.sha256 for shard in split.shards)
        if (digest_of_shards(split.shards) if has_digests else digests[name].hexdigest()) != split.sha256:
            raise DatasetError(
                f"{directory}: the {name} shards do not match the fingerprint; prepare it again"
            )
    return without_sums


def _check_size(directory: Path, shard: ShardFile, item_bytes: int) -> None:
    """Raise ``DatasetError`` if the shard is missing or has another size than the index gives."""
    path, expected_bytes = directory / shard.file, shard.tokens * item_bytes
    try:
        actual_bytes = path.stat().st_size
    except OSError as error:
        raise DatasetError(
            f"cannot open {path}: {error.strerror}; copy it again, or prepare the dataset again"
        ) from error
    if actual_bytes != expected_bytes:
        raise DatasetError(
            f"{path} has {actual_bytes} bytes instead of {expected_bytes}; copy it again from an intact copy, or "
            "prepare the dataset again"
        )


def _map_shard(
    directory: Path, shard: ShardFile, dtype: np.dtype[Any], *, verify_complete: bool
) -> "_MappedShard":
    """Map a shard for reading, with its block sums.

    With ``verify_complete``, a shard without block sums is verified completely now; otherwise never. Raises
    ``DatasetError`` if it is missing, damaged, or of another size.
    """
    _check_size(directory, shard, dtype.itemsize)
    path = directory / shard.file
    with open_regular(path, follow=True) as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sums = shard_writer.read_sums(path, shard, len(mapping))
    if sums is None and verify_complete:
        shard_writer.check_shard(path, shard, mapping)
    checked = shard_writer.CheckedBlocks(path, shard, memoryview(mapping), sums)
    return _MappedShard(mapping, np.frombuffer(mapping, dtype=dtype), checked)


def _major_faults() -> int:
    """Return the number of this thread's page faults that read the disk (getrusage(2): ``ru_majflt``); 0 if the system does not count them per thread."""
    thread_scope = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if thread_scope is None else resource.getrusage(thread_scope).ru_majflt


def _checksum(path: Path, *updates: Callable[[bytes], None]) -> str:
    """Return the XXH3-128 of a file in hex, passing each block to ``updates``; raises ``DatasetError``."""
    checksum = xxhash.xxh3_128()
    try:
        with open_regular(path, follow=True) as file:
            while block := file.read(_READ_BYTES):
                checksum.update(block)
                for update in updates:
                    update(block)
    except OSError as error:
        raise DatasetError(
            f"cannot read {path}: {error}; copy it again, or prepare the dataset again"
        ) from error
    return checksum.hexdigest()
