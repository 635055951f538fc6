"""What a run file's data are made of: one prepared dataset, or several that are mixed.

The indices of all datasets together answer what the start of a run asks of one: size of the vocabulary, fingerprint, tokens. From
them, the batch and the stages follows the run's ``Mixture``, and with it what the run would read of each source by when: all before
a token is read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from phalanx.data.errors import DatasetError
from phalanx.data.order.mixture import Mixture, Source
from phalanx.data.reading.places import DatasetPlace, open_places
from phalanx.data.stored.index import TRAIN, DatasetIndex
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.run.fields import Problem
from phalanx.run.resolve import ONLY
from phalanx.run.rules import stages_of
from phalanx.run.spec import DataSpec, RunSpec, SourceSpec


class DataIndex(Protocol):
    """What the start of a run must know of its data."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def train_tokens(self) -> int: ...
    @property
    def held_out_tokens(self) -> int: ...
    @property
    def held_out_xz_bits_per_byte(self) -> float | None: ...
    @property
    def packed_seq_len(self) -> int: ...
    @property
    def document_end(self) -> int | None: ...
    @property
    def document_mask(self) -> bool: ...


@dataclass(frozen=True)
class MixtureIndex:
    """The indices of a run's sources, by name."""

    sources: Mapping[str, DatasetIndex]

    @property
    def vocab_size(self) -> int:
        """That of each source: their tokenizer is the same."""
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
        """The length of packed records, if any source has such; all that have are of one length."""
        return max(index.packed_seq_len for index in self.sources.values())

    @property
    def document_end(self) -> int | None:
        """The token that ends documents, if it is not the tokenizer's; the same in all sources."""
        return next(iter(self.sources.values())).document_end

    @property
    def document_mask(self) -> bool:
        """True if any source asks for it."""
        return any(index.document_mask for index in self.sources.values())

    @property
    def held_out_xz_bits_per_byte(self) -> float | None:
        """None: what ``xz`` needs for the texts of all sources together is not known."""
        return None


def index_of_places(places: Mapping[str, DatasetPlace]) -> DatasetIndex | MixtureIndex:
    """The index of a run's data. Raises ``DatasetError`` if a dataset has another tokenizer than the others."""
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
    """Raises ``DatasetError`` if conversations end with another token than documents: attention would not tell one of them from the next."""
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


def read_data_index(data: DataSpec) -> DatasetIndex | MixtureIndex:
    """The index of a run's data. Raises ``DatasetError`` if a dataset is missing or damaged, or has another tokenizer than the others."""
    return index_of_places(open_places(data))


def part_of(source: SourceSpec, samples: int) -> range:
    """The numbers of those of a dataset's ``samples`` that ``use`` says, by the decimals that are written."""
    first, stop = (math.floor(Fraction(str(fraction)) * samples) for fraction in source.use)
    return range(first, stop)


def mixture_of(spec: RunSpec, index: MixtureIndex) -> Mixture:
    """The order in which a run draws from its sources. Raises ``DatasetError`` if one that it draws from has no whole sample."""
    sources = []
    for source in sorted(spec.data.sources, key=lambda source: source.name):
        one = index.sources[source.name]
        try:
            samples = len(part_of(source, one.samples(TRAIN, spec.train.seq_len)))
        except DatasetError as error:
            raise DatasetError(f"source {source.name!r}: {error}") from error
        if not samples and any(source.weights):
            raise DatasetError(
                f"source {source.name!r} has {one.train_tokens:,} training tokens, of which data.sources.{source.name}.use = {list(source.use)} is "
                f"not one sample of {spec.train.seq_len + 1}; shorten train.seq_len, use more of it, or prepare more text"
            )
        sources.append(Source(source.name, samples, source.weights))
    return Mixture(sources, stages_of(spec.data), spec.runtime.seed, spec.train.batch_size)


@dataclass(frozen=True)
class SourceUse:
    """What a run reads of one of its sources."""

    name: str
    records: int
    """Samples in the part that is used."""
    drawn: int
    """Samples that the run draws, an epoch's second time counted too."""
    first_end_step: int | None
    """The step that draws the last sample of the first epoch; ``None`` if the run, or the last stage, does not get there."""
    limit_step: int | None
    """The first step that would read beyond ``epochs``; ``None`` if none of the run's does."""

    @property
    def epochs(self) -> float:
        """Times that the part is read."""
        return self.drawn / self.records if self.records else 0.0


def source_uses(spec: RunSpec, mixture: Mixture) -> list[SourceUse]:
    """What the run reads of each source, in the mixture's order."""
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
    """The sources that the run would read more often than ``epochs`` allows."""
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
