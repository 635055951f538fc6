"""The stages that write output: ``tokenizer``, ``write`` (a portion's documents become shards of tokens) and ``seal``.

A portion has its own shards and does not depend on other portions: ``train-00077.bin``, ``train-00077-001.bin``, ... with block sums beside them, and
the same for held-out documents. Within the portion, documents are joined end to end or packed into records. The list of documents is
stored in ``preparation/origin``, so that records can be traced.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.chat.encode import BadConversationError
from phalanx.data.dedup import count_shared
from phalanx.data.errors import PreparationError
from phalanx.data.portions.find_duplicates import without_duplicates
from phalanx.data.portions.planning.plan import INDEX_KEY, PREPARATION, PreparationPlan, put_tokenizer
from phalanx.data.portions.read_portion import KeptDocument, stepped_documents
from phalanx.data.portions.tasks import Stage, StoredObject, TaskManifest, Workplace, manifest_key
from phalanx.data.preparing.prepare import interruptible
from phalanx.data.preparing.split_writer import SplitWriter, packed
from phalanx.data.stored.index import (
    HELD_OUT,
    SPLITS,
    TRAIN,
    ChatRecipe,
    DatasetIndex,
    Recipe,
    ShardFile,
    Split,
    digest_of_shards,
)
from phalanx.data.stored.shard_writer import BlockSummer, OpenShard, ShardWriter
from phalanx.data.tokenizers.tokenizer import train_bpe
from phalanx.store.store import MOST_CREATED_BYTES, ExistsError

_MOST_SHARDS_OF_A_PORTION = 1_000


def shard_tokens(shard_mib: int, dtype: str, seq_len: int) -> int:
    """Return the number of tokens of a full shard, a multiple of the record length if there are records."""
    tokens = (shard_mib << 20) // np.dtype(dtype).itemsize
    return max(tokens - tokens % seq_len, seq_len) if seq_len else tokens


def write_portion(place: Workplace, number: int) -> None:
    """Run task ``number`` of the stage ``write``: store the shards of the portion's kept documents, by split, and
    commit its manifest.
    """
    manifest = place.new_manifest("write", number)
    writers = {name: _PortionSplit(place, manifest, name) for name in SPLITS}
    for split, document in split_documents(place, number, manifest):
        writers[split].documents.add(document)
    splits = {name: writer.close() for name, writer in writers.items()}
    end = place.plan.held_out_end
    in_both = int(end is not None and end.portion == number and end.characters > 0)
    manifest.counts["documents kept"] = sum(split.documents for split in splits.values()) - in_both
    manifest.counts["text bytes"] = sum(split.text_bytes for split in splits.values())
    manifest.counts["tokens to train on"] = splits[TRAIN].tokens
    manifest.counts["tokens held out"] = splits[HELD_OUT].tokens
    place.commit(manifest)


def split_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[tuple[str, KeptDocument]]:
    """Yield (split, document) of a portion's kept documents, in order.

    ``manifest`` counts documents read and dropped, by reason. Duplicates are left out, if the recipe removes them.
    """
    plan, rule = place.plan, place.plan.split_rule
    read_documents = stepped_documents if plan.recipe.dedup is None else without_duplicates
    for ordinal, document in enumerate(read_documents(place, number, manifest)):
        yield from rule.divide(document, number, ordinal)


class _PortionSplit:
    """One split of a portion: its shards, its list of documents and the hashes of their texts, added to the manifest."""

    def __init__(self, place: Workplace, manifest: TaskManifest, split: str) -> None:
        """Open the writers of one split of a portion; objects are added to ``manifest`` as they are stored."""
        self._place, self._manifest, self._split = place, manifest, split
        self._name = f"{split}-{manifest.task:05d}"
        self._origin: list[tuple[int, str, int]] = []
        output, dtype = place.plan.recipe.output, place.encoding.dtype
        tokens = shard_tokens(output.shard_mib, dtype, output.seq_len)
        shards = ShardWriter(self, dtype=dtype, shard_tokens=tokens)

        def on_encoded(document: KeptDocument, tokens: int) -> None:
            self._origin.append((document.piece, document.name, tokens))

        self.documents = SplitWriter(shards, place.encoding, self._on_bad, on_encoded)

    def close(self) -> Split:
        """Store the last shard, the documents' origins and the text hashes under the task's keys, and return the split.

        It adds the split's facts and counts to the manifest, which the caller stores.
        """
        split = self.documents.close()
        if self._origin:
            rows = "\n".join(
                json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in self._origin
            )
            self._place.put(self._manifest, origin_key(self._name), zlib.compress(rows.encode(), 1))
        texts = self.documents.text_hashes.tobytes()
        self._place.put_packed(self._manifest, texts_key(self._split, self._manifest.task), texts)
        self._manifest.facts[self._split] = {
            "shards": [msgspec.structs.asdict(shard) for shard in split.shards],
            "documents": split.documents,
            "text_bytes": split.text_bytes,
            "padding": split.padding,
            **({"learned": split.learned} if self._place.encoding.chat is not None else {}),
        }
        counts = self._manifest.counts
        for reason, count in self.documents.left_out.items():
            counts[f"dropped: {reason}"] = counts.get(f"dropped: {reason}", 0) + count
        return split

    def open(self, number: int) -> OpenShard:
        """Return the writer of the portion's shard ``number``. Raises ``ValueError`` for too many."""
        if number >= _MOST_SHARDS_OF_A_PORTION:
            raise ValueError(f"portion {self._name} has {number} shards")
        name = self._name + (f"-{number:03d}" if number else "")
        return _StoredShard(self._place, self._manifest, name)

    def digest(self, shards: Sequence[ShardFile]) -> str:
        """Return the digest of the portion's part of the split."""
        return digest_of_shards(shards)

    def _on_bad(self, document: KeptDocument, error: BadConversationError) -> None:
        """Raise ``PreparationError`` for a conversation that cannot be trained on if its source has ``on_bad =
        "stop"``; otherwise do nothing.
        """
        plan, portion = self._place.plan, self._manifest.task
        file = plan.files[plan.portions[portion][document.piece].file]
        if plan.recipe.source[file.source].on_bad == "stop":
            raise PreparationError(
                f'portion {portion}: conversation {document.name}: {error}; mend it and plan again, or write source.on_bad = "skip" and plan again'
            ) from error


class _StoredShard:
    """A shard in memory that is stored when it is complete."""

    def __init__(self, place: Workplace, manifest: TaskManifest, name: str) -> None:
        self._place, self._manifest, self._name = place, manifest, name
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def finish(self, tokens: int) -> ShardFile:
        """Store the collected tokens and their block sums as objects of the task, and return the shard's entry for the index."""
        data, sums = bytes(self._data), BlockSummer()
        self._data.clear()
        sums.update(data)
        checksum = xxhash.xxh3_128(data).hexdigest()
        self._place.put(self._manifest, f"{self._name}.bin", data)
        self._place.put(self._manifest, f"{self._name}.sums", sums.content(checksum))
        return ShardFile(f"{self._name}.bin", tokens, checksum, hashlib.sha256(data).hexdigest())

    def abandon(self) -> None:
        pass


def texts_key(split: str, portion: int) -> str:
    """Return the name of the text hashes of one split of a portion."""
    return f"texts-{split}-{portion:05d}"


def origin_key(name: str) -> str:
    """Return the key of the list of documents, with their lengths in tokens, in the shards with this name."""
    return f"{PREPARATION}/origin/{name}.z"


# The stage ``tokenizer``: one task that trains a BPE tokenizer on a sample of the training documents.
#
# The sample is the beginning of evenly spaced portions: as many as ``output.tokenizer_bytes`` allows, and at least one.


def sampled_portions(plan: PreparationPlan) -> list[int]:
    """Return the numbers of portions to train the tokenizer on, evenly spread, at least one: about ``tokenizer_bytes``."""
    count = len(plan.portions)
    total_bytes = max(1, sum(plan.bytes_of(number) for number in range(count)))
    chosen = max(1, min(count, count * plan.recipe.output.tokenizer_bytes // total_bytes))
    return [number * count // chosen for number in range(chosen)]


def train_tokenizer(place: Workplace, number: int) -> None:
    """Run the only task of the stage ``tokenizer``: train BPE on a sample of the training split, and store it and its manifest."""
    manifest = place.new_manifest("tokenizer", number)
    tokenizer = interruptible(
        lambda: train_bpe(_sample(place), vocab_size=place.plan.recipe.output.vocab_size)
    )
    for key in put_tokenizer(place.store, tokenizer):
        data = place.store.get(key)
        manifest.objects.append(StoredObject(key, len(data), xxhash.xxh3_128(data).hexdigest()))
    manifest.facts["fingerprint"] = tokenizer.fingerprint
    place.commit(manifest)


def _sample(place: Workplace) -> Iterator[str]:
    """Yield whole texts of the training split from the sampled portions, until those of a portion have its equal share
    of ``tokenizer_bytes``.
    """
    output = place.plan.recipe.output
    chosen = sampled_portions(place.plan)
    for portion in chosen:
        remaining = max(1, output.tokenizer_bytes // len(chosen))
        for split, document in split_documents(place, portion):
            if split == TRAIN:
                yield document.text
                remaining -= len(document.text.encode())
            if remaining <= 0:
                break


# The stage ``seal``: one task that commits the dataset by writing the index of all portions.
#
# The dataset exists only with ``index.json``. It is written by a create operation, or, if it is too large for one, by a put
# operation, which always has the same bytes.


def seal(place: Workplace, _number: int) -> None:
    """Run the only task of the stage ``seal``: check the shards' sizes, and store the tokenizer and the index, which
    complete the dataset.

    Raises ``PreparationError`` if an object is missing or the index of another dataset is there.
    """
    manifests = place.manifests(Stage("write", len(place.plan.portions)))
    _require_objects(place, manifests)
    index = dataset_index(place, manifests)
    put_tokenizer(place.store, place.encoding, below="")
    text = index.to_json().encode()
    try:
        if len(text) <= MOST_CREATED_BYTES:
            place.store.create(INDEX_KEY, text)
        else:
            place.store.put(INDEX_KEY, text)
    except ExistsError:
        raise PreparationError(
            f"{place.url}/{INDEX_KEY} is of another dataset; prepare again with another --out"
        ) from None


def dataset_index(place: Workplace, manifests: list[TaskManifest]) -> DatasetIndex:
    """Return the index of the shards of all portions, in order. Raises ``PreparationError`` if no tokens are left to train on."""
    plan, output, encoding = place.plan, place.plan.recipe.output, place.encoding
    splits = {name: _joined(name, manifests) for name in SPLITS}
    if not splits[TRAIN].tokens:
        raise PreparationError(
            "no document is left to train on; see the reasons: phalanx data show " + place.url
        )
    chat = encoding.chat
    recipe = Recipe(
        plan.sha256,
        plan.tokenizer,
        output.vocab_size if plan.tokenizer == "bpe" else None,
        output.held_out,
        shard_tokens(output.shard_mib, encoding.dtype, output.seq_len),
        place.tokenizer.document_start if chat is None else (),
        output.seq_len,
        None if chat is None else ChatRecipe(chat.layout.template.sha256, chat.end, output.too_long),
        output.hold_out_by,
    )
    return encoding.index(recipe, splits, held_out_in_training=_held_out_in_training(place, manifests))


def has_text_hashes(manifests: Sequence[TaskManifest]) -> bool:
    """Return False if an earlier version wrote a portion without the hashes of its texts."""
    return all(_text_hashes(manifest, name) is not None for manifest in manifests for name in SPLITS)


def _held_out_in_training(place: Workplace, manifests: Sequence[TaskManifest]) -> int:
    """Return the number of held-out documents whose text is also in the training split, by the stored hashes; 0 without them."""
    if not has_text_hashes(manifests):
        return 0

    def read(name: str) -> Iterator[NDArray[np.uint64]]:
        stored = filter(None, (_text_hashes(manifest, name) for manifest in manifests))
        return (np.frombuffer(place.get_packed(texts), dtype="<u8") for texts in stored)

    return count_shared(np.concatenate([np.empty(0, "<u8"), *read(HELD_OUT)]), read(TRAIN))


def _text_hashes(manifest: TaskManifest, name: str) -> StoredObject | None:
    """Return the object with the hashes of the texts of split ``name``; None if the task stored none."""
    key = texts_key(name, manifest.task)
    return next((item for item in manifest.objects if item.key.rpartition("/")[2] == key), None)


def _joined(name: str, manifests: list[TaskManifest]) -> Split:
    """Return the split ``name`` with the shards of all portions, in order, and summed counts."""
    facts = [manifest.facts[name] for manifest in manifests]
    shards = tuple(ShardFile(**shard) for fact in facts for shard in fact["shards"])
    documents, text_bytes, padding, learned = (
        sum(fact.get(field, 0) for fact in facts)
        for field in ("documents", "text_bytes", "padding", "learned")
    )
    return Split(shards, documents, text_bytes, digest_of_shards(shards), padding, learned)


def _require_objects(place: Workplace, manifests: list[TaskManifest]) -> None:
    """Raise ``PreparationError`` if an object of the manifests is missing from the store or has another size."""
    stored_bytes = {info.key: info.nbytes for info in place.store.list()}
    for manifest in manifests:
        bad = next((item for item in manifest.objects if stored_bytes.get(item.key) != item.nbytes), None)
        if bad is not None:
            raise PreparationError(
                f"{place.url}/{bad.key} is gone or cut short since it was written; remove {manifest_key('write', manifest.task)} there, "
                "and give the same command"
            )


def sweep(place: Workplace, stages: Sequence[str]) -> None:
    """Delete the objects of ``stages``, which only earlier stages needed, and leftovers of killed writers. The dataset must be sealed."""
    for stage in stages:
        below = f"{PREPARATION}/{stage}"
        place.store.delete([info.key for info in place.store.list(below)])
    place.store.remove_unfinished()


# Trace a record of a prepared dataset to its documents and their raw files.
#
# A portion's shards are stored with a list of its documents and their lengths in tokens. For joined documents, the lengths determine the
# documents of a record. For packed documents, the packing follows from the lengths and is computed again.


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
    for name, shards in itertools.groupby(
        index.split(split).shards, lambda shard: "-".join(PurePath(shard.file).stem.split("-")[:2])
    ):
        tokens = sum(shard.tokens for shard in shards)
        if offset < stop and start < offset + tokens:
            traced += _in_portion(place, index, name, max(0, start - offset), min(tokens, stop - offset))
        offset += tokens
    return traced


def _in_portion(
    place: Workplace, index: DatasetIndex, name: str, start: int, stop: int
) -> list[TracedDocument]:
    """Return the documents of tokens ``start`` to ``stop`` of the portion that wrote the shard ``name``; in packed
    records those of the record with ``start``. Raises ``PreparationError`` if no portion wrote it.
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
    ranges: Iterable[tuple[int, int, int]] = _overlaps(lengths, start, stop)
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


def _overlaps(lengths: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (document, first token, tokens) for each document that overlaps tokens ``start`` to ``stop`` of the
    documents joined in order.
    """
    offset = 0
    for number, length in enumerate(lengths):
        first, last = max(start, offset), min(stop, offset + length)
        if first < last:
            yield number, first - offset, last - first
        offset += length
