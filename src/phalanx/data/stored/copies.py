"""Copy prepared datasets between folders and object stores, and verify stored datasets.

A copy is compared with the checksums of the dataset's index while it is read, so a damaged dataset is not copied. The index is written last and only
if there is none; until then, the dataset does not exist. A shard's block sums are written after the shard, so a repeated copy skips the shards that
have block sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import xxhash

from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.errors import DatasetError, DatasetExistsError
from phalanx.data.stored.index import INDEX_FILE, SPLITS, DatasetIndex, ShardFile, parse_index
from phalanx.data.stored.shard_writer import BlockSummer, sums_header
from phalanx.data.tokenizers.published import CONFIG_FILE, TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import saved_fingerprint
from phalanx.store.open_store import open_store
from phalanx.store.store import ExistsError, MissingObjectError, ShortObjectError, Store, StoreError

_READ_BYTES = 8 << 20
_READ_AT_ONCE = 4

OnBytes = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass(frozen=True)
class Copied:
    """Result of a copy."""

    index: DatasetIndex
    written_bytes: int
    """Bytes of shards written; fewer than all if an interrupted copy was continued."""
    was_there: bool
    """True if the complete dataset was there already."""


def copy_dataset(source: str, target: str, on_bytes: OnBytes = lambda _done, _of: None) -> Copied:
    """Copy the dataset at one path or URL to another; ``on_bytes`` receives (bytes done, bytes of all shards).

    Copied shards are verified by their checksums. Copies nothing if the same index is there already, and no shard
    whose block sums are there. Raises ``DatasetError`` if the source is damaged or a store fails,
    ``DatasetExistsError`` if ``target`` has another dataset.
    """
    try:
        return _copy(open_store(source), open_store(target), on_bytes)
    except StoreError as error:
        raise DatasetError(str(error)) from error


def verify_stored(url: str, on_bytes: OnBytes = lambda _done, _of: None) -> None:
    """Read the dataset at a URL and verify its tokenizer, shards and block sums. Raises ``DatasetError`` that names all
    damaged files, or if the store fails.

    ``on_bytes`` receives (bytes read, bytes of all shards).
    """
    try:
        store = open_store(url)
        _, index = _index(store)
        bad = list(_bad_files(store, index, on_bytes))
    except StoreError as error:
        raise DatasetError(str(error)) from error
    if bad:
        raise DatasetError(
            f"{url}: not what was written: {', '.join(bad)}; remove these objects and copy the dataset there again from an intact one "
            "(`phalanx data copy FOLDER URL`)"
        )


def _copy(source: Store, target: Store, on_bytes: OnBytes) -> Copied:
    """Copy tokenizer, chat template, shards and block sums to ``target``, the index last. Shards whose block sums are
    there already are skipped.

    Copies nothing if the same index is there. Raises ``DatasetExistsError`` for another dataset, ``DatasetError`` for
    a damaged source.
    """
    content, index = _index(source)
    if not _tokenizer_fits(source, index):
        raise DatasetError(
            f"the tokenizer at {source.url} is not the one that its tokens were made with; {_REMEDY}"
        )
    total = _bytes(index)
    with suppress(MissingObjectError):
        if target.get(INDEX_FILE) == content:
            on_bytes(total, total)
            return Copied(index, 0, was_there=True)
        raise DatasetExistsError(
            f"{target.url} already holds another dataset; choose another place, or remove that one"
        )
    for name in (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE):
        with suppress(MissingObjectError):
            target.put(name, source.get(name))
    done_bytes = written = 0
    for shard in _shards(index):
        nbytes = shard.tokens * index.item_bytes
        if not _holds_sums(target, shard):
            _copy_shard(source, target, shard, nbytes)
            written += nbytes
        done_bytes += nbytes
        on_bytes(done_bytes, total)
    try:
        target.create(INDEX_FILE, content)
    except ExistsError as error:
        raise DatasetExistsError(
            f"another dataset was written to {target.url} in the meantime; choose another place, or remove that one"
        ) from error
    return Copied(index, written, was_there=False)


def _copy_shard(source: Store, target: Store, shard: ShardFile, nbytes: int) -> None:
    """Copy a shard, then its block sums.

    Raises ``DatasetError`` before the last block if the source's bytes are not what was written.
    """
    sums = BlockSummer()

    def blocks() -> Iterator[memoryview]:
        """Yield the source's blocks, adding each to the block sums. Raises ``DatasetError`` ahead of the last one if
        the checksum is wrong, so that the object is never completed.
        """
        done_bytes, checksum = 0, xxhash.xxh3_128()
        for block in _blocks(source, shard.file, nbytes):
            checksum.update(block)
            sums.update(block)
            done_bytes += len(block)
            if done_bytes == nbytes and checksum.hexdigest() != shard.xxh3_128:
                # Checked before the last block is returned, so that the object is never completed.
                raise DatasetError(
                    f"{source.url}/{shard.file} is not what was written, and was not copied; {_REMEDY}"
                )
            yield block

    target.put_blocks(shard.file, blocks(), nbytes)
    target.put(_sums_name(shard), sums.content(shard.xxh3_128))


def _bad_files(store: Store, index: DatasetIndex, on_bytes: OnBytes) -> Iterator[str]:
    """Read all files, and yield the names of those that are damaged, missing or cut short: the tokenizer, shards, and
    block sums of good shards.
    """
    if not _tokenizer_fits(store, index):
        yield TOKENIZER_FILE
    done_bytes, total = 0, _bytes(index)
    for shard in _shards(index):
        checksum, sums = xxhash.xxh3_128(), BlockSummer()
        try:
            for block in _blocks(store, shard.file, shard.tokens * index.item_bytes):
                checksum.update(block)
                sums.update(block)
                done_bytes += len(block)
                on_bytes(done_bytes, total)
        except (MissingObjectError, ShortObjectError):
            yield f"{shard.file} (missing or cut short)"
            continue
        if checksum.hexdigest() != shard.xxh3_128:
            yield shard.file
            continue
        try:
            if store.get(_sums_name(shard)) != sums.content(shard.xxh3_128):
                yield _sums_name(shard)
        except MissingObjectError:
            yield f"{_sums_name(shard)} (missing)"


def _blocks(store: Store, key: str, nbytes: int) -> Iterator[memoryview]:
    """Yield the object's bytes in order, with several requests at a time."""
    step = _READ_BYTES * _READ_AT_ONCE
    for start in range(0, nbytes, step):
        stop = min(start + step, nbytes)
        spans = [(offset, min(offset + _READ_BYTES, stop)) for offset in range(start, stop, _READ_BYTES)]
        yield from store.ranges(key, spans)


def _index(store: Store) -> tuple[bytes, DatasetIndex]:
    """Return the index's bytes and content; raises ``DatasetError`` if there is no dataset."""
    try:
        content = store.get(INDEX_FILE)
    except MissingObjectError as error:
        raise DatasetError(f"there is no prepared dataset at {store.url}; correct the path or URL") from error
    return content, parse_index(content.decode(errors="replace"), Path(f"{store.url}/{INDEX_FILE}"))


def _tokenizer_fits(store: Store, index: DatasetIndex) -> bool:
    """Return True if the stored tokenizer is the one that the index names; False also if its files are missing."""
    files: dict[str, bytes] = {}
    for name in (TOKENIZER_FILE, CONFIG_FILE):
        with suppress(MissingObjectError):
            files[name] = store.get(name)
    return saved_fingerprint(files) == index.tokenizer_fingerprint


def _holds_sums(target: Store, shard: ShardFile) -> bool:
    """Return True if the store has block sums of this shard, which are written after its bytes. Only their header is read."""
    header = sums_header(shard.xxh3_128)
    try:
        return bytes(target.ranges(_sums_name(shard), [(0, len(header))])[0]) == header
    except (MissingObjectError, ShortObjectError):
        return False


def _shards(index: DatasetIndex) -> Iterable[ShardFile]:
    return (shard for name in SPLITS for shard in index.split(name).shards)


def _bytes(index: DatasetIndex) -> int:
    return sum(shard.tokens for shard in _shards(index)) * index.item_bytes


def _sums_name(shard: ShardFile) -> str:
    return str(PurePosixPath(shard.file).with_suffix(".sums"))


_REMEDY = "copy it again from an intact copy, or prepare the dataset again"
