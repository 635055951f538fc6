"""Describe the data of a run: the provenance of each dataset, the batch of a step, and a record as text with its loss mask."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.errors import DatasetError
from phalanx.data.origin.where import DataOrigin, Reading, documents_of_record, readings_of_step
from phalanx.data.reading.dataset import TokenSequences, inputs_of, tokenizer_of
from phalanx.data.reading.sources import DataIndex, DatasetPlace, MixtureIndex, open_places
from phalanx.data.stored.index import TRAIN, DatasetIndex
from phalanx.data.tokenizers.published.byte_fallback import FallbackTokenizer
from phalanx.data.tokenizers.tokenizer import BpeTokenizer, Tokenizer, load_tokenizer
from phalanx.run.resolve import ONLY
from phalanx.run.spec import RunSpec

# Provenance of a run's tokens: each dataset's address, the hash of its manifest, and its recipe.
#
# A dataset's fingerprint identifies its tokens. The recipe identifies their origin: ``source_sha256`` over the names and texts of all documents, the
# tokenizer's fingerprint, and the options. A dataset that was prepared in portions also has its plan, and ``phalanx data trace`` traces single
# records.


def provenance(index: DataIndex, addresses: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Return what each dataset was made of and its sizes, by the name of its source.

    ``addresses`` are by the same names. The name is empty for a run without ``[[data.sources]]``.
    """
    indices: Mapping[str, DatasetIndex] = {}
    if isinstance(index, DatasetIndex):
        indices = {ONLY: index}
    elif isinstance(index, MixtureIndex):
        indices = index.sources
    return {name: _dataset_facts(dataset, addresses.get(name, "")) for name, dataset in indices.items()}


def _dataset_facts(index: DatasetIndex, address: str) -> dict[str, object]:
    return {
        "address": address,
        "fingerprint": index.fingerprint,
        "manifest_sha256": hashlib.sha256(index.to_json().encode()).hexdigest(),
        "train_tokens": index.train_tokens,
        "held_out_tokens": index.held_out_tokens,
        "documents": index.train.documents + index.held_out.documents,
        "recipe": {name: value for name, value in asdict(index.recipe).items() if value not in (None, (), 0)},
    }


# Show the samples of one step of a run, for example after a jump of the loss.


@dataclass(frozen=True)
class ShownSample:
    """A sample of a step: its storage location, its documents, and its text."""

    reading: Reading
    documents: range | None
    """Numbers, from 0 in shard order, of the documents with tokens in the sample. ``None`` if the dataset is packed, or too large to
    count them."""
    record: ShownRecord


def show_batch(
    spec: RunSpec,
    index: DatasetIndex | MixtureIndex,
    step: int,
    slot: int | None = None,
    origin: DataOrigin | None = None,
) -> list[ShownSample]:
    """Return the samples of ``step`` (from 1), or of one of its slots, in slot order.

    Raises ``DatasetError`` for a step before the run's first, or a slot that does not exist. Reads the samples from the
    dataset.
    """
    if slot is not None and not slot < spec.train.slots:
        raise DatasetError(f"there is no slot {slot}: the run has {spec.train.slots}, from 0")
    readings = readings_of_step(spec, index, step, origin)
    places = open_places(spec.data)
    return [
        _shown(places[reading.source], reading, spec.train.seq_len)
        for reading in readings
        if slot is None or reading.slot == slot
    ]


def _shown(place: DatasetPlace, reading: Reading, seq_len: int) -> ShownSample:
    """Read the record of a reading and return it as text, with the documents it contains, which are unknown for packed
    datasets.
    """
    record = show_record(place, TRAIN, reading.record, seq_len)
    documents = None
    if not place.index.packed_seq_len:
        end = place.index.document_end
        end = load_tokenizer(place.folder).end_of_document if end is None else end
        documents = documents_of_record(place, reading.record, seq_len, end)
    return ShownSample(reading, documents, record)


@dataclass(frozen=True)
class RecordPiece:
    """A range of a record."""

    text: str
    learned: bool
    """True if its tokens have a loss. The first token of a document has none in any case."""


@dataclass(frozen=True)
class ShownRecord:
    """A record as text."""

    pieces: tuple[RecordPiece, ...]
    tokens: int
    """Number of tokens without padding."""
    padding: int


def show_record(place: DatasetPlace, split: str, number: int, seq_len: int) -> ShownRecord:
    """Return record ``number`` (from 0) of ``seq_len`` tokens of a split as text, in pieces that are trained on or not.

    Special tokens are spelled, and padding at the end is only counted. Raises ``DatasetError`` if there is no such
    record.
    """
    sequences = TokenSequences(place, split, seq_len)
    if not 0 <= number < len(sequences):
        raise DatasetError(
            f"there is no record {number:,}: the split has {len(sequences):,} of {seq_len:,} tokens, counted from 0"
        )
    tokenizer, sample = tokenizer_of(place), sequences.samples(np.array([number]))
    ids, learned = inputs_of(sample)[0], sample[0, :-1] >= 0
    end = place.index.document_end
    used = len(ids)
    if sequences.packed:
        padding_token = tokenizer.end_of_document if end is None else end
        unpadded = np.flatnonzero(ids != padding_token)
        used = min(
            int(unpadded[-1]) + 2 if len(unpadded) else 0, used
        )  # the first end token belongs to the last document
    ids, learned = ids[:used], learned[:used]
    runs = np.split(np.arange(used), np.flatnonzero(np.diff(learned)) + 1) if used else []
    pieces = (RecordPiece(_spelled(tokenizer, ids[run].tolist()), bool(learned[run[0]])) for run in runs)
    return ShownRecord(tuple(pieces), used, seq_len - used)


def _spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, special tokens included where the tokenizer has them."""
    if isinstance(tokenizer, BpeTokenizer | FallbackTokenizer):
        return str(HfTokenizer.from_str(tokenizer.serialized).decode(ids, skip_special_tokens=False))
    return tokenizer.decode(ids)
