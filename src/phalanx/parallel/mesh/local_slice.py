"""Rectangular parts of a tensor: where one lies, what two have in common, and how an array is indexed by it.

The one geometry of shards: what this rank holds of a parameter (``partition.py``), what an optimizer exchanges, and what a
checkpoint stores (``Box`` adds the tensor's name, dtype and full shape). Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LocalSlice(NamedTuple):
    """The part of a tensor that begins at ``offset`` and extends over ``shape``, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def intersection(one: LocalSlice, other: LocalSlice) -> LocalSlice | None:
    """The elements in both parts of one tensor, or ``None`` where there are none."""
    (begin, size), (other_begin, other_size) = one, other
    starts = tuple(map(max, begin, other_begin))
    stops = (min(a + m, b + n) for a, m, b, n in zip(begin, size, other_begin, other_size, strict=True))
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return LocalSlice(starts, shape) if all(extent > 0 for extent in shape) else None


def slices_in(part: LocalSlice, origin: Sequence[int]) -> tuple[slice, ...]:
    """The index of ``part`` in an array whose first element lies at ``origin`` of the tensor."""
    return tuple(
        slice(start - zero, start - zero + size) for start, size, zero in zip(*part, origin, strict=True)
    )
