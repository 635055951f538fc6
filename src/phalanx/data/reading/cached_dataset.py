"""A dataset in an object store and its cache: a local folder with its index, its tokenizer, and the blocks that were read.

The index is read from the store each time, and the other small files once. The folder is named by a digest of the index. So all runs and ranks of a
machine share it for any URL, and another dataset under the same URL has another folder. ``CachedShards`` reads tokens like ``TokenShards``, but from sparse
files (``phalanx.data.reading.cached_shard``) whose missing blocks are fetched in parallel.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.errors import DatasetError
from phalanx.data.reading.cached_shard import THREAD, CachedShard, CacheTraffic, Requests, Room
from phalanx.data.stored.index import INDEX_FILE, DatasetIndex, parse_index
from phalanx.data.stored.shards import MAX_OPEN_MAPS, TokenArray
from phalanx.data.tokenizers.published import CONFIG_FILE, TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import saved_fingerprint
from phalanx.process.background import in_background
from phalanx.run.directory.files import user_cache, write_atomically
from phalanx.store.open_store import open_store
from phalanx.store.store import MissingObjectError, RetryPolicy, Store, StoreError, UnavailableError

_PATIENCE_AHEAD_S = 30.0
"""Timeout of read-ahead requests. A request for needed data has the full ``CacheOptions.timeout_s``."""
_TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE)


@dataclass(frozen=True)
class CacheOptions:
    """Location and size limit of all cached datasets, and the timeout of a store (fields of ``[data]``)."""

    cache: str = ""
    """Folder of all cached datasets; if empty, ``datasets`` in this user's caches."""
    limit_bytes: int = 64 << 30
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class CachedDataset:
    """A dataset in ``store``. ``folder`` has ``index.json`` and the tokenizer's files; other files are found as they are read."""

    url: str
    folder: Path
    index: DatasetIndex
    store: Store
    store_ahead: Store
    """The same store with a shorter timeout."""
    room: Room
    requests: Requests
    traffic: CacheTraffic = field(default_factory=CacheTraffic)


def open_cached(url: str, options: CacheOptions) -> CachedDataset:
    """Return the dataset at ``url`` with a cache on this machine, in ``options.cache`` or the default folder.

    Fetches the index and the tokenizer. Raises ``DatasetError``.
    """
    root = Path(options.cache).expanduser() if options.cache else user_cache() / "datasets"
    try:
        store = open_store(url, RetryPolicy(timeout_s=options.timeout_s))
        ahead = open_store(url, RetryPolicy(timeout_s=min(_PATIENCE_AHEAD_S, options.timeout_s)))
        return cached_in(store, ahead, root, options.limit_bytes)
    except StoreError as error:
        raise DatasetError(str(error)) from error


def cached_in(store: Store, store_ahead: Store, root: Path, limit_bytes: int) -> CachedDataset:
    """Return the dataset in ``store`` with its cache below ``root``.

    Fetches the index, and the tokenizer and chat template if they are not cached, and writes them to the dataset's
    folder. Raises ``DatasetError`` if the cache cannot be written, and ``StoreError``.
    """
    newest = root / "newest" / _name_of(store.url.encode())
    # If nothing was read from this URL yet, request the three files in parallel.
    early = {} if newest.exists() else _requested_files(store)
    content = _index_content(store, store_ahead, root, newest)
    # For an index of many shards, the digest takes a fifth of the decoding time.
    folder_name = in_background(partial(_name_of, content), THREAD)
    index = parse_index(content.decode(errors="replace"), Path(f"{store.url}/{INDEX_FILE}"))
    folder = root / folder_name.result()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if saved_fingerprint(_cached_tokenizer_files(folder)) != index.tokenizer_fingerprint:
            for name, small in _tokenizer_files(store, index, early).items():
                write_atomically(folder / name, small, durable=False)
        has_index = (folder / INDEX_FILE).exists() and (folder / INDEX_FILE).stat().st_size == len(content)
        if index.recipe.chat is not None and not has_index:
            # Datasets of earlier versions have no template.
            with suppress(MissingObjectError):
                write_atomically(folder / TEMPLATE_FILE, store.get(TEMPLATE_FILE))
        # Files are not synced to disk: damage from a power failure is detected by the size, the folder's name, or the index.
        if not has_index:
            write_atomically(folder / INDEX_FILE, content, durable=False)  # last, after the small files
        newest.parent.mkdir(exist_ok=True)
        write_atomically(newest, folder.name.encode(), durable=False)
    except OSError as error:
        raise DatasetError(
            f"cannot write the cache of {store.url} in {root} ({error.strerror}): make room there, or give another folder in data.cache"
        ) from error
    return CachedDataset(store.url, folder, index, store, store_ahead, Room(root, limit_bytes), Requests())


def _index_content(store: Store, store_ahead: Store, root: Path, newest: Path) -> bytes:
    """Return the index in the store, or the last one read if the store does not respond.

    Raises ``DatasetError`` if the store has none, and ``StoreError``.
    A rank that restarts during an outage may have all needed data in the cache. If the store has another dataset now, block sums prevent its
    tokens from being used with the old index.
    """
    try:
        return _required(store_ahead, INDEX_FILE)
    except UnavailableError:
        with suppress(OSError):
            name = newest.read_text()
            content = (root / name / INDEX_FILE).read_bytes()
            if _name_of(content) == name:
                return content
    return _required(store, INDEX_FILE)


def _cached_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer's files that are in the cache."""
    files: dict[str, bytes] = {}
    for name in _TOKENIZER_FILES:
        with suppress(OSError):
            files[name] = (folder / name).read_bytes()
    return files


def _requested_files(store: Store) -> dict[str, Future[bytes]]:
    return {name: in_background(partial(_required, store, name), THREAD) for name in _TOKENIZER_FILES}


def _tokenizer_files(store: Store, index: DatasetIndex, early: dict[str, Future[bytes]]) -> dict[str, bytes]:
    """Return the files of the tokenizer that ``index`` names, from ``early`` if it has them.

    Raises ``DatasetError`` if they are missing or of another tokenizer, and ``StoreError``.

    The store may get another dataset between two requests. That dataset's tokenizer must not be stored in this one's folder, because later runs
    would use it.
    """
    files = {name: small.result() for name, small in (early or _requested_files(store)).items()}
    if saved_fingerprint(files) != index.tokenizer_fingerprint:
        files = {name: small.result() for name, small in _requested_files(store).items()}
    if saved_fingerprint(files) == index.tokenizer_fingerprint:
        return files
    raise DatasetError(
        f"the tokenizer in {store.url} is not the one that the index there names: if another dataset is being copied there, try again once it "
        "is whole; else copy the dataset there again (`phalanx data copy FOLDER URL`)"
    )


def _name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _required(store: Store, name: str) -> bytes:
    """Return an object of the store. Raises ``DatasetError`` if it is missing."""
    try:
        return store.get(name)
    except MissingObjectError as error:
        raise DatasetError(
            f"{store.url} holds no {name}; correct the URL, or copy a prepared dataset there (`phalanx data copy FOLDER URL`)"
        ) from error


class _Piece(NamedTuple):
    """A range of one shard and its position in the output."""

    number: int
    start_bytes: int
    stop_bytes: int
    row: int
    column: int


class CachedShards:
    """The token stream of one split of a cached dataset, read like one array. Thread-safe."""

    def __init__(self, dataset: CachedDataset, split: str) -> None:
        """Read the token stream of ``split``; no shard is opened yet."""
        self.dtype = np.dtype(dataset.index.dtype).newbyteorder("<")
        self._dataset = dataset
        self._shards = dataset.index.split(split).shards
        self._starts = np.cumsum([0, *[shard.tokens for shard in self._shards]], dtype=np.int64)
        self._open: OrderedDict[int, CachedShard] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def unchecked(self) -> bool:
        """False: every block is compared with its sum."""
        return False

    def read(self, start: int, stop: int) -> TokenArray:
        """Return tokens ``start`` to ``stop`` as stored (uint16 or uint32).

        Raises ``IndexError`` for a range outside the stream, ``DatasetError`` if the tokens are unavailable or damaged.
        Fetches blocks that are not cached, and caches them.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(
                f"tokens {start}..{stop} are not within the {self.tokens} of {self._dataset.url}"
            )
        out: TokenArray = np.empty((1, stop - start), dtype=self.dtype)
        self._read_into(out, self._pieces(np.array([start]), stop - start, np.array([0])))
        return out.reshape(-1)

    def gather(
        self, starts: NDArray[np.int64], length: int, out: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        """Write ``length`` tokens from each of ``starts`` into the corresponding one of ``rows`` of ``out``, int64. Raises the errors of ``read``."""
        if starts.size and (starts.min() < 0 or starts.max() + length > self.tokens):
            raise IndexError(
                f"{length} tokens from {starts.min()}..{starts.max()} are not within the {self.tokens}"
            )
        self._read_into(out, self._pieces(starts, length, rows))

    def read_ahead(self, starts: NDArray[np.int64], length: int) -> None:
        """Fetch ``length`` tokens from each of ``starts`` in the background if they are not cached. Returns at once."""
        for piece in self._pieces(starts, length, np.zeros_like(starts)):
            self._dataset.requests.ahead(partial(self._fetched, piece, self._dataset.store_ahead))

    def _read_into(self, out: NDArray[np.generic], pieces: list[_Piece]) -> None:
        """Write the pieces' tokens into ``out``: cached ones from disk, the rest from the store, in parallel. Counts
        the requested bytes.

        Raises ``DatasetError`` if the store does not answer in time or the bytes are damaged.
        """
        missing: list[_Piece] = []
        requested_bytes = 0
        for piece in pieces:
            requested_bytes += piece.stop_bytes - piece.start_bytes
            shard = self._open_already(piece.number)
            data = None if shard is None else shard.held(piece.start_bytes, piece.stop_bytes)
            if data is None:
                missing.append(piece)
            else:
                self._place(out, piece, data)
        self._dataset.traffic.add_requested(requested_bytes)
        if not missing:
            return
        calls = [partial(self._fetched, piece, self._dataset.store) for piece in missing]
        try:
            fetched = self._dataset.requests.results(calls)
        except UnavailableError as error:
            raise DatasetError(
                f"{error}; training continues from its last checkpoint when the store responds again (data.timeout_s limits the wait)"
            ) from error
        except StoreError as error:
            raise DatasetError(str(error)) from error
        for piece, data in zip(missing, fetched, strict=True):
            self._place(out, piece, data)

    def _place(self, out: NDArray[np.generic], piece: _Piece, data: memoryview) -> None:
        """Write a piece's tokens into its place in ``out``."""
        tokens = np.frombuffer(data, dtype=self.dtype)
        out[piece.row, piece.column : piece.column + len(tokens)] = tokens

    def _pieces(self, starts: NDArray[np.int64], length: int, rows: NDArray[np.int64]) -> list[_Piece]:
        """Return the ranges of shards with ``length`` tokens from each of ``starts``, for the rows ``rows``: one
        piece each, or several if it crosses shard boundaries.
        """
        pieces = []
        item = self.dtype.itemsize
        numbers = np.searchsorted(self._starts, starts, side="right") - 1
        for start, number, row in zip(starts.tolist(), numbers.tolist(), rows.tolist(), strict=True):
            stop, position = start + length, start
            while position < stop:
                begin, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
                pieces.append(
                    _Piece(number, (position - begin) * item, (end - begin) * item, row, position - start)
                )
                position, number = end, number + 1
        return pieces

    def _open_already(self, number: int) -> CachedShard | None:
        """Return the shard if it is open. Opening it accesses the disk, which is left to the request threads."""
        with self._lock:
            return self._open.get(number)

    def _opened(self, number: int) -> CachedShard:
        """Return the shard's cache, opened if necessary; the one that was used least recently is closed if too many are open."""
        opened = self._open_already(number)
        if opened is None:
            dataset, shard = self._dataset, self._shards[number]
            nbytes = shard.tokens * self.dtype.itemsize
            opened = CachedShard(dataset.folder, shard, nbytes, dataset.room, dataset.traffic)
            with self._lock:
                self._open[number] = opened
                if len(self._open) > MAX_OPEN_MAPS:
                    self._open.popitem(last=False)
        return opened

    def _fetched(self, piece: _Piece, store: Store) -> memoryview:
        return self._opened(piece.number).fetched(piece.start_bytes, piece.stop_bytes, store)
