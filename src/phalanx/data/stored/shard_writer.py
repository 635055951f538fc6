"""Write token shards: flat files of a split's tokens, each with its checksum and block sums.

A dataset is written to a temporary directory, synced to disk, and renamed. So under its final name it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.stored.index import INDEX_FILE, DatasetIndex, ShardFile
from phalanx.run.directory.files import open_regular, sync

# Block sums: a checksum of each 8 KiB of a token shard, so that every token is verified before training.
#
# A loader reads a few KiB at random offsets, so it cannot use a checksum of the complete shard. Therefore ``train-00000.bin``
# has a file ``train-00000.sums`` with the xxh3_64 of each block, which is cheaper to compute than to fetch the block from
# memory. A block is compared at its first access through a map, and again after the map is reopened. Blocks are small, because
# verifying one requires reading it completely. The file begins with the shard's checksum in ``index.json``, so that a shard and
# its sums cannot both be from another dataset.
#
# Layout, little-endian: 8 bytes magic, 16 bytes xxh3_128 of the shard, 8 bytes zero, then 8 bytes per block. This is 0.1% of
# the shard.

BLOCK_BYTES = 1 << 13
_MAGIC = b"PHXSUMS1"
_HEADER_BYTES = 32


def sums_file(shard: Path) -> Path:
    """Return the path of a shard's block sums."""
    return shard.with_suffix(".sums")


class BlockSummer:
    """Computes the block sums of a shard from its bytes, added in order in pieces of any size."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0

    def update(self, data: memoryview | bytes) -> None:
        """Add the next bytes of the shard; each full block of ``BLOCK_BYTES`` is summed."""
        remaining = memoryview(data).cast("B")
        while remaining:
            take = min(BLOCK_BYTES - self._open_bytes, len(remaining))
            self._open.update(remaining[:take])
            self._open_bytes += take
            remaining = remaining[take:]
            if self._open_bytes == BLOCK_BYTES:
                self._close_block()

    def content(self, shard_xxh3_128: str) -> bytes:
        """Return the content of the block-sums file of a shard with this checksum. No bytes may be added afterwards."""
        if self._open_bytes:
            self._close_block()
        return sums_header(shard_xxh3_128) + np.array(self._sums, dtype="<u8").tobytes()

    def _close_block(self) -> None:
        """Append the sum of the open block, and begin the next."""
        self._sums.append(self._open.intdigest())
        self._open, self._open_bytes = xxhash.xxh3_64(), 0


def read_sums(path: Path, shard: ShardFile, shard_bytes: int) -> NDArray[np.uint64] | None:
    """Return a shard's block sums, mapped; ``None`` if there are none, as for a dataset prepared before 0.2.

    Raises ``DatasetError`` if they are truncated, or belong to other bytes than those in the index.
    """
    file = sums_file(path)
    blocks = -(-shard_bytes // BLOCK_BYTES)
    try:
        with open_regular(file, follow=True) as opened:
            header = opened.read(_HEADER_BYTES)
        expected_bytes = _HEADER_BYTES + 8 * blocks
        if file.stat().st_size == expected_bytes and header == sums_header(shard.xxh3_128):
            return np.memmap(file, dtype="<u8", mode="r", offset=_HEADER_BYTES, shape=(blocks,))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatasetError(f"cannot read {file}: {error.strerror}; {_remedy(file)}") from error
    raise DatasetError(f"{file} holds no block sums of {path.name} as the index has it; {_remedy(file)}")


def parse_sums(content: bytes, shard: ShardFile, shard_bytes: int) -> NDArray[np.uint64] | None:
    """Return the block sums in the content of a shard's file of them; ``None`` if it is truncated, or belongs to other
    bytes than those in the index.
    """
    expected_bytes = _HEADER_BYTES + 8 * -(-shard_bytes // BLOCK_BYTES)
    if len(content) == expected_bytes and content.startswith(sums_header(shard.xxh3_128)):
        return np.frombuffer(content, dtype="<u8", offset=_HEADER_BYTES)
    return None


def sums_header(shard_xxh3_128: str) -> bytes:
    return _MAGIC + bytes.fromhex(shard_xxh3_128) + bytes(8)


def _remedy(file: Path) -> str:
    return (
        "copy it again from an intact copy, or remove it and write it again from the shard with "
        f"`phalanx data verify {file.parent} --write-sums`"
    )


class CheckedBlocks:
    """Tracks the verified blocks of a mapped shard. Thread-safe: at worst, a block is verified twice."""

    def __init__(
        self, path: Path, shard: ShardFile, content: memoryview, sums: NDArray[np.uint64] | None
    ) -> None:
        """Track the verified blocks of ``content``, a mapped shard. Without ``sums``, all blocks count as verified."""
        self._verified = np.full(-(-len(content) // BLOCK_BYTES), sums is None)
        self._unchecked_count = 0 if sums is None else len(sums)
        self._path = path
        self._shard = shard
        self._content = content
        # A plain array, because indexing a memmap is several times slower.
        self._sums = np.empty(0, np.uint64) if sums is None else np.asarray(sums)

    def check(self, starts_bytes: NDArray[np.int64], length_bytes: int) -> None:
        """Verify unverified blocks in ``length_bytes`` (at least 1) from each of ``starts_bytes``; bytes beyond the end
        are ignored.

        Raises ``DatasetError`` that names the damaged bytes. Intact blocks are not read again.
        """
        if not self._unchecked_count:
            return
        first = starts_bytes // BLOCK_BYTES
        last = np.minimum((starts_bytes + length_bytes - 1) // BLOCK_BYTES, len(self._verified) - 1)
        steps = range(int((last - first).max()) + 1)
        touched = np.concatenate([np.minimum(first + step, last) for step in steps])
        pending = touched[~self._verified[touched]]
        if not pending.size:
            return
        pending = np.unique(pending)
        content, digest = self._content, xxhash.xxh3_64_intdigest
        digests = [digest(content[start : start + BLOCK_BYTES]) for start in (pending * BLOCK_BYTES).tolist()]
        wrong = np.flatnonzero(np.array(digests, np.uint64) != self._sums[pending])
        if wrong.size:
            self._verified[pending[: wrong[0]]] = True
            self._refuse(int(pending[wrong[0]]) * BLOCK_BYTES)
        self._verified[pending] = True
        # Counted again instead of decremented: two threads that verify one block would decrement twice.
        self._unchecked_count = len(self._verified) - int(np.count_nonzero(self._verified))

    def unseen(self, starts_bytes: NDArray[np.int64], length_bytes: int) -> NDArray[np.bool_] | None:
        """Return for which of ``starts_bytes`` ``check`` would verify the first or last block; ``None`` if all blocks are verified."""
        if not self._unchecked_count:
            return None
        last = np.minimum((starts_bytes + length_bytes - 1) // BLOCK_BYTES, len(self._verified) - 1)
        unseen: NDArray[np.bool_] = ~(self._verified[starts_bytes // BLOCK_BYTES] & self._verified[last])
        return unseen

    def _refuse(self, start: int) -> None:
        """Raise ``DatasetError`` for the block at ``start``, or for the block sums if the shard as a whole is intact."""
        if xxhash.xxh3_128_hexdigest(self._content) == self._shard.xxh3_128:
            file = sums_file(self._path)
            raise DatasetError(f"{file} is damaged, and {self._path.name} is not; {_remedy(file)}")
        stop = min(start + BLOCK_BYTES, len(self._content))
        raise DatasetError(
            f"{self._path}: bytes {start} to {stop} are not what was written, and nothing of them was trained on; copy the file again "
            f"from an intact copy, or prepare the dataset again (`phalanx data verify {self._path.parent}` names every bad file)"
        )


def check_shard(path: Path, shard: ShardFile, content: Any) -> None:
    """Compare a shard without block sums with its checksum in the index. Raises ``DatasetError`` that names it."""
    if xxhash.xxh3_128_hexdigest(content) != shard.xxh3_128:
        raise DatasetError(
            f"{path} is not what was written, and nothing of it was trained on; copy it again from an intact copy, or prepare the "
            "dataset again"
        )


@dataclass(frozen=True)
class WrittenSplit:
    """The shards of a written split, and the digest of its stream."""

    shards: tuple[ShardFile, ...]
    sha256: str


class OpenShard(Protocol):
    """A shard that is being written."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        ...

    def finish(self, tokens: int) -> ShardFile:
        """Store the shard at its final place, and return its description. ``tokens`` is its number of tokens."""
        ...

    def abandon(self) -> None:
        """Close the file without completing the shard."""
        ...


class ShardPlace(Protocol):
    """Destination of a split's shards."""

    def open(self, number: int) -> OpenShard:
        """Open the shard with this number."""
        ...

    def digest(self, shards: Sequence[ShardFile]) -> str:
        """Return the digest of the split with these shards."""
        ...


class ShardWriter:
    """Cuts a token stream into shards of ``shard_tokens``.

    As a context manager it only closes open files: without ``close``, there is no split.
    """

    def __init__(self, place: ShardPlace, *, dtype: str, shard_tokens: int) -> None:
        """Write shards of ``shard_tokens`` tokens of ``dtype``, little-endian, to ``place``. Raises ``DatasetError``
        if ``shard_tokens`` is below 1.
        """
        if shard_tokens < 1:
            raise DatasetError(f"shard_tokens = {shard_tokens} is not positive")
        self._place = place
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._shards: list[ShardFile] = []
        self._open: OpenShard | None = None
        self._open_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abandon()

    def append(self, tokens: NDArray[Any]) -> None:
        """Append token ids (1-D, any integer dtype) to the stream. Each must fit the stored dtype, which is not checked.

        Opens a shard when needed, and finishes each one that is full.
        """
        tokens = tokens.astype(self._dtype)
        while tokens.size:
            if self._open is None:
                self._open = self._place.open(len(self._shards))
            part = tokens[: self._shard_tokens - self._open_tokens]
            self._open.write(part.data.cast("B"))
            self._open_tokens += len(part)
            tokens = tokens[len(part) :]
            if self._open_tokens == self._shard_tokens:
                self._finish_shard()

    def close(self) -> WrittenSplit:
        """Finish the last shard."""
        self._finish_shard()
        return WrittenSplit(tuple(self._shards), self._place.digest(self._shards))

    def _finish_shard(self) -> None:
        """Finish the open shard, if there is one."""
        if self._open is not None:
            self._shards.append(self._open.finish(self._open_tokens))
            self._open, self._open_tokens = None, 0


class ShardFolder:
    """Writes shards as files of a folder, with a digest over the complete stream."""

    def __init__(self, directory: Path, split: str) -> None:
        self._directory, self._split = directory, split
        self._stream_digest = hashlib.sha256()

    def open(self, number: int) -> OpenShard:
        return _ShardInFolder(self._directory / f"{self._split}-{number:05d}.bin", self._stream_digest.update)

    def digest(self, shards: Sequence[ShardFile]) -> str:  # noqa: ARG002  that of the stream
        return self._stream_digest.hexdigest()


class _ShardInFolder:
    """A shard file that is durable when finished."""

    def __init__(self, path: Path, on_bytes: Callable[[memoryview], None]) -> None:
        self._path, self._on_bytes = path, on_bytes
        self._file = path.open("xb", buffering=1 << 20)
        self._checksum = xxhash.xxh3_128()
        self._sums = BlockSummer()

    def write(self, data: memoryview) -> None:
        """Append ``data`` to the file, and add it to the checksum and block sums."""
        self._on_bytes(data)
        self._file.write(data)
        self._checksum.update(data)
        self._sums.update(data)

    def finish(self, tokens: int) -> ShardFile:
        """Sync and close the file, write its block sums beside it (not synced yet), and return its entry for the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        checksum = self._checksum.hexdigest()
        sums_file(self._path).write_bytes(self._sums.content(checksum))  # made durable by ``commit``
        return ShardFile(self._path.name, tokens, checksum)

    def abandon(self) -> None:
        """Close the file, which stays incomplete; errors are ignored."""
        # Closing flushes the buffer, which fails again on a full disk, but the file is closed anyway.
        with contextlib.suppress(OSError):
            self._file.close()


def commit(partial: Path, directory: Path, index: DatasetIndex) -> None:
    """Write the index of the shards in ``partial``, sync all files to disk, and rename the folder to ``directory``.

    Raises ``OSError`` (ENOTEMPTY or EEXIST) if ``directory`` exists and is not empty; nothing is changed there.
    ``directory`` must be on the same file system.
    """
    (partial / INDEX_FILE).write_bytes(index.to_json().encode())
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    partial.rename(directory)
    sync(directory.parent)
