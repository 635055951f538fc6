"""Encodes the documents of one split into its shards, joined, packed or as conversations, and counts them."""

from __future__ import annotations

import numpy as np

from phalanx.data.chat.encode import BadConversationError, ChatEncoder
from phalanx.data.errors import CorpusError
from phalanx.data.preparing.packing import Packer
from phalanx.data.stored.index import Split, loss_bit
from phalanx.data.stored.shard_writer import ShardWriter
from phalanx.data.tokenizers.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 21


class SplitEncoder:
    """Encodes one split's documents in batches into its shards, and counts."""

    def __init__(self, writer: ShardWriter, tokenizer: Tokenizer, packed_seq_len: int) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._packer = Packer(packed_seq_len, tokenizer.end_of_document) if packed_seq_len else None
        self._batch: list[str] = []
        self._batch_characters = 0
        self._documents = 0
        self._text_bytes = 0

    def add(self, name: str, text: str, text_bytes: int) -> None:  # noqa: ARG002  each text can be encoded
        self._batch.append(text)
        self._batch_characters += len(text)
        self._documents += 1
        self._text_bytes += text_bytes
        if self._batch_characters >= _BATCH_CHARACTERS:
            self._flush()

    def close(self) -> Split:
        self._flush()
        padding = 0
        if self._packer is not None:
            if (records := self._packer.flush()) is not None:
                self._writer.append(records.reshape(-1))
            padding = self._packer.padding_tokens
        written = self._writer.close()
        return Split(written.shards, self._documents, self._text_bytes, written.sha256, padding)

    def _flush(self) -> None:
        start = np.array(self._tokenizer.document_start, dtype=np.uint32)
        end = np.array([self._tokenizer.end_of_document], dtype=np.uint32)
        encoded = self._tokenizer.encode_batch(self._batch)
        if self._packer is not None:
            for ids in encoded:
                records = self._packer.add(np.concatenate([start, ids, end]))
                if records is not None:
                    self._writer.append(records.reshape(-1))
        elif encoded:
            self._writer.append(np.concatenate([piece for ids in encoded for piece in (start, ids, end)]))
        self._batch, self._batch_characters = [], 0


class ChatSplitEncoder:
    """Encodes one split's conversations into its shards, and counts."""

    def __init__(self, writer: ShardWriter, encoder: ChatEncoder, dtype: str, seq_len: int) -> None:
        self._writer, self._encoder, self._loss_bit = writer, encoder, loss_bit(dtype)
        self._packer = Packer(seq_len, encoder.end)
        self._documents = self._text_bytes = self._learned = self._left_out = 0

    def add(self, name: str, text: str, text_bytes: int) -> None:
        try:
            encoded = self._encoder.encode(text)
        except BadConversationError as error:
            if self._encoder.layout.on_bad == "stop":
                raise CorpusError(
                    f"{name}: {error}; mend it, or leave out all that is bad: `phalanx data prepare --on-bad skip`"
                ) from error
            encoded = None
        if encoded is None:
            self._left_out += 1
            return
        self._documents += 1
        self._text_bytes += text_bytes
        self._learned += int(encoded.learned.sum())
        records = self._packer.add(
            encoded.ids | np.where(encoded.learned, self._loss_bit, 0).astype(np.uint32)
        )
        if records is not None:
            self._writer.append(records.reshape(-1))

    def close(self) -> Split:
        if (records := self._packer.flush()) is not None:
            self._writer.append(records.reshape(-1))
        written = self._writer.close()
        return Split(
            written.shards,
            self._documents,
            self._text_bytes,
            written.sha256,
            self._packer.padding_tokens,
            self._learned,
            self._left_out,
        )
