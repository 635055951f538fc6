"""Samples for a run: the prepared token stream, cut into sequences and addressed by number.

For a sequence length S, sample j of a split is tokens j*S to j*S + S inclusive: S inputs and, shifted by one, S targets. Documents are joined end
to end ("packing", as in GPT-3 and after). ``RunData`` returns training samples in the run's order, of one dataset or a mixture of several, and
held-out samples in file order. It does not depend on the number of ranks: a rank requests the sample numbers that it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.data.errors import DatasetError
from phalanx.data.order.permutation import SampleOrder
from phalanx.data.reading.cached_dataset import CachedDataset, CachedShards
from phalanx.data.reading.sources import (
    DataIndex,
    DatasetPlace,
    index_of_places,
    mixture_of,
    open_place,
    open_places,
    part_of,
)
from phalanx.data.stored.index import HELD_OUT, TRAIN, DatasetIndex
from phalanx.data.stored.shards import verify
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from phalanx.run.read import ONLY
from phalanx.run.spec import RunSpec

# Locations of a run's samples, computed in batches for sequential reads.
#
# A location takes about a hundred numpy operations (``phalanx.data.order``), each of which costs about as much for eight
# samples as for a thousand. So a process that reads the run in sequence locates a batch with its first sample. A process that
# takes a few samples of each step, such as one of many ranks, locates only those.

SampleLocator = Callable[[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Maps ``first`` and ``count`` to the source's number, and the record's number in the source's part, of each of these samples of the run."""

_STRETCH = 8192


class LocatedAhead:
    """Returns the locations that ``place`` returns, with fewer calls of it. Thread-safe."""

    def __init__(self, place: SampleLocator) -> None:
        self._place = place
        self._located: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        """First sample and locations of the last batch, assigned together so that threads see a consistent value."""
        self._next = -1

    def __call__(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sources and records of samples ``first`` to ``first + count``, each (count,).

        Calls in sequence compute a longer stretch ahead and take later batches from it.
        """
        in_turn, self._next = first == self._next, first + count
        located = self._located
        if located is None or not located[0] <= first <= first + count <= located[0] + len(located[1]):
            located = (first, *self._place(first, max(count, _STRETCH) if in_turn else count))
            self._located = located
        start, sources, records = located
        part = slice(first - start, first - start + count)
        return sources[part], records[part]


# One call may count a complete held-out split, which as int64 can be larger than memory.
_COUNTED_AT_ONCE = 256


NO_TARGET = -100
"""Target of a token without a target: the last one of a packed record. The loss ignores it (``phalanx.train.step.loss.IGNORE``).

A token ``t`` without a loss, such as one that the user of a conversation wrote, is ``~t`` in a sample, below 0: see ``inputs_of``.
"""


def inputs_of(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens of samples, ``(count, seq_len)``, with or without a loss."""
    tokens = samples[:, :-1]
    return np.where(tokens < 0, ~tokens, tokens)


class TokenSequences:
    """A split in samples of ``seq_len`` inputs and targets: a stream without an incomplete sample at its end, or packed records."""

    def __init__(self, place: DatasetPlace, split: str, seq_len: int) -> None:
        """Open a split's shards. Raises ``DatasetError`` if a shard is missing or of another size, or records have
        another length.

        Raises ``ValueError`` for a ``seq_len`` below 1.
        """
        if seq_len < 1:
            raise ValueError(f"seq_len = {seq_len} is not positive")
        self._samples = place.index.samples(split, seq_len)
        self.shards = place.shards(split)
        self.seq_len = seq_len
        self.packed = bool(place.index.packed_seq_len)
        self._loss_bit = place.index.loss_bit

    def __len__(self) -> int:
        return self._samples

    def samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples with these numbers (1-D); shape (len(indices), seq_len + 1), int64.

        Inputs are ``[:, :-1]``, targets ``[:, 1:]``. Raises ``IndexError`` for a number not in [0, len(self)).
        """
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        self.read_into(out, np.arange(len(indices)), indices)
        return out

    def read_into(self, out: NDArray[np.int64], rows: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        """Write the samples with these numbers into these rows of ``out``, each of ``seq_len`` + 1 tokens.

        In packed records, a token that is not trained on is stored as its complement, and the last column is
        ``NO_TARGET``. Raises ``IndexError`` for a number not in [0, len(self)).
        """
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()}..{indices.max()} are not all in [0, {len(self)})")
        if self.packed:
            self.shards.gather(indices * self.seq_len, self.seq_len, out[:, :-1], rows)
            if self._loss_bit:
                stored = out[rows, :-1]
                tokens = stored & (self._loss_bit - 1)
                out[rows, :-1] = np.where(stored & self._loss_bit, tokens, ~tokens)
            out[rows, -1] = NO_TARGET
        else:
            self.shards.gather(indices * self.seq_len, self.seq_len + 1, out, rows)

    def read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Fetch the samples with these numbers in the background if they are in an object store. Returns at once."""
        if isinstance(self.shards, CachedShards):
            self.shards.read_ahead(indices * self.seq_len, self.seq_len + (not self.packed))


@dataclass(frozen=True)
class SourceData:
    """A prepared dataset as one source of a run."""

    name: str
    place: DatasetPlace
    train: TokenSequences
    held_out: TokenSequences
    first: int = 0
    """Number of the first sample in the part that the run draws from."""


class RunData:
    """The data loader of one run: one prepared dataset or several, in the run's order. Thread-safe."""

    index: DataIndex
    tokenizer: Tokenizer

    def __init__(
        self,
        index: DataIndex,
        tokenizer: Tokenizer,
        sources: Sequence[SourceData],
        place: SampleLocator,
        *,
        within_documents: bool = False,
    ) -> None:
        """Read samples of ``sources``; ``place`` returns source and record of a run's samples. ``within_documents``:
        The token after a document's end is not a target (``train.targets_within_documents``).
        """
        self.index = index
        self.tokenizer = tokenizer
        self._sources = tuple(sources)
        self._place = LocatedAhead(place)
        self._within_documents = within_documents
        end = index.document_end
        self._document_end = tokenizer.end_of_document if end is None else end
        self._held_out_starts = np.cumsum([0, *(len(source.held_out) for source in sources)], dtype=np.int64)

    @classmethod
    def open(cls, directory: Path, seq_len: int, seed: int, *, within_documents: bool = False) -> Self:
        """Open only the dataset in ``directory``, shuffled by ``seed``.

        Raises ``DatasetError`` if it is missing, damaged, or shorter than one sample.
        """
        return cls._of_single_dataset(open_place(str(directory)), seq_len, seed, within_documents)

    @classmethod
    def _of_single_dataset(
        cls, dataset: DatasetPlace, seq_len: int, seed: int, within_documents: bool
    ) -> Self:
        """Return the data of a run of one dataset, permuted each epoch; raises ``DatasetError`` if it is too short for
        one sample.
        """
        index = dataset.index
        source = _open_source(ONLY, dataset, seq_len)
        samples = len(source.train)
        if samples == 0:
            raise DatasetError(
                f"{dataset.address} has {index.train_tokens} training tokens, and one sample of seq_len = {seq_len} "
                f"needs {seq_len + 1}; shorten seq_len or prepare more text"
            )
        order = SampleOrder(n=samples, seed=seed)

        def place(first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            return np.zeros(count, dtype=np.int64), order.dataset_indices(first, count)

        return cls(index, tokenizer_of(dataset), [source], place, within_documents=within_documents)

    @classmethod
    def of_run(cls, spec: RunSpec) -> Self:
        """Return the data of a run, in its order: of one dataset, or of its sources mixed.

        Raises ``DatasetError`` if a dataset is missing, damaged or too short, or sources do not fit together, and
        ``TokenizerError``.
        """
        places = open_places(spec.data)
        index, within_documents = index_of_places(places), spec.train.targets_within_documents
        if isinstance(index, DatasetIndex):
            return cls._of_single_dataset(
                places[ONLY], spec.train.seq_len, spec.runtime.seed, within_documents
            )
        mixture = mixture_of(spec, index)
        parts = {source.name: source for source in spec.data.sources}
        sources = []
        for source in mixture.sources:  # in the order of names
            opened = _open_source(source.name, places[source.name], spec.train.seq_len)
            tokenizer = tokenizer_of(places[source.name])
            sources.append(replace(opened, first=part_of(parts[source.name], len(opened.train)).start))

        def place(first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            located = mixture.locate(np.arange(first, first + count, dtype=np.int64))
            return located.source, located.record

        return cls(index, tokenizer, sources, place, within_documents=within_documents)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all tokens and the tokenizer; for several sources, of their names and fingerprints."""
        return self.index.fingerprint

    @property
    def seq_len(self) -> int:
        return self._sources[0].train.seq_len

    @property
    def held_out_len(self) -> int:
        return int(self._held_out_starts[-1])

    @property
    def held_out_parts(self) -> dict[str, range]:
        """The ranges of each source's held-out samples by its name; the name of a single dataset is ""."""
        edges = itertools.pairwise(self._held_out_starts.tolist())
        return {source.name: range(*edge) for source, edge in zip(self._sources, edges, strict=True)}

    @property
    def unchecked_folders(self) -> list[Path]:
        """Folders of the datasets whose tokens are not verified when they are read: large ones without block sums."""
        return [source.place.folder for source in self._sources if source.train.shards.unchecked]

    @property
    def cached(self) -> list[CachedDataset]:
        """The datasets that are in object stores."""
        return [source.place.cached for source in self._sources if source.place.cached is not None]

    def read_ahead(self, first: int, count: int) -> None:
        """Fetch the run's samples ``first`` to ``first + count`` in the background if they are in object stores.

        Does nothing for local datasets.
        """
        numbers, records = self._place(first, count)
        for number in np.unique(numbers).tolist():
            source = self._sources[number]
            source.train.read_ahead(source.first + records[numbers == number])

    def waiting_s(self) -> float:
        """Return the longest current wait for samples from an object store in seconds; 0 if there is none."""
        return max((dataset.requests.waiting_s() for dataset in self.cached), default=0.0)

    def give_up(self) -> None:
        """End all current waits for object stores with ``DatasetError``, and drop the read-ahead requests."""
        for dataset in self.cached:
            dataset.requests.give_up()

    def train_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the run's samples ``first`` to ``first + count``, across epochs; shape (count, seq_len + 1), int64."""
        numbers, records = self._place(first, count)
        if len(self._sources) == 1:
            return self._sources[0].train.samples(self._sources[0].first + records)
        samples = np.empty((count, self.seq_len + 1), dtype=np.int64)
        for number in sorted(set(numbers.tolist())):
            source, rows = self._sources[number], np.flatnonzero(numbers == number)
            source.train.read_into(samples, rows, source.first + records[rows])
        return samples

    def held_out_samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return held-out samples ``first`` to ``first + count``, source by source in file order; shape (count, seq_len + 1), int64.

        Raises ``IndexError`` past ``held_out_len``.
        """
        return self._held_out(np.arange(first, first + count, dtype=np.int64))

    def held_out_bytes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of text in the targets of each of these held-out samples; shape (len(indices),), int64.

        A space that the tokenizer puts before a text is not counted.
        """
        byte_lengths = np.append(self.tokenizer.byte_lengths, 0)  # index -1 is for no target
        if not (prefix := self.tokenizer.prefix_bytes):
            return self._of_targets(indices, lambda targets, _: byte_lengths[targets])
        before_text = [self._document_end, *self.tokenizer.document_start][-1]

        def lengths(targets: NDArray[np.int64], previous: NDArray[np.int64]) -> NDArray[np.int64]:
            # The first token of a text includes a space that is not part of the text.
            spelled: NDArray[np.int64] = byte_lengths[targets]
            return np.where((previous == before_text) & (spelled > 0), spelled - prefix, spelled)

        return self._of_targets(indices, lengths)

    def held_out_targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of targets of each of these held-out samples; shape (len(indices),), int64."""
        if not self._within_documents and not any(source.held_out.packed for source in self._sources):
            return np.full(len(indices), self.seq_len, dtype=np.int64)
        return self._of_targets(indices, lambda targets, _: targets >= 0)

    def _of_targets(
        self,
        indices: NDArray[np.int64],
        figure: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[Any]],
    ) -> NDArray[np.int64]:
        """Return for each held-out sample, ``(len(indices),)``, the sum of ``figure(targets, tokens before them)``,
        in which -1 stands for no target.
        """
        sums = np.empty(len(indices), dtype=np.int64)
        for start in range(0, len(indices), _COUNTED_AT_ONCE):
            block = slice(start, start + _COUNTED_AT_ONCE)
            samples = self._held_out(indices[block])
            tokens, targets = inputs_of(samples), samples[:, 1:]
            has_no_target = targets < 0
            if self._within_documents:
                has_no_target |= tokens == self._document_end
            sums[block] = figure(np.where(has_no_target, -1, targets), tokens).sum(axis=1)
        return sums

    def _held_out(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return held-out samples, (len(indices), seq_len + 1), numbered over all sources.

        Raises ``IndexError`` for a number out of range.
        """
        if indices.size and (indices.min() < 0 or indices.max() >= self.held_out_len):
            raise IndexError(
                f"samples {indices.min()}..{indices.max()} are not all in [0, {self.held_out_len})"
            )
        samples = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        numbers = np.searchsorted(self._held_out_starts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            offsets = indices[rows] - self._held_out_starts[number]
            self._sources[number].held_out.read_into(samples, rows, offsets)
        return samples


def _open_source(name: str, place: DatasetPlace, seq_len: int) -> SourceData:
    """Open both splits of a dataset."""
    train, held_out = (TokenSequences(place, split, seq_len) for split in (TRAIN, HELD_OUT))
    return SourceData(name, place, train, held_out)


def tokenizer_of(place: DatasetPlace) -> Tokenizer:
    """Return the tokenizer of a dataset. Raises ``DatasetError`` if its tokens were made with another one, and
    ``TokenizerError`` if it cannot be loaded.
    """
    tokenizer = load_tokenizer(place.folder)
    if tokenizer.fingerprint != place.index.tokenizer_fingerprint:
        raise DatasetError(
            f"the tokenizer in {place.folder} is not the one that its tokens were made with; copy the dataset again, "
            "or prepare it again"
        )
    return tokenizer


def verify_dataset(directory: Path, *, write_missing_sums: bool = False) -> int:
    """Verify the tokenizer and all shards against the index. Returns the number of shards that have no block sums afterwards.

    ``write_missing_sums`` writes block sums of intact shards. Raises ``DataError`` that names the differences.
    """
    tokenizer_of(open_place(str(directory)))
    return verify(directory, write_missing_sums=write_missing_sums)
