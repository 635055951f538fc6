"""Buckets: small gradients exchanged together, so that each exchange is large enough to fill a link. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
