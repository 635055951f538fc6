"""The sources of a run's data: one prepared dataset or a mixture of several, and their locations.

At a run's start, the indices of all datasets give the vocabulary size, fingerprint and token counts. With the batch size and the stages,
they determine the run's ``Mixture``, and how much the run reads of each source by each step, before any token is read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from phalanx.data.chat.template import TEMPLATE_FILE
from phalanx.data.errors import DatasetError
from phalanx.data.order.mixture import Mixture, MixtureSource
from phalanx.data.reading.cached_dataset import CachedDataset, CachedShards, CacheOptions, open_cached
from phalanx.data.stored.index import TRAIN, DatasetIndex, read_index
from phalanx.data.stored.shards import TokenShards
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.run.fields import Problem
from phalanx.run.read import ONLY, addresses
from phalanx.run.rules import stages_of
from phalanx.run.spec import DataSpec, RunSpec, SourceSpec
from phalanx.store.open_store import check_url, is_remote, is_url
from phalanx.store.store import StoreError

# Locations of a run's datasets: folders, or local caches of datasets in object stores.
#
# Readers of a dataset use the same interface for both: the index, the tokenizer's files, and the tokens of a split.


@dataclass(frozen=True)
class DatasetPlace:
    """A dataset that can be read."""

    address: str
    """Path or URL from the run file, for messages."""
    folder: Path
    """Folder with ``index.json`` and the tokenizer's files: the dataset's folder, or its cache."""
    index: DatasetIndex
    cached: CachedDataset | None = None

    def shards(self, split: str) -> TokenShards | CachedShards:
        """Return the tokens of a split. Raises ``DatasetError`` if a shard of a folder is missing or has another size."""
        if self.cached is not None:
            return CachedShards(self.cached, split)
        return TokenShards.open(self.folder, split)


def open_place(address: str, options: CacheOptions | None = None) -> DatasetPlace:
    """Return the dataset at a path or URL; a remote one is read through a cache, as ``options`` configure it.

    Raises ``DatasetError`` if there is none, or if its index is damaged.
    """
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
    """Return the folder of a path or ``file://`` URL. Raises ``DatasetError`` for another URL."""
    if not is_url(address):
        return Path(address)
    try:
        return Path(unquote(urlsplit(check_url(address)).path))
    except StoreError as error:
        raise DatasetError(str(error)) from error


def cache_options(data: DataSpec) -> CacheOptions:
    """Return the cache options in the run file."""
    return CacheOptions(data.cache, int(data.cache_gib * (1 << 30)), data.timeout_s)


def open_places(data: DataSpec) -> dict[str, DatasetPlace]:
    """Return the place of each source by its name, in order of names. A run without sources has ``data.path`` as
    ``ONLY``. Opens indices, and fetches those of remote datasets.

    Raises ``DatasetError`` if one is missing or damaged.
    """
    options = cache_options(data)
    return {name: open_place(address, options) for name, address in addresses(data).items()}


def template_folder(places: Mapping[str, DatasetPlace]) -> Path | None:
    """Return the folder of the first dataset of conversations with a chat template; ``None`` if there is none."""
    folders = (place.folder for place in places.values() if place.index.recipe.chat is not None)
    return next((folder for folder in folders if (folder / TEMPLATE_FILE).exists()), None)


def tokenizer_folder(places: Mapping[str, DatasetPlace]) -> Path:
    """Return the folder of a dataset with the run's tokenizer, which is the same in all sources."""
    return next(iter(places.values())).folder


@dataclass(frozen=True)
class MixtureIndex:
    """The indices of a run's sources, by name."""

    sources: Mapping[str, DatasetIndex]

    def samples(self, split: str, seq_len: int) -> int:
        """Return the number of samples of ``seq_len`` inputs in a split of all sources, each without an incomplete one at its end."""
        return sum(index.samples(split, seq_len) for index in self.sources.values())

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the sources' common tokenizer."""
        return next(iter(self.sources.values())).vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over the names and fingerprints of all sources."""
        parts = (f"{name} {index.fingerprint}" for name, index in sorted(self.sources.items()))
        return hashlib.sha256("\n".join(("mixture 1", *parts)).encode()).hexdigest()

    @property
    def train_tokens(self) -> int:
        return sum(index.train_tokens for index in self.sources.values())

    @property
    def held_out_tokens(self) -> int:
        return sum(index.held_out_tokens for index in self.sources.values())

    @property
    def packed_seq_len(self) -> int:
        """Length of packed records if a source has them; it is the same in all such sources."""
        return max(index.packed_seq_len for index in self.sources.values())

    @property
    def document_end(self) -> int | None:
        """The token that ends documents, if it is not the tokenizer's; the same in all sources."""
        return next(iter(self.sources.values())).document_end

    @property
    def document_mask(self) -> bool:
        """True if a source needs it."""
        return any(index.document_mask for index in self.sources.values())

    @property
    def held_out_xz_bits_per_byte(self) -> float | None:
        """None: the compressed size of all sources' texts together is not known."""
        return None


DataIndex: TypeAlias = DatasetIndex | MixtureIndex
"""The index of a run's data: of its only dataset, or of all sources."""


def index_of_places(places: Mapping[str, DatasetPlace]) -> DataIndex:
    """Return the index of a run's data.

    Raises ``DatasetError`` if datasets have different tokenizers. Also if documents and conversations end with
    different tokens.
    """
    indices = {name: place.index for name, place in places.items()}
    if ONLY in indices:
        return indices[ONLY]
    first = next(iter(indices))
    for name, index in indices.items():
        if index.tokenizer_fingerprint != indices[first].tokenizer_fingerprint:
            raise DatasetError(
                f"source {name!r} was prepared with another tokenizer than source {first!r}: prepare it with that one "
                f"(`phalanx data prepare TEXT... --tokenizer {places[first].folder / 'tokenizer.json'} --out FOLDER`)"
            )
    if any(index.document_end is not None for index in indices.values()):
        _require_one_end(indices, load_tokenizer(places[first].folder).end_of_document)
    return MixtureIndex(indices)


def _require_one_end(indices: Mapping[str, DatasetIndex], usual: int) -> None:
    """Raise ``DatasetError`` if conversations and documents end with different tokens: attention could not separate
    them.

    ``usual`` is the tokenizer's end of document. At least one of ``indices`` is of conversations.
    """
    ends = {
        name: usual if index.document_end is None else index.document_end for name, index in indices.items()
    }
    chats = next(name for name, index in indices.items() if index.document_end is not None)
    for name, end in ends.items():
        if end != ends[chats]:
            raise DatasetError(
                f"conversations of source {chats!r} end with token {ends[chats]}, since its chat template uses the tokenizer's own end token, and "
                f"documents of source {name!r} with {end}: name token {ends[chats]} as eos_token in tokenizer_config.json, and prepare {name!r} again"
            )


def read_data_index(data: DataSpec) -> DataIndex:
    """Return the index of a run's data. Raises ``DatasetError`` if a dataset is missing or damaged, or if tokenizers differ."""
    return index_of_places(open_places(data))


def part_of(source: SourceSpec, samples: int) -> range:
    """Return the range of a dataset's ``samples`` selected by ``use``, computed exactly from its decimals."""
    first, stop = (math.floor(Fraction(str(fraction)) * samples) for fraction in source.use)
    return range(first, stop)


def mixture_of(spec: RunSpec, index: MixtureIndex) -> Mixture:
    """Return the order in which a run draws from its sources.

    Raises ``DatasetError`` if a source with a weight has no complete sample. Sources are in the order of their names.
    """
    sources = []
    for source in sorted(spec.data.sources, key=lambda source: source.name):
        source_index = index.sources[source.name]
        try:
            samples = len(part_of(source, source_index.samples(TRAIN, spec.train.seq_len)))
        except DatasetError as error:
            raise DatasetError(f"source {source.name!r}: {error}") from error
        if not samples and any(source.weights):
            raise DatasetError(
                f"source {source.name!r} has {source_index.train_tokens:,} training tokens, of which data.sources.{source.name}.use = {list(source.use)} is "
                f"not one sample of {spec.train.seq_len + 1}; shorten train.seq_len, use more of it, or prepare more text"
            )
        sources.append(MixtureSource(source.name, samples, source.weights))
    return Mixture(sources, stages_of(spec.data), spec.runtime.seed, spec.train.batch_size)


@dataclass(frozen=True)
class SourceUse:
    """Numbers of samples that a run reads from one source."""

    name: str
    records: int
    """Number of samples in the part in use."""
    drawn: int
    """Number of samples that the run draws, including repeats in later epochs."""
    first_end_step: int | None
    """Step that draws the last sample of the first epoch; ``None`` if the run does not reach it."""
    limit_step: int | None
    """First step that would exceed ``epochs``; ``None`` if no step does."""

    @property
    def epochs(self) -> float:
        """Number of times that the part is read."""
        return self.drawn / self.records if self.records else 0.0


def source_uses(spec: RunSpec, mixture: Mixture) -> list[SourceUse]:
    """Return how many records the run reads of each source, in the mixture's order.

    Steps are counted from 1: the step that reads the last record of the first epoch, and the one that exceeds the
    limit of epochs. They are None if the run does not come that far, or there is no limit.
    """
    limits = {source.name: Fraction(str(source.epochs)) for source in spec.data.sources}
    drawn = mixture.drawn(spec.train.steps * spec.train.batch_size)

    def step_of(number: int, draw: int) -> int | None:
        return mixture.step_of_draw(number, draw) if draw < int(drawn[number]) else None

    return [
        SourceUse(
            name=source.name,
            records=source.records,
            drawn=int(drawn[number]),
            first_end_step=step_of(number, source.records - 1) if source.records else None,
            limit_step=step_of(number, math.floor(limits[source.name] * source.records))
            if limits[source.name]
            else None,
        )
        for number, source in enumerate(mixture.sources)
    ]


def epoch_problems(spec: RunSpec, mixture: Mixture) -> Iterator[Problem]:
    """Yield a problem for each source that the run would read more often than ``epochs`` allows."""
    limits = {source.name: source.epochs for source in spec.data.sources}
    for use in source_uses(spec, mixture):
        if use.limit_step is not None:
            end = f", or end at step {use.limit_step - 1:,}" if use.limit_step > 1 else ""
            yield Problem(
                f"data.sources.{use.name}.epochs",
                f"source {use.name!r} would be read {use.epochs:.3g} times by step {spec.train.steps:,}, and {limits[use.name]:g} is allowed",
                f"lower its weight, raise epochs (0 is no limit){end}",
                ("train.steps",),
            )


def same_datasets(fingerprints: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the names of the sources that are one dataset, in their order, from the fingerprint of each; those without one are left out."""
    names: dict[str, list[str]] = {}
    for name, fingerprint in fingerprints.items():
        names.setdefault(fingerprint, []).append(name)
    return [tuple(same) for fingerprint, same in names.items() if fingerprint and len(same) > 1]
