"""Whole sums of a rank that adds its own, contiguous slots first (ZeRO-1): those that it holds at once, and those that it exchanges.

A rank's slots are a complete subtree only if their number is a power of two. Of three, one is added to nothing before the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

_RANKS = 8
"""Ranks whose slots are looked at: those of more ranks are in the same places of their subtrees, or in better ones."""
_SUM_BYTES = 4


@cache
def held_bytes(slots: int, leaf_bytes: int) -> int:
    """Return the most bytes of whole sums that a rank of ``slots`` slots holds beside a slot's own gradient, for each element.

    ``leaf_bytes`` is the size of a slot's gradient that is not added yet; 4 of all sums.
    """
    sizes = [0]
    for first in range(0, _RANKS * slots, slots):
        last = first + slots
        # The most nodes are there before a slot that completes many of them.
        moments = {(last >> level << level) - 1 for level in range(slots.bit_length())}
        sizes += [
            sum(_SUM_BYTES if level else leaf_bytes for level in _levels(first, moment))
            for moment in moments
            if moment > first
        ]
    return max(sizes)


@cache
def exchanged(slots: int) -> int:
    """Return the most whole sums that a rank of ``slots`` slots exchanges."""
    return max(len(list(_levels(first, first + slots))) for first in range(0, _RANKS * slots, slots))


def _levels(first: int, last: int) -> Iterator[int]:
    """Yield the level of each node of the tree that remains of the leaves from ``first`` up to ``last``."""
    level = 0
    while first < last:
        if first % 2:
            yield level
            first += 1
        if last % 2:
            yield level
            last -= 1
        first, last, level = first // 2, last // 2, level + 1
