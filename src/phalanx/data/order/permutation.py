"""Compute the order in which a run sees the samples of its dataset; nothing is stored.

A stored shuffled list costs seconds and gigabytes to load when a run resumes. Here the shuffle is a keyed pseudo-random permutation. The
position of sample *i* depends only on (seed, epoch, *i*), so any rank can compute any range, and resuming costs nothing.

The permutation is the generalized Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002). A position
x < n is a pair (left, right) in a grid of a x b >= n cells. Each round adds a keyed hash of one half to the other, modulo that half's size.
This is invertible, so it permutes the grid. A result outside n goes through the cipher again until it is inside ("cycle walking"). Because a
is the root of n rounded up, fewer than one in sqrt(n) cells are outside. The hash is SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014).
For few items, eight rounds reach every permutation but not equally often: a chi-square over all orders of six items is off by hundreds of
standard deviations. So up to ``SORTED_UP_TO`` samples, the order is a sort by keyed hash.

A run's bits depend on the order: changing a constant here changes every run.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A BLAKE2b digest has exactly eight 64-bit keys. Four rounds already pass the tests against a true shuffle.
ROUNDS = 8
# Pairs of positions are visibly biased up to about 16 items; a sort of this many hashes still costs microseconds.
SORTED_UP_TO = 1024
_SORTED_TOGETHER = 1 << 16
"""Number of hashes sorted in one batch for several small permutations (half a MiB)."""
MAX_SAMPLES = 2**62


def permute(index: NDArray[np.int64], *, n: int, key: int) -> NDArray[np.int64]:
    """Return the images of ``index`` under the keyed permutation of ``range(n)``.

    ``index`` has any shape, with values in [0, n). The result is int64 of the same shape. ``key`` is in [0, 2**64). Costs about 8 hash evaluations
    per element, independent of n; up to ``SORTED_UP_TO``, hashes and sorts all of ``range(n)`` instead. Raises ``ValueError`` for a value out of range.
    """
    _require_within("positions", index, n)
    round_keys = _round_keys(key)
    if n <= SORTED_UP_TO:
        order: NDArray[np.int64] = _orders_by_hash(n, round_keys[None])[0]
        return order[index]
    return _enciphered(index, n, round_keys)


def permute_in_turn(
    index: NDArray[np.int64], turn: NDArray[np.int64], *, n: int, keys: Sequence[int]
) -> NDArray[np.int64]:
    """Return the images under several permutations of ``range(n)``: ``index[i]`` is permuted with ``keys[turn[i]]``.

    Equivalent to ``permute`` for each key, but much faster for small ``n`` and many keys. Both arrays are one-dimensional, and ``turn`` does not
    decrease.
    """
    if n > SORTED_UP_TO and keys:
        edges = np.searchsorted(turn, np.arange(1, len(keys)))
        parts = zip(np.split(index, edges), keys, strict=True)
        return np.concatenate([permute(part, n=n, key=key) for part, key in parts])
    images = np.empty_like(index)
    batch = max(1, _SORTED_TOGETHER // n)
    for first in range(0, len(keys), batch):
        round_keys = np.stack([_round_keys(key) for key in keys[first : first + batch]])
        selection = slice(*np.searchsorted(turn, (first, first + batch)))
        images[selection] = _orders_by_hash(n, round_keys)[turn[selection] - first, index[selection]]
    return images


def place_in_permutation(image: NDArray[np.int64], *, n: int, key: int) -> NDArray[np.int64]:
    """Return the preimages of ``image``: the inverse of ``permute``, with the same shapes, cost and errors."""
    _require_within("images", image, n)
    round_keys = _round_keys(key)
    if n <= SORTED_UP_TO:
        return np.argsort(_orders_by_hash(n, round_keys[None])[0]).astype(np.int64)[image]
    return _enciphered(image, n, round_keys, inverse=True)


def key_of(purpose: str, seed: int, number: int, name: str = "") -> int:
    """Return the key of one of a run's permutations for a purpose (at most 8 ASCII letters), the run's seed, a number and a name."""
    message = seed.to_bytes(8, "little") + number.to_bytes(8, "little") + name.encode()
    digest = hashlib.blake2b(message, digest_size=8, person=f"phalanx {purpose}".encode()).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class SampleOrder:
    """The order of a run over a dataset of ``n`` samples, with a different permutation in each epoch."""

    n: int
    """Samples in the dataset; at least 1."""
    seed: int
    """The run's data seed: any integer in [0, 2**64)."""

    def __post_init__(self) -> None:
        _require_range("n", self.n, 1, MAX_SAMPLES)
        _require_range("seed", self.seed, 0, 2**64 - 1)

    def dataset_indices(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the dataset samples of the run's samples ``first`` to ``first + count``; shape (count,), int64.

        Run sample i is in epoch i // n. The order is the same however the run is divided into batches. Each epoch is
        permuted by a key of its own. Raises ``ValueError`` for a ``first`` or ``count`` out of range.
        """
        _require_range("first", first, 0, MAX_SAMPLES)
        _require_range("count", count, 0, MAX_SAMPLES)
        indices = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, position = divmod(first + filled, self.n)
            count_here = min(count - filled, self.n - position)
            positions = np.arange(position, position + count_here, dtype=np.int64)
            indices[filled : filled + count_here] = permute(
                positions, n=self.n, key=key_of("epoch", self.seed, epoch)
            )
            filled += count_here
        return indices


def _enciphered(
    values: NDArray[np.int64], n: int, round_keys: NDArray[np.uint64], *, inverse: bool = False
) -> NDArray[np.int64]:
    """Return the images of ``values`` in [0, n), or their preimages: the cipher is repeated on those outside of the range."""
    cells = _feistel(values.ravel().astype(np.uint64), n, round_keys, inverse=inverse)
    outside = np.flatnonzero(cells >= n)
    while outside.size:
        cells[outside] = _feistel(cells[outside], n, round_keys, inverse=inverse)
        outside = outside[cells[outside] >= n]
    return cells.astype(np.int64).reshape(values.shape)


def _feistel(
    x: NDArray[np.uint64], n: int, round_keys: NDArray[np.uint64], *, inverse: bool
) -> NDArray[np.uint64]:
    """Return the images of ``x`` under one pass of the cipher, on the smallest near-square grid of at least n cells;
    values from n up to the grid's size can result.

    ``inverse``: their preimages, by the rounds in reverse order. ``x`` is unchanged.
    """
    combined = _subtracted if inverse else _added
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    columns, rows = np.array(a, np.uint64), np.array(b, np.uint64)
    right = x // columns
    left = x - right * columns
    for number in reversed(range(ROUNDS)) if inverse else range(ROUNDS):
        if number % 2 == 0:
            left = combined(left, _mix(right ^ round_keys[number, ...]), columns)
        else:
            right = combined(right, _mix(left ^ round_keys[number, ...]), rows)
    cells: NDArray[np.uint64] = right * columns + left
    return cells


def _added(
    half: NDArray[np.uint64], hashed: NDArray[np.uint64], size: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return ``(half + hashed) % size`` for halves below ``size``, which is below 2**32. Overwrites ``hashed``.

    NumPy divides an array by a scalar with vectorized multiplications, but uses the processor's slow division for remainders. A sum below twice
    the size needs no remainder: if it is below the size, subtracting the size wraps to nearly 2**64, so the minimum is correct.
    """
    _reduce(hashed, size)
    hashed += half
    np.minimum(hashed, hashed - size, out=hashed)
    return hashed


def _subtracted(
    half: NDArray[np.uint64], hashed: NDArray[np.uint64], size: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return ``(half - hashed) % size`` for halves below ``size``, which is below 2**32. Overwrites ``hashed``."""
    _reduce(hashed, size)
    np.subtract(half, hashed, out=hashed)
    np.minimum(hashed, hashed + size, out=hashed)
    return hashed


def _reduce(values: NDArray[np.uint64], size: NDArray[np.uint64]) -> None:
    """Compute ``values %= size`` faster."""
    quotients = values // size
    quotients *= size
    values -= quotients


def _orders_by_hash(n: int, round_keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return small permutations, one for each row of ``round_keys``: (rows, n). The hash is one-to-one, so there are no ties."""
    first, second = round_keys[:, :1], round_keys[:, 1:2]
    return np.argsort(_mix(_mix(np.arange(n, dtype=np.uint64) ^ first) ^ second), axis=1).astype(np.int64)


# Zero-dimensional arrays, which NumPy handles twice as fast as its scalars.
_SHIFTS = tuple(np.array(shift, np.uint64) for shift in (30, 27, 31))
_FACTORS = tuple(np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a new array, ``x`` after SplitMix64's finalizer: each input bit changes each output bit with a probability near one half."""
    mixed = x >> _SHIFTS[0]
    mixed ^= x
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def _round_keys(key: int) -> NDArray[np.uint64]:
    """Return ``ROUNDS`` keys, uint64, hashed from ``key``. Raises ``ValueError`` for one outside 64 bits."""
    _require_range("key", key, 0, 2**64 - 1)
    digest = hashlib.blake2b(
        key.to_bytes(8, "little"), digest_size=8 * ROUNDS, person=b"phalanx rounds"
    ).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _require_within(kind: str, values: NDArray[np.int64], n: int) -> None:
    """Raise ``ValueError`` unless ``n`` and all ``values`` are in range."""
    _require_range("n", n, 1, MAX_SAMPLES)
    if values.size and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"{kind} {values.min()}..{values.max()} are not all in [0, {n})")


def _require_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ``ValueError`` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"{name} = {value} is not in [{low}, {high}]")
