"""Block sums: a checksum of each 8 KiB of a token shard, so that no token is trained on that was not looked at.

The checksum of a whole shard is of no use to a loader, which reads a few KiB here and there. Beside ``train-00000.bin`` therefore lies
``train-00000.sums``: xxh3_64 of each block, which costs less to compute than the block costs to fetch from memory. A block is compared
when it is first touched through a map; a map that was closed and opened again is looked at anew. Blocks are small because to look at
one means to read all of it from the disk, for the sake of one sequence. The file begins with the checksum of its shard in ``index.json``,
so that a shard and its sums cannot both be taken from another dataset.

Layout, little-endian: 8 bytes magic, 16 bytes xxh3_128 of the shard, 8 bytes zero, then 8 bytes a block. 0.1% of the shard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.stored.index import ShardFile
from phalanx.run.directory.files import open_regular

BLOCK_BYTES = 1 << 13
_MAGIC = b"PHXSUMS1"
_HEADER_BYTES = 32


def sums_file(shard: Path) -> Path:
    """Where the block sums of a shard lie."""
    return shard.with_suffix(".sums")


class BlockSummer:
    """Sums the blocks of a shard whose bytes are given in order, in pieces of any size."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._open = xxhash.xxh3_64()
        self._open_bytes = 0

    def update(self, data: memoryview | bytes) -> None:
        """The next bytes of the shard."""
        rest = memoryview(data).cast("B")
        while rest:
            take = min(BLOCK_BYTES - self._open_bytes, len(rest))
            self._open.update(rest[:take])
            self._open_bytes += take
            rest = rest[take:]
            if self._open_bytes == BLOCK_BYTES:
                self._close_block()

    def content(self, shard_xxh3_128: str) -> bytes:
        """The bytes of the sums' file of a shard with this checksum. Nothing may be added afterwards."""
        if self._open_bytes:
            self._close_block()
        return sums_header(shard_xxh3_128) + np.array(self._sums, dtype="<u8").tobytes()

    def _close_block(self) -> None:
        self._sums.append(self._open.intdigest())
        self._open, self._open_bytes = xxhash.xxh3_64(), 0


def read_sums(path: Path, shard: ShardFile, shard_bytes: int) -> NDArray[np.uint64] | None:
    """The sums of a shard's blocks, mapped; ``None`` if there are none, as of a dataset that was prepared before 0.2.

    Raises ``DatasetError`` if they are cut short, or those of other bytes than the index says.
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


def sums_header(shard_xxh3_128: str) -> bytes:
    return _MAGIC + bytes.fromhex(shard_xxh3_128) + bytes(8)


def _remedy(file: Path) -> str:
    return (
        "copy it again from an intact copy, or remove it and have it made anew from the shard with "
        f"`phalanx data verify {file.parent} --write-sums`"
    )


class CheckedBlocks:
    """Which blocks of a mapped shard were compared with their sums. Threads may share it: at worst a block is compared twice."""

    def __init__(
        self, path: Path, shard: ShardFile, content: memoryview, sums: NDArray[np.uint64] | None
    ) -> None:
        """Without ``sums`` there is nothing to compare: every block counts as done."""
        self._done = np.full(-(-len(content) // BLOCK_BYTES), sums is None)
        self._left = 0 if sums is None else len(sums)
        self._path = path
        self._shard = shard
        self._content = content
        # A plain array: indexing a memmap costs several times as much.
        self._sums = np.empty(0, np.uint64) if sums is None else np.asarray(sums)

    def check(self, starts_bytes: NDArray[np.int64], length_bytes: int) -> None:
        """Compares the blocks of ``length_bytes`` (at least 1) from each of ``starts_bytes`` that were not yet; what is beyond the end is left out.

        Raises ``DatasetError`` that names the bytes that are wrong.
        """
        if not self._left:
            return
        first = starts_bytes // BLOCK_BYTES
        last = np.minimum((starts_bytes + length_bytes - 1) // BLOCK_BYTES, len(self._done) - 1)
        steps = range(int((last - first).max()) + 1)
        touched = np.concatenate([np.minimum(first + step, last) for step in steps])
        pending = touched[~self._done[touched]]
        if not pending.size:
            return
        pending = np.unique(pending)
        content, digest = self._content, xxhash.xxh3_64_intdigest
        found = [digest(content[start : start + BLOCK_BYTES]) for start in (pending * BLOCK_BYTES).tolist()]
        wrong = np.flatnonzero(np.array(found, np.uint64) != self._sums[pending])
        if wrong.size:
            self._done[pending[: wrong[0]]] = True
            self._refuse(int(pending[wrong[0]]) * BLOCK_BYTES)
        self._done[pending] = True
        # Counted and not counted down: two threads that compare one block would count it twice.
        self._left = len(self._done) - int(np.count_nonzero(self._done))

    def unseen(self, starts_bytes: NDArray[np.int64], length_bytes: int) -> NDArray[np.bool_] | None:
        """Where ``check`` would have something to compare in the first or last block; ``None`` if nowhere."""
        if not self._left:
            return None
        last = np.minimum((starts_bytes + length_bytes - 1) // BLOCK_BYTES, len(self._done) - 1)
        unseen: NDArray[np.bool_] = ~(self._done[starts_bytes // BLOCK_BYTES] & self._done[last])
        return unseen

    def _refuse(self, start: int) -> None:
        if xxhash.xxh3_128_hexdigest(self._content) == self._shard.xxh3_128:
            file = sums_file(self._path)
            raise DatasetError(f"{file} is damaged, and {self._path.name} is not; {_remedy(file)}")
        stop = min(start + BLOCK_BYTES, len(self._content))
        raise DatasetError(
            f"{self._path}: bytes {start} to {stop} are not what was written, and nothing of them was trained on; copy the file again "
            f"from an intact copy, or prepare the dataset anew (`phalanx data verify {self._path.parent}` names every bad file)"
        )


def check_whole(path: Path, shard: ShardFile, content: Any) -> None:
    """Compares all of a shard that has no block sums with its checksum in the index. Raises ``DatasetError`` that names it."""
    if xxhash.xxh3_128_hexdigest(content) != shard.xxh3_128:
        raise DatasetError(
            f"{path} is not what was written, and nothing of it was trained on; copy it again from an intact copy, or prepare the "
            "dataset anew"
        )
