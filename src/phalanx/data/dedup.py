"""Find duplicate documents: exact ones by hash, near ones (which share most word n-grams) by MinHash and banding.

For two documents, the share of permutations with the same minimum n-gram is an unbiased estimate of the Jaccard similarity J of their n-gram
sets (Broder, "On the resemblance and containment of documents", 1997). The permutations are divided into bands. Two documents that agree in
all rows of a band are candidates, with probability 1 - (1 - J^rows)^bands. For FineWeb's 14 bands of 8 rows (arXiv 2406.17557), that is 0.99
at J = 0.85 and 0.05 at 0.5. Candidates are then compared by the lowest bit of each permutation's value, of which (1 + J) / 2 agree (b-bit
minwise hashing, Li and König, arXiv 0910.3349). This costs one bit of storage per permutation and removes most pairs that are not similar.

The package ``rensa`` computes sketches.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator
from types import ModuleType

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.errors import PreparationError, optional_package
from phalanx.data.steps.step import words_of

# Exact duplicates: documents with the same text in Unicode normal form C with white space collapsed.
#
# Texts are compared by 128-bit hashes (xxh3_128). Among 10^12 documents, a collision has a probability of 1.5 in 10^15.

# Overlap of the splits: held-out documents whose text is also in the training split make the held-out loss too low.
#
# Texts in normal form are compared by 64-bit hashes (xxh3). With 10^9 training documents, one held-out document in 2 x 10^10 is
# counted wrongly.


def count_shared(held_out: NDArray[np.uint64], train: Iterable[NDArray[np.uint64]]) -> int:
    """Return how many of the hashes ``held_out`` (n,) are in any of the arrays ``train``, which are searched one after another.

    A hash that ``held_out`` has twice counts twice. The arrays need not be sorted.
    """
    unique, documents = np.unique(held_out, return_counts=True)
    shared = np.zeros(len(unique), dtype=bool)
    for hashes in train if len(unique) else ():
        nearest = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
        shared[nearest[unique[nearest] == hashes]] = True
    return int(documents[shared].sum())


HASH_DTYPE = np.dtype([("key", "<u8"), ("rest", "<u8"), ("ordinal", "<u4")])
"""A document's hash in two halves, and the document's number in its portion."""


def normal_form(text: str) -> str:
    """Return the text in the form used for comparison."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def hash_of(normal: str) -> tuple[int, int]:
    """Return the two halves of the hash of a text in normal form."""
    value = xxhash.xxh3_128_intdigest(normal.encode())
    return value >> 64, value & ((1 << 64) - 1)


def later_copies(hashes: NDArray[np.void], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the ``places`` of documents whose hash also has an earlier place.

    ``hashes`` (n,) has the fields of ``HASH_DTYPE``, ``places`` is (n,).
    """
    order = np.lexsort((places, hashes["rest"], hashes["key"]))
    ordered = hashes[order]
    same = (ordered["key"][1:] == ordered["key"][:-1]) & (ordered["rest"][1:] == ordered["rest"][:-1])
    return np.sort(places[order][1:][same])


_SEED = 1


def band_dtype(permutations: int) -> np.dtype[np.void]:
    """Return the stored type of one band of a document: hash of the band's rows, the document's number in its portion, and the lowest bits of all permutations."""
    return np.dtype([("key", "<u8"), ("ordinal", "<u4"), ("bits", "u1", (-(-permutations // 8),))])


def require_rensa() -> ModuleType:
    """Return the package that finds near duplicates. Raises ``PreparationError`` with the command that installs it."""
    missing = "near duplicates are found by the package rensa, which is not installed"
    remedy = "pip install 'phalanx-train[prepare]', or pip install rensa==0.5.0"
    return optional_package("rensa", PreparationError(f"{missing}: {remedy}"))


def signature(normal: str, permutations: int, ngram: int) -> NDArray[np.uint32]:
    """Return the MinHash signature of ``normal``: each permutation's minimum over n-grams of its words,
    (permutations,) uint32.

    The text is lower-cased first. One of fewer than ``ngram`` words is one n-gram. In scripts without spaces, n-grams
    consist of letters (``phalanx.data.steps.step``). Raises ``PreparationError`` without ``rensa``.
    """
    words = words_of(normal.lower()).units
    grams = [" ".join(words[start : start + ngram]) for start in range(max(1, len(words) - ngram + 1))]
    sketch = require_rensa().RMinHash(num_perm=permutations, seed=_SEED)
    sketch.update(grams)
    return np.array(sketch.digest(), dtype=np.uint32)


def band_rows(values: NDArray[np.uint32], ordinal: int, bands: int, rows: int) -> NDArray[np.void]:
    """Return the stored bands of a document with this signature, (bands,) of ``band_dtype``.

    An entry has the band's hash, the document's ``ordinal``, and the lowest bit of each value, packed.
    """
    entries = np.zeros(bands, dtype=band_dtype(bands * rows))
    little = values.astype("<u4")
    entries["key"] = [
        xxhash.xxh3_64_intdigest(little[band * rows : (band + 1) * rows].tobytes(), seed=band)
        for band in range(bands)
    ]
    entries["ordinal"] = ordinal
    entries["bits"] = np.packbits((values & 1).astype(np.uint8))
    return entries


def similar_pairs(
    entries: NDArray[np.void], places: NDArray[np.uint64], permutations: int, least_similarity: float
) -> NDArray[np.uint64]:
    """Return pairs (earlier place, later place), (m, 2), of entries with the same key whose similarity is at least
    ``least_similarity``.

    Similarity is estimated from how many of the ``permutations`` bits agree. A group's first entry takes all that are
    similar to it, then the rest repeats; not all pairs are returned. ``entries`` (n,) has the fields of ``band_dtype``,
    ``places`` is (n,).
    """
    order = np.lexsort((places, entries["key"]))
    keys, bits, ordered = entries["key"][order], entries["bits"][order], places[order]
    edges = (
        np.flatnonzero(np.diff(keys, prepend=keys[:1] ^ np.uint64(1))) if len(keys) else np.empty(0, np.int64)
    )
    stops = np.append(edges[1:], len(keys))
    least = math.ceil(permutations * (1 + least_similarity) / 2)
    pairs = [
        pair
        for start, stop in zip(edges.tolist(), stops.tolist(), strict=True)
        if stop - start > 1
        for pair in _pairs_of_group(ordered[start:stop], bits[start:stop], permutations, least)
    ]
    return np.unique(np.concatenate(pairs), axis=0) if pairs else np.empty((0, 2), dtype=np.uint64)


def _pairs_of_group(
    places: NDArray[np.uint64], bits: NDArray[np.uint8], permutations: int, least: int
) -> Iterator[NDArray[np.uint64]]:
    """Yield pairs (first place of a cluster, later place): the first entry takes all that are similar to it, then the
    rest repeats.
    """
    while len(places) > 1:
        agree = permutations - np.bitwise_count(bits ^ bits[0]).sum(axis=1, dtype=np.int64)
        similar = agree >= least
        later = places[similar][1:]
        if len(later):
            yield np.stack([np.full_like(later, places[0]), later], axis=1)
        places, bits = places[~similar], bits[~similar]


def all_but_the_first(pairs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return all places except the lowest of each cluster that the pairs ``(m, 2)`` connect, sorted.

    Union-find in rounds over all pairs: roots are attached to lower roots, then paths are halved until all nodes point to a root.
    """
    nodes, ends = np.unique(pairs, return_inverse=True)
    ends = ends.reshape(-1, 2)
    root = np.arange(len(nodes))
    while True:
        left, right = root[ends[:, 0]], root[ends[:, 1]]
        if np.array_equal(left, right):
            later: NDArray[np.uint64] = nodes[root != np.arange(len(nodes))]
            return later
        np.minimum.at(root, np.maximum(left, right), np.minimum(left, right))
        while not np.array_equal(higher := root[root], root):
            root = higher
