"""Overlap of the splits: held-out documents whose text is trained on too, which makes the held-out loss too low.

Texts are compared in normal form, by 64-bit hashes (xxh3): of 10^9 documents to train on, one held-out document in 2 x 10^10 is counted wrongly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from phalanx.data.dedup.exact import hash_of, normal_form
from phalanx.data.stored.index import HELD_OUT, SPLITS


class SplitOverlap:
    """Hashes of the texts of each split, eight bytes a document."""

    def __init__(self) -> None:
        self._hashes = {split: array("Q") for split in SPLITS}

    def add(self, split: str, text: str) -> None:
        """Note a document of a split."""
        self._hashes[split].append(hash_of(normal_form(text))[0])

    def of_split(self, split: str) -> NDArray[np.uint64]:
        """The hashes of a split, (documents,), little-endian."""
        return np.array(self._hashes[split], dtype="<u8")

    def held_out_in_training(self) -> int:
        """Held-out documents whose text is in the training split too."""
        train = (self.of_split(split) for split in SPLITS if split != HELD_OUT)
        return count_shared(self.of_split(HELD_OUT), train)


def count_shared(held_out: NDArray[np.uint64], train: Iterable[NDArray[np.uint64]]) -> int:
    """How many of ``held_out`` (n,) are in any of the arrays ``train``, which are looked at one after another."""
    unique, documents = np.unique(held_out, return_counts=True)
    shared = np.zeros(len(unique), dtype=bool)
    for hashes in train if len(unique) else ():
        nearest = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
        shared[nearest[unique[nearest] == hashes]] = True
    return int(documents[shared].sum())
