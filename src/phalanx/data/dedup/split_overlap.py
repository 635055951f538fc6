"""Overlap of the splits: held-out documents whose text is trained on too, which makes the held-out loss too low.

Texts are compared in normal form, by 64-bit hashes (xxh3): of 10^9 documents to train on, one held-out document in 2 x 10^10 is counted wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def count_shared(held_out: NDArray[np.uint64], train: Iterable[NDArray[np.uint64]]) -> int:
    """How many of ``held_out`` (n,) are in any of the arrays ``train``, which are looked at one after another."""
    unique, documents = np.unique(held_out, return_counts=True)
    shared = np.zeros(len(unique), dtype=bool)
    for hashes in train if len(unique) else ():
        nearest = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
        shared[nearest[unique[nearest] == hashes]] = True
    return int(documents[shared].sum())
