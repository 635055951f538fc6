"""Where a record of a prepared dataset comes from: its documents, and the raw files that they were read from.

Beside the shards of a portion lies the list of its documents with their lengths in tokens. Which of them a record of joined documents touches is a matter of sums;
how packed ones were packed follows from the lengths alone, so it is computed again.
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
    """A document of which a record holds tokens."""

    name: str
    """As it was called when it was read: with ``@OFFSET`` of its line in the file, uncompressed, or ``#ROW`` of a table."""
    url: str
    """The raw file."""
    first: int
    """Number, from 0, of its first token in the record among the document's."""
    tokens: int


def trace(
    place: Workplace, index: DatasetIndex, split: str, record: int, seq_len: int
) -> list[TracedDocument]:
    """The documents of a record of ``seq_len`` tokens, in its order. For packed datasets ``seq_len`` is theirs.

    Raises ``PreparationError`` for a record that is not there.
    """
    records = index.samples(split, seq_len)
    if not 0 <= record < records:
        raise PreparationError(f"there is no record {record:,} in {split}: it has {records:,}, from 0")
    found: list[TracedDocument] = []
    start, stop = record * seq_len, (record + 1) * seq_len
    at = 0
    for name, shards in itertools.groupby(index.split(split).shards, lambda shard: _portion_name(shard.file)):
        tokens = sum(shard.tokens for shard in shards)
        if at < stop and start < at + tokens:
            found += _in_portion(place, index, name, max(0, start - at), min(tokens, stop - at))
        at += tokens
    return found


def _in_portion(
    place: Workplace, index: DatasetIndex, name: str, start: int, stop: int
) -> list[TracedDocument]:
    plan, number = place.plan, name.rpartition("-")[2]
    if not number.isdecimal() or int(number) >= len(plan.portions):
        raise PreparationError(
            f"{place.url}/{INDEX_KEY} names a shard {name} that no portion wrote: it was changed; copy it again, or prepare the dataset anew"
        )
    portion = int(number)
    rows = _documents_of(place, origin_key(name))
    lengths = [length for _, _, length in rows]
    seq_len = index.packed_seq_len
    stretches: Iterable[tuple[int, int, int]] = _joined(lengths, start, stop)
    if seq_len:
        records = packed(lengths, seq_len, plan.recipe.output.length_classes)
        record = next(itertools.islice(records, start // seq_len, None), [])
        stretches = ((number, piece.start, len(piece)) for number, piece in record)
    return [
        TracedDocument(
            rows[number][1], plan.files[plan.portions[portion][rows[number][0]].file].url, first, tokens
        )
        for number, first, tokens in stretches
    ]


def _documents_of(place: Workplace, key: str) -> list[tuple[int, str, int]]:
    """(number of its piece in the portion, name, tokens) of each document of a portion. Raises ``PreparationError`` if the list is damaged."""
    try:
        lines = zlib.decompress(place.store.get(key))
        return msgspec.json.decode(b"[" + lines.replace(b"\n", b",") + b"]", type=list[tuple[int, str, int]])
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PreparationError(
            f"{place.url}/{key}, the list of documents that was written beside the tokens, is damaged ({error}): nothing that is trained on is, but "
            "its records cannot be traced until it is copied again, or the dataset prepared anew"
        ) from None


def _joined(lengths: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(document, first token, tokens) of a stretch of documents that are joined."""
    at = 0
    for number, length in enumerate(lengths):
        first, last = max(start, at), min(stop, at + length)
        if first < last:
            yield number, first - at, last - first
        at += length


def _portion_name(file: str) -> str:
    return "-".join(PurePath(file).stem.split("-")[:2])
