"""The stage ``write``: the documents of a portion become shards of tokens, in the layout that training reads.

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

from phalanx.data.chat.encode import BadConversationError
from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import PREPARATION
from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.portions.work.find_duplicates import without_duplicates
from phalanx.data.portions.work.read_portion import KeptDocument, stepped_documents
from phalanx.data.preparing.split_writer import SplitWriter
from phalanx.data.stored.block_sums import BlockSummer
from phalanx.data.stored.index import HELD_OUT, SPLITS, TRAIN, ShardFile, Split, digest_of_shards
from phalanx.data.stored.shard_writer import OpenShard, ShardWriter

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
