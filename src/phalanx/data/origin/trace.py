"""Trace a record of a prepared dataset to its documents and their raw files.

A portion's shards are stored with a list of its documents and their lengths in tokens. For joined documents, the lengths determine the
documents of a record. For packed documents, the packing follows from the lengths and is computed again.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

import msgspec

from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import INDEX_KEY
from phalanx.data.portions.tasks import Workplace
from phalanx.data.portions.write_portion import origin_key
from phalanx.data.preparing.packing import packed
from phalanx.data.stored.index import DatasetIndex


@dataclass(frozen=True)
class TracedDocument:
    """A document with tokens in a record."""

    name: str
    """The document's name when it was read, with ``@OFFSET`` of its line in the uncompressed file or ``#ROW`` of a table."""
    url: str
    """Address of the raw file."""
    first: int
    """Index in the document of its first token in the record."""
    tokens: int


def trace(
    place: Workplace, index: DatasetIndex, split: str, record: int, seq_len: int
) -> list[TracedDocument]:
    """Return the documents of a record of ``seq_len`` tokens, in order. For packed datasets, ``seq_len`` is that of the
    packing.

    Raises ``PreparationError`` if the record does not exist. Reads the lists of documents that the preparation stored.
    Raises ``PreparationError`` also if one is damaged.
    """
    records = index.samples(split, seq_len)
    if not 0 <= record < records:
        raise PreparationError(f"there is no record {record:,} in {split}: it has {records:,}, from 0")
    traced: list[TracedDocument] = []
    start, stop = record * seq_len, (record + 1) * seq_len
    offset = 0
    for name, shards in itertools.groupby(index.split(split).shards, lambda shard: _portion_name(shard.file)):
        tokens = sum(shard.tokens for shard in shards)
        if offset < stop and start < offset + tokens:
            traced += _in_portion(place, index, name, max(0, start - offset), min(tokens, stop - offset))
        offset += tokens
    return traced


def _in_portion(
    place: Workplace, index: DatasetIndex, name: str, start: int, stop: int
) -> list[TracedDocument]:
    """Return the documents of tokens ``start`` to ``stop`` of the portion that wrote the shard ``name``; raises
    ``PreparationError``.
    """
    plan, number = place.plan, name.rpartition("-")[2]
    if not number.isdecimal() or int(number) >= len(plan.portions):
        raise PreparationError(
            f"{place.url}/{INDEX_KEY} names a shard {name} that no portion wrote: the index was changed; copy it again, or prepare the dataset again"
        )
    portion = int(number)
    rows = _documents_of(place, origin_key(name))
    lengths = [length for _, _, length in rows]
    seq_len = index.packed_seq_len
    ranges: Iterable[tuple[int, int, int]] = _joined(lengths, start, stop)
    if seq_len:
        records = packed(lengths, seq_len, plan.recipe.output.length_classes)
        record = next(itertools.islice(records, start // seq_len, None), [])
        ranges = ((number, piece.start, len(piece)) for number, piece in record)
    return [
        TracedDocument(
            rows[number][1], plan.files[plan.portions[portion][rows[number][0]].file].url, first, tokens
        )
        for number, first, tokens in ranges
    ]


def _documents_of(place: Workplace, key: str) -> list[tuple[int, str, int]]:
    """Return (number of its piece in the portion, name, tokens) of each document of a portion. Raises ``PreparationError`` if the list is damaged."""
    try:
        lines = zlib.decompress(place.store.get(key))
        return msgspec.json.decode(b"[" + lines.replace(b"\n", b",") + b"]", type=list[tuple[int, str, int]])
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PreparationError(
            f"{place.url}/{key}, the list of documents, is damaged ({error}): the tokens are not affected, but "
            "records cannot be traced until it is copied again, or the dataset prepared again"
        ) from None


def _joined(lengths: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (document, first token, tokens) for each document that overlaps tokens ``start`` to ``stop`` of the
    documents joined in order.
    """
    offset = 0
    for number, length in enumerate(lengths):
        first, last = max(start, offset), min(stop, offset + length)
        if first < last:
            yield number, first - offset, last - first
        offset += length


def _portion_name(file: str) -> str:
    return "-".join(PurePath(file).stem.split("-")[:2])
