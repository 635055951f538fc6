"""The stages that write: ``tokenizer``, ``write`` (documents of a portion become shards of tokens) and ``seal``.

A portion has its own shards, so that it depends on no other: ``train-00077.bin``, ``train-00077-001.bin``, ... with block sums beside them, and the same for held-out
documents. Documents are joined end to end, or packed into records, within the portion. Which documents those were, in order, is kept in
``preparation/origin`` for whoever asks where a record comes from.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.chat.encode import BadConversationError
from phalanx.data.dedup import count_shared
from phalanx.data.errors import PreparationError
from phalanx.data.portions.find_duplicates import KeptDocument, stepped_documents, without_duplicates
from phalanx.data.portions.planning.plan import INDEX_KEY, PREPARATION, PreparationPlan, put_tokenizer
from phalanx.data.portions.tasks import Stage, StoredObject, TaskManifest, Workplace, manifest_key
from phalanx.data.preparing.prepare import interruptible
from phalanx.data.preparing.split_writer import SplitWriter
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
    """Tokens of a full shard: whole records, if there are any."""
    tokens = (shard_mib << 20) // np.dtype(dtype).itemsize
    return max(tokens - tokens % seq_len, seq_len) if seq_len else tokens


def write_portion(place: Workplace, number: int) -> None:
    """Do the task ``number`` of the stage ``write``."""
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
    """(split, document) of what is kept of a portion, in order. Documents read and dropped are counted in ``manifest``, by reason."""
    plan, rule = place.plan, place.plan.split_rule
    kept = stepped_documents if plan.recipe.dedup is None else without_duplicates
    for ordinal, document in enumerate(kept(place, number, manifest)):
        yield from rule.divide(document, number, ordinal)


class _PortionSplit:
    """One split of a portion: its shards, the list of its documents and the hashes of their texts, entered in the manifest."""

    def __init__(self, place: Workplace, manifest: TaskManifest, split: str) -> None:
        self._place, self._manifest, self._split = place, manifest, split
        self._name = f"{split}-{manifest.task:05d}"
        self._origin: list[tuple[int, str, int]] = []
        output, dtype = place.plan.recipe.output, place.encoding.dtype
        tokens = shard_tokens(output.shard_mib, dtype, output.seq_len)
        shards = ShardWriter(self, dtype=dtype, shard_tokens=tokens)
        self.documents = SplitWriter(shards, place.encoding, self._on_bad, self._on_encoded)

    def close(self) -> Split:
        """Write what is left, and enter what the index says of the split."""
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
        """Begin the shard with this number."""
        if number >= _MOST_SHARDS_OF_A_PORTION:
            raise ValueError(f"portion {self._name} has {number} shards")
        name = self._name + (f"-{number:03d}" if number else "")
        return _StoredShard(self._place, self._manifest, name)

    def digest(self, shards: Sequence[ShardFile]) -> str:
        """The digest of the portion's part of the split."""
        return digest_of_shards(shards)

    def _on_encoded(self, document: KeptDocument, tokens: int) -> None:
        self._origin.append((document.piece, document.name, tokens))

    def _on_bad(self, document: KeptDocument, error: BadConversationError) -> None:
        plan, portion = self._place.plan, self._manifest.task
        file = plan.files[plan.portions[portion][document.piece].file]
        if plan.recipe.source[file.source].on_bad == "stop":
            raise PreparationError(
                f'portion {portion}: conversation {document.name}: {error}; mend it and plan again, or write source.on_bad = "skip" and plan again'
            ) from error


class _StoredShard:
    """A shard in memory, put into the store when it is finished."""

    def __init__(self, place: Workplace, manifest: TaskManifest, name: str) -> None:
        self._place, self._manifest, self._name = place, manifest, name
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def finish(self, tokens: int) -> ShardFile:
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
    """The name of the hashes of the texts of one split of a portion."""
    return f"texts-{split}-{portion:05d}"


def origin_key(name: str) -> str:
    """The key of the list of documents, with their lengths in tokens, that lie in the shards called ``name``."""
    return f"{PREPARATION}/origin/{name}.z"


# The stage ``tokenizer``: one task that trains a BPE on a sample of the documents to train on.
#
# The sample is of portions that are spread evenly over all, as many as ``output.tokenizer_bytes`` allows, at least one, and of each of them the beginning.


def sampled_portions(plan: PreparationPlan) -> list[int]:
    """The portions that the tokenizer is trained on."""
    count = len(plan.portions)
    total_bytes = max(1, sum(plan.bytes_of(number) for number in range(count)))
    chosen = max(1, min(count, count * plan.recipe.output.tokenizer_bytes // total_bytes))
    return [number * count // chosen for number in range(chosen)]


def train_tokenizer(place: Workplace, number: int) -> None:
    """Do the only task of the stage ``tokenizer``."""
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
    output = place.plan.recipe.output
    chosen = sampled_portions(place.plan)
    for portion in chosen:
        left = max(1, output.tokenizer_bytes // len(chosen))
        for split, document in split_documents(place, portion):
            if split == TRAIN:
                yield document.text
                left -= len(document.text.encode())
            if left <= 0:
                break


# The stage ``seal``: one task that makes a dataset of all portions by writing its index, which is the commit.
#
# Until ``index.json`` is there, there is no dataset; and it is written by a create, or, above what a create takes, by a put of the same bytes from whoever seals.


def seal(place: Workplace, _number: int) -> None:
    """Do the only task of the stage ``seal``."""
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
    """The index of the shards of all portions, in their order. Raises ``PreparationError`` if there is no text to train on."""
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
    return encoding.index(recipe, splits)


def held_out_in_training(place: Workplace, manifests: Sequence[TaskManifest]) -> int | None:
    """Held-out documents whose text is in the training split too; ``None`` if an earlier version wrote one of the portions, and kept no hashes."""
    hashes: dict[str, list[StoredObject]] = {name: [] for name in SPLITS}
    for manifest in manifests:
        written = {item.key.rpartition("/")[2]: item for item in manifest.objects}
        for name in SPLITS:
            texts = written.get(texts_key(name, manifest.task))
            if texts is None:
                return None
            hashes[name].append(texts)

    def read(name: str) -> Iterator[NDArray[np.uint64]]:
        return (np.frombuffer(place.get_packed(texts), dtype="<u8") for texts in hashes[name])

    return count_shared(np.concatenate([np.empty(0, "<u8"), *read(HELD_OUT)]), read(TRAIN))


def _joined(name: str, manifests: list[TaskManifest]) -> Split:
    facts = [manifest.facts[name] for manifest in manifests]
    shards = tuple(ShardFile(**shard) for fact in facts for shard in fact["shards"])
    documents, text_bytes, padding, learned = (
        sum(fact.get(field, 0) for fact in facts)
        for field in ("documents", "text_bytes", "padding", "learned")
    )
    return Split(shards, documents, text_bytes, digest_of_shards(shards), padding, learned)


def _require_objects(place: Workplace, manifests: list[TaskManifest]) -> None:
    there = {info.key: info.nbytes for info in place.store.list()}
    for manifest in manifests:
        bad = next((item for item in manifest.objects if there.get(item.key) != item.nbytes), None)
        if bad is not None:
            raise PreparationError(
                f"{place.url}/{bad.key} is gone or cut short since it was written; remove {manifest_key('write', manifest.task)} there, "
                "and give the same command"
            )


def sweep(place: Workplace, stages: Sequence[str]) -> None:
    """Remove what only earlier stages needed, and what killed writers left. The dataset must be sealed."""
    for stage in stages:
        below = f"{PREPARATION}/{stage}"
        place.store.delete([info.key for info in place.store.list(below)])
    place.store.remove_unfinished()
