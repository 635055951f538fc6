"""Where the samples of a run lie, located for a stretch at once where they are asked for one after another.

A sample's place is computed by some hundred operations of numpy (``phalanx.data.order``), each of which costs about as much for eight samples as for a
thousand. A process that reads the run from one end to the other therefore has a stretch located with the first sample of it; one that takes
a few samples of each step, as a rank of many does, has just those located.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Place = Callable[[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For ``first`` and ``count``: the number of the source, and of the record in its part, of each of these samples of the run."""

_STRETCH = 8192


class LocatedAhead:
    """The places of samples as ``place`` gives them, fewer calls of it. Threads may share it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        """The first sample of the stretch that was located last, and its places; exchanged as one, so that no thread sees half of it."""
        self._next = -1

    def __call__(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        in_turn, self._next = first == self._next, first + count
        known = self._known
        if known is None or not known[0] <= first <= first + count <= known[0] + len(known[1]):
            known = (first, *self._place(first, max(count, _STRETCH) if in_turn else count))
            self._known = known
        start, sources, records = known
        part = slice(first - start, first - start + count)
        return sources[part], records[part]
