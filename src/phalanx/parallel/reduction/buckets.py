"""Buckets and spans: the division of gradients for their exchange and for integer sums, without torch.

A bucket has small gradients that are exchanged together, so that each exchange is large enough to fill a link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

BUCKET_ELEMENTS = 8 << 20
"""Elements that fill a bucket: 32 MiB in fp32, enough to saturate any link."""
T = TypeVar("T")


def in_buckets(items: Iterable[T], elements: Callable[[T], int]) -> Iterator[list[T]]:
    """Group ``items`` in their order; each group but the last has at least ``BUCKET_ELEMENTS`` elements."""
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
# A span must be the same on every fleet, so it must not cross a boundary at which any fleet cuts. FSDP2 gives each rank complete rows
# (indices of the first dimension). So rows are divided into spans of equal length: the largest power of two that divides the row, at
# most 128. A vector's rows are single elements.
#
# FSDP2 passes a group's gradients by shares: each rank's rows of every parameter of the group, concatenated and padded with rows of
# zeros to the same length on all ranks. A layout has the positions of the spans in a share.


LONGEST_SPAN = 128
"""Maximum number of elements in a span. The exponent then adds less than a hundredth to the bytes."""
_LARGEST_INT32_COUNT = 1024
"""With more summands than this, the carries would leave too few of a word's 32 bits for digits."""


def word_bytes(count: int) -> int:
    """Return the bytes of each of an element's two words, in sums of ``count`` numbers."""
    return 4 if count <= _LARGEST_INT32_COUNT else 8


@dataclass(frozen=True)
class SpanSegment:
    """Consecutive spans of one size in a share."""

    first_element: int
    first_span: int
    spans: int
    size: int
    """Elements of each span."""


@dataclass(frozen=True)
class SpanLayout:
    """Positions of the spans in a share of one or more parameters."""

    segments: tuple[SpanSegment, ...]

    @property
    def elements(self) -> int:
        """Number of elements in a share."""
        return sum(segment.spans * segment.size for segment in self.segments)

    @property
    def spans(self) -> int:
        """Number of spans in a share."""
        return sum(segment.spans for segment in self.segments)


def span_size(shape: Sequence[int]) -> int:
    """Return the number of elements in each span of a parameter of ``shape``."""
    return math.gcd(math.prod(shape[1:]), LONGEST_SPAN)


def share_layout(shapes: Iterable[Sequence[int]], ranks: int) -> SpanLayout:
    """Return the spans of a rank's share of parameters of ``shapes``, divided by rows over ``ranks``.

    Rows are rounded up; neighbors with one span size form a segment.
    """
    segments: list[SpanSegment] = []
    element = span = 0
    for shape in shapes:
        size, rows = span_size(shape), -(-(shape[0] if shape else 1) // ranks)
        spans = rows * math.prod(shape[1:]) // size
        if segments and segments[-1].size == size:
            last = segments.pop()
            segments.append(SpanSegment(last.first_element, last.first_span, last.spans + spans, size))
        elif spans:
            segments.append(SpanSegment(element, span, spans, size))
        element, span = element + spans * size, span + spans
    return SpanLayout(tuple(segments))
