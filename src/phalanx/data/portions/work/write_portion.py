"""The stage ``write``: the documents of a portion become shards of tokens, in the layout that training reads.

A portion has its own shards, so that it depends on no other: ``train-00077.bin``, ``train-00077-001.bin``, ... with block sums beside them, and the same for held-out
documents. Documents are joined end to end, or packed into records, within the portion. Which documents those were, in order, is kept in
``preparation/origin`` for whoever asks where a record comes from.
"""

from __future__ import annotations

import hashlib
import json
import zlib

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.chat.encode import BadConversationError, ChatEncoder, ChatLayout
from phalanx.data.chat.template import ChatTemplate
from phalanx.data.dedup.split_overlap import SplitOverlap
from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import PREPARATION
from phalanx.data.portions.tasks import TaskManifest, Workplace
from phalanx.data.portions.to_train_on import split_documents
from phalanx.data.preparing.packing import PackerByLength
from phalanx.data.stored.block_sums import BlockSummer
from phalanx.data.stored.index import HELD_OUT, SPLITS, TRAIN, ShardFile, dtype_for, loss_bit
from phalanx.data.tokenizers.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 21
_MOST_SHARDS_OF_A_PORTION = 1_000


def shard_tokens(shard_mib: int, dtype: str, seq_len: int) -> int:
    """Tokens of a full shard: whole records, if there are any."""
    tokens = (shard_mib << 20) // np.dtype(dtype).itemsize
    return max(tokens - tokens % seq_len, seq_len) if seq_len else tokens


def write_portion(place: Workplace, number: int) -> None:
    """Do the task ``number`` of the stage ``write``."""
    manifest = place.new_manifest("write", number)
    splits = {name: _SplitWriter(place, manifest, name, number) for name in SPLITS}
    overlap = SplitOverlap()
    for split, document in split_documents(place, number, manifest):
        splits[split].add(document.piece, document.name, document.text)
        overlap.add(split, document.text)
    for name, writer in splits.items():
        manifest.facts[name] = writer.close()
        place.put_packed(manifest, texts_key(name, number), overlap.of_split(name).tobytes())
    end = place.plan.held_out_end
    in_both = int(end is not None and end.portion == number and end.characters > 0)
    manifest.counts["documents kept"] = sum(manifest.facts[name]["documents"] for name in SPLITS) - in_both
    manifest.counts["text bytes"] = sum(manifest.facts[name]["text_bytes"] for name in SPLITS)
    manifest.counts["tokens to train on"] = sum(shard["tokens"] for shard in manifest.facts[TRAIN]["shards"])
    manifest.counts["tokens held out"] = sum(shard["tokens"] for shard in manifest.facts[HELD_OUT]["shards"])
    place.commit(manifest)


class _SplitWriter:
    """Encodes the documents of one split of a portion into its shards, each written when it is full."""

    def __init__(self, place: Workplace, manifest: TaskManifest, split: str, portion: int) -> None:
        self._place, self._manifest, self._name = place, manifest, f"{split}-{portion:05d}"
        output = place.plan.recipe.output
        self._tokenizer: Tokenizer = place.tokenizer
        self._chat = chat_encoder(place)
        end = self._tokenizer.end_of_document if self._chat is None else self._chat.end
        self._packer = PackerByLength(output.seq_len, end, output.length_classes) if output.seq_len else None
        self._dtype = np.dtype(stored_dtype(place)).newbyteorder("<")
        self._learned = 0
        self._full_bytes = (
            shard_tokens(output.shard_mib, self._dtype.name, output.seq_len) * self._dtype.itemsize
        )
        self._shard = bytearray()
        self._shards: list[ShardFile] = []
        self._batch: list[str] = []
        self._batch_characters = 0
        self._origin: list[tuple[int, str, int]] = []
        self._text_bytes = 0
        self._names: list[tuple[int, str]] = []

    def add(self, piece: int, name: str, text: str) -> None:
        if self._chat is not None:
            self._add_conversation(self._chat, piece, name, text)
            return
        self._batch.append(text)
        self._names.append((piece, name))
        self._batch_characters += len(text)
        self._text_bytes += len(text.encode())
        if self._batch_characters >= _BATCH_CHARACTERS:
            self._encode()

    def close(self) -> dict[str, object]:
        """Write what is left; returns what the index says of the portion's part of the split."""
        self._encode()
        if self._packer is not None and (records := self._packer.flush()) is not None:
            self._append(records.reshape(-1))
        if self._shard:
            self._finish_shard()
        if self._origin:
            rows = "\n".join(
                json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in self._origin
            )
            self._place.put(self._manifest, origin_key(self._name), zlib.compress(rows.encode(), 1))
        return {
            "shards": [msgspec.structs.asdict(shard) for shard in self._shards],
            "documents": len(self._origin),
            "text_bytes": self._text_bytes,
            "padding": self._packer.padding_tokens if self._packer is not None else 0,
            **({"learned": self._learned} if self._chat is not None else {}),
        }

    def _add_conversation(self, chat: ChatEncoder, piece: int, name: str, text: str) -> None:
        reason = "dropped: longer than a record"
        try:
            encoded = chat.encode(text)
        except BadConversationError as error:
            portion = self._place.plan.portions[self._manifest.task]
            source = self._place.plan.recipe.source[self._place.plan.files[portion[piece].file].source]
            if source.on_bad == "stop":
                raise PreparationError(
                    f'portion {self._manifest.task}: conversation {name}: {error}; mend it and plan again, or write source.on_bad = "skip" and plan again'
                ) from error
            encoded, reason = None, "dropped: bad"
        if encoded is None:
            self._manifest.counts[reason] = self._manifest.counts.get(reason, 0) + 1
            return
        assert self._packer is not None, "conversations are packed"
        self._origin.append((piece, name, len(encoded.ids)))
        self._text_bytes += len(text.encode())
        self._learned += int(encoded.learned.sum())
        flag = np.where(encoded.learned, loss_bit(self._dtype.name), 0).astype(np.uint32)
        if (records := self._packer.add(encoded.ids | flag)) is not None:
            self._append(records.reshape(-1))

    def _encode(self) -> None:
        start = np.array(self._tokenizer.document_start, dtype=np.uint32)
        end = np.array([self._tokenizer.end_of_document], dtype=np.uint32)
        encoded = self._tokenizer.encode_batch(self._batch)
        for (piece, name), ids in zip(self._names, encoded, strict=True):
            self._origin.append((piece, name, len(start) + len(ids) + 1))
        if self._packer is not None:
            for ids in encoded:
                if (records := self._packer.add(np.concatenate([start, ids, end]))) is not None:
                    self._append(records.reshape(-1))
        elif encoded:
            self._append(np.concatenate([part for ids in encoded for part in (start, ids, end)]))
        self._batch, self._names, self._batch_characters = [], [], 0

    def _append(self, tokens: NDArray[np.uint32]) -> None:
        rest = tokens.astype(self._dtype).data.cast("B")
        while rest:
            room = self._full_bytes - len(self._shard)
            self._shard += rest[:room]
            rest = rest[room:]
            if len(self._shard) == self._full_bytes:
                self._finish_shard()

    def _finish_shard(self) -> None:
        number = len(self._shards)
        if number >= _MOST_SHARDS_OF_A_PORTION:
            raise ValueError(f"portion {self._name} has {number} shards")
        name = self._name + (f"-{number:03d}" if number else "")
        data, sums = bytes(self._shard), BlockSummer()
        self._shard.clear()
        sums.update(data)
        checksum = xxhash.xxh3_128(data).hexdigest()
        self._place.put(self._manifest, f"{name}.bin", data)
        self._place.put(self._manifest, f"{name}.sums", sums.content(checksum))
        tokens = len(data) // self._dtype.itemsize
        self._shards.append(ShardFile(f"{name}.bin", tokens, checksum, hashlib.sha256(data).hexdigest()))


def chat_encoder(place: Workplace) -> ChatEncoder | None:
    """The encoder of the recipe's conversations; ``None`` if it is of texts."""
    output = place.plan.recipe.output
    if output.layout == "text":
        return None
    template = ChatTemplate(output.template, output.special_tokens)
    return ChatEncoder(place.tokenizer, ChatLayout(template, output.too_long), output.seq_len)


def stored_dtype(place: Workplace) -> str:
    """The dtype of stored tokens."""
    return dtype_for(place.tokenizer.vocab_size, with_loss_bit=place.plan.recipe.output.layout == "chat")


def texts_key(split: str, portion: int) -> str:
    """The name of the hashes of the texts of one split of a portion."""
    return f"texts-{split}-{portion:05d}"


def origin_key(name: str) -> str:
    """The key of the list of documents, with their lengths in tokens, that lie in the shards called ``name``."""
    return f"{PREPARATION}/origin/{name}.z"
