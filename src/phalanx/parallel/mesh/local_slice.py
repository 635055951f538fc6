"""Rectangular slices of a tensor: their position, their intersection, and their index in an array.

They describe a rank's part of a parameter (``Partition``), the slices that an optimizer exchanges, and those in a checkpoint.
(``Box`` adds the tensor's name, dtype and full shape.) Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LocalSlice(NamedTuple):
    """A slice of a tensor that begins at ``offset`` and extends over ``shape``, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def intersection(first: LocalSlice, second: LocalSlice) -> LocalSlice | None:
    """Return the elements in both slices of one tensor, or ``None`` if there are none."""
    (begin, size), (other_begin, other_size) = first, second
    starts = tuple(map(max, begin, other_begin))
    stops = (min(a + m, b + n) for a, m, b, n in zip(begin, size, other_begin, other_size, strict=True))
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return LocalSlice(starts, shape) if all(extent > 0 for extent in shape) else None


def slices_in(part: LocalSlice, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of ``part`` in an array whose first element is at ``origin`` of the tensor."""
    return tuple(
        slice(start - zero, start - zero + size) for start, size, zero in zip(*part, origin, strict=True)
    )
