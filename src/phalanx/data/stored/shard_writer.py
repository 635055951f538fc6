"""Token shards written: a split's stream of tokens cut into flat files, each with its checksum and the sums of its blocks.

A dataset is written into a directory of another name, forced to disk, and takes its own name in one rename: under its name it is whole or not there.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.stored.block_sums import BlockSummer, sums_file
from phalanx.data.stored.index import INDEX_FILE, DatasetIndex, ShardFile
from phalanx.data.stored.shards import TokenArray
from phalanx.run.directory.durable import sync


@dataclass(frozen=True)
class WrittenSplit:
    """The shards of a split that has been written, and the digest of its stream."""

    shards: tuple[ShardFile, ...]
    sha256: str


class ShardWriter:
    """Cuts a token stream into shards of ``shard_tokens`` in ``directory``; ``close`` makes them durable.

    As a context manager it leaves no file open, and closes nothing for you: without ``close`` there is no split.
    """

    def __init__(self, directory: Path, split: str, *, dtype: str, shard_tokens: int) -> None:
        if shard_tokens < 1:
            raise DatasetError(f"shard_tokens = {shard_tokens} is not positive")
        self._directory = directory
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._shards: list[ShardFile] = []
        self._stream_digest = hashlib.sha256()
        self._open: _OpenShard | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abandon()

    def append(self, tokens: NDArray[Any]) -> None:
        """Write token ids (1-D, any integer dtype; each must fit the stored dtype) at the stream's end."""
        tokens = tokens.astype(self._dtype)
        self._stream_digest.update(tokens.data)
        while tokens.size:
            if self._open is None:
                self._open = _OpenShard(self._directory / f"{self._split}-{len(self._shards):05d}.bin")
            room = self._shard_tokens - self._open.tokens
            self._open.write(tokens[:room])
            tokens = tokens[room:]
            if self._open.tokens == self._shard_tokens:
                self._finish_shard()

    def close(self) -> WrittenSplit:
        """Finish the last shard."""
        self._finish_shard()
        return WrittenSplit(tuple(self._shards), self._stream_digest.hexdigest())

    def _finish_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.finish())
            self._open = None


class _OpenShard:
    """The shard being written."""

    def __init__(self, path: Path) -> None:
        self.tokens = 0
        self._path = path
        self._file = path.open("xb", buffering=1 << 20)
        self._checksum = xxhash.xxh3_128()
        self._sums = BlockSummer()

    def write(self, tokens: TokenArray) -> None:
        self._file.write(tokens.data)
        self._checksum.update(tokens.data)
        self._sums.update(tokens.data)
        self.tokens += len(tokens)

    def finish(self) -> ShardFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        checksum = self._checksum.hexdigest()
        sums_file(self._path).write_bytes(self._sums.content(checksum))  # made durable by ``commit``
        return ShardFile(self._path.name, self.tokens, checksum)

    def abandon(self) -> None:
        # Closing flushes what is buffered, which fails anew on a full disk; the file is closed all the same.
        with contextlib.suppress(OSError):
            self._file.close()


def commit(partial: Path, directory: Path, index: DatasetIndex) -> None:
    """Write the index of the shards in ``partial``, force all to disk, and give it the name ``directory``.

    Raises ``OSError`` (ENOTEMPTY or EEXIST) if ``directory`` exists and is not empty; then nothing has changed there.
    """
    (partial / INDEX_FILE).write_bytes(index.to_json().encode())
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    partial.rename(directory)
    sync(directory.parent)
