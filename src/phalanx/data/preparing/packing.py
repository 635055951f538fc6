"""Packing: documents are put into records of one length, uncut and with minimal padding.

Joining text end to end and chopping it cuts most documents, and the text after a cut is read without its beginning. Ding et al. ("Fewer
Truncations Improve Language Modeling", arXiv 2404.10830) pack instead: a record is a bin, and each document, longest first, goes into the
fullest bin with room for it (best-fit decreasing). On lengths of web text, a few hundredths of a percent is padding. Only a document longer than
a record is cut, into pieces that overlap by one token, so that each token except the first is predicted exactly once.

A window of documents is packed at a time, so memory does not grow with the corpus. Ties are resolved by order: the same documents give the same
records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        """
        Args:
            seq_len: Tokens of a record.
            classes: Maximum document length of each class, in increasing order; longer documents form another class.
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
        """``padding`` is the token that pads a record, a document's end. The other arguments are those of ``Packing``."""
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
