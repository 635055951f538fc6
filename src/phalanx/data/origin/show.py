"""The data of a run for people: provenance of each dataset, the batch of a step, and a record as text with what is learned of it."""

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

# Where the tokens of a run come from: of each dataset its address, the hash of its manifest, and the recipe that made it.
#
# The fingerprint of a dataset says which tokens they are; the recipe says what they were made from (``source_sha256`` over the names and texts
# of all documents, the tokenizer's fingerprint, how they were cut), so that the chain goes back to the texts. A dataset that was prepared by
# steps keeps its plan beside it, and ``phalanx data trace`` follows single records.


def provenance(index: DataIndex, addresses: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """What is known of each dataset by the name of its source; of a run without ``[[data.sources]]`` that is empty."""
    known: Mapping[str, DatasetIndex] = {}
    if isinstance(index, DatasetIndex):
        known = {ONLY: index}
    elif isinstance(index, MixtureIndex):
        known = index.sources
    return {name: _of_one(one, addresses.get(name, "")) for name, one in known.items()}


def _of_one(index: DatasetIndex, address: str) -> dict[str, object]:
    return {
        "address": address,
        "fingerprint": index.fingerprint,
        "manifest_sha256": hashlib.sha256(index.to_json().encode()).hexdigest(),
        "train_tokens": index.train_tokens,
        "held_out_tokens": index.held_out_tokens,
        "documents": index.train.documents + index.held_out.documents,
        "recipe": {name: value for name, value in asdict(index.recipe).items() if value not in (None, (), 0)},
    }


# Shows the samples of one step of a run: what one wants to see when its loss has jumped.


@dataclass(frozen=True)
class ShownSample:
    """A sample of a step: where it is stored, of which documents it is, and its text."""

    reading: Reading
    documents: range | None
    """Numbers, from 0 in the order of the shards, of the documents that it holds tokens of; ``None`` if the dataset is packed, or so
    large that nobody counted."""
    record: ShownRecord


def show_batch(
    spec: RunSpec,
    index: DatasetIndex | MixtureIndex,
    step: int,
    slot: int | None = None,
    origin: DataOrigin | None = None,
) -> list[ShownSample]:
    """The samples of ``step`` (from 1), or those of one slot of it, in the slots' order.

    Raises ``DatasetError`` for a step before the run's first, or a slot that it does not have.
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
    record = show_record(place, TRAIN, reading.record, seq_len)
    documents = None
    if not place.index.packed_seq_len:
        end = place.index.document_end
        end = load_tokenizer(place.folder).end_of_document if end is None else end
        documents = documents_of_record(place, reading.record, seq_len, end)
    return ShownSample(reading, documents, record)


@dataclass(frozen=True)
class Piece:
    """A stretch of a record."""

    text: str
    learned: bool
    """True if there is a loss on its tokens; those that begin a document have none all the same."""


@dataclass(frozen=True)
class ShownRecord:
    """A record as text."""

    pieces: tuple[Piece, ...]
    tokens: int
    """Without those that fill it up."""
    padding: int


def show_record(place: DatasetPlace, split: str, number: int, seq_len: int) -> ShownRecord:
    """Record ``number`` of ``seq_len`` tokens of a split, from 0, special tokens spelled out. Raises ``DatasetError`` if there is none."""
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
        filling = tokenizer.end_of_document if end is None else end
        others = np.flatnonzero(ids != filling)
        used = min(int(others[-1]) + 2 if len(others) else 0, used)  # the last document's end is its own
    ids, learned = ids[:used], learned[:used]
    runs = np.split(np.arange(used), np.flatnonzero(np.diff(learned)) + 1) if used else []
    pieces = (Piece(_spelled(tokenizer, ids[run].tolist()), bool(learned[run[0]])) for run in runs)
    return ShownRecord(tuple(pieces), used, seq_len - used)


def _spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    if isinstance(tokenizer, BpeTokenizer | FallbackTokenizer):
        return str(HfTokenizer.from_str(tokenizer.serialized).decode(ids, skip_special_tokens=False))
    return tokenizer.decode(ids)
