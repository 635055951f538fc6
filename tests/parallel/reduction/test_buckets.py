"""Buckets of gradients: in order, none lost, and all but the last full."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.parallel.divisions import BUCKET_ELEMENTS, in_buckets


@example([BUCKET_ELEMENTS - 1, 1, BUCKET_ELEMENTS - 1, 1, 1])
@given(st.lists(st.integers(1, 2 * BUCKET_ELEMENTS)))
def test_buckets_keep_the_order_and_are_full_with_their_last_item(sizes: list[int]) -> None:
    buckets = list(in_buckets(sizes, lambda size: size))
    assert [size for bucket in buckets for size in bucket] == sizes
    assert all(sum(bucket) >= BUCKET_ELEMENTS for bucket in buckets[:-1])
    assert all(sum(bucket[:-1]) < BUCKET_ELEMENTS for bucket in buckets)
