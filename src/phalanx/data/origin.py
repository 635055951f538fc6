"""Describe the data of a run: which step reads what, the provenance of each dataset, and a record as text with its loss mask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction

import msgspec
import numpy as np
from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.errors import DatasetError
from phalanx.data.order.permutation import SampleOrder, key_of, place_in_permutation
from phalanx.data.reading.dataset import TokenSequences, inputs_of, tokenizer_of
from phalanx.data.reading.sources import (
    DataIndex,
    DatasetPlace,
    MixtureIndex,
    SourceUse,
    mixture_of,
    open_places,
    part_of,
    source_uses,
)
from phalanx.data.stored.index import TRAIN, DatasetIndex
from phalanx.data.tokenizers.published import PublishedTokenizer
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from phalanx.run.read import ONLY
from phalanx.run.rules import stages_of
from phalanx.run.spec import RunSpec

# Map each step of a run to its stored sequences, and each stored sequence to its steps.
#
# Both are closed forms of the run's order (``phalanx.data.order.permutation``, ``phalanx.data.order.mixture``). They need
# neither a trained run nor its log. A *record* is a sequence of ``train.seq_len`` tokens of a dataset's training split, counted
# from 0 in shard order. A document is in one or more records.


_SCANNED_TOKENS = 1 << 24
_COUNTED_TOKENS = 1 << 27
"""Limit for numbering documents, which counts end tokens from the beginning: it takes seconds up to this size."""


@dataclass(frozen=True)
class DataOrigin:
    """The position in the data at which a run's own steps begin; not the beginning for a child run."""

    step: int = 0
    """Number of earlier steps, done by its parents."""
    sample: int = 0
    """Number of samples drawn in these steps."""


@dataclass(frozen=True)
class SampleLocation:
    """A sample of the run and its storage location."""

    sample: int
    slot: int
    source: str
    """Empty for a run of one dataset."""
    epoch: int
    record: int
    file: str
    """The shard with its first token."""
    offset_bytes: int
    """Offset of that token in the shard."""


def index_of(index: DataIndex, name: str) -> DatasetIndex:
    """Return the index of a source; a run of one dataset has the source name "". Raises ``DatasetError`` for another name."""
    if isinstance(index, DatasetIndex):
        if name != ONLY:
            raise DatasetError(
                f"the run has one dataset, and no source called {name!r}: leave the source out"
            )
        return index
    if name not in index.sources:
        known_names = f"there are: {', '.join(index.sources)}"
        raise DatasetError(
            f"no source is called {name!r}; {known_names}" if name else f"name a source; {known_names}"
        )
    return index.sources[name]


class StageShares(msgspec.Struct, frozen=True):
    """Shares of the samples in one stage of a run."""

    first_step: int
    last_step: int | None
    """None: the stage has no end."""
    requested: dict[str, float] = msgspec.field(name="asked")
    achieved: dict[str, float]
    """Differs from ``requested`` only if the sum of the smallest integer weights exceeds ``LONGEST_PATTERN``."""


def mixture_facts(spec: RunSpec, index: DataIndex) -> tuple[list[StageShares], list[SourceUse]]:
    """Return a run's shares by stage, and the use of each source at the run's end.

    A run of one dataset has no stages. Shares are given as configured, scaled to a sum of one, and as the integer
    pattern realizes them.
    """
    if isinstance(index, DatasetIndex):
        samples, drawn = _single_order(spec, index).n, spec.train.steps * spec.train.batch_size
        epoch_steps = -(-samples // spec.train.batch_size)
        return [], [SourceUse(ONLY, samples, drawn, epoch_steps if drawn >= samples else None, None)]
    mixture, starts = mixture_of(spec, index), stages_of(spec.data)
    stages = []
    for number, (start, end) in enumerate(zip(starts, (*starts[1:], None), strict=True)):
        total = sum(Fraction(str(source.weights[number])) for source in mixture.sources)
        stages.append(
            StageShares(
                start + 1,
                end,
                {
                    source.name: float(Fraction(str(source.weights[number])) / total)
                    for source in mixture.sources
                },
                {
                    source.name: float(share)
                    for source, share in zip(mixture.sources, mixture.shares(number), strict=True)
                },
            )
        )
    return stages, source_uses(spec, mixture)


def readings_of_step(
    spec: RunSpec, index: DataIndex, step: int, origin: DataOrigin | None = None
) -> list[SampleLocation]:
    """Return which record each sample of step ``step`` (from 1) reads, with its slot, source, epoch, shard file and
    byte offset.

    In slot order. ``origin`` is the parent's end for a child run. Raises ``DatasetError`` for a step before the run's
    first.
    """
    origin = origin or DataOrigin()
    if not origin.step < step:
        raise DatasetError(
            f"the run's first own step is {origin.step + 1}, and step {step} is its parent's: give the directory of the parent"
        )
    batch = spec.train.batch_size
    samples = np.arange(batch, dtype=np.int64) + origin.sample + (step - 1 - origin.step) * batch
    if isinstance(index, MixtureIndex):
        mixture = mixture_of(spec, index)
        located = mixture.locate(samples)
        names = [mixture.sources[number].name for number in located.source.tolist()]
        firsts = {source.name: _part(spec, index, source.name).start for source in mixture.sources}
        records = [firsts[name] + record for name, record in zip(names, located.record.tolist(), strict=True)]
        epochs = located.epoch.tolist()
    else:
        order = _single_order(spec, index)
        records = order.dataset_indices(int(samples[0]), batch).tolist()
        epochs, names = (samples // order.n).tolist(), [ONLY] * batch
    per_slot = batch // spec.train.slots
    return [
        SampleLocation(
            sample,
            position // per_slot,
            name,
            epoch,
            record,
            *_stored(index_of(index, name), record * spec.train.seq_len),
        )
        for position, (sample, name, epoch, record) in enumerate(
            zip(samples.tolist(), names, epochs, records, strict=True)
        )
    ]


def steps_of_record(
    spec: RunSpec,
    index: DataIndex,
    source: str,
    record: int,
    origin: DataOrigin | None = None,
) -> list[int]:
    """Return the steps of the run, from 1, that train on record ``record`` of a source. For a child run, only its own steps are returned.

    Raises ``DatasetError`` if there is no such source or record. The result is empty for a record outside the part in use.
    """
    origin = origin or DataOrigin()
    records = index_of(index, source).samples(TRAIN, spec.train.seq_len)
    if not 0 <= record < records:
        raise DatasetError(
            f"there is no record {record:,}: the dataset has {records:,} of {spec.train.seq_len} tokens, counted from 0"
        )
    if isinstance(index, MixtureIndex):
        part = _part(spec, index, source)
        if record not in part:
            return []
        steps = mixture_of(spec, index).steps_of(source, record - part.start, spec.train.steps)
        return [step for step in steps if step > origin.step]
    return list(_steps_of_single(spec, _single_order(spec, index), record, origin))


def records_of_document(spec: RunSpec, place: DatasetPlace, document: int, end_of_document: int) -> range:
    """Return the records with tokens of a document of the training split, counted from 0 in shard order.

    Reads the tokens up to the document's end. A record's tokens are its inputs; a document's last token can be the
    target of the record before. Raises ``DatasetError`` if there is no such document. Also raises it for a packed
    dataset, whose documents are not in order.
    """
    if place.index.packed_seq_len:
        raise DatasetError(
            f"{place.address} is packed, and its documents are not in their order: give the number of a record"
        )
    shards = place.shards(TRAIN)
    counted, begin = 0, 0
    for start in range(0, shards.tokens, _SCANNED_TOKENS):
        tokens = shards.read(start, min(start + _SCANNED_TOKENS, shards.tokens))
        ends = np.flatnonzero(tokens == end_of_document) + start
        if counted + len(ends) > document:
            if document > counted:
                begin = int(ends[document - counted - 1]) + 1
            end = int(ends[document - counted])
            return range(begin // spec.train.seq_len, end // spec.train.seq_len + 1)
        if len(ends):
            begin = int(ends[-1]) + 1
        counted += len(ends)
    raise DatasetError(
        f"there is no document {document:,}: {place.address} has {place.index.train.documents:,} to train on, counted from 0"
    )


def documents_of_record(place: DatasetPlace, record: int, seq_len: int, end_of_document: int) -> range | None:
    """Return the documents, counted from 0 in shard order, with tokens in the inputs of a record of the training split.

    The inverse of ``records_of_document``, for an existing record of a dataset that is not packed. Reads the tokens before
    the record; ``None`` if there are too many.
    """
    start, shards = record * seq_len, place.shards(TRAIN)
    if start > _COUNTED_TOKENS:
        return None
    before = sum(
        int(
            np.count_nonzero(shards.read(position, min(position + _SCANNED_TOKENS, start)) == end_of_document)
        )
        for position in range(0, start, _SCANNED_TOKENS)
    )
    inside = shards.read(start, min(start + seq_len, shards.tokens))
    # An end token belongs to the document it ends, so one in the last position does not begin another document.
    return range(before, before + 1 + int(np.count_nonzero(inside[:-1] == end_of_document)))


def _steps_of_single(spec: RunSpec, order: SampleOrder, record: int, origin: DataOrigin) -> Iterator[int]:
    """Yield the steps, from 1, of a run of one dataset that train on ``record``, once an epoch; a child's own steps only."""
    batch = spec.train.batch_size
    stop = origin.sample + (spec.train.steps - origin.step) * batch
    for epoch in range(origin.sample // order.n, -(-stop // order.n)):
        place = place_in_permutation(np.array([record]), n=order.n, key=key_of("epoch", order.seed, epoch))
        sample = epoch * order.n + int(place[0])
        if origin.sample <= sample < stop:
            yield origin.step + (sample - origin.sample) // batch + 1


def _single_order(spec: RunSpec, index: DatasetIndex) -> SampleOrder:
    """Return the order of a run of one dataset; raises ``DatasetError`` if it has no complete sequence."""
    samples = index.samples(TRAIN, spec.train.seq_len)
    if not samples:
        raise DatasetError(f"the dataset has no whole sequence of train.seq_len = {spec.train.seq_len}")
    return SampleOrder(samples, spec.runtime.seed)


def _part(spec: RunSpec, index: MixtureIndex, name: str) -> range:
    """Return the samples of a source's training split that the run uses."""
    source = next(source for source in spec.data.sources if source.name == name)
    return part_of(source, index.sources[name].samples(TRAIN, spec.train.seq_len))


def _stored(index: DatasetIndex, token: int) -> tuple[str, int]:
    """Return the shard file with a token of the training split, and the token's byte offset in it; raises ``IndexError``."""
    for shard in index.train.shards:
        if token < shard.tokens:
            return shard.file, token * index.item_bytes
        token -= shard.tokens
    raise IndexError(f"token {token} is beyond the last shard")


# Provenance of a run's tokens: each dataset's address, the hash of its manifest, and its recipe.
#
# A dataset's fingerprint identifies its tokens. The recipe identifies their origin: ``source_sha256`` over the names and texts
# of all documents, the tokenizer's fingerprint, and the options. A dataset that was prepared in portions also has its plan, and
# ``phalanx data trace`` traces single records.


def provenance(index: DataIndex, addresses: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Return the address, hashes, sizes and recipe of each dataset, by the name of its source.

    ``addresses`` are by the same names, and "" is the name in a run without ``[[data.sources]]``. Recipe fields that
    are None, empty or 0 are left out, and so are held-out documents if none of them is in the training split.
    """
    indices = index.sources if isinstance(index, MixtureIndex) else {ONLY: index}
    return {
        name: {
            "address": addresses.get(name, ""),
            "fingerprint": dataset.fingerprint,
            "manifest_sha256": hashlib.sha256(dataset.to_json().encode()).hexdigest(),
            "train_tokens": dataset.train_tokens,
            "held_out_tokens": dataset.held_out_tokens,
            "documents": dataset.train.documents + dataset.held_out.documents,
            **(
                {
                    "held_out_documents": dataset.held_out.documents,
                    "held_out_in_training": dataset.held_out_in_training,
                }
                if dataset.held_out_in_training
                else {}
            ),
            "recipe": {
                key: value for key, value in asdict(dataset.recipe).items() if value not in (None, (), 0)
            },
        }
        for name, dataset in indices.items()
    }


# Show the samples of one step of a run, for example after a jump of the loss.


@dataclass(frozen=True)
class ShownSample:
    """A sample of a step: its storage location, its documents, and its text."""

    reading: SampleLocation
    documents: range | None
    """Numbers, from 0 in shard order, of the documents with tokens in the sample. ``None`` if the dataset is packed, or too large to
    count them."""
    record: ShownRecord


def show_batch(
    spec: RunSpec,
    index: DataIndex,
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


def _shown(place: DatasetPlace, reading: SampleLocation, seq_len: int) -> ShownSample:
    """Return the record of a reading as text, with the documents in it.

    The documents are None for a packed dataset, or a record too far into the data to count them.
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
    if isinstance(tokenizer, PublishedTokenizer):
        return str(HfTokenizer.from_str(tokenizer.serialized).decode(ids, skip_special_tokens=False))
    return tokenizer.decode(ids)
