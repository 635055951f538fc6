"""Exact duplicates: documents with the same text once it is in normal form C and its white space is joined.

Texts are compared by 128-bit hashes (xxh3_128): among 10^12 documents two different ones agree with a probability of 1.5 in 10^15.
"""

from __future__ import annotations

import unicodedata

import numpy as np
import xxhash
from numpy.typing import NDArray

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
