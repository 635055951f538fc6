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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW_TOKENS = 1 << 24
"""Tokens that are packed together; on web-like lengths 2^24 tokens are within some tenths of a percent of the least padding."""


Record = list[tuple[int, range]]
"""Contents of a record, in order: numbers of documents, and which of their tokens."""


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


class Packing:
    """Places the documents of a stream in records by their lengths, a window at a time.

    Documents of each class of lengths are packed with their like alone, so that long ones do not share a record with many short ones: a run whose sequences
    are long is to see long documents; filled up with short ones, a record of 131,072 tokens would teach it little beyond a few thousand. Each class has
    windows, and so its last records, of its own.
    """

    def __init__(
        self, seq_len: int, classes: Sequence[int] = (), *, window_tokens: int = WINDOW_TOKENS
    ) -> None:
        """
        Args:
            seq_len: Tokens of a record.
            classes: The most tokens of a document of each class, in rising order; longer documents are a class of their own.
            window_tokens: Tokens that are packed together.

        Raises ``ValueError`` for a ``seq_len`` below 2.
        """
        if seq_len < 2:
            raise ValueError(f"seq_len = {seq_len} holds no token and its target")
        self._seq_len, self._classes, self._window_tokens = seq_len, tuple(classes), window_tokens
        self._windows: list[Record] = [[] for _ in range(len(self._classes) + 1)]
        self._tokens = [0] * len(self._windows)
        self._documents = 0

    def add(self, length: int) -> list[Record]:
        """Take the tokens of a document, its end included; returns the records of its class's window, when that is full."""
        window = bisect_left(self._classes, length)
        self._windows[window] += [(self._documents, piece) for piece in pieces_of(length, self._seq_len)]
        self._tokens[window] += length
        self._documents += 1
        return self._close(window) if self._tokens[window] >= self._window_tokens else []

    def flush(self) -> list[Record]:
        """The records of what was added since the last windows, class after class."""
        return [record for window in range(len(self._windows)) for record in self._close(window)]

    def _close(self, window: int) -> list[Record]:
        pieces, self._windows[window], self._tokens[window] = self._windows[window], [], 0
        bins = best_fit([len(piece) for _, piece in pieces], self._seq_len)
        return [[pieces[item] for item in items] for items in bins]


def packed(lengths: Iterable[int], seq_len: int, classes: Sequence[int] = ()) -> Iterator[Record]:
    """The records that documents of these lengths are packed into, in order."""
    packing = Packing(seq_len, classes)
    for length in lengths:
        yield from packing.add(length)
    yield from packing.flush()


class Packer:
    """Packs the documents of a stream into records, a window at a time."""

    def __init__(
        self,
        seq_len: int,
        padding: int,
        classes: Sequence[int] = (),
        *,
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        """``padding``: The token that fills a record, the end of a document. The others are those of ``Packing``."""
        self.seq_len = seq_len
        self.padding_tokens = 0
        """Tokens that were added so far."""
        self._packing, self._padding = Packing(seq_len, classes, window_tokens=window_tokens), padding
        self._open: dict[int, NDArray[Any]] = {}
        """The documents of windows that are not full, by their number."""
        self._documents = 0

    def add(self, document: NDArray[Any]) -> NDArray[Any] | None:
        """Take the tokens of a document, its end included; returns the records of a window, ``(records, seq_len)``, when one is full."""
        self._open[self._documents] = document
        self._documents += 1
        return self._filled(self._packing.add(len(document)))

    def flush(self) -> NDArray[Any] | None:
        """The records of what was added since the last windows; ``None`` if that is nothing."""
        return self._filled(self._packing.flush())

    def _filled(self, records: list[Record]) -> NDArray[Any] | None:
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
