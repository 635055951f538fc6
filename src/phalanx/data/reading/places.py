"""Where the datasets of a run are found: in folders, or, of those that lie in object stores, in caches on this machine.

Everything that reads a dataset is given its place, and need not know which of the two it is: the index, the tokenizer's files, and the tokens of
a split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.errors import DatasetError
from phalanx.data.reading.cache.cached_dataset import CachedDataset, CachedShards, CacheOptions, open_cached
from phalanx.data.stored.index import DatasetIndex, read_index
from phalanx.data.stored.shards import Shards, TokenShards
from phalanx.run.resolve import addresses
from phalanx.run.spec import DataSpec
from phalanx.store.open_store import check_url, is_remote, is_url
from phalanx.store.store import StoreError


@dataclass(frozen=True)
class DatasetPlace:
    """A dataset that can be read."""

    address: str
    """The path or URL as it was given, for messages."""
    folder: Path
    """The folder with ``index.json`` and the tokenizer's files: the dataset's own, or that of its cache."""
    index: DatasetIndex
    cached: CachedDataset | None = None

    def shards(self, split: str) -> Shards:
        """The tokens of a split. Raises ``DatasetError`` if a shard of a folder is missing or of another size."""
        if self.cached is not None:
            return CachedShards(self.cached, split)
        return TokenShards.open(self.folder, split)


def open_place(address: str, options: CacheOptions | None = None) -> DatasetPlace:
    """The dataset at a path or URL. Raises ``DatasetError`` if there is none, or if it is damaged."""
    if is_remote(address):
        try:
            url = check_url(address)
        except StoreError as error:
            raise DatasetError(str(error)) from error
        cached = open_cached(url, options or CacheOptions())
        return DatasetPlace(address, cached.folder, cached.index, cached)
    folder = local_folder(address)
    return DatasetPlace(address, folder, read_index(folder))


def local_folder(address: str) -> Path:
    """The folder that a path, or a URL of a file, names. Raises ``DatasetError`` for another URL."""
    if not is_url(address):
        return Path(address)
    try:
        return Path(unquote(urlsplit(check_url(address)).path))
    except StoreError as error:
        raise DatasetError(str(error)) from error


def cache_options(data: DataSpec) -> CacheOptions:
    """What the run file says of the cache."""
    return CacheOptions(data.cache, int(data.cache_gib * (1 << 30)), data.timeout_s)


def open_places(data: DataSpec) -> dict[str, DatasetPlace]:
    """The place of each source by its name, in the order of names; of a run without sources, that of ``data.path`` as ``ONLY``.

    Raises ``DatasetError``.
    """
    options = cache_options(data)
    return {name: open_place(address, options) for name, address in addresses(data).items()}


def template_folder(places: Mapping[str, DatasetPlace]) -> Path | None:
    """The folder of the first dataset of conversations that has its chat template; ``None`` if there is none."""
    folders = (place.folder for place in places.values() if place.index.recipe.chat is not None)
    return next((folder for folder in folders if (folder / TEMPLATE_FILE).exists()), None)


def tokenizer_folder(places: Mapping[str, DatasetPlace]) -> Path:
    """The folder of a dataset whose tokenizer is the run's; all sources have the same."""
    return next(iter(places.values())).folder
