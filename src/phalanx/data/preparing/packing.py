"""Packing: documents put whole into records of one length, with as little padding as there can be.

Text that is joined end to end and chopped cuts most documents somewhere, and what follows the cut is read without its beginning. Ding et
al. ("Fewer Truncations Improve Language Modeling", arXiv 2404.10830) pack instead: a record is a bin, and each document goes into the
fullest bin that has room for it, the longest documents first (best-fit decreasing). On the lengths of web text that leaves some hundredths
of a percent as padding. Only a document that is longer than a record is cut, into pieces that overlap by one token, so that each token
but a document's first is predicted exactly once.

Packing looks at a window of documents at a time, so that memory does not grow with the corpus. Ties go by order: the same documents give
the same records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW_TOKENS = 1 << 24
"""Tokens that are packed together; on web-like lengths 2^24 tokens are within some tenths of a percent of the least padding."""


def pieces_of(length: int, seq_len: int) -> list[range]:
    """The pieces of a document of ``length`` tokens: one, or as many of ``seq_len`` as it takes, each beginning with the last token of the one before."""
    if length <= seq_len:
        return [range(length)]
    step = seq_len - 1
    return [range(start, min(start + seq_len, length)) for start in range(0, length - 1, step)]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of items in bins that hold ``room`` at most, by best-fit decreasing; bins in the order of their first items.

    Each of ``lengths`` is in [1, room]. Costs a few microseconds an item.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [
        [] for _ in range(room + 1)
    ]  # numbers of bins, by the room that is left in them
    some = 0  # bit r is set if with_room[r] is not empty
    for item in sorted(
        range(len(lengths)), key=lambda number: -lengths[number]
    ):  # stable: equal ones in order
        length = lengths[item]
        fitting = some >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[left].pop()
            if not with_room[left]:
                some ^= 1 << left
        else:
            left, chosen = room, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left -= length
        if left:
            with_room[left].append(chosen)
            some |= 1 << left
    # Long documents would all come first, and a part of a dataset would not be like the others.
    return sorted((sorted(items) for items in bins), key=lambda items: items[0])


class Packer:
    """Packs the documents of a stream into records, a window at a time."""

    def __init__(self, seq_len: int, padding: int, *, window_tokens: int = WINDOW_TOKENS) -> None:
        """
        Args:
            seq_len: Tokens of a record.
            padding: The token that fills a record, the end of a document.
            window_tokens: Tokens that are packed together.

        Raises ``ValueError`` for a ``seq_len`` below 2.
        """
        if seq_len < 2:
            raise ValueError(f"seq_len = {seq_len} holds no token and its target")
        self.seq_len = seq_len
        self.padding_tokens = 0
        """Tokens that were added so far."""
        self._padding, self._window_tokens = padding, window_tokens
        self._pieces: list[NDArray[Any]] = []
        self._tokens = 0

    def add(self, document: NDArray[Any]) -> NDArray[Any] | None:
        """Takes the tokens of a document, its end included; returns the records of a window, ``(records, seq_len)``, when one is full."""
        for piece in pieces_of(len(document), self.seq_len):
            self._pieces.append(document[piece.start : piece.stop])
        self._tokens += len(document)
        return self.flush() if self._tokens >= self._window_tokens else None

    def flush(self) -> NDArray[Any] | None:
        """The records of what was added since the last window; ``None`` if that is nothing."""
        if not self._pieces:
            return None
        bins = best_fit([len(piece) for piece in self._pieces], self.seq_len)
        records = np.full((len(bins), self.seq_len), self._padding, dtype=np.uint32)
        for record, items in zip(records, bins, strict=True):
            joined = np.concatenate([self._pieces[item] for item in items])
            record[: len(joined)] = joined
            self.padding_tokens += self.seq_len - len(joined)
        self._pieces, self._tokens = [], 0
        return records


class PackerByLength:
    """Packs documents of each class of lengths with their like alone, so that long ones do not share a record with many short ones.

    A run whose sequences are long is to see long documents; filled up with short ones, a record of 131,072 tokens would teach it little beyond
    a few thousand. Each class has windows, and so its last records, of its own.
    """

    def __init__(self, seq_len: int, padding: int, classes: Sequence[int]) -> None:
        """``classes``: The most tokens of a document of each class, in rising order; longer documents are a class of their own."""
        self._classes = tuple(classes)
        self._packers = [Packer(seq_len, padding) for _ in range(len(self._classes) + 1)]

    @property
    def padding_tokens(self) -> int:
        """Tokens that were added so far."""
        return sum(packer.padding_tokens for packer in self._packers)

    def add(self, document: NDArray[Any]) -> NDArray[Any] | None:
        """Takes the tokens of a document, its end included; returns the records of its class's window, when that is full."""
        return self._packers[bisect_left(self._classes, len(document))].add(document)

    def flush(self) -> NDArray[Any] | None:
        """The records of what was added since the last windows, class after class; ``None`` if that is nothing."""
        records = [found for packer in self._packers if (found := packer.flush()) is not None]
        return np.concatenate(records) if records else None
