"""Token shards written: a split's stream of tokens cut into flat files, each with its checksum and the sums of its blocks.

A dataset is written into a directory of another name, forced to disk, and takes its own name in one rename: under its name it is whole or not there.
"""

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
from phalanx.data.stored.block_sums import BlockSummer, sums_file
from phalanx.data.stored.index import INDEX_FILE, DatasetIndex, ShardFile
from phalanx.run.directory.files import sync


@dataclass(frozen=True)
class WrittenSplit:
    """The shards of a split that has been written, and the digest of its stream."""

    shards: tuple[ShardFile, ...]
    sha256: str


class OpenShard(Protocol):
    """A shard that is being written."""

    def write(self, data: memoryview) -> None:
        """Take bytes at its end."""
        ...

    def finish(self, tokens: int) -> ShardFile:
        """Put it where it is to be, and describe it; ``tokens`` is how many it holds."""
        ...

    def abandon(self) -> None:
        """Leave no file open."""
        ...


class ShardPlace(Protocol):
    """Where the shards of a split are written."""

    def open(self, number: int) -> OpenShard:
        """Begin the shard with this number."""
        ...

    def digest(self, shards: Sequence[ShardFile]) -> str:
        """The digest of the split with these shards."""
        ...


class ShardWriter:
    """Cuts a token stream into shards of ``shard_tokens``.

    As a context manager it leaves no file open, and closes nothing for you: without ``close`` there is no split.
    """

    def __init__(self, place: ShardPlace, *, dtype: str, shard_tokens: int) -> None:
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
        """Write token ids (1-D, any integer dtype; each must fit the stored dtype) at the stream's end."""
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
        if self._open is not None:
            self._shards.append(self._open.finish(self._open_tokens))
            self._open, self._open_tokens = None, 0


class ShardFolder:
    """Shards as files of a folder, written as they grow, with a digest over the whole stream."""

    def __init__(self, directory: Path, split: str) -> None:
        self._directory, self._split = directory, split
        self._stream_digest = hashlib.sha256()

    def open(self, number: int) -> OpenShard:
        return _ShardInFolder(self._directory / f"{self._split}-{number:05d}.bin", self._stream_digest.update)

    def digest(self, shards: Sequence[ShardFile]) -> str:  # noqa: ARG002  that of the stream
        return self._stream_digest.hexdigest()


class _ShardInFolder:
    """A file; durable when it is finished."""

    def __init__(self, path: Path, on_bytes: Callable[[memoryview], None]) -> None:
        self._path, self._on_bytes = path, on_bytes
        self._file = path.open("xb", buffering=1 << 20)
        self._checksum = xxhash.xxh3_128()
        self._sums = BlockSummer()

    def write(self, data: memoryview) -> None:
        self._on_bytes(data)
        self._file.write(data)
        self._checksum.update(data)
        self._sums.update(data)

    def finish(self, tokens: int) -> ShardFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        checksum = self._checksum.hexdigest()
        sums_file(self._path).write_bytes(self._sums.content(checksum))  # made durable by ``commit``
        return ShardFile(self._path.name, tokens, checksum)

    def abandon(self) -> None:
        # Closing flushes what is buffered, which fails again on a full disk; the file is closed all the same.
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
