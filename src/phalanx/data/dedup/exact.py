"""Exact duplicates: documents with the same text once it is in normal form C and its white space is joined.

Texts are compared by 128-bit hashes (xxh3_128): among 10^12 documents two different ones agree with a probability of 1.5 in 10^15.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

# Overlap of the splits: held-out documents whose text is trained on too, which makes the held-out loss too low.
#
# Texts are compared in normal form, by 64-bit hashes (xxh3): of 10^9 documents to train on, one held-out document in 2 x 10^10 is counted wrongly.


def count_shared(held_out: NDArray[np.uint64], train: Iterable[NDArray[np.uint64]]) -> int:
    """How many of ``held_out`` (n,) are in any of the arrays ``train``, which are looked at one after another."""
    unique, documents = np.unique(held_out, return_counts=True)
    shared = np.zeros(len(unique), dtype=bool)
    for hashes in train if len(unique) else ():
        nearest = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
        shared[nearest[unique[nearest] == hashes]] = True
    return int(documents[shared].sum())


HASH_DTYPE = np.dtype([("key", "<u8"), ("rest", "<u8"), ("ordinal", "<u4")])
"""A document's hash, in two halves, and its number in its portion."""


def normal_form(text: str) -> str:
    """The text that is compared."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def hash_of(normal: str) -> tuple[int, int]:
    """The two halves of the hash of a text in normal form."""
    value = xxhash.xxh3_128_intdigest(normal.encode())
    return value >> 64, value & ((1 << 64) - 1)


def later_copies(hashes: NDArray[np.void], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The ``places`` of documents whose hash an earlier place has too. ``hashes`` (n,) has the fields of ``HASH_DTYPE``, ``places`` is (n,)."""
    order = np.lexsort((places, hashes["rest"], hashes["key"]))
    ordered = hashes[order]
    same = (ordered["key"][1:] == ordered["key"][:-1]) & (ordered["rest"][1:] == ordered["rest"][:-1])
    return np.sort(places[order][1:][same])
