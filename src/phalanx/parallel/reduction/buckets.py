"""Buckets and spans: how gradients are cut for their exchange and for integer sums, without torch.

A bucket has small gradients that are exchanged together, so that each exchange is large enough to fill a link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

BUCKET_ELEMENTS = 8 << 20
"""Elements after which a bucket is full: 32 MiB in fp32, enough to fill any link."""
T = TypeVar("T")


def in_buckets(items: Iterable[T], elements: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups ``items`` in their order; each group but the last has at least ``BUCKET_ELEMENTS`` elements."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        bucket.append(item)
        filled += elements(item)
        if filled >= BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


# Spans: consecutive elements of a parameter's row, which share one exponent in an integer sum (``bins.py``).
#
# A span must be the same on every fleet, so it may not reach over a place where some fleet cuts. FSDP2 gives each rank whole rows (a row is
# what one index of the first dimension selects), so rows are divided into spans of as many elements as possible, at most 128, and
# never into a remainder: the largest power of two that divides the row. A vector's rows are single elements.
#
# FSDP2 hands over a group's gradients by shares: for each rank its rows of every parameter of the group, end to end, padded with rows of
# zeros to the same length on all ranks. A layout says where in a share the spans are. No torch.


LONGEST_SPAN = 128
"""Elements of a span, where rows allow it: their exponent then adds less than a hundredth to the bytes."""
_LARGEST_INT32_COUNT = 1024
"""Summands above which 32 bits for a word and its carries would leave too few digits."""


def word_bytes(count: int) -> int:
    """Bytes of each of the two words of an element, in sums of ``count`` numbers."""
    return 4 if count <= _LARGEST_INT32_COUNT else 8


@dataclass(frozen=True)
class Segment:
    """Consecutive spans of one size in a share."""

    first_element: int
    first_span: int
    spans: int
    size: int
    """Elements of each span."""


@dataclass(frozen=True)
class SpanLayout:
    """The spans of a share of one or more parameters."""

    segments: tuple[Segment, ...]

    @property
    def elements(self) -> int:
        """Elements of a share."""
        return sum(segment.spans * segment.size for segment in self.segments)

    @property
    def spans(self) -> int:
        """Spans of a share."""
        return sum(segment.spans for segment in self.segments)


def span_size(shape: Sequence[int]) -> int:
    """Elements of each span of a parameter of ``shape``."""
    return math.gcd(math.prod(shape[1:]), LONGEST_SPAN)


def share_layout(shapes: Iterable[Sequence[int]], ranks: int) -> SpanLayout:
    """The spans of a rank's share of parameters of ``shapes``, divided by rows over ``ranks``."""
    segments: list[Segment] = []
    element = span = 0
    for shape in shapes:
        size, rows = span_size(shape), -(-(shape[0] if shape else 1) // ranks)
        spans = rows * math.prod(shape[1:]) // size
        if segments and segments[-1].size == size:
            last = segments.pop()
            segments.append(Segment(last.first_element, last.first_span, last.spans + spans, size))
        elif spans:
            segments.append(Segment(element, span, spans, size))
        element, span = element + spans * size, span + spans
    return SpanLayout(tuple(segments))
