"""Shows the samples of one step of a run: what one wants to see when its loss has jumped."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.errors import DatasetError
from phalanx.data.origin.show_record import ShownRecord, show_record
from phalanx.data.origin.where import DataOrigin, Reading, documents_of_record, readings_of_step
from phalanx.data.reading.places import DatasetPlace, open_places
from phalanx.data.reading.sources import MixtureIndex
from phalanx.data.stored.index import TRAIN, DatasetIndex
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.run.spec import RunSpec


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
