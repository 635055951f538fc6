"""A split: the rule that puts a document into one, and the writer of its documents, encoded, joined or packed, into counted shards."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from phalanx.data.chat.encode import BadConversationError, ChatEncoder, save_template
from phalanx.data.dedup import hash_of, normal_form
from phalanx.data.errors import CorpusError
from phalanx.data.formats.document import Document
from phalanx.data.preparing.packing import Packer
from phalanx.data.stored.index import (
    HELD_OUT,
    TRAIN,
    DatasetIndex,
    Recipe,
    Split,
    dtype_for,
    loss_bit,
)
from phalanx.data.stored.shard_writer import ShardWriter
from phalanx.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, tokenizer_from_file

# The split of each document, by one rule for every preparation.
#
# A hash of a document's name, or of its text, decides, so that the document stays in its split when others are added. If that leaves a split of few documents
# empty, the end of the largest document is held out. Conversations are not cut: the last of them moves to the empty split.

_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True)
class HeldOutEnd:
    """A document whose end is held out, where a split of so few whole documents would be empty."""

    portion: int
    document: int
    """Its number among the documents with text of the portion."""
    characters: int
    """How many of its last characters are held out; 0 moves it whole to the split that is empty."""
    to_train_on: bool = False
    """With 0 characters: the split that it is moved to is the one to train on."""


@dataclass(frozen=True)
class SplitRule:
    """Assigns documents to splits."""

    held_out: float
    """Share of documents held out."""
    hold_out_by: str = "name"
    """"name", or "text": its normal form, which all copies have."""
    end: HeldOutEnd | None = None
    """``None``: hashes alone decide."""

    def split_of(self, document: Document) -> str:
        """Return the split that the hash of a document names."""
        by_name = self.hold_out_by == "name"
        return split_of(document.name if by_name else normal_form(document.text), self.held_out)

    def divide(self, document: _D, portion: int, number: int) -> Iterator[tuple[str, _D]]:
        """(split, document) of the document ``number`` of a portion: one, or two parts of the document whose end is held out."""
        end = self.end
        if end is None or (end.portion, end.document) != (portion, number):
            yield self.split_of(document), document
        elif not end.characters:
            yield TRAIN if end.to_train_on else HELD_OUT, document
        else:
            begin, rest = cut_end(document.text, end.characters)
            yield TRAIN, replace(document, text=begin)
            yield HELD_OUT, replace(document, text=rest)


def split_of(decisive: str, held_out_fraction: float) -> str:
    """The split, "train" or "held_out", of a document: a hash of ``decisive``, its name or text, decides."""
    place = int.from_bytes(hashlib.sha256(decisive.encode()).digest()[:8], "little") / 2**64
    return HELD_OUT if place < held_out_fraction else TRAIN


def cut_end(text: str, characters: int) -> tuple[str, str]:
    """``text`` in two, the second of about ``characters``: it begins after a line's end or a space if one is near."""
    at = len(text) - characters
    for separator in ("\n", " "):
        after = text.rfind(separator, max(at - characters, 0), at) + 1
        if after > 0:
            return text[:after], text[after:]
    return text[:at], text[at:]


def held_out_end(
    documents: Iterable[tuple[int, int, Document]],
    rule: SplitRule,
    files: Sequence[object],
    *,
    divisible: bool,
) -> HeldOutEnd | None:
    """Choose the document whose end is held out; ``None`` if hashes leave no split empty, after which no more ``documents`` are taken.

    Args:
        documents: (portion, number in the portion, document) of each document with text.
        rule: The rule, without an end.
        files: Where the documents come from, for a message.
        divisible: A document may be cut.

    Raises ``CorpusError`` if there is too little text for two splits.
    """
    required = {TRAIN, HELD_OUT} if rule.held_out > 0 else {TRAIN}
    splits: set[str] = set()
    characters, most, count = 0, 0, 0
    largest = last = (0, 0)
    for portion, number, document in documents:
        splits.add(rule.split_of(document))
        if required <= splits:
            return None
        length, last = len(document.text), (portion, number)
        characters, count = characters + length, count + 1
        if length > most:
            most, largest = length, last
    if not divisible:
        if count < 2:
            raise CorpusError(f"there are {count} conversations, and some are to be held out; give more")
        return HeldOutEnd(*last, 0, to_train_on=splits == {HELD_OUT})
    if most < 2:
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        of = f" of {', '.join(map(str, files[:3]))}{more}" if files else ""
        raise CorpusError(
            f"there is too little text in {count} documents{of} to train on some and hold some out; give more"
        )
    return HeldOutEnd(*largest, min(math.ceil(rule.held_out * characters), most // 2))


_BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class Encoding:
    """How documents become the tokens of a dataset."""

    tokenizer: Tokenizer
    seq_len: int = 0
    """Tokens of a record that documents are packed into; 0 joins them end to end."""
    length_classes: tuple[int, ...] = ()
    chat: ChatEncoder | None = None
    """The encoder of conversations; ``None`` for texts."""

    @cached_property
    def dtype(self) -> str:
        """The dtype of stored tokens."""
        return dtype_for(self.tokenizer.vocab_size, with_loss_bit=self.chat is not None)

    @property
    def document_end(self) -> int:
        """The token that ends a document, and fills records up."""
        return self.tokenizer.end_of_document if self.chat is None else self.chat.end

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and the chat template to go with it. Raises ``OSError``."""
        self.tokenizer.save(folder)
        if self.chat is not None:
            save_template(folder, self.chat.layout.template)

    def index(
        self, recipe: Recipe, splits: Mapping[str, Split], xz_bits_per_byte: float | None = None
    ) -> DatasetIndex:
        """The index of the dataset with these splits."""
        return DatasetIndex(
            self.dtype,
            self.tokenizer.vocab_size,
            self.tokenizer.kind,
            self.tokenizer.fingerprint,
            splits[TRAIN],
            splits[HELD_OUT],
            xz_bits_per_byte,
            recipe,
            document_mask=bool(self.seq_len),
        )


def named_tokenizer(choice: str | Path, folder: Path = Path()) -> Tokenizer | None:
    """The tokenizer that is named: "bytes", or a path below ``folder``; ``None`` for "bpe", which is to be trained. Raises ``TokenizerError``."""
    if choice == "bpe":
        return None
    return BytesTokenizer() if choice == "bytes" else tokenizer_from_file(folder / choice)


def description(tokenizer: Tokenizer | None) -> str:
    """Return "bytes", "bpe" if there is no tokenizer yet, or "file:" and its fingerprint."""
    if tokenizer is None or isinstance(tokenizer, BytesTokenizer):
        return "bpe" if tokenizer is None else "bytes"
    return f"file:{tokenizer.fingerprint}"


class SplitWriter(Generic[_D]):
    """Encodes the documents of one split in batches into its shards, and counts."""

    def __init__(
        self,
        shards: ShardWriter,
        encoding: Encoding,
        on_bad: Callable[[_D, BadConversationError], None],
        on_encoded: Callable[[_D, int], None] = lambda *_: None,
    ) -> None:
        """
        Args:
            shards: Where the tokens go.
            encoding: How documents become tokens.
            on_bad: Called with a conversation that cannot be trained on; it is left out if that returns.
            on_encoded: Called with each document that is written, in order, and its tokens.
        """
        self.left_out: Counter[str] = Counter()
        """Conversations that are left out, by reason."""
        self._shards, self._encoding = shards, encoding
        self._on_bad, self._on_encoded = on_bad, on_encoded
        self._packer = (
            Packer(encoding.seq_len, encoding.document_end, encoding.length_classes)
            if encoding.seq_len
            else None
        )
        self._batch: list[_D] = []
        self._batch_characters = 0
        self._documents = self._text_bytes = self._learned = 0
        self._hashes = array("Q")

    @property
    def text_hashes(self) -> NDArray[np.uint64]:
        """64-bit hashes of the texts in normal form, (documents,), little-endian."""
        return np.array(self._hashes, dtype="<u8")

    def add(self, document: _D) -> None:
        """Take a document of the split."""
        self._hashes.append(hash_of(normal_form(document.text))[0])
        if self._encoding.chat is not None:
            self._add_conversation(self._encoding.chat, document)
            return
        self._batch.append(document)
        self._batch_characters += len(document.text)
        if self._batch_characters >= _BATCH_CHARACTERS:
            self._encode_batch()

    def close(self) -> Split:
        """Write what is left."""
        self._encode_batch()
        if self._packer is not None:
            self._append(self._packer.flush())
        written = self._shards.close()
        return Split(
            written.shards,
            self._documents,
            self._text_bytes,
            written.sha256,
            self._packer.padding_tokens if self._packer is not None else 0,
            self._learned,
            self.left_out.total(),
        )

    def _add_conversation(self, chat: ChatEncoder, document: _D) -> None:
        try:
            encoded = chat.encode(document.text)
        except BadConversationError as error:
            self._on_bad(document, error)
            self.left_out["bad"] += 1
            return
        if encoded is None:
            self.left_out["longer than a record"] += 1
            return
        assert self._packer is not None, "conversations are packed"
        self._count(document, len(encoded.ids))
        self._learned += int(encoded.learned.sum())
        flag = np.where(encoded.learned, loss_bit(self._encoding.dtype), 0).astype(np.uint32)
        self._append(self._packer.add(encoded.ids | flag))

    def _encode_batch(self) -> None:
        tokenizer = self._encoding.tokenizer
        start = np.array(tokenizer.document_start, dtype=np.uint32)
        end = np.array([tokenizer.end_of_document], dtype=np.uint32)
        encoded = tokenizer.encode_batch([document.text for document in self._batch])
        for document, ids in zip(self._batch, encoded, strict=True):
            self._count(document, len(start) + len(ids) + 1)
            if self._packer is not None:
                self._append(self._packer.add(np.concatenate([start, ids, end])))
        if self._packer is None and encoded:
            self._append(np.concatenate([part for ids in encoded for part in (start, ids, end)]))
        self._batch, self._batch_characters = [], 0

    def _count(self, document: _D, tokens: int) -> None:
        self._documents += 1
        self._text_bytes += len(document.text.encode())
        self._on_encoded(document, tokens)

    def _append(self, tokens: NDArray[Any] | None) -> None:
        """Write tokens, or whole records, if there are any."""
        if tokens is not None:
            self._shards.append(tokens.reshape(-1))
