"""Splits: the rule that assigns documents, and the writer that encodes them into shards, joined or packed, and counts them."""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
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

# One rule for all preparations assigns documents to splits.
#
# A hash of a document's name or text decides, so that its split does not change when others are added. If a split of few
# documents would be empty, the end of the largest document is held out. Conversations are not cut: the last one moves to the
# empty split.

_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True)
class HeldOutEnd:
    """A document whose end is held out because a split would be empty otherwise."""

    portion: int
    document: int
    """Its number among the portion's documents with text."""
    characters: int
    """Number of its last characters that are held out; 0 moves the document to the empty split uncut."""
    to_train_on: bool = False
    """With 0 characters: True if the document is moved to the training split."""


@dataclass(frozen=True)
class SplitRule:
    """Assigns documents to splits."""

    held_out: float
    """Share of documents held out."""
    hold_out_by: str = "name"
    """"name" or "text": the part of a document that is hashed. Text is hashed in normal form, which is equal for all copies."""
    end: HeldOutEnd | None = None
    """``None``: only hashes decide."""

    def split_of(self, document: Document) -> str:
        """Return the document's split according to its hash."""
        by_name = self.hold_out_by == "name"
        return split_of(document.name if by_name else normal_form(document.text), self.held_out)

    def divide(self, document: _D, portion: int, number: int) -> Iterator[tuple[str, _D]]:
        """Yield (split, document) for document ``number`` of a portion, by the hash of the document.

        The document of ``end`` becomes two parts, of which the second is held out; if it is to stay whole, it goes to
        the split that would be empty.
        """
        end = self.end
        if end is None or (end.portion, end.document) != (portion, number):
            yield self.split_of(document), document
        elif not end.characters:
            yield TRAIN if end.to_train_on else HELD_OUT, document
        else:
            begin, ending = cut_end(document.text, end.characters)
            yield TRAIN, replace(document, text=begin)
            yield HELD_OUT, replace(document, text=ending)


def split_of(hashed: str, held_out_fraction: float) -> str:
    """Return the split "train" or "held_out" of a document by the hash of ``hashed``, its name or text."""
    fraction = int.from_bytes(hashlib.sha256(hashed.encode()).digest()[:8], "little") / 2**64
    return HELD_OUT if fraction < held_out_fraction else TRAIN


def cut_end(text: str, characters: int) -> tuple[str, str]:
    """Divide ``text`` in two. The second part has ``characters`` characters, or up to twice as many if it can begin
    after a line end, else after a space.
    """
    cut = len(text) - characters
    for separator in ("\n", " "):
        after = text.rfind(separator, max(cut - characters, 0), cut) + 1
        if after > 0:
            return text[:after], text[after:]
    return text[:cut], text[cut:]


def held_out_end(
    documents: Iterable[tuple[int, int, Document]],
    rule: SplitRule,
    files: Sequence[object],
    *,
    divisible: bool,
) -> HeldOutEnd | None:
    """Choose the document for a split that would be empty: the longest, whose end is held out, or if not
    ``divisible`` the whole last one.

    Returns ``None`` if hashes leave no split empty; then no more ``documents`` are read. ``documents`` has (portion,
    number in the portion, document) of each document with text. ``rule`` is without an end. ``files`` are named in a
    message. Raises ``CorpusError`` if there is too little text for two splits.
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
    """The encoding of documents into the tokens of a dataset."""

    tokenizer: Tokenizer
    seq_len: int = 0
    """Tokens of a record into which documents are packed; 0 joins documents end to end."""
    length_classes: tuple[int, ...] = ()
    chat: ChatEncoder | None = None
    """The encoder of conversations; ``None`` for texts."""

    @cached_property
    def dtype(self) -> str:
        """The dtype of stored tokens."""
        return dtype_for(self.tokenizer.vocab_size, with_loss_bit=self.chat is not None)

    @property
    def document_end(self) -> int:
        """The token that ends a document and pads records."""
        return self.tokenizer.end_of_document if self.chat is None else self.chat.end

    def save(self, folder: Path) -> None:
        """Write the tokenizer and the chat template. Raises ``OSError``."""
        self.tokenizer.save(folder)
        if self.chat is not None:
            save_template(folder, self.chat.layout.template)

    def index(
        self,
        recipe: Recipe,
        splits: Mapping[str, Split],
        xz_bits_per_byte: float | None = None,
        held_out_in_training: int = 0,
    ) -> DatasetIndex:
        """Return the index of the dataset with these splits; ``xz_bits_per_byte`` is the compression of held-out
        text, if it was measured, and ``held_out_in_training`` the number of held-out documents that are in both splits.
        """
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
            held_out_in_training=held_out_in_training,
        )


def named_tokenizer(choice: str | Path, folder: Path = Path()) -> Tokenizer | None:
    """Return the tokenizer "bytes", or the one at a path below ``folder``; ``None`` for "bpe", which is trained later. Raises ``TokenizerError``."""
    if choice == "bpe":
        return None
    return BytesTokenizer() if choice == "bytes" else tokenizer_from_file(folder / choice)


def description(tokenizer: Tokenizer | None) -> str:
    """Return "bytes", "bpe" if there is no tokenizer yet, or "file:" and its fingerprint."""
    if tokenizer is None or isinstance(tokenizer, BytesTokenizer):
        return "bpe" if tokenizer is None else "bytes"
    return f"file:{tokenizer.fingerprint}"


class SplitWriter(Generic[_D]):
    """Encodes the documents of one split in batches, writes them to its shards, and counts them."""

    def __init__(
        self,
        shards: ShardWriter,
        encoding: Encoding,
        on_bad: Callable[[_D, BadConversationError], None],
        on_encoded: Callable[[_D, int], None] = lambda *_: None,
    ) -> None:
        """Write the tokens of documents, encoded by ``encoding``, to ``shards``.

        ``on_bad`` is called with a conversation that cannot be trained on. If it returns, the conversation is left
        out. ``on_encoded`` is called with each written document, in order, and its number of tokens.
        """
        self.left_out: Counter[str] = Counter()
        """Number of conversations left out, by reason."""
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
        """Add a document to the split: add the hash of its text to ``text_hashes``, and encode and write it in batches.
        A conversation is encoded at once.

        A conversation that cannot be trained on or is too long is counted in ``left_out``.
        """
        self._hashes.append(hash_of(normal_form(document.text))[0])
        if self._encoding.chat is not None:
            self._add_conversation(self._encoding.chat, document)
            return
        self._batch.append(document)
        self._batch_characters += len(document.text)
        if self._batch_characters >= _BATCH_CHARACTERS:
            self._encode_batch()

    def close(self) -> Split:
        """Encode and write the remaining documents, close the shards, and return the split: shards, counts and hash."""
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
        """Encode a conversation and pack it with its loss bits, or count it in ``left_out``, after ``on_bad`` if it is bad."""
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
        """Encode the collected documents, append them with their start and end tokens, and empty the batch."""
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
        """Count a written document, and call ``on_encoded``."""
        self._documents += 1
        self._text_bytes += len(document.text.encode())
        self._on_encoded(document, tokens)

    def _append(self, tokens: NDArray[Any] | None) -> None:
        """Write tokens, or complete records, if there are any."""
        if tokens is not None:
            self._shards.append(tokens.reshape(-1))


# Packing: documents are put into records of one length, uncut and with minimal padding.
#
# Joining text end to end and chopping it cuts most documents, and the text after a cut is read without its beginning. Ding et
# al. ("Fewer Truncations Improve Language Modeling", arXiv 2404.10830) pack instead: a record is a bin, and each document,
# longest first, goes into the fullest bin with room for it (best-fit decreasing). On lengths of web text, a few hundredths of a
# percent is padding. Only a document longer than a record is cut, into pieces that overlap by one token, so that each token
# except the first is predicted exactly once.
#
# A window of documents is packed at a time, so memory does not grow with the corpus. Ties are resolved by order: the same
# documents give the same records.


WINDOW_TOKENS = 1 << 24
"""Tokens that are packed together. On web-like lengths, 2^24 tokens are within tenths of a percent of the minimal padding."""


Record = list[tuple[int, range]]
"""Contents of a record in order: numbers of documents, and ranges of their tokens."""


def pieces_of(length: int, seq_len: int) -> list[range]:
    """Return the pieces of a document of ``length`` tokens: one, or several of ``seq_len``. Each later piece begins with the last token of the previous one."""
    if length <= seq_len:
        return [range(length)]
    step = seq_len - 1
    return [range(start, min(start + seq_len, length)) for start in range(0, length - 1, step)]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the items in bins of size ``room``, packed by best-fit decreasing. Bins are in the order of their first items.

    Each of ``lengths`` is in [1, room]. Costs a few microseconds per item.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # numbers of bins, by remaining room
    occupied = 0  # bit r is set if with_room[r] is not empty
    for item in sorted(
        range(len(lengths)), key=lambda number: -lengths[number]
    ):  # stable: equal lengths keep their order
        length = lengths[item]
        fitting = occupied >> length
        if fitting:
            remaining = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[remaining].pop()
            if not with_room[remaining]:
                occupied ^= 1 << remaining
        else:
            remaining, chosen = room, len(bins)
            bins.append([])
        bins[chosen].append(item)
        remaining -= length
        if remaining:
            with_room[remaining].append(chosen)
            occupied |= 1 << remaining
    # Without this sort, all long documents would come first, and parts of a dataset would differ.
    return sorted((sorted(items) for items in bins), key=lambda items: items[0])


class Packing:
    """Assigns the documents of a stream to records by their lengths, one window at a time.

    Only documents of the same length class are packed together, so a long document does not share a record with many short ones. A run with long
    sequences should see long documents: a record of 131,072 tokens of short documents would teach it little about long contexts. Each class has its
    own windows and last records.
    """

    def __init__(
        self, seq_len: int, classes: Sequence[int] = (), *, window_tokens: int = WINDOW_TOKENS
    ) -> None:
        """Pack documents into records of ``seq_len`` tokens. ``classes`` are the maximum document lengths of each
        class, in increasing order; longer documents form another class. ``window_tokens`` of a class are packed
        together.

        Raises ``ValueError`` for a ``seq_len`` below 2.
        """
        if seq_len < 2:
            raise ValueError(f"seq_len = {seq_len} holds no token and its target")
        self._seq_len, self._classes, self._window_tokens = seq_len, tuple(classes), window_tokens
        self._windows: list[Record] = [[] for _ in range(len(self._classes) + 1)]
        self._tokens = [0] * len(self._windows)
        self._documents = 0

    def add(self, length: int) -> list[Record]:
        """Add the length of a document, including its end; later documents are numbered on.

        Return the records of its class's window when that is full, otherwise an empty list.
        """
        window = bisect_left(self._classes, length)
        self._windows[window] += [(self._documents, piece) for piece in pieces_of(length, self._seq_len)]
        self._tokens[window] += length
        self._documents += 1
        return self._close(window) if self._tokens[window] >= self._window_tokens else []

    def flush(self) -> list[Record]:
        """Return the records of the remaining documents, one class after another."""
        return [record for window in range(len(self._windows)) for record in self._close(window)]

    def _close(self, window: int) -> list[Record]:
        """Empty a window, and return its pieces packed into records."""
        pieces, self._windows[window], self._tokens[window] = self._windows[window], [], 0
        bins = best_fit([len(piece) for _, piece in pieces], self._seq_len)
        return [[pieces[item] for item in items] for items in bins]


def packed(lengths: Iterable[int], seq_len: int, classes: Sequence[int] = ()) -> Iterator[Record]:
    """Yield the records that ``Packing`` makes of documents of these lengths, as lists of (document number, range of
    its tokens).
    """
    packing = Packing(seq_len, classes)
    for length in lengths:
        yield from packing.add(length)
    yield from packing.flush()


class Packer:
    """Packs the documents of a stream into records, one window at a time."""

    def __init__(
        self,
        seq_len: int,
        padding: int,
        classes: Sequence[int] = (),
        *,
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        """Pack documents; nothing is packed yet. ``padding`` is the token that pads a record, a document's end. The
        other arguments are those of ``Packing``.
        """
        self.seq_len = seq_len
        self.padding_tokens = 0
        """Number of padding tokens so far."""
        self._packing, self._padding = Packing(seq_len, classes, window_tokens=window_tokens), padding
        self._open: dict[int, NDArray[Any]] = {}
        """Documents of windows that are not full, by number."""
        self._documents = 0

    def add(self, document: NDArray[Any]) -> NDArray[Any] | None:
        """Add the tokens of a document, including its end. Returns the records of a window, ``(records, seq_len)``, when one is full."""
        self._open[self._documents] = document
        self._documents += 1
        return self._filled(self._packing.add(len(document)))

    def flush(self) -> NDArray[Any] | None:
        """Return the records of the remaining documents; ``None`` if there are none."""
        return self._filled(self._packing.flush())

    def _filled(self, records: list[Record]) -> NDArray[Any] | None:
        """Return the records' tokens, padded, ``(records, seq_len)``; ``None`` if there are none. Forgets the documents in them."""
        if not records:
            return None
        rows = np.full((len(records), self.seq_len), self._padding, dtype=np.uint32)
        for row, record in zip(rows, records, strict=True):
            end = 0
            for number, piece in record:
                row[end : end + len(piece)] = self._open[number][piece.start : piece.stop]
                end += len(piece)
            self.padding_tokens += self.seq_len - end
        for record in records:
            for number, _ in record:
                self._open.pop(number, None)
        return rows
